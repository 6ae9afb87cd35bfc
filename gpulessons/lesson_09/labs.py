"""The figure of lesson 9: the bytes at the peak of several training steps."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from gputrace import Trace, units
from gputrace.figures.figure import (
    BLACK,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    TEXT_POINTS,
    Figure,
    new_canvas,
)
from labkit import machine
from labkit.labs.figures import badged, in_style

GIB = 1 << 30
BAR_HEIGHT = 0.6


def kinds_at_peak(trace: Trace) -> dict[str, int]:
    """Return the bytes of each kind at the moment with the most allocated bytes."""
    moment = trace.allocated.argmax()
    return {kind: int(sizes[moment]) for kind, sizes in trace.layers().items()}


@in_style
def plot_peaks(traces: Mapping[str, Trace], room: int) -> Figure:
    """Draw the kinds of bytes at the peak of each trace, one bar below the other.

    Args:
        traces: recorded training steps by their names, the first one on top.
        room: bytes that the GPU has free for PyTorch, drawn as a dotted line.
    """
    peaks = {name: kinds_at_peak(trace) for name, trace in traces.items()}
    canvas, axes = new_canvas(_finding(peaks, room))
    axes.set_position((0.17, 0.34, 0.79, 0.52))
    _draw(axes, peaks, room)
    sentences = [f"{name}: {_in_words(kinds)}." for name, kinds in peaks.items()]
    sentences.append(f"The GPU has {units.byte_text(room)} free.")
    return badged(canvas, machine.in_use().badge, *sentences)


def _finding(peaks: Mapping[str, Mapping[str, int]], room: int) -> str:
    sizes = [sum(kinds.values()) for kinds in peaks.values()]
    first, last = units.byte_text(sizes[0]), units.byte_text(sizes[-1])
    return f"From {first} to {last}. The GPU has {units.byte_text(room)} free"


def _in_words(kinds: Mapping[str, int]) -> str:
    parts = [f"{kind} {units.byte_text(size)}" for kind, size in kinds.items() if size]
    return f"{units.byte_text(sum(kinds.values()))}, {', '.join(parts)}"


def _draw(axes: Axes, peaks: Mapping[str, Mapping[str, int]], room: int) -> None:
    """Draw the bars, the sum of each bar, a dotted line at `room` bytes, and the legend."""
    left = [0.0] * len(peaks)
    for kind, colour in CATEGORY_COLOURS.items():
        sizes = [kinds.get(kind, 0) / GIB for kinds in peaks.values()]
        if max(sizes) * GIB < room / 200:  # too thin to see
            continue
        look: dict[str, Any] = {"color": colour, "hatch": CATEGORY_HATCHES.get(kind)}
        look |= {"edgecolor": BLACK, "linewidth": 0.6, "label": kind}
        axes.barh(range(len(peaks)), sizes, BAR_HEIGHT, left, **look)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, kinds in enumerate(peaks.values()):
        total = sum(kinds.values()) / GIB
        beside = max(total, room / GIB)  # the dotted line does not cross the number
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(f"{total:.1f}", (beside, row), (4, 0), **place)
    axes.axvline(room / GIB, color=BLACK, linestyle=":", linewidth=1.6, label="free on the GPU")
    axes.set_yticks(range(len(peaks)), list(peaks), fontsize=TEXT_POINTS)
    axes.set(xlim=(0, 1.1 * max(*left, room / GIB)), ylim=(len(peaks) - 0.5, -0.5))
    axes.set_xlabel("GiB at the peak")
    axes.grid(axis="y", visible=False)
    legend: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.02, 0.06), "ncols": 4}
    axes.figure.legend(frameon=False, fontsize=TEXT_POINTS, **legend)
