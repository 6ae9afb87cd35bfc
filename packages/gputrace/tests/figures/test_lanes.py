"""How spans become boxes: none is lost, no time is made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrace.figures.lanes import COLUMN, LEAST, WIDE, boxes, short_name


@pytest.mark.parametrize(
    ("told", "low", "seen"),
    [
        ([], 0, []),
        ([(10, 20), (20, 40)], 0, [(10, 10, 1), (20, 20, 1)]),  # wide: a box of its own
        ([(10, 10.01), (50, 51.5)], 0, [(10, 1, 1), (50, 1.5, 1)]),  # narrow and alone: it is seen
        # columns, as high as the share of their time
        (
            [(i, i + 0.5) for i in range(8)],
            0,
            [(0, COLUMN, 0.5), (COLUMN, COLUMN, 0.5)],
        ),
        ([(0, 0.001), (1, 1.001)], 0, [(0, COLUMN, LEAST)]),
        ([(0, 0), (1, 1)], 0, [(0, COLUMN, LEAST)]),  # no time at all
        ([(0, 2), (1, 3), (3, 4)], 0, [(0, COLUMN, 1.0)]),  # what overlaps counts once
        # columns do not move with what lies before them
        (
            [(9, 9.5), (10, 10.5)],
            8.0,
            [(8, COLUMN, 0.25)],
        ),
    ],
)
def test_spans_become_boxes(told, low, seen):
    start, end = np.array(told, float).reshape(-1, 2).T
    assert [
        tuple(round(value, 6) for value in box) for box in boxes(start, end, low, 1.0).tolist()
    ] == seen


spans = st.lists(st.tuples(st.floats(0, 500), st.floats(0, 20)), min_size=1, max_size=60).map(
    lambda rows: [(start, start + length) for start, length in sorted(rows)]
)


@given(spans)
def test_every_span_is_covered_and_the_area_of_what_does_not_overlap_is_its_time(told):
    start, end = np.array(told).T
    x, width, height = boxes(start, end, 0.0, 1.0).T
    for a, b in told:
        middle = (a + b) / 2
        assert ((x <= middle + 1e-9) & (middle <= x + width + 1e-9)).any()
    assert (height <= 1).all() and (height >= LEAST).all() and (width > 0).all()
    apart = [told[0]]
    for a, b in told[1:]:
        if a > apart[-1][1] + 10 and b - a >= WIDE and apart[-1][1] - apart[-1][0] >= WIDE:
            apart.append((a, b))
    if len(apart) == len(told) and told[0][1] - told[0][0] >= WIDE:
        assert (width * height).sum() == pytest.approx(sum(b - a for a, b in told))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, "
            "at::native::CUDAFunctor_add<float>, char* >(int)",
            "vectorized_elementwise_kernel",
        ),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        (
            "at::cuda::(anonymous namespace)::kernel(int)",
            "at::cuda::(anonymous namespace)::kernel(int)",
        ),
        ("addmm", "addmm"),
        ("<lambda>", "<lambda>"),
    ],
)
def test_kernels_of_cpp_have_short_names(name, short):
    assert short_name(name) == short
