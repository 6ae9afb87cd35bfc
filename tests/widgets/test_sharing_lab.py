"""The lab of shared models, on a virtual GPU."""

import pytest

import labkit
from labkit.widgets import SharingLab


@pytest.fixture(autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        yield


def run(lab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


@pytest.mark.slow
def test_prediction_and_result_come_together():
    lab = SharingLab("one server", processes=2)
    assert "Together they take 0.686 GiB; you predicted 2, 1.31 too high." in run(lab, "2")
    assert "2 processes, one server: 702 MiB of the GPU" in lab.picture.value and "Predicted: 2 GiB" in lab.picture.value
    assert "you predicted 0.66. A good prediction!" in run(lab, "0.66")


def test_another_choice_asks_for_another_prediction():
    lab = SharingLab()
    lab.answer.value = "1"
    lab.predict_button.click()
    assert lab.prediction == 1 and not lab.run_button.disabled
    lab.choices["way"].value = "shared weights"
    assert lab.prediction is None and lab.run_button.disabled and "First predict" in lab.message.value
    parameters = lab.experiment().parameters
    assert parameters["ways"] == ["shared weights"] and parameters["processes"] == 3 and parameters["weights"] == 512 << 20


def test_a_stopped_run_leaves_the_prediction_open(monkeypatch):
    lab = SharingLab("a copy each")
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "1")
    assert "Stopped after 1 of 3 points. Not all processes were started, so your prediction of 1 stays open." in said
    assert "1 process, a copy each" in lab.picture.value


def test_the_choices_are_locked_during_a_run(monkeypatch):
    lab = SharingLab("one server", processes=2)
    seen = []
    monkeypatch.setattr(lab, "point", lambda row: seen.append(lab.choices["way"].disabled) or "")
    run(lab, "1")
    assert seen == [True, True] and not lab.choices["way"].disabled
