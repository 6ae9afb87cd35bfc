"""DataParallel's training step: measured, drawn, and the lab."""

import pytest
import torch

import labkit
from gpulessons.lesson_03.labs import DataParallelLab, data_parallel_step, plot_data_parallel_step
from gpulessons.lesson_03.labs.data_parallel import COLUMNS, parallel_gain
from labkit.labs import Result, Run, collect, recorded_result

from ...learner import predict_and_run as run


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_the_small_model_is_slower_and_the_large_faster_as_recorded(like):
    with labkit.use(gpus=4, like=like, quiet=True):
        result = collect(data_parallel_step(gpus=[1, 4], repeats=1))
    for source in (result, recorded_result("data_parallel_step")):
        assert parallel_gain(source, "small")[4] < 0.5
        assert parallel_gain(source, "large")[4] > 1.5
    assert result.recorded() is not None


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        first, second = (
            collect(data_parallel_step([1, 2], {"tiny": (8, 6)}, repeats=2)) for _ in range(2)
        )
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("seconds") == pytest.approx(second.column("seconds"))
    assert first.recorded() is None


def test_a_stopped_run_gains_only_where_both_were_measured():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        run = data_parallel_step([1, 2], {"a": (8, 6), "b": (4, 2)}, repeats=1)
        assert run.total == 4
        next(run)
        assert parallel_gain(run.result(), "a") == {}
        next(run)
        run.close()
    assert list(parallel_gain(run.result(), "a")) == [2]
    assert parallel_gain(run.result(), "b") == {}


def test_bad_arguments_are_refused():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match=r"gpus=\(1, 2, 4\).*from 1 to 2"):
            data_parallel_step()
        with pytest.raises(ValueError, match="for model 'wide', got 4096"):
            data_parallel_step([1], {"wide": 4096})
        with pytest.raises(ValueError, match="from 1 to 65536"):
            data_parallel_step([1], {"empty": (0, 5)})
        with pytest.raises(ValueError, match="expected at least one model as name"):
            data_parallel_step([1], {})


@pytest.mark.gpu(4)
@pytest.mark.filterwarnings(  # DataParallel starts threads.
    "ignore:.*Attempting to run cuBLAS, but there was no current CUDA context"
)
def test_four_real_gpus_say_the_same():
    with labkit.use(gpus=4, virtual=False, quiet=True):
        result = collect(data_parallel_step())
    assert parallel_gain(result, "small")[4] < 1 < parallel_gain(result, "large")[4]


def steps(seconds, badge="measured on paper", **more) -> Result:
    """Return a made-up result from {model: {number of GPUs: seconds}}."""
    rows = []
    for model, values in seconds.items():
        for gpus, value in values.items():
            rows.append({"gpus": gpus, "model": model, "width": 8, "batch": 4, "seconds": value})
    parameters = {"gpus": [1, 2, 4], "models": {model: [8, 4] for model in seconds}}
    return Result("data_parallel_step", parameters, COLUMNS, rows, badge, **more)


USUAL = steps({"small": {1: 0.002, 2: 0.006, 4: 0.012}, "large": {1: 0.12, 2: 0.07, 4: 0.04}})


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (USUAL, "4 GPUs: the small model 6.0 times slower, the large model 3.0 times faster"),
        (steps({"only": {1: 1.0, 2: 0.99}}), "2 GPUs: the only model as fast as on one"),
        (
            steps({"small": {1: 0.002, 4: 0.004}, "large": {1: 0.12}}),
            "4 GPUs: the small model 2.0 times slower",
        ),
        (
            steps({"small": {1: 0.002}, "large": {}}),
            "Not measured yet: a model on one GPU and on several",
        ),
    ],
)
def test_the_title_compares_with_one_gpu(result, title):
    assert plot_data_parallel_step(result).title == title


def test_the_words_hold_finding_numbers_prediction_recording_and_badge():
    recorded = steps(
        {"small": {1: 0.001, 4: 0.003}},
        "recorded on 4× NVIDIA H200",
        origin={"machine": "4x NVIDIA H200"},
    )
    figure = plot_data_parallel_step(USUAL, recorded, 2)
    assert figure.alt == (
        "4 GPUs: the small model 6.0 times slower, the large model 3.0 times faster. "
        "A step of the small model takes 2 ms on 1, 6 ms on 2, 12 ms on 4; "
        "a step of the large model takes 120 ms on 1, 70 ms on 2, 40 ms on 4. "
        "Predicted for the large model on 4 GPUs: 2 times faster. "
        "Recorded on 4× NVIDIA H200: a step of the small model takes 1 ms on 1, 3 ms on 4. "
        "Measured on paper."
    )


def test_solid_is_measured_dashed_is_recorded_hollow_is_predicted(drawn):
    plot_data_parallel_step(USUAL, USUAL, 2)
    lines = drawn[-1].axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-", "None"]
    assert lines[-1].get_markerfacecolor() == "none"
    assert list(lines[-1].get_ydata()) == [2]
    assert list(lines[-2].get_ydata()) == [1, 0.12 / 0.07, 0.12 / 0.04]  # speed-up
    texts = {text.get_text() for text in drawn[-1].axes[0].texts}
    assert {"predicted: 2 times", "one GPU"} <= texts
    assert [label.get_text() for label in drawn[-1].axes[0].get_xticklabels()] == ["1", "2", "4"]


def test_a_prediction_for_what_was_not_measured_is_not_drawn():
    result = steps({"small": {1: 0.002}, "large": {}})
    assert "Predicted" not in plot_data_parallel_step(result, prediction=3).alt


@pytest.fixture
def lab():
    with labkit.use(gpus=4, virtual=True, quiet=True):
        yield DataParallelLab()


@pytest.fixture(scope="module")
def whole():
    """The result of a complete run of the experiment.

    All tests share it, because it takes seconds.
    """
    with labkit.use(gpus=4, virtual=True, quiet=True):
        return collect(data_parallel_step())


def test_prediction_and_result_come_together(whole, lab, monkeypatch):
    rows = iter(whole.rows)
    again = Run(whole.name, whole.parameters, whole.columns, whole.badge, len(whole.rows), rows)
    monkeypatch.setattr(lab, "experiment", lambda: again)
    said = run(lab, "6")
    assert "The step was 1.9 times as fast on 4 GPUs" in said
    assert "you predicted 6, which is 3.1 times too high." in said
    words = lab.picture.value
    assert "Predicted for the large model on 4 GPUs: 6 times faster." in words
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in words
    assert len(lab.result.rows) == 6


def test_it_says_how_far_the_prediction_was_off(whole, lab):
    assert "which is 3.9 times too low." in lab.verdict(whole, 0.5)
    assert "A good prediction!" in lab.verdict(whole, 1.9)


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "3")
    assert "Stopped after 1 of 6 points. The large model was not measured on 4 GPUs" in said
    assert "so your prediction of 3 stays open." in said


def test_the_question_names_model_and_gpus(lab):
    assert "4096 neurons wide, a batch of 8192 rows" in lab.question
    assert "on 4 GPUs than on one" in lab.question


def test_too_few_gpus_are_named(lab):
    labkit.use(None)
    with labkit.use(gpus=2, virtual=True, quiet=True):
        assert "gpus=(1, 2, 4): give one or more whole numbers from 1 to 2" in run(lab, "3")


def test_the_recording_is_shown(whole, lab):
    assert "Recorded on 4× NVIDIA H200" in lab.draw(whole, None).alt
