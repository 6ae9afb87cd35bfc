"""A pipeline's step: what each GPU does when, the figure, and the lab."""

import pytest
import torch
from torch import nn

import labkit
from gpulessons.lesson_04.labs import PipelineLab, pipeline_step, plot_pipeline_step
from gpulessons.lesson_04.labs.pipeline import (
    COLUMNS,
    Pipe,
    is_whole,
    stage_peaks,
    stages,
    waiting_share,
)
from gpulessons.lesson_04.schedules import GPIPE, ONE_BATCH, ONE_F_ONE_B, SCHEDULES, bubble
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

SMALL = {"width": 4096, "batch": 8192}


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_the_gpus_wait_as_long_as_the_formula_says(like):
    with labkit.use(gpus=2, like=like, quiet=True):
        result = collect(pipeline_step((2, 2), 4, **SMALL))
    assert waiting_share(result, ONE_BATCH) == pytest.approx(bubble(2, 1), abs=0.06)
    assert waiting_share(result, GPIPE) == pytest.approx(bubble(2, 4), abs=0.06)
    assert waiting_share(result, ONE_F_ONE_B) == pytest.approx(bubble(2, 4), abs=0.08)
    assert len(result.rows) == 2 * 2 * (1 + 4 + 4) and set(result.rows[0]) == set(COLUMNS)


def test_1f1b_keeps_less_and_least_on_the_last_stage():
    with labkit.use(gpus=3, virtual=True, quiet=True):
        result = collect(pipeline_step((1, 1, 1), 6, [GPIPE, ONE_F_ONE_B], **SMALL))
    gpipe, alternating = stage_peaks(result, GPIPE), stage_peaks(result, ONE_F_ONE_B)
    assert alternating[2] < alternating[1] < gpipe[1]
    assert alternating[0] < 0.8 * gpipe[0]


def test_a_slow_link_and_an_uneven_cut_make_the_gpus_wait():
    def waits(layers=(2, 2), link=1) -> float:
        return waiting_share(collect(pipeline_step(layers, 4, [GPIPE], link, **SMALL)), GPIPE)

    with labkit.use(gpus=2, virtual=True, quiet=True):
        even = waits()
        assert waits(link=16) > even + 0.1
        assert waits(layers=(3, 1)) > even + 0.1


def test_work_stands_behind_what_it_needs_and_never_overlaps_on_a_gpu():
    with labkit.use(gpus=3, virtual=True, quiet=True):
        result = collect(pipeline_step((1, 1, 1), 3, [ONE_F_ONE_B], width=256, batch=256))
    ends = {}
    for row in result.rows:
        before = (
            (row["stage"] - 1, "forward")
            if row["work"] == "forward"
            else (row["stage"] + 1, "backward")
        )
        assert row["start"] >= ends.get((*before, row["micro_batch"]), 0.0)
        assert row["start"] >= ends.get(row["stage"], 0.0) - 1e-9
        ends[row["stage"]] = ends[row["stage"], row["work"], row["micro_batch"]] = (
            row["start"] + row["seconds"]
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [6, 7])
def test_values_and_gradients_are_those_of_one_gpu(schedule, rows):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        torch.manual_seed(0)
        halves = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(f"cuda:{index}") for index in range(2)
        ]
        x = torch.randn(rows, 4, device="cuda:0")
        parts = x.chunk(1 if schedule == ONE_BATCH else 3)
        for part in parts:
            (halves[1](halves[0](part).to("cuda:1")).square().mean() / len(parts)).backward()
        due = [parameter.grad.cpu() for half in halves for parameter in half.parameters()]
        for half in halves:
            half.zero_grad()
        Pipe(halves).step(x, len(parts), schedule)
        for parameter, gradient in zip(
            [p for half in halves for p in half.parameters()], due, strict=True
        ):
            assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-6)


