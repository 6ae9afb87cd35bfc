"""The lab of leaks, on a virtual GPU."""

import gc

import pytest

import labkit
from labkit.widgets import LeakLab


@pytest.fixture(autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        gc.freeze()  # the objects of pytest and torch are left out of the search for holders, which makes it quick
        yield
        gc.unfreeze()


def run(lab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


def test_prediction_result_and_holder_come_together():
    lab = LeakLab(["hook"], steps=2)
    said = run(lab, "3")
    assert "The loop keeps 1 MiB a step; you predicted 3, 2 too high." in said
    assert "The largest tensor that leaked is held by global `seen[" in said
    assert "Memory grows by 1 MiB a step" in lab.picture.value and "Predicted: 3 MiB a step" in lab.picture.value
    assert lab.leaks == ["hook"]


def test_nothing_may_be_predicted_and_kept():
    lab = LeakLab([], steps=2)
    assert "The loop keeps 0 MiB a step; you predicted 0. A good prediction!" in run(lab, "0")
    assert "Memory does not grow" in lab.picture.value


def test_the_source_follows_the_switches_and_asks_for_another_prediction():
    lab = LeakLab(["kept losses"], steps=2)
    assert "<b>losses.append(loss)</b>" in lab.source.value.replace("    ", "").replace("<b>    ", "<b>")
    lab.answer.value = "1"
    lab.predict_button.click()
    assert lab.prediction == 1 and not lab.run_button.disabled
    lab.switches["retain_graph"].value = True
    assert "backward(retain_graph=True)" in lab.source.value
    assert lab.prediction is None and lab.run_button.disabled and "First predict" in lab.message.value
    assert lab.leaks == ["kept losses", "retain_graph"]


def test_a_stopped_run_says_what_was_kept_until_then(monkeypatch):
    lab = LeakLab(["kept batches"])
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    said = run(lab, "1")
    assert "Stopped after 1 of 6 points. The loop keeps 1.5 MiB a step; you predicted 1, 0.5 too low." in said
    assert "held by" not in said


def test_silly_predictions_are_refused():
    lab = LeakLab()
    for typed in ("", "many", "-1", "nan", "1e9"):
        assert "type a number from 0 to 1000" in run(lab, typed)


def test_the_switches_are_locked_during_a_run(monkeypatch):
    lab = LeakLab(["hook"], steps=2)
    seen = []
    monkeypatch.setattr(lab, "point", lambda row: seen.append(lab.switches["hook"].disabled) or "")
    run(lab, "1")
    assert seen == [True, True] and not lab.switches["hook"].disabled
