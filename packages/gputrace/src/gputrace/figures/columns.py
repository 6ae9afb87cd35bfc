"""How a recording of any length becomes a picture: columns of time, each with the highest moment in it."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

NARROW = 6  # pixels: steps of training that are narrower are not drawn one by one


def columns_of(trace: "TraceData", pixels: int) -> np.ndarray:
    """The edges of the columns, in seconds, from 0 to the end of the trace; one column a pixel.

    Where steps of training are too narrow to be distinguished, the columns are as wide as a step, so that they show the peak of each.
    """
    last = float(trace.events.time[-1]) if len(trace.events) else 0.0
    end = max(trace.seconds, last) or 1e-6  # seconds: a recording of nothing
    count = pixels
    step = _step(trace)
    if 0 < step < NARROW * end / pixels:
        count = max(1, min(pixels, int(end / (1.25 * step))))
    return np.linspace(0, end, count + 1)


def _step(trace: "TraceData") -> float:
    """Seconds from one step of training to the next, in the middle of all; 0 if there are no steps."""
    for name in ("backward", "forward"):
        starts = [phase.start for phase in trace.phases if phase.name == name]
        if len(starts) > 2:
            return float(np.median(np.diff(starts)))
    return 0.0


def highest(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """For each interval between two edges the index of the highest value in it, the first of equals.

    `times`, in order, say when each value began; it holds until the next. The first is at `edges[0]` or before; what begins at the last
    edge or later counts only there if that is where the times end.
    """
    before = max(int(np.searchsorted(times, edges[0], side="left")) - 1, 0)
    until = max(int(np.searchsorted(times, edges[-1], side="right")), before + 1)
    return before + _highest(np.maximum(times[before:until], edges[0]), values[before:until], edges)


def _highest(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The same of times none of which lies outside the edges."""
    count = len(edges) - 1
    interval = np.minimum(np.searchsorted(edges, times, side="right") - 1, count - 1)
    first, after = np.searchsorted(interval, np.arange(count), side="left"), np.searchsorted(interval, np.arange(count), side="right")
    chosen = np.maximum(first - 1, 0)  # what holds when the interval begins
    filled = np.flatnonzero(after > first)
    most = np.full(count, values.min())
    most[filled] = np.maximum.reduceat(values, first[filled])
    tops = np.flatnonzero(values == most[interval])
    _, top = np.unique(interval[tops], return_index=True)
    rises = values[tops[top]] > values[chosen[filled]]
    chosen[filled[rises]] = tops[top][rises]
    return chosen
