"""When each stage works: what is recorded, and how it is drawn."""

import re

import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn

import labkit
from gpulessons.lesson_04.schedules import in_turn, orders
from gpulessons.lesson_04.work import plot_work, record_work, waiting
from gputrace.figures.figure import BLUE, ORANGE


@pytest.fixture
def two_gpus():
    with labkit.use(gpus=2, virtual=True, values=False, quiet=True):
        yield


def stage(gpu, layers=1, width=2048):
    return nn.Sequential(*[nn.Linear(width, width, device=f"cuda:{gpu}") for _ in range(layers)])


def step(stages, parts):
    """Run a training step on two stages, with a micro-batch for each of the `parts`.

    Tensors are moved with plain `.to`.
    """
    outputs = [stages[1](stages[0](part).to("cuda:1")) for part in parts]
    torch.cat(outputs).square().mean().backward()


def batch(rows=4096, width=2048):
    return torch.ones(rows, width, device="cuda:0")


def done_by(rows, index):
    """Return the passes of the stage with this index in order of time, such as "F1 B1"."""
    found = [row for row in rows if row["stage"] == index]
    return " ".join(f"{row['work'][0].upper()}{row['micro_batch'] + 1}" for row in found)


def test_every_pass_of_every_micro_batch_is_recorded_in_the_order_of_time(two_gpus):
    stages = [stage(0), stage(1)]
    rows = record_work(stages, lambda: step(stages, batch().chunk(2)))
    assert [done_by(rows, index) for index in (0, 1)] == ["F1 F2 B2 B1"] * 2
    for index in (0, 1):
        ends = 0.0
        for row in rows:
            if row["stage"] == index:
                assert row["start"] >= ends and row["seconds"] > 0
                ends = row["start"] + row["seconds"]


def test_a_backward_pass_ends_when_its_stage_is_done(two_gpus):
    """The first stage computes no gradient of its input, but a gradient of each parameter.

    Its backward pass ends with the last of these gradients.
    """
    stages = [stage(0, layers=2), stage(1, layers=2)]
    rows = record_work(stages, lambda: step(stages, batch().chunk(2)))
    seconds = {(row["stage"], row["work"], row["micro_batch"]): row["seconds"] for row in rows}
    forward = seconds[0, "forward", 0]
    for number in (0, 1):
        assert seconds[0, "backward", number] == pytest.approx(1.5 * forward, rel=0.2)
        assert seconds[1, "backward", number] == pytest.approx(2 * forward, rel=0.2)


def test_the_seconds_are_those_of_the_step(two_gpus):
    stages = [stage(0), stage(1)]
    parts = batch().chunk(1)
    rows = record_work(stages, lambda: step(stages, parts))
    end = max(row["start"] + row["seconds"] for row in rows)
    assert end == pytest.approx(labkit.seconds(lambda: step(stages, parts)), rel=0.05)
    assert 0.5 < waiting(rows, 2) < 0.7


def test_the_peak_is_that_of_the_step_alone(two_gpus):
    stages, x = [stage(0), stage(1)], batch()
    held = torch.ones(1 << 26, device="cuda:0")
    rows = record_work(stages, lambda: step(stages, x.chunk(1)))
    peaks = {row["stage"]: row["peak"] for row in rows}
    del held
    activations = x.numel() * 4
    assert all(activations <= peak < 8 * activations for peak in peaks.values())


def test_nothing_stays_on_the_stages(two_gpus):
    stages = [stage(0), stage(1)]
    record_work(stages, lambda: step(stages, batch().chunk(1)))
    for each in stages:
        assert not each._forward_hooks and not each._forward_pre_hooks
        assert all(not parameter._post_accumulate_grad_hooks for parameter in each.parameters())
    with pytest.raises(RuntimeError, match="broken"):
        record_work(stages, broken_the_second_time(stages))
    assert not any(each._forward_hooks for each in stages)


def broken_the_second_time(stages):
    calls = []

    def run():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")

    return run


def test_values_and_gradients_are_those_of_the_step_alone():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        stages = [stage(0, width=8), stage(1, width=8)]
        x = torch.linspace(-1, 1, 48, device="cuda:0").reshape(6, 8)
        step(stages, x.chunk(3))
        expected = [each[0].weight.grad.clone() for each in stages]
        for each in stages:
            each.zero_grad()
        record_work(stages, lambda: step(stages, x.chunk(3)))
        for each, gradient in zip(stages, expected, strict=True):
            assert torch.allclose(each[0].weight.grad, 2 * gradient)  # the step ran twice


