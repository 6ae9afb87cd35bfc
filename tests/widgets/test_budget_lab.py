"""The lab of memory budgets: choices, silly input, what it says of a training that fits and of one that does not."""

import pytest

import labkit
from labkit.experiments import GPT, MLP, fit, memory_plan
from labkit.widgets import BudgetLab


@pytest.fixture
def lab():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield BudgetLab(MLP(256, 2), batch=512)


def run(lab: BudgetLab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


def test_what_fits_is_measured_on_the_gpu_in_use(lab):
    said = run(lab, "0.02")
    assert "The formula says 0.0208 GiB, at its fullest in" in said and "you predicted 0.02. A good prediction!" in said
    assert "Measured: 0.0208 GiB. Of 14.4 GiB on Tesla T4: It fits." in said
    assert "Predicted: 0.02 GiB." in lab.picture.value


def test_what_does_not_fit_is_told_what_to_change(lab):
    lab.network.value, lab.batch.value, lab.gpu.value = "GPT-2 medium", "8", "T4"
    assert lab.run_button.disabled
    assert "It does not fit. First change: 4 micro-batches." in run(lab, "9")
    assert "Measured" not in lab.message.value


def test_more_gpus_leave_less_on_each(lab):
    lab.network.value, lab.batch.value, lab.gpus.value, lab.gpu.value = "GPT-2 medium", "8", 4, "A100"
    run(lab, "9")
    assert lab.result.rows[0]["buckets"] > 0 and "It fits." in lab.message.value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": "many"}, "“many” is no batch: type a whole number of rows from 1 to 1048576."),
        ({"batch": "-3"}, "“-3” is no batch"),
        ({"batch": "²"}, "is no batch"),
        ({"batch": ""}, "“” is no batch"),
        ({"batch": "9" * 30}, "is no batch"),
        ({"batch": "2", "gpus": 4}, "4 GPU(s) and 1 micro-batch(es) need a row each"),
        ({"network": "GPT-2 small", "precision": "autocast bfloat16", "gpu": "T4"}, "choose autocast float16"),
    ],
)
def test_silly_input_is_answered_without_a_failure(lab, change, said):
    for name, value in change.items():
        getattr(lab, name).value = value
    answered = run(lab, "1")
    assert said in answered and "failed" not in answered and lab.picture.value == ""
    lab.network.value, lab.batch.value, lab.gpus.value, lab.precision.value, lab.gpu.value = "your own", "512", 1, "float32", fit.IN_USE
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


def test_the_plain_figure_needs_no_prediction():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        assert "Predicted" not in BudgetLab(GPT(64, 1, 1, 16, 100)).figure().alt