def test_a_stopped_run_has_no_share_of_a_step_that_it_did_not_see():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        run = pipeline_step((1, 1), 2, [ONE_BATCH, GPIPE], width=64, batch=64)
        assert run.total == 4 + 8
        for _ in range(6):
            next(run)
        run.close()
    result = run.result()
    assert is_whole(result, ONE_BATCH) and not is_whole(result, GPIPE) and stages(result) == 2
    assert waiting_share(result, GPIPE) is None and waiting_share(result, ONE_BATCH) > 0


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        first, second = (collect(pipeline_step((1, 1), 2, width=64, batch=64)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("seconds") == pytest.approx(second.column("seconds"))


def test_bad_arguments_are_refused():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        for layers in ((2, 2, 2, 2), (), (0, 1), 2):
            with pytest.raises(ValueError, match="layers=.*of each of 1 to 2 stages"):
                pipeline_step(layers)
        for schedules in ((), "GPipe", ["2F2B"]):
            with pytest.raises(
                ValueError, match="give one or more of 'one batch', 'GPipe', '1F1B'"
            ):
                pipeline_step((1, 1), schedules=schedules)
        with pytest.raises(ValueError, match="micro_batches=9: a batch of 8 rows"):
            pipeline_step((1, 1), 9, batch=8)
        with pytest.raises(ValueError, match="link=0: give a whole number"):
            pipeline_step((1, 1), link=0)
        with pytest.raises(ValueError, match="width=100000: give at most 65536"):
            pipeline_step((1, 1), width=100000)


@pytest.mark.gpu(4)
def test_four_real_gpus_say_the_same():
    with labkit.use(gpus=4, virtual=False, quiet=True):
        result = collect(pipeline_step())
    assert waiting_share(result, ONE_BATCH) > 0.7
    assert waiting_share(result, GPIPE) == pytest.approx(bubble(4, 8), abs=0.1)
    assert stage_peaks(result, ONE_F_ONE_B)[0] < stage_peaks(result, GPIPE)[0]


WORK = [
    ("forward", 0, 0, 0.0, 1.0),
    ("forward", 1, 0, 1.0, 1.0),
    ("backward", 1, 0, 2.0, 2.0),
    ("backward", 0, 0, 4.0, 2.0),
]


MIB = 1 << 20


def step(*schedules, work=WORK, badge="measured on paper", **more) -> Result:
    """Return a made-up result of two stages and one micro-batch under these schedules.

    Each GPU works for 3 of 6 seconds.
    """
    rows = [
        {
            "schedule": name,
            "stage": stage,
            "work": what,
            "micro_batch": index,
            "start": start,
            "seconds": took,
            "peak": (stage + 1) * MIB,
        }
        for name in schedules
        for what, stage, index, start, took in work
    ]
    parameters = {
        "schedules": list(schedules),
        "layers": "1+1",
        "micro_batches": 1,
        "link": 1,
        "width": 8,
        "batch": 8,
    }
    return Result("pipeline_step", parameters, COLUMNS, rows, badge, **more)


def test_the_title_says_how_long_the_gpus_wait():
    assert plot_pipeline_step(step("one batch")).title == "The GPUs wait 50% of the step"
    assert (
        plot_pipeline_step(step("GPipe", "1F1B")).title
        == "The GPUs wait: 50% with GPipe, 50% with 1F1B"
    )


@pytest.mark.parametrize("work", [WORK[:3], []])
def test_a_stopped_run_is_drawn_without_a_finding(work):
    assert (
        plot_pipeline_step(step("GPipe", work=work), prediction=20).title
        == "Not measured yet: a whole step"
    )


def test_the_words_hold_memory_prediction_recording_and_badge():
    recorded = step(
        "GPipe", badge="recorded on 4× NVIDIA H200", origin={"machine": "4x NVIDIA H200"}
    )
    assert plot_pipeline_step(step("GPipe"), recorded, 40).alt == (
        "The GPUs wait 50% of the step. "
        "Memory of the step: GPipe takes 1 MiB on cuda:0, 2 MiB on cuda:1. "
        "Predicted for GPipe: the GPUs wait 40%. "
        "Recorded on 4× NVIDIA H200: the GPUs wait 50% with GPipe. Measured on paper."
    )


def test_each_work_is_a_bar_and_the_prediction_a_hollow_marker(drawn):
    plot_pipeline_step(step("GPipe"), prediction=40)
    (axes,) = drawn[-1].axes
    assert [
        (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches
    ] == [(start, took, pytest.approx(stage)) for _, stage, _, start, took in WORK]
    (marker,) = axes.lines
    assert marker.get_markerfacecolor() == "none"
    assert marker.get_xdata()[0] == pytest.approx(5.0)
    texts = [text.get_text() for text in axes.texts]
    assert sorted(texts) == ["1 MiB", "2 MiB", "predicted: 40%"]  # one micro-batch needs no number


def test_a_panel_for_each_schedule_on_one_scale(drawn):
    plot_pipeline_step(step("one batch", "GPipe", "1F1B"))
    assert len(drawn[-1].axes) == 3
    assert len({axes.get_xlim() for axes in drawn[-1].axes}) == 1
    assert drawn[-1].axes[1].get_title(loc="left") == "GPipe: GPUs wait 50%"


@pytest.fixture
def lab():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield PipelineLab(["GPipe"], micro_batches=4)


def test_prediction_and_result_come_together(lab):
    said = run(lab, "20")
    assert "With GPipe the GPUs wait 2" in said
    assert "you predicted 20%" in said
    assert "The formula says 20%." in said
    assert "Predicted for GPipe: the GPUs wait 20%." in lab.picture.value
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in lab.picture.value
    assert len(lab.result.rows) == 16


def test_it_says_how_far_the_prediction_was_off(lab):
    assert "too high." in run(lab, "70")
    assert "too low." in run(lab, "0")


@pytest.mark.parametrize("silly", ["", "a fifth", "-1", "nan", "1e9"])
def test_silly_predictions_are_not_taken(lab, silly):
    lab.answer.value = silly
    lab.predict_button.click()
    assert "type a number from 0" in lab.message.value and lab.run_button.disabled


def test_not_all_of_a_step_can_be_waiting(lab):
    lab.answer.value = "100"
    lab.predict_button.click()
    assert "predict less than 100%" in lab.message.value and lab.run_button.disabled


def test_choices_change_the_experiment_and_ask_for_a_new_prediction(lab):
    run(lab, "20")
    lab.micro_batches.value = 1
    assert lab.run_button.disabled and "First predict" in lab.message.value
    lab.stages.value, lab.link.value, lab.switches["1F1B"].value = 1, "4 times slower", True
    assert "With 1F1B the GPUs wait" in run(lab, "0")
    parameters = lab.result.parameters
    assert (parameters["layers"], parameters["micro_batches"], parameters["link"]) == ("2", 1, 4)
    assert parameters["schedules"] == ["GPipe", "1F1B"]


def test_without_a_schedule_it_says_so_and_goes_on(lab):
    lab.switches["GPipe"].value = False
    assert "Switch at least one schedule on." in run(lab, "20")
    assert "failed" not in lab.message.value
    lab.switches["one batch"].value = True
    assert "With one batch the GPUs wait" in run(lab, "50")


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "20")
    assert "Stopped after 1 of 16 points. GPipe was not measured to its end" in said
    assert "so your prediction of 20% stays open." in said
    assert not lab.micro_batches.disabled


def test_without_gpus_it_says_what_to_do():
    assert "no GPU is in use: labkit.use" in run(PipelineLab(), "20")
