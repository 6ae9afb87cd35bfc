"""The lab of data parallelism, on virtual GPUs."""

import pytest

import labkit
from labkit.widgets import DataParallelLab

MODELS = {"small": (8, 4), "large": (4096, 8192)}


@pytest.fixture
def lab():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield DataParallelLab(gpus=(1, 2), models=MODELS, repeats=1)


def run(lab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


def test_prediction_and_result_come_together(lab):
    assert "The step was 1.5 times as fast on 2 GPUs; you predicted 6, which is 4.0 times too high." in run(lab, "6")
    words = lab.picture.value
    assert "Predicted for the large model on 2 GPUs: 6 times faster." in words
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in words
    assert len(lab.result.rows) == 4


def test_it_says_how_far_the_prediction_was_off(lab):
    assert "which is 3.0 times too low." in run(lab, "0.5")
    assert "A good prediction!" in run(lab, "1.4")


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    assert "Stopped after 1 of 4 points. The large model was not measured on 2 GPUs, so your prediction of 3 stays open." in run(lab, "3")


def test_the_question_names_model_and_gpus(lab):
    assert "4096 neurons wide, a batch of 8192 rows" in lab.question and "on 2 GPUs than on one" in lab.question


def test_too_few_gpus_are_named(lab):
    assert "gpus=(1, 2, 4): give one or more whole numbers from 1 to 2" in run(DataParallelLab(), "3")


def test_the_recording_is_shown_for_the_default_models():
    with labkit.use(gpus=4, virtual=True, quiet=True):
        assert "Recorded on 4× NVIDIA H200" in DataParallelLab(repeats=1).figure().alt
