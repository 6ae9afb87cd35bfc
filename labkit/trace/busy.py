"""How long something went on, and how long two things did at once: the numbers of a timeline."""

import numpy as np

from labkit.trace.spans import COPIES, KERNEL, KIND_OF, Spans

# What `Trace.busy` may be asked for, and the kinds of span that it means.
ASKED = {"kernel": (KERNEL,), "copy": COPIES, **{name: (KIND_OF[name],) for name in ("h2d", "d2h", "p2p")}}


def chosen(spans: Spans, device: int, kinds: tuple[int, ...]) -> np.ndarray:
    """Which of the spans are a device's and of one of these kinds."""
    return (spans.device == device) & np.isin(spans.kind, kinds)


def seconds_of(spans: Spans, *which: np.ndarray) -> float:
    """Seconds in which at least one of the spans, marked in one of `which`, went on."""
    mask = np.logical_or.reduce(which)
    start, end = spans.start[mask], spans.end[mask]
    if not len(start):
        return 0.0
    # In order of start: what is between the latest end so far and the next start is a gap.
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - latest[:-1], 0.0)
    return round(float(latest[-1] - start[0] - gaps.sum()), 12)  # to the picosecond: less is only how floats round


def seconds_of_both(spans: Spans, first: np.ndarray, second: np.ndarray) -> float:
    """Seconds in which one of the first and one of the second went on at once."""
    both = seconds_of(spans, first) + seconds_of(spans, second) - seconds_of(spans, first, second)
    return round(max(0.0, both), 11)  # each of the three is off by up to half a picosecond
