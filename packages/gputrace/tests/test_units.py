"""Numbers with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace import units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (1024, "bytes", "1 KiB"),
        (3 << 29, "bytes", "1.5 GiB"),
        (1 << 52, "bytes", "4096 TiB"),
        (1.7e-5, "seconds", "17 µs"),
        (0.0024, "seconds", "2.4 ms"),
        (31.25, "seconds", "31.2 s"),
        (1.19e10, "bytes per second", "11.9 GB/s"),
        (2.27e8, "bytes per second", "0.227 GB/s"),
        (4.14e12, "bytes per second", "4.14 TB/s"),
        ("pinned", "", "pinned"),
        (64, "neurons", "64"),
        (0.0, "seconds", "0 µs"),
        (-0.0024, "seconds", "-2.4 ms"),
        (1234.5, "seconds", "1234 s"),
        (999.9, "seconds", "1000 s"),
        (-3 << 20, "bytes", "-3 MiB"),
        (-2e9, "bytes per second", "-2 GB/s"),
        (5e15, "bytes per second", "5000 TB/s"),
        (123456.0, "", "123456"),
        (12345.67, "neurons", "12346"),
        (9999.9, "", "10000"),
        (-123456.0, "", "-123456"),
        (1.5e20, "", "1.5e+20"),
        (0.000012345, "", "1.234e-05"),
        (float("nan"), "", "nan"),
        (None, "", "–"),
        (None, "bytes", "–"),
        (None, "seconds", "–"),
    ],
)
def test_a_value_is_told_in_the_unit_that_suits_it(value, unit, text):
    assert units.text(value, unit) == text


@given(st.integers(1, 1 << 50))
def test_the_byte_unit_leaves_a_number_from_1_to_1024(nbytes):
    size, _ = units.byte_unit(nbytes)
    assert 1 <= nbytes / size < 1024 or size == 1 << 40


@given(st.floats(1e-4, 1e15), st.integers(2, 6))
def test_a_number_keeps_its_digits_and_needs_no_exponent(value, digits):
    text = units.number_text(value, digits)
    assert "e" not in text and float(text) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))
