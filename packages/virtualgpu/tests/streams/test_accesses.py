"""Two regions of a storage overlap if they have a byte in common."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualgpu.streams.accesses import Region

HUGE = 1 << 40


def region(offset, size, stride, dtype=torch.float32) -> Region:
    return Region(offset, tuple(size), tuple(stride), dtype)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (region(0, [HUGE], [1]), region(HUGE // 2, [HUGE], [1]), True),
        (region(0, [HUGE], [1]), region(HUGE, [HUGE], [1]), False),
        (region(0, [HUGE, 4], [4, 1]), region(0, [4, HUGE], [1, 4]), True),
        (region(0, [HUGE], [1]), region(3, [HUGE // 4], [2]), True),
        (region(8, [HUGE // 2], [3]), region(0, [HUGE, 3], [3, 1]), True),
    ],
)
def test_a_region_without_gaps_is_compared_by_its_ends_however_large(one, other, overlap):
    assert one.overlaps(other) == other.overlaps(one) == overlap


regions = st.builds(
    lambda offset, sizes: region(offset, [n for n, _ in sizes], [s for _, s in sizes]),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=3),
)


def elements(shown: Region) -> set[int]:
    return set(
        torch.arange(200).as_strided(shown.size, shown.stride, shown.offset).flatten().tolist()
    )


@given(regions, regions)
def test_regions_overlap_if_they_show_an_element_in_common(one, other):
    assert one.overlaps(other) == bool(elements(one) & elements(other))
