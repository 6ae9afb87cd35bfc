"""The figure of DataParallel's training step."""

import pytest

from labkit import plots
from labkit.experiments.data_parallel import COLUMNS, WORK_COLUMNS
from labkit.experiments.result import Result


def steps(seconds, badge="measured on paper", **more) -> Result:
    """A result from {model: {GPUs: seconds}}."""
    rows = [
        {"gpus": gpus, "model": model, "width": 8, "batch": 4, "seconds": value}
        for model, values in seconds.items()
        for gpus, value in values.items()
    ]
    parameters = {"gpus": [1, 2, 4], "models": {model: [8, 4] for model in seconds}}
    return Result("data_parallel_step", parameters, COLUMNS, rows, badge, **more)


USUAL = steps({"small": {1: 0.002, 2: 0.006, 4: 0.012}, "large": {1: 0.12, 2: 0.07, 4: 0.04}})


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (USUAL, "4 GPUs: the small model 6.0 times slower, the large model 3.0 times faster"),
        (steps({"only": {1: 1.0, 2: 0.99}}), "2 GPUs: the only model as fast as on one"),
        (steps({"small": {1: 0.002, 4: 0.004}, "large": {1: 0.12}}), "4 GPUs: the small model 2.0 times slower"),
        (steps({"small": {1: 0.002}, "large": {}}), "Not measured yet: a model on one GPU and on several"),
    ],
)
def test_the_title_compares_with_one_gpu(result, title):
    assert plots.data_parallel_step(result).title == title


def test_the_words_hold_finding_numbers_prediction_recording_and_badge():
    recorded = steps({"small": {1: 0.001, 4: 0.003}}, "recorded on 4× NVIDIA H200", origin={"machine": "4x NVIDIA H200"})
    figure = plots.data_parallel_step(USUAL, recorded, 2)
    assert figure.alt == (
        "4 GPUs: the small model 6.0 times slower, the large model 3.0 times faster. "
        "A step of the small model takes 2 ms on 1, 6 ms on 2, 12 ms on 4; a step of the large model takes 120 ms on 1, 70 ms on 2, "
        "40 ms on 4. Predicted for the large model on 4 GPUs: 2 times faster. "
        "Recorded on 4× NVIDIA H200: a step of the small model takes 1 ms on 1, 3 ms on 4. Measured on paper."
    )


def test_solid_is_measured_dashed_is_recorded_hollow_is_predicted(drawn):
    plots.data_parallel_step(USUAL, USUAL, 2)
    lines = drawn[-1].axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-", "None"]
    assert lines[-1].get_markerfacecolor() == "none"
    assert list(lines[-1].get_ydata()) == [0.06]
    assert "predicted: 2 times" in [text.get_text() for text in drawn[-1].axes[0].texts]
    assert [label.get_text() for label in drawn[-1].axes[0].get_xticklabels()] == ["1", "2", "4"]


def test_a_prediction_for_what_was_not_measured_is_not_drawn():
    assert "Predicted" not in plots.data_parallel_step(steps({"small": {1: 0.002}, "large": {}}), prediction=3).alt


def work(shares, badge="measured on paper", **more) -> Result:
    """A result from {model: shares of the GPUs}."""
    rows = [
        {"model": model, "gpu": gpu, "computing": share, "seconds": 1.0} for model, row in shares.items() for gpu, share in enumerate(row)
    ]
    return Result("data_parallel_work", {"gpus": 2, "models": {"small": [8, 4], "large": [8, 4]}}, WORK_COLUMNS, rows, badge, **more)


def test_the_share_of_a_step_at_work_beside_the_recorded_one():
    recorded = work({"small": [0.1, 0.2], "large": [0.9, 0.8]}, "recorded on 2× NVIDIA H200", origin={"machine": "2x NVIDIA H200"})
    figure = plots.data_parallel_work(work({"small": [0.2, 0.1], "large": [0.75, 0.65]}), recorded)
    assert figure.title == "GPUs compute for 15% of the small model's step, 70% of the large model's step"
    assert "Small model, GPU 0 20%, GPU 1 10%; large model, GPU 0 75%, GPU 1 65%." in figure.alt
    assert "GPU 0 90%" in figure.alt and figure.alt.endswith("Measured on paper.")


def test_nothing_measured_yet():
    assert plots.data_parallel_work(work({})).title == "Not measured yet: for how much of a step each GPU computes"
