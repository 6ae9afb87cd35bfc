"""Recurrent layers run as one cuDNN operator with its buffers, and agree with the CPU."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from virtualgpu import hardware
from virtualgpu.ops.nn.recurrent import workspace

from ..recorded import check

NAMES = (
    "shared/lstm", "shared/gru", "more/lstm1", "more/lstm2", "more/lstm_bi",
    "more/gru2", "more/rnn1", "more/lstm_half", "more/lstm_eval",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_dropout_keeps_a_state_for_good(machine):
    gpu = hardware.machine().gpu("cuda:0")
    check("more/lstm_drop")
    state = gpu.libraries.pop("cudnn dropout")
    assert state.requested == 49152 * 132
    gpu.allocator.free(state)


# Workspaces of an H200: kind, steps, batch, inputs, hidden, layers, directions, dtype, training.
MEASURED = {
    ("lstm", 40, 16, 128, 256, 1, 1, "float32", True): 13730176,
    ("lstm", 40, 16, 128, 256, 2, 2, "float32", False): 53281152,
    ("lstm", 20, 32, 32, 64, 1, 1, "float32", True): 12075520,
    ("lstm", 20, 8, 32, 64, 1, 1, "float64", True): 9077056,
    ("gru", 20, 8, 64, 64, 3, 1, "float32", True): 26358080,
    ("gru", 60, 32, 1, 64, 2, 1, "float16", True): 21578112,
    ("rnn_tanh", 50, 32, 256, 512, 1, 2, "float16", False): 32604672,
}


@pytest.mark.parametrize("layer", MEASURED)
def test_workspaces_are_those_of_an_h200(layer):
    kind, steps, batch, *rest = layer
    assert workspace(kind, steps * batch, batch, *rest) == MEASURED[layer]


def pair(kind, *sizes, **options):
    plain = kind(*sizes, **options)
    moved = kind(*sizes, **options)
    moved.load_state_dict(plain.state_dict())
    return plain, moved.cuda()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
def test_values_agree_with_the_cpu(kind, options, machine, without_tf32):
    plain, moved = pair(kind, 3, 4, **options)
    x = torch.randn(5, 2, 3, requires_grad=True)
    y = x.detach().cuda().requires_grad_()
    expected, got = plain(x)[0], moved(y)[0]
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(got.cpu(), expected)
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    for a, b in zip(moved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_packed_sequences_agree_with_the_cpu(machine, without_tf32):
    plain, moved = pair(nn.LSTM, 3, 4, batch_first=True)
    x, lengths = torch.randn(2, 3, 3), torch.tensor([3, 2])
    outputs = []
    for layer, data in ((plain, x), (moved, x.cuda())):
        packed = pack_padded_sequence(data, lengths, batch_first=True)
        assert packed.batch_sizes.device.type == "cpu"
        out, seen = pad_packed_sequence(layer(packed)[0], batch_first=True)
        out.sum().backward()
        outputs.append((out.detach().cpu(), seen, layer.weight_hh_l0.grad.cpu()))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    "settings", [{}, {"batch_first": True, "padding_value": 2.0}, {"padding_side": "left"}]
)
def test_sequences_are_padded_where_they_lie(settings, machine):
    sequences = [torch.randn(n, 2, requires_grad=True) for n in (2, 3, 1)]
    moved = [x.detach().to("cuda:1").requires_grad_() for x in sequences]
    expected, got = pad_sequence(sequences, **settings), pad_sequence(moved, **settings)
    assert got.device == torch.device("cuda:1")
    torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close([x.grad.cpu() for x in moved], [x.grad for x in sequences])
    assert torch.equal(
        pack_sequence(moved, enforce_sorted=False).data.cpu(),
        pack_sequence(sequences, enforce_sorted=False).data,
    )


def test_weights_lie_in_one_block(machine):
    layer = nn.LSTM(3, 4, device="cuda")
    assert len({w.untyped_storage().data_ptr() for w in layer.parameters()}) == 1


def test_backward_of_evaluation_is_refused(machine):
    layer = nn.GRU(3, 4, device="cuda").eval()
    with pytest.raises(
        RuntimeError, match="cudnn RNN backward can only be called in training mode"
    ):
        layer(torch.randn(5, 2, 3, device="cuda"))[0].sum().backward()


def test_a_gradient_that_does_not_lie_step_by_step_is_copied(machine):
    layer = nn.LSTM(4, 64, batch_first=True, device="cuda")
    x = torch.randn(8, 30, 4, device="cuda")
    peaks = []
    # The gradient in the order of the batch, and the output's own gradient.
    for whole in (False, True):
        out = layer(x)[0]
        gradient = torch.zeros_like(out) if whole else torch.zeros(out.shape, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(gradient)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        layer.zero_grad()
        del out
    copied, weights = 8 * 30 * 64 * 4, 4 * 64 * (4 + 64 + 2) * 4
    assert peaks[0] - peaks[1] == max(copied, weights) - weights


def test_its_node_is_named_as_cudnns(machine):
    assert (
        torch.nn.LSTM(2, 3, device="cuda")(torch.ones(1, 1, 2, device="cuda"))[0].grad_fn.name()
        == "CudnnRnnBackward0"
    )


@pytest.mark.parametrize("options", [{}, {"enforce_sorted": False}])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lengths_on_a_gpu_are_refused(options, device, machine):
    lengths = torch.tensor([5, 3, 2], device="cuda")
    with pytest.raises(
        RuntimeError,
        match="^'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor$",
    ):
        pack_padded_sequence(
            torch.randn(3, 5, 4, device=device), lengths, batch_first=True, **options
        )


def test_a_state_of_another_dtype_is_refused(machine):
    x = torch.ones(1, 2, 3, device="cuda", dtype=torch.float16)
    state = torch.zeros(1, 2, 4, device="cuda")
    layer = torch.nn.GRU(3, 4).cuda().half()
    message = "found input tensor with Half and hidden tensor with Float"
    with pytest.raises(RuntimeError, match=message):
        layer(x, state)
