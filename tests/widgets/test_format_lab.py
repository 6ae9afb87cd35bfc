"""The lab of number formats: predictions of any kind, silly input, and a computation that changes."""

import pytest

from labkit.experiments import number_formats
from labkit.widgets import FormatLab


def run(lab, computation: str, prediction: str) -> str:
    lab.computation.value = computation
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


@pytest.mark.parametrize(
    ("computation", "prediction", "said"),
    [
        ("0.1 + 0.2", "0.3", "float16 makes 0.299804688 of 0.1 + 0.2; you predicted 0.3. A good prediction!"),
        ("0.1 + 0.2", "-3", "you predicted -3.<"),
        ("300**2", "inf", "float16 makes infinity of 300**2; you predicted inf. A good prediction!"),
        ("inf - inf", "nan", "float16 makes not a number of inf - inf; you predicted nan. A good prediction!"),
        ("1e-8", "0", "float16 makes 0 of 1e-8; you predicted 0. A good prediction!"),
        ("1 < 2", "1", "I cannot compute “1 &lt; 2”: type numbers"),
        ("sum(1, 1e9)", "1", "write sum(number, times)"),
        ("", "1", "There is nothing to compute"),
        ("1/3", "a third", "“a third” is not a prediction: type a number such as 0.3, or inf, or nan"),
        ("1/3", "", "There is no prediction yet"),
    ],
)
def test_what_it_says(computation, prediction, said):
    assert said in run(FormatLab(), computation, prediction)


def test_prediction_and_result_come_together():
    lab = FormatLab()
    run(lab, "1/3", "0.25")
    assert "Predicted for float16: 0.25." in lab.picture.value
    assert "Float16: 0.333251953, off by 0.024 %, bits 0 01101 0101010101." in lab.picture.value


def test_a_mistake_clears_the_picture_and_the_lab_goes_on():
    lab = FormatLab()
    run(lab, "1/3", "1")
    assert "failed" not in run(lab, "1/", "1") and lab.picture.value == ""
    assert "float16 makes 0.5 of 1/2" in run(lab, "1/2", "0.5")


def test_another_computation_asks_for_another_prediction():
    lab = FormatLab()
    run(lab, "1/3", "1")
    lab.computation.value = "1/7"
    assert lab.run_button.disabled and "First predict" in lab.message.value


def test_the_plain_figure_needs_no_prediction():
    assert "Predicted" not in FormatLab("300**2").figure().alt


def test_a_run_that_stops_early_leaves_the_prediction_open():
    lab = FormatLab()
    part = number_formats("1/3")
    next(part)
    assert "stays open" in lab.verdict(part.result(), 1.0)
