"""Number formats: bits and rounding, the figure, and the lab."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpulessons.lesson_07.labs import FormatLab, number_formats, plot_number_formats
from gpulessons.lesson_07.labs.formats import FLOAT64, FORMATS
from labkit.labs import collect

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE = {2: torch.int16, 4: torch.int32}
FORM = {form.name: form for form in FORMATS}


@pytest.mark.parametrize("name", DTYPES)
@given(x=st.floats(width=32, allow_nan=False) | st.floats(-500, 500, width=32))
def test_numbers_and_bits_are_those_of_torch(name, x):
    form, dtype = FORM[name], DTYPES[name]
    number = torch.tensor(x, dtype=torch.float32).to(dtype)
    value = form.rounded(x)
    assert value == number.float().item()
    bits = number.view(WHOLE[dtype.itemsize]).item() & (2**form.bits - 1)
    assert int("".join(form.pattern(value)), 2) == bits


@given(x=st.floats(allow_nan=False))
def test_float64_is_pythons_own(x):
    assert FLOAT64.rounded(x) == x


@pytest.mark.parametrize("name", DTYPES)
def test_the_largest_number_is_that_of_torch(name):
    assert FORM[name].largest == torch.finfo(DTYPES[name]).max


def test_tf32_has_the_range_of_float32_and_the_digits_of_float16():
    form = FORM["tf32"]
    assert form.bits == 19
    assert form.rounded(0.1) == FORM["float16"].rounded(0.1)
    assert form.rounded(1e38) == pytest.approx(1e38, rel=1e-3)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_number_has_an_exponent_of_ones(form):
    sign, exponent, fraction = form.pattern(form.rounded(math.nan))
    assert sign == "0" and set(exponent) == {"1"} and "1" in fraction
    assert [len(part) for part in (sign, exponent, fraction)] == [
        1,
        form.exponent_bits,
        form.fraction_bits,
    ]


def test_a_computation_is_rounded_at_every_step():
    result = collect(number_formats("sum(1, 3000)"))
    assert dict(zip(result.column("format"), result.column("value"), strict=True)) == {
        "float32": 3000, "tf32": 2048, "bfloat16": 256, "float16": 2048,
    }  # fmt: skip
    assert set(result.column("exact")) == {3000}
    assert result.recorded() is None


def test_it_counts_as_a_gpu_counts():
    """The sums of the lab must equal those of PyTorch's own operators."""
    for name in ("bfloat16", "float16"):
        total, one = torch.zeros((), dtype=DTYPES[name]), torch.tensor(0.01, dtype=DTYPES[name])
        for _ in range(1000):
            total += one
        assert collect(number_formats("sum(0.01, 1000)")).column("value", format=name) == [
            total.item()
        ]


def test_a_mistake_shows_before_the_first_point():
    with pytest.raises(ValueError, match="I cannot compute “foo”"):
        number_formats("1 + foo")


@pytest.mark.parametrize(
    ("computation", "title"),
    [
        ("0.5", "0.5: every format says what float64 says"),
        ("300**2", "300**2 is too large for float16"),
        ("1e39", "1e39 is too large for every format"),
        ("1e-8", "1e-8 is too small for float16"),
        ("1/3", "1/3: float16 is off by 0.024 %, bfloat16 off by 0.2 %"),
        ("1/0", "1/0: every format says what float64 says"),
        ("inf - inf", "inf - inf: every format says what float64 says"),
        ("(400**2 - 300**2) / 7e4", "(400**2 - 300**2) / 7e4 is lost on the way in float16"),
    ],
)
def test_the_title_says_what_came_out(computation, title):
    assert plot_number_formats(collect(number_formats(computation))).title == title


def test_a_long_computation_is_cut_in_the_title_and_a_stopped_one_says_so():
    assert plot_number_formats(collect(number_formats("+".join(["0.125"] * 30)))).title.endswith(
        "…"
    )
    run = number_formats("1/3")
    assert plot_number_formats(run.result()).title == "Not computed yet: 1/3"
    next(run)
    assert "float32" in plot_number_formats(run.result()).title


def test_the_words_hold_the_bits_and_the_prediction(drawn):
    alt = plot_number_formats(collect(number_formats("-2")), prediction=math.inf).alt
    assert "Float16: -2, as float64, bits 1 10000 0000000000." in alt
    assert "Predicted for float16: inf." in alt


def run(lab, computation: str, prediction: str) -> str:
    lab.computation.value = computation
    lab.answer.value = prediction
    lab.predict_button.click()
    lab.run_button.click()
    return lab.message.value


@pytest.mark.parametrize(
    ("computation", "prediction", "said"),
    [
        ("0.1 + 0.2", "0.3", "0.1 + 0.2 is 0.299804688; you predicted 0.3. A good prediction!"),
        ("0.1 + 0.2", "-3", "you predicted -3.<"),
        ("300**2", "inf", "In float16, 300**2 is infinity; you predicted inf. A good prediction!"),
        ("inf - inf", "nan", "inf - inf is not a number; you predicted nan. A good prediction!"),
        ("1e-8", "0", "In float16, 1e-8 is 0; you predicted 0. A good prediction!"),
        ("1 < 2", "1", "I cannot compute “1 &lt; 2”: type numbers"),
        ("0,1 + 0,2", "1", "“0,1 + 0,2” has a comma: type a point, 0.1 + 0.2."),
        ("sum(1, 1e9)", "1", "write sum(number, times)"),
        ("", "1", "There is nothing to compute"),
        (
            "1/3",
            "a third",
            "“a third” is not a prediction: type a number such as 0.3, or inf, or nan",
        ),
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
    assert "In float16, 1/2 is 0.5" in run(lab, "1/2", "0.5")


def test_another_computation_asks_for_another_prediction():
    lab = FormatLab()
    run(lab, "1/3", "1")
    lab.computation.value = "1/7"
    assert lab.run_button.disabled and "First predict" in lab.message.value


def test_a_run_that_stops_early_leaves_the_prediction_open():
    lab = FormatLab()
    part = number_formats("1/3")
    next(part)
    assert "stays open" in lab.verdict(part.result(), 1.0)
