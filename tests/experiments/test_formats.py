"""Number formats: every value and every bit as PyTorch has them, where PyTorch has the format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.experiments import collect, number_formats
from labkit.experiments.formats import FLOAT64, FORMATS

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8 e5m2": torch.float8_e5m2,
    "float8 e4m3": torch.float8_e4m3fn,
}
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FORM = {form.name: form for form in FORMATS}


@pytest.mark.parametrize("name", DTYPES)
@given(x=st.floats(width=32, allow_nan=False) | st.floats(-500, 500, width=32))
def test_numbers_and_bits_are_those_of_torch(name, x):
    form, dtype = FORM[name], DTYPES[name]
    if not form.infinite and abs(x) > form.largest:
        return  # versions of PyTorch differ: the largest number, or none
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


def test_what_is_too_large_for_e4m3_becomes_its_largest():
    form = FORM["float8 e4m3"]
    assert [form.rounded(x) for x in (464.0, 1e9, math.inf, -1e9)] == [448, 448, 448, -448]
    assert form.pattern(math.nan) == ("0", "1111", "111")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_no_number_has_an_exponent_of_ones(form):
    sign, exponent, fraction = form.pattern(form.rounded(math.nan))
    assert sign == "0" and set(exponent) == {"1"} and "1" in fraction
    assert [len(part) for part in (sign, exponent, fraction)] == [1, form.exponent_bits, form.fraction_bits]


def test_a_computation_is_rounded_at_every_step():
    result = collect(number_formats("sum(1, 3000)"))
    assert dict(zip(result.column("format"), result.column("value"), strict=True)) == {
        "float32": 3000, "tf32": 2048, "bfloat16": 256, "float16": 2048, "float8 e5m2": 8, "float8 e4m3": 16,
    }  # fmt: skip
    assert set(result.column("exact")) == {3000}
    assert result.recorded() is None


def test_it_counts_as_a_gpu_counts():
    """The same sums, by PyTorch's own operators."""
    for name in ("bfloat16", "float16"):
        total, one = torch.zeros((), dtype=DTYPES[name]), torch.tensor(0.01, dtype=DTYPES[name])
        for _ in range(1000):
            total += one
        assert collect(number_formats("sum(0.01, 1000)")).column("value", format=name) == [total.item()]


def test_a_mistake_shows_before_the_first_point():
    with pytest.raises(ValueError, match="I cannot compute “foo”"):
        number_formats("1 + foo")
