"""The lab of pipelines, on virtual GPUs."""

import pytest

import labkit
from labkit.widgets import PipelineLab


@pytest.fixture
def lab():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield PipelineLab(["GPipe"], micro_batches=4)


def run(lab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


def test_prediction_and_result_come_together(lab):
    said = run(lab, "20")
    assert "With GPipe the GPUs wait 2" in said and "you predicted 20%" in said and "The formula says 20%." in said
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
    assert "Switch at least one schedule on." in run(lab, "20") and "failed" not in lab.message.value
    lab.switches["one batch"].value = True
    assert "With one batch the GPUs wait" in run(lab, "50")


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    assert "Stopped after 1 of 16 points. GPipe was not measured to its end, so your prediction of 20% stays open." in run(lab, "20")
    assert not lab.micro_batches.disabled


def test_without_gpus_it_says_what_to_do():
    assert "no GPU is in use: labkit.use" in run(PipelineLab(), "20")


def test_the_plain_figure_needs_no_prediction(lab):
    assert "Predicted" not in lab.figure().alt