def test_stages_that_cannot_be_watched_are_refused(two_gpus):
    stages = [stage(0), stage(1)]
    with pytest.raises(ValueError, match="did not call stage 1"):
        record_work(stages, lambda: stages[0](batch()).sum().backward())
    with pytest.raises(ValueError, match="A stage needs parameters on a GPU"):
        record_work([nn.ReLU()], lambda: None)
    with pytest.raises(ValueError, match="A stage needs parameters on a GPU"):
        record_work([nn.Linear(2, 2)], lambda: None)


def test_one_step_is_drawn_without_numbers(two_gpus, drawn):
    stages = [stage(0), stage(1)]
    figure = plot_work(stages, {"the whole batch": lambda: step(stages, batch().chunk(1))})
    (axes,) = drawn[-1].axes
    assert re.fullmatch(r"The GPUs wait [56]\d% of the step", figure.title)
    assert axes.get_title(loc="left") == "the whole batch"
    assert [text.get_text() for text in axes.texts] == []
    assert [entry.get_text() for entry in drawn[-1].legends[0].get_texts()] == [
        "forward",
        "backward",
    ]
    colours = {bar.get_facecolor() for bar in axes.patches}
    assert len(axes.patches) == 4 and len(colours) == 2
    assert "cuda:0 F1 B1; cuda:1 F1 B1." in figure.alt
    assert figure.alt.endswith("Virtual GPU, modelled on NVIDIA Tesla T4.")


def test_each_step_has_a_panel_with_its_name_and_the_numbers_of_micro_batches(two_gpus, drawn):
    stages = [stage(0), stage(1)]
    steps = {
        "whole": lambda: step(stages, batch().chunk(1)),
        "split": lambda: step(stages, batch().chunk(2)),
    }
    figure = plot_work(stages, steps, memory=True)
    whole, split = drawn[-1].axes
    assert whole.get_xlim() == split.get_xlim()
    for axes, name in ((whole, "whole"), (split, "split")):
        assert re.fullmatch(rf"{name}: GPUs wait \d\d%", axes.get_title(loc="left"))
    numbers = [text.get_text() for text in split.texts if text.get_text() in ("1", "2")]
    assert sorted(numbers) == ["1"] * 4 + ["2"] * 4
    legend = [entry.get_text() for entry in drawn[-1].legends[0].get_texts()]
    assert legend[-1] == "number of the micro-batch"
    assert sum("MiB" in text.get_text() for text in whole.texts) == 2
    assert "Memory of the step: whole takes" in figure.alt
    assert re.fullmatch(r"The GPUs wait: \d\d% with whole, \d\d% with split", figure.title)


def test_forward_and_backward_have_the_colours_of_the_legend(two_gpus, drawn):
    stages = [stage(0), stage(1)]
    plot_work(stages, {"step": lambda: step(stages, batch().chunk(1))})
    legend = {
        entry.get_label(): to_hex(entry.get_facecolor())
        for entry in drawn[-1].legends[0].get_patches()
    }
    assert legend == {"forward": BLUE.lower(), "backward": ORANGE.lower()}
    bars = sorted(drawn[-1].axes[0].patches, key=lambda bar: bar.get_x())
    expected = [legend[work] for work in ("forward", "forward", "backward", "backward")]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == expected


def test_orders_are_written_as_a_learner_writes_them():
    assert orders("GPipe", 2, 2) == [["F1", "F2", "B1", "B2"]] * 2
    assert orders("1F1B", 2, 2) == [["F1", "F2", "B1", "B2"], ["F1", "B1", "F2", "B2"]]
    with pytest.raises(ValueError, match="choose one of 'one batch', 'GPipe', '1F1B'"):
        orders("2F2B", 2, 2)


def test_work_comes_behind_what_it_needs():
    found = in_turn([["F1", "B1"], ["F1", "B1"]])
    assert found == [(0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)]


@pytest.mark.parametrize("action", ["f1", "F0", "F", "1F", "", "B1.5"])
def test_what_is_no_action_is_refused(action):
    with pytest.raises(ValueError, match="is no action. Write F1 or B1"):
        in_turn([[action]])


def test_orders_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        in_turn([["B1", "F1"], ["F1", "B1"]])


@pytest.mark.gpu(2)
def test_two_real_gpus_take_turns():
    with labkit.use(gpus=2, virtual=False, quiet=True):
        stages = [stage(0, 2, 4096), stage(1, 2, 4096)]
        x = batch(8192, 4096)
        rows = record_work(stages, lambda: step(stages, x.chunk(1)))
    assert 0.45 < waiting(rows, 2) < 0.65
    assert [done_by(rows, index) for index in (0, 1)] == ["F1 B1"] * 2
