"""Memory that grows per step differs from memory that varies, and from a large first step."""

import textwrap

import pytest

from gputrace.fit.growth import FOREVER, Growth, growth_of, varies
from gputrace.fit.measurement import MORE
from gputrace.fit.outcome import Wish

MIB = 1 << 20


@pytest.mark.parametrize(
    ("peaks", "grows"),
    [
        ([], None),
        ([5], None),
        ([5, 6], None),
        ([5, 6, 7], None),  # too few steps to know
        ([5, 9, 9, 9], None),  # the optimizer's state
        ([9, 5, 5, 5], None),
        ([1, 2, 3, 4], Growth(1, 1)),
        ([9, 2, 3, 4, 5, 6, 7, 8], Growth(1, 1)),
        ([1, 10, 10, 12, 12, 14, 14, 16], Growth(1, 1)),  # every second step
        ([1, 2, 4, 8, 16], Growth(8, 2)),
        ([1, 20, 30, 35, 40, 40, 40, 40], None),  # a cache that is full
        ([1, 10, 10, 10, 10, 10, 10, 12], None),  # once, as an evaluation
        ([1, 10, 14, 12, 9, 14], None),
    ],
)
def test_peaks_that_grow(peaks, grows):
    assert growth_of(peaks, []) == grows


def test_peaks_that_vary_grow_if_every_step_leaves_tensors_behind():
    peaks = [100, 140, 120, 190, 150, 170]
    assert varies(peaks)
    assert growth_of(peaks, [90, 10, 20, 30, 40, 50]) == Growth(20, 1)  # the last two may be in use
    assert growth_of(peaks, [90, 0, 0, 0, 40, 50]) is None
    assert growth_of(peaks, [90, 10, 0, 10, 40, 50]) is None


@pytest.mark.parametrize(
    ("peaks", "due"),
    [
        ([9, 5, 6, 5], True),
        ([9, 5, 5, 5], False),
        ([1, 2, 3, 4], False),
        ([1, 1000, 1001, 1000], False),
    ],
)
def test_peaks_that_vary(peaks, due):
    assert varies(peaks) == due


def test_steps_until_a_gpu_is_full():
    assert Growth(10, 1).steps_until(95) == 9
    assert Growth(10, 1).steps_until(5) == 0
    assert Growth(1, 1).steps_until(1 << 40) == FOREVER
    assert Growth(10, 2).steps_until(20 + 40 + 80) == 3
    assert Growth(10, 2).steps_until(19) == 0


TRAIN = """
    import sys, torch; from torch import nn
    def main():
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        losses, cache = [], {{}}
        for step in range({steps}):
            rows = {rows}
            outputs = model(torch.ones(rows, 512, device="cuda"))
            loss = outputs.square().mean()
            {kept}
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
    main()
"""


@pytest.fixture
def outcome(run, tmp_path):
    """A function that runs steps of a script and returns the outcome."""

    def of(rows="256", kept="pass", steps=1000, asked=4, memory=None):
        path = tmp_path / "train.py"
        path.write_text(
            textwrap.dedent(TRAIN.format(rows=rows, kept=kept, steps=steps)), encoding="utf-8"
        )
        found = run(Wish(str(path), [], False, "T4", asked, memory=memory))
        assert not found.failed
        return found, growth_of(found.peaks, found.left)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["256", "128 if step == 0 else 256", "512 if step == 0 else 256"])
def test_a_first_step_unlike_the_others_is_no_growth(outcome, rows):
    """The first step is larger or smaller than the others.

    The optimizer makes its state in it, too.
    """
    found, grows = outcome(rows)
    assert grows is None and not varies(found.peaks) and found.grows == ""
    assert found.steps == 4 and found.peaks[2] == found.peaks[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "per_step", "holder"),
    [
        # the input, the hidden layer before and after its activation, and the output
        ("losses.append(loss)", 2 * MIB + 512, "losses[1]"),
        ("cache[step] = outputs.detach()", MIB // 2, "cache[1]"),
        ("losses.append(loss.detach())", 512, "losses[1]"),
        ("if step % 2: cache[step] = outputs.detach()", MIB // 4, "cache[1]"),
    ],
)
def test_what_a_script_keeps_of_each_step_is_growth(outcome, kept, per_step, holder):
    found, grows = outcome(kept=kept)
    assert found.steps == 4 + MORE and grows is not None and grows.ratio == 1
    assert grows.bytes == pytest.approx(per_step, rel=0.35)
    assert (
        found.grows.startswith("Tensors of earlier steps stay alive. Most come from train.py:")
        and holder in found.grows
    )


@pytest.mark.slow
def test_a_batch_that_doubles_grows_faster_and_faster(outcome):
    found, grows = outcome(rows="64 << step")
    assert grows.ratio == pytest.approx(2, rel=0.1)
    assert found.grows.startswith("Most of the growth at the peak is in tensors that train.py:")


@pytest.mark.slow
def test_batches_of_many_sizes_vary_and_with_a_leak_they_grow_too(outcome):
    lengths = "[256, 640, 512, 1024, 512, 768, 640, 512, 768][step % 9]"
    found, grows = outcome(rows=lengths)
    assert varies(found.peaks) and grows is None and found.grows == ""
    found, grows = outcome(
        rows=lengths, kept="losses.append(torch.ones(1 << 20, device='cuda'))", asked=7
    )
    assert grows.bytes == pytest.approx(4 * MIB, rel=0.02)
    assert varies(found.peaks) and "losses[1]" in found.grows


@pytest.mark.slow
def test_a_script_that_ends_by_itself_says_where_its_peak_grew(outcome):
    found, grows = outcome(kept="losses.append(torch.ones(1 << 20, device='cuda'))", steps=4)
    assert found.steps == 4 and grows == Growth(4 * MIB, 1)
    assert found.grows.startswith("Most of the growth at the peak is in tensors that train.py:11 ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "kept"),
    [("256", "losses.append(torch.ones(4 << 20, device='cuda'))"), ("64 << step", "pass")],
)
def test_a_gpu_is_full_when_it_was_said_to_be(outcome, rows, kept):
    found, grows = outcome(rows, kept, memory=2 << 30)
    said = found.steps + grows.steps_until(found.total - found.used)
    full, _ = outcome(rows, kept, asked=1000, memory=2 << 30)
    assert not full.fits and said == pytest.approx(full.steps, abs=max(1, 0.05 * full.steps))
