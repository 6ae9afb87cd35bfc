"""The figures of pipelines: the finding, the bars, the memory beside them, and what was recorded or predicted."""

import pytest

from labkit import plots
from labkit.experiments import pipeline, splits
from labkit.experiments.result import Result

WORK = [("forward", 0, 0, 0.0, 1.0), ("forward", 1, 0, 1.0, 1.0), ("backward", 1, 0, 2.0, 2.0), ("backward", 0, 0, 4.0, 2.0)]
MIB = 1 << 20


def step(*schedules, work=WORK, badge="measured on paper", **more) -> Result:
    """A step of two stages and one micro-batch under each of the schedules; each GPU works for 3 of 6 seconds."""
    rows = [
        {"schedule": name, "stage": stage, "work": what, "micro_batch": index, "start": start, "seconds": took, "peak": (stage + 1) * MIB}
        for name in schedules
        for what, stage, index, start, took in work
    ]
    parameters = {"schedules": list(schedules), "layers": "1+1", "micro_batches": 1, "link": 1, "width": 8, "batch": 8}
    return Result("pipeline_step", parameters, pipeline.COLUMNS, rows, badge, **more)


def sweep(seconds, badge="measured on paper", **more) -> Result:
    """A result from {program: {splits: seconds}}."""
    rows = [{"splits": n, "program": program, "seconds": took} for program, values in seconds.items() for n, took in values.items()]
    return Result("pipeline_splits", {"splits": [1, 2, 4]}, splits.COLUMNS, rows, badge, **more)


def test_the_title_says_how_long_the_gpus_wait():
    assert plots.pipeline_step(step("one batch")).title == "The GPUs wait 50% of the step"
    assert plots.pipeline_step(step("GPipe", "1F1B")).title == "The GPUs wait: 50% with GPipe, 50% with 1F1B"


@pytest.mark.parametrize("work", [WORK[:3], []])
def test_a_stopped_run_is_drawn_without_a_finding(work):
    assert plots.pipeline_step(step("GPipe", work=work), prediction=20).title == "Not measured yet: a whole step"


def test_the_words_hold_memory_prediction_recording_and_badge():
    recorded = step("GPipe", badge="recorded on 4× NVIDIA H200", origin={"machine": "4x NVIDIA H200"})
    assert plots.pipeline_step(step("GPipe"), recorded, 40).alt == (
        "The GPUs wait 50% of the step. Memory of the step: GPipe takes 1 MiB on cuda:0, 2 MiB on cuda:1. "
        "Predicted for GPipe: the GPUs wait 40%. Recorded on 4× NVIDIA H200: the GPUs wait 50% with GPipe. Measured on paper."
    )


def test_each_work_is_a_bar_and_the_prediction_a_hollow_marker(drawn):
    plots.pipeline_step(step("GPipe"), prediction=40)
    (axes,) = drawn[-1].axes
    assert [(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in axes.patches] == [
        (start, took, pytest.approx(stage)) for _, stage, _, start, took in WORK
    ]
    (marker,) = axes.lines
    assert marker.get_markerfacecolor() == "none" and marker.get_xdata()[0] == pytest.approx(5.0)  # 6 s of work on 2 GPUs, 60% of the step
    texts = [text.get_text() for text in axes.texts]
    assert {"predicted: 40%", "1 MiB", "2 MiB", "1"} <= set(texts)


def test_a_panel_for_each_schedule_on_one_scale(drawn):
    plots.pipeline_step(step("one batch", "GPipe", "1F1B"))
    assert len(drawn[-1].axes) == 3
    assert len({axes.get_xlim() for axes in drawn[-1].axes}) == 1
    assert drawn[-1].axes[1].get_title(loc="left") == "GPipe: GPUs wait 50%"


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({1: 2.0, 2: 1.4, 4: 1.0}, "4 micro-batches are 2.0 times as fast as one"),
        ({1: 2.0, 2: 1.0, 4: 1.5}, "2 micro-batches are 2.0 times as fast as one; 4 are slower again"),
        ({1: 1.0, 2: 1.0, 4: 1.5}, "The batch in one piece is fastest"),
        ({2: 1.0}, "Not measured yet: a batch whole and cut"),
        ({}, "Not measured yet: a batch whole and cut"),
    ],
)
def test_the_title_of_a_sweep_names_the_best_number_of_parts(seconds, title):
    assert plots.pipeline_splits(sweep({"compute first": seconds})).title == title


def test_solid_is_measured_dashed_is_recorded_dotted_the_formula(drawn):
    measured = sweep({"copy first": {1: 2.0, 2: 2.0}, "compute first": {1: 2.0, 2: 1.4}})
    recorded = sweep({"copy first": {1: 0.2, 2: 0.2}}, "recorded on 4× NVIDIA H200", origin={"machine": "4x NVIDIA H200"})
    figure = plots.pipeline_splits(measured, recorded)
    (axes,) = drawn[-1].axes
    assert [line.get_linestyle() for line in axes.lines] == ["--", "-", "-", ":"]
    assert list(axes.lines[-1].get_ydata()) == [2.0, 1.5]
    assert "formula" in [text.get_text() for text in axes.texts]
    assert figure.alt == (
        "2 micro-batches are 1.4 times as fast as one. "
        "Copy first takes 2 s with 1, 2 s with 2; compute first takes 2 s with 1, 1.4 s with 2. "
        "Recorded on 4× NVIDIA H200: copy first takes 200 ms with 1, 200 ms with 2. Measured on paper."
    )
