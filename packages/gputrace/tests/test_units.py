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
