"""Columns of time: the highest moment of each, whatever happens in between."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gputrace.figures.columns import columns_of, highest
from gputrace.phases import Phase


def by_hand(times, values, edges):
    """Return the highest value in each interval, found by comparing all of them."""
    found = []
    for index, (begin, end) in enumerate(itertools.pairwise(edges)):
        last = index == len(edges) - 2
        inside = [
            value
            for time, value in zip(times, values, strict=True)
            if begin <= time < end or (last and time == end)
        ]
        before = [value for time, value in zip(times, values, strict=True) if time < begin][-1:]
        found.append(max(inside + before))
    return found


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=60), st.integers(1, 12))
@example([(0, 0)], 1)  # several moments at the first edge
def test_each_column_has_its_highest_value(later, count):
    times = np.array([0, *sorted(time for time, _ in later)], float)
    values = np.array([3, *(value for _, value in later)])
    edges = np.linspace(0, 40, count + 1)
    assert values[highest(times, values, edges)].tolist() == by_hand(
        times.tolist(), values.tolist(), edges.tolist()
    )


def test_a_peak_without_length_among_many_events_is_kept():
    times = np.linspace(0, 1, 100_001)
    values = np.ones(100_001, int)
    values[31_415] = 7
    chosen = highest(times, values, np.linspace(0, 1, 601))
    assert values[chosen].max() == 7
    assert 31_415 in chosen


def test_one_column_a_pixel_unless_steps_are_narrower_than_can_be_told_apart(trace_of):
    def steps(count):
        return [
            Phase("backward", number / count, (number + 0.5) / count, 0) for number in range(count)
        ]

    assert len(columns_of(trace_of([], seconds=1.0), 600)) == 601
    assert len(columns_of(trace_of([], seconds=1.0, phases=steps(10)), 600)) == 601
    edges = columns_of(trace_of([], seconds=1.0, phases=steps(300)), 600)
    assert 1 / 300 < edges[1] < 1.5 / 300
    assert len(columns_of(trace_of([], seconds=1.0, phases=steps(5000)), 600)) == 601


def test_columns_reach_to_the_last_event_and_have_a_length_where_nothing_took_time(trace_of):
    assert columns_of(trace_of([(2.0, "alloc", 1, 1)], seconds=1.0), 10)[-1] == 2.0
    assert columns_of(trace_of([]), 10)[-1] == pytest.approx(1e-6)
