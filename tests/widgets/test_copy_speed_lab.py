"""The lab of copy speed, on a virtual GPU."""

import pytest

import labkit
from gputrace import units
from labkit import recordings
from labkit.experiments import Result
from labkit.experiments.copies import COLUMNS, PREDICTED_SIZE
from labkit.widgets import CopySpeedLab

SIZES = (1 << 12, PREDICTED_SIZE)


@pytest.fixture
def lab():
    with labkit.use(virtual=True, quiet=True):
        yield CopySpeedLab(sizes=SIZES, repeats=1)


def run(lab, prediction: str) -> str:
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


def test_prediction_result_and_recording_come_together(lab):
    assert "From pinned memory 16 MiB were copied 2.0 times faster; you predicted 5, which is 2.5 times too high." in run(lab, "5")
    words = lab.picture.value
    assert "Predicted at 16 MiB: 5 times faster." in words
    (speed,) = recordings.load("copy_speed").column("bytes_per_second", size=1 << 24, memory="pinned", direction="h2d")
    assert f"Recorded on NVIDIA H200, torch 2.11: 16 MiB copies at {units.rate_text(speed)} from pinned" in words
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in words
    assert len(lab.result.rows) == 8


def test_it_says_how_far_the_prediction_was_off(lab):
    assert "which is 4.0 times too low." in run(lab, "0.5")
    assert "A good prediction!" in run(lab, "2.1")


def test_a_run_that_stops_early_leaves_the_prediction_open(lab, monkeypatch):
    monkeypatch.setattr(lab, "point", lambda row: lab.stop_button.click() or "first")
    assert "Stopped after 1 of 8 points. Copies of 16 MiB were not measured, so your prediction of 3 stays open." in run(lab, "3")
    assert "Not measured yet" in lab.picture.value


def test_without_a_gpu_it_says_what_to_do():
    assert "no GPU is in use: labkit.use(gpus=1)" in run(CopySpeedLab(), "3")


def test_bad_sizes_are_named():
    with labkit.use(virtual=True, quiet=True):
        assert "sizes=[0]: give one or more whole numbers" in run(CopySpeedLab(sizes=[0]), "3")


def test_the_plain_figure_needs_no_prediction(lab):
    assert "Predicted" not in lab.figure().alt
    assert lab.figure().alt.startswith("Pinned memory copies")


def test_a_verdict_on_a_result_without_the_asked_size():
    result = Result("copy_speed", {"sizes": [4096]}, COLUMNS, [], "measured on paper")
    assert "stays open" in CopySpeedLab().verdict(result, 2)
