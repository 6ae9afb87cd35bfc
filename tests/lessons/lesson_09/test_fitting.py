"""Whether a training fits: plans, the figure of one, and the lab."""

from itertools import pairwise

import pytest

import labkit
from gpulessons.lesson_09.labs import BudgetLab, memory_plan, plot_memory_plan
from gpulessons.lesson_09.labs.fitting import COLUMNS, TERMS, answer, plan
from gpulessons.lesson_09.labs.fitting import changes as changes_of
from gpulessons.lesson_09.training import Setting, fits
from gpulessons.networks import GPT, MLP
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

MEDIUM = GPT(width=1024, layers=24, heads=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "name", "changes", "said"),
    [
        (Setting(MEDIUM, 8), "T4", ["4 micro-batches"], "It does not fit. First change: 4 micro-batches."),
        (Setting(MEDIUM, 1), "T4", [], "It fits."),
        (Setting(MLP(16384, 3), 64), "T4", ["a fused Adam"], "It does not fit. First change: a fused Adam."),
        (Setting(MLP(16384, 12), 64), "A100", ["momentum instead of Adam"], "It does not fit. First change: momentum instead of Adam."),
        (
            Setting(MLP(16384, 8), 1 << 17),
            "A100",
            ["131072 micro-batches", "momentum instead of Adam"],
            "It does not fit. First change: 131072 micro-batches; then momentum instead of Adam.",
        ),
        (Setting(MLP(65536, 2), 64, optimizer="SGD"), "T4", [], "It does not fit, and none of these changes helps"),
    ],
)
def test_the_plan_says_what_to_change_first(setting, name, changes, said):
    result = collect(memory_plan(setting, name))
    assert result.column("change")[1:] == changes
    assert answer(result).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T4", "H200"])
@pytest.mark.parametrize("batch", [1, 1 << 16])
def test_each_change_saves_memory_until_it_fits(name, batch):
    steps = list(plan(Setting(MLP(16384, 8), batch), name))
    assert all(later.memory.peak < before.memory.peak for before, later in pairwise(steps))
    assert not any(fits(step.memory, name) for step in steps[:-1])
    assert all(step.setting.batch == batch and step.setting.network == steps[0].setting.network for step in steps)


def test_a_row_has_all_of_its_peak():
    result = collect(memory_plan(Setting(MLP(256, 2), 512), "L4"))
    assert result.badge == "measured on virtual GPUs, modelled on NVIDIA L4"
    assert result.parameters == {"setting": str(Setting(MLP(256, 2), 512)), "gpu": "NVIDIA L4", "whole": True}
    [row] = result.rows
    assert sum(row[name] for name in TERMS) == row["peak"] and row["phase"] == "the backward pass"


def test_a_plan_for_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no profile of a GPU named"):
        memory_plan(Setting(MLP(), 8), "K80")


def test_newer_gpus_are_told_to_take_bfloat16():
    for name, half in (("A100", "bfloat16"), ("T4", "float16")):
        change, other = next(changes_of(Setting(GPT(), 8), name))
        assert change == f"autocast to {half}" and other.precision == f"autocast {half}"


GIB = 1 << 30


def result_of(*peaks: float, whole: bool = True) -> Result:
    """A result whose steps have these peaks in GiB, all of it activations, on a GPU with 4 GiB."""
    changes = ["as chosen", "checkpointing", "a fused Adam"][: len(peaks)]
    rows = []
    for change, peak in zip(changes, peaks, strict=True):
        terms = dict.fromkeys(TERMS, 0) | {"activations": round(peak * GIB)}
        rows.append({"change": change, "phase": "the forward pass", "peak": round(peak * GIB), "room": 4 * GIB, **terms})
    return Result("memory_plan", {"setting": "MLP()", "gpu": "some GPU", "whole": whole}, COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (result_of(1), "It fits."),
        (result_of(6, 5), "It does not fit. First change: checkpointing. Even so it does not fit."),
        (result_of(6, 5, whole=False), "It does not fit. First change: checkpointing."),
        (result_of(3.9, 3), "It hardly fits. First change: checkpointing."),
        (result_of(6, whole=False), "It does not fit."),
    ],
)
def test_the_answer_says_no_more_than_was_measured(result, said):
    assert answer(result) == said


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (result_of(1), "Needs 1 GiB, some GPU has 4 GiB: it fits"),
        (result_of(6, 3), "Needs 6 GiB, some GPU has 4 GiB: enough with checkpointing"),
        (result_of(6, 5, 3), "Needs 6 GiB, some GPU has 4 GiB: first change checkpointing"),
        (result_of(6), "Needs 6 GiB, some GPU has 4 GiB: it does not fit"),
        (result_of(), "Not measured yet: some GPU"),
    ],
)
def test_the_title_says_whether_it_fits_and_what_to_change(result, title, drawn):
    assert plot_memory_plan(result).title == title


def test_the_words_hold_terms_and_prediction():
    alt = plot_memory_plan(result_of(6, 3), prediction=2.5).alt
    assert "As chosen: 6 GiB in the forward pass: activations 6 GiB." in alt
    assert "Checkpointing: 3 GiB in the forward pass: activations 3 GiB." in alt
    assert "Predicted: 2.5 GiB." in alt


@pytest.fixture
def lab():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield BudgetLab(MLP(256, 2), batch=512)


@pytest.mark.slow
def test_what_fits_is_said_to_fit(lab):
    said = run(lab, "0.02")
    assert "It takes 0.0208 GiB, at its fullest in the backward pass; you predicted 0.02. A good prediction!" in said
    assert "Of 14.4 GiB on Tesla T4: It fits." in said
    assert "Predicted: 0.02 GiB." in lab.picture.value and lab.progress.value == lab.progress.max


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_to_change(lab):
    lab.network.value, lab.batch.value, lab.gpu.value = "GPT-2 medium", "8", "T4"
    assert lab.run_button.disabled
    assert "It does not fit. First change: 4 micro-batches." in run(lab, "9")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": "many"}, "“many” is no batch: type a whole number of rows from 1 to 1048576."),
        ({"batch": "-3"}, "“-3” is no batch"),
        ({"batch": "²"}, "is no batch"),
        ({"batch": ""}, "“” is no batch"),
        ({"batch": "9" * 30}, "is no batch"),
        ({"batch": "2", "gpus": 4}, "4 GPU(s) and 1 micro-batch(es) need a row each"),
    ],
)
def test_silly_input_is_answered_without_a_failure(lab, change, said):
    for name, value in change.items():
        getattr(lab, name).value = value
    answered = run(lab, "1")
    assert said in answered and "failed" not in answered and lab.picture.value == ""
    lab.batch.value, lab.gpus.value = "512", 1
    assert "It fits." in run(lab, "1")


def test_choices_are_locked_while_it_runs_and_a_change_asks_for_another_prediction(lab):
    lab.answer.value = "1"
    lab.predict_button.click()
    lab.checkpointing.value = True
    assert lab.prediction is None and lab.run_button.disabled
    lab._set_buttons(running=True)
    assert lab.network.disabled and lab.batch.disabled and lab.gpu.disabled


def test_a_run_that_stops_early_leaves_the_prediction_open(lab):
    nothing = memory_plan(lab.setting()).result()
    assert "stays open" in lab.verdict(nothing, 1.0)
