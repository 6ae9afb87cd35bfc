"""Columns of time in which a recording of any length becomes a picture.

Each column shows the highest value in its interval.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

NARROW = 6  # pixels. Narrower training steps are not drawn one by one.


def columns_of(trace: "TraceData", pixels: int) -> np.ndarray:
    """Return the edges of the columns, in seconds from 0 to the end. A column is a pixel wide.

    If training steps are too narrow to be distinguished, a column is about as wide as a step. Then
    each column shows the peak of a step.
    """
    last = float(trace.events.time[-1]) if len(trace.events) else 0.0
    end = max(trace.seconds, last) or 1e-6  # an empty recording, too, needs an interval
    count = pixels
    step = _step(trace)
    if 0 < step < NARROW * end / pixels:
        count = max(1, min(pixels, int(end / (1.25 * step))))
    return np.linspace(0, end, count + 1)


def _step(trace: "TraceData") -> float:
    """Return the median time from one training step to the next, or 0 if there are no steps."""
    for name in ("backward", "forward"):
        starts = [phase.start for phase in trace.phases if phase.name == name]
        if len(starts) > 2:
            return float(np.median(np.diff(starts)))
    return 0.0


def highest(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the index of the highest value in each interval between two edges.

    If several are equal, it is the first.

    Args:
        times: when each value began, in order. A value lasts until the next one. The first one
            begins at `edges[0]` or before. Values that begin at the last edge or later count only
            if `times` ends there.
    """
    before = max(int(np.searchsorted(times, edges[0], side="left")) - 1, 0)
    until = max(int(np.searchsorted(times, edges[-1], side="right")), before + 1)
    return before + _highest(np.maximum(times[before:until], edges[0]), values[before:until], edges)


def _highest(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return what `highest` returns, for times that are all between the first and last edge."""
    count = len(edges) - 1
    interval = np.minimum(np.searchsorted(edges, times, side="right") - 1, count - 1)
    numbers = np.arange(count)
    first = np.searchsorted(interval, numbers, side="left")
    after = np.searchsorted(interval, numbers, side="right")
    chosen = np.maximum(first - 1, 0)  # the value that lasts when the interval begins
    filled = np.flatnonzero(after > first)
    most = np.full(count, values.min())
    most[filled] = np.maximum.reduceat(values, first[filled])
    tops = np.flatnonzero(values == most[interval])
    _, top = np.unique(interval[tops], return_index=True)
    rises = values[tops[top]] > values[chosen[filled]]
    chosen[filled[rises]] = tops[top][rises]
    return chosen
