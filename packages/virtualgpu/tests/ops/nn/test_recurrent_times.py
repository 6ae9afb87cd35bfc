"""The time of the steps of a sequence."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import virtualgpu
from virtualgpu import hardware
from virtualgpu.ops.nn.recurrent import (
    LAUNCHES_BACK_OF_A_LAYER,
    LAUNCHES_OF_A_CALL,
    LAUNCHES_OF_A_LAYER,
)

from ..heard import spans


@pytest.fixture
def without_values():
    with virtualgpu.use(1, like="H200", values=False):
        yield


def _seconds(work) -> float:
    """Call `work` twice, and return the seconds of the second call on the machine's clock."""
    work()
    torch.cuda.synchronize()
    begin = virtualgpu.host_time()
    work()
    torch.cuda.synchronize()
    return virtualgpu.host_time() - begin


def test_the_steps_of_a_sequence_take_what_they_took_on_an_h200(without_values):
    """Check a step of a network that is narrower than those of the rule. It took 6.6 ms.

    The rule comes from kernels.json.
    """
    wide, sequence = (
        nn.LSTM(1024, 1024, num_layers=2, device="cuda"),
        torch.zeros(128, 64, 1024, device="cuda"),
    )
    assert _seconds(lambda: wide(sequence)) == pytest.approx(3.94e-3, rel=0.05)
    assert _seconds(lambda: wide(sequence)[0].sum().backward()) == pytest.approx(9.99e-3, rel=0.12)
    words, layers, head = (
        nn.Embedding(10000, 512).cuda(),
        nn.LSTM(512, 512, 2, batch_first=True).cuda(),
        nn.Linear(512, 10000).cuda(),
    )
    ids = torch.zeros(16, 64, dtype=torch.long, device="cuda")

    def loss():
        return nn.functional.cross_entropy(head(layers(words(ids))[0]).flatten(0, 1), ids.flatten())

    assert _seconds(loss) == pytest.approx(2.6e-3, rel=0.15)
    # without the 0.1 ms of SGD
    assert _seconds(lambda: loss().backward()) == pytest.approx(6.5e-3, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "hidden", "per_step"),
    [(nn.LSTM, 256, 15.4e-6), (nn.GRU, 256, 15.4e-6), (nn.LSTM, 64, 3e-6)],
)
def test_each_step_of_a_wide_layer_takes_a_while_and_packed_ones_count_too(
    without_values, kind, hidden, per_step
):
    layer = kind(8, hidden, bidirectional=True, device="cuda")

    def packed(steps: int):
        return pack_padded_sequence(
            torch.zeros(steps, 2, 8, device="cuda"), torch.tensor([steps, steps])
        )

    few, many = (_seconds(lambda steps=steps: layer(packed(steps))) for steps in (20, 60))
    assert many - few == pytest.approx(40 * 2 * per_step, rel=0.1, abs=1e-4)


def test_the_host_calls_cudnn_once_there_and_twice_back(without_values):
    profile, layer = hardware.machine().profile, nn.GRU(8, 64, device="cuda")
    overheads = {
        span.name: span.overhead
        for span in spans(lambda: layer(torch.zeros(5, 2, 8, device="cuda"))[0].sum().backward())
    }
    there, back = (overheads[name] / profile.launch_seconds for name in ("gru", "gru_backward"))
    calls = profile.cudnn_seconds / profile.launch_seconds
    assert there == pytest.approx(calls + LAUNCHES_OF_A_CALL + LAUNCHES_OF_A_LAYER)
    assert back == pytest.approx(2 * calls + LAUNCHES_BACK_OF_A_LAYER)
