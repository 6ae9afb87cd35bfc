"""Figures of two recordings of the same task: the original in grey, and the new one in colour."""

from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures.columns import highest
from gputrace.figures.figure import (
    BESIDE,
    BLUE,
    DOTS_PER_INCH,
    GREY,
    SIZE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    add_title,
    byte_ticks,
    new_canvas,
    time_ticks,
    words,
)
from gputrace.figures.lanes import (
    IN_GREY,
    LOOKS,
    NAMES,
    Lane,
    draw_lane,
    kinds_of,
    lanes_of,
    shade,
)
from gputrace.figures.relations import draw_waits
from gputrace.spans import HOST

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

LEFT, RIGHT = 0.17, 0.79  # the sides of a timeline's axes, as shares of the figure's width
LANE = 0.27  # inches, the height of a lane
ABOVE, BELOW = 0.62, 0.72  # inches for the title and the legend, and for the axis and the badge
BUDGET: dict[str, Any] = {"color": VERMILLION, "linewidth": 1.4, "linestyle": "--", "zorder": 4}


def memory_compared(
    own: "TraceData",
    original: "TraceData",
    title: str,
    budget: float | None = None,
    reserved: bool = False,
) -> Figure:
    """Draw the memory of two recordings over time, each of the device with the highest peak.

    Args:
        own: the recording to draw in colour.
        original: the recording to draw in grey.
        title: the finding.
        budget: a number of bytes to mark with a line.
        reserved: whether to draw the memory that the allocator holds instead of the tensors.
    """
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(title)
        end = max(own.seconds, original.seconds, 1e-6)
        pixels = round(axes.get_position().width * SIZE[0] * DOTS_PER_INCH)
        edges = np.linspace(0, end, pixels + 1)
        tops = []
        filled: dict[str, Any] = {"fill": True, "color": GREY, "linewidth": 0, "zorder": 2}
        line_only: dict[str, Any] = {"baseline": None, "color": BLUE, "linewidth": 2, "zorder": 3}
        for trace, look in ((original, filled), (own, line_only)):
            line = trace.timeline()
            values = line.reserved if reserved else line.allocated
            seen = edges[edges <= max(trace.seconds, edges[1])]
            axes.stairs(values[highest(line.times, values, seen)], seen, **look)
            tops.append(int(values.max()))
        entries: list = [Patch(color=GREY, label="original")]
        entries.append(Line2D([], [], color=BLUE, label="yours"))
        if budget is not None:
            entries.append(_add_budget(axes, budget))
        byte_ticks(axes, 1.08 * max(*tops, budget or 1), 6)
        time_ticks(axes, end)
        axes.set_ylabel("reserved memory" if reserved else "memory of tensors")
        axes.grid(axis="x", visible=False)
        canvas.legend(handles=entries, **_beside_axes(axes))
        add_badge(canvas, own.badge)
        before, after = (units.byte_text(top) for top in tops)
        limit = "" if budget is None else f", budget {units.byte_text(budget)}"
        return Figure(canvas, words(canvas, f"Peak: {after}, original {before}{limit}", own.badge))


def timeline_compared(
    own: "TraceData", original: "TraceData", title: str, budget: float | None = None
) -> Figure:
    """Draw what ran when in two recordings, one below the other on the same axis of time.

    Args:
        own: the recording to draw in colour.
        original: the recording to draw in grey, above.
        title: the finding.
        budget: a number of seconds to mark with a line.
    """
    parts = [(original, IN_GREY, _lanes(original)), (own, LOOKS, _lanes(own))]
    count = sum(len(lanes) for _, _, lanes in parts)
    end = max(own.end, original.end, budget or 0.0, 1e-6) * 1.02
    height = ABOVE + BELOW + LANE * (count + 0.5)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(SIZE[0], height), facecolor="white")
        add_title(canvas, title)
        pixels = (RIGHT - LEFT) * SIZE[0] * DOTS_PER_INCH
        bottom = BELOW / height
        for trace, looks, lanes in reversed(parts):
            share = LANE * len(lanes) / height
            axes = canvas.add_axes((LEFT, bottom, RIGHT - LEFT, share))
            _draw(axes, trace, looks, lanes, end, pixels)
            time_ticks(axes, end)
            name = "yours" if trace is own else "original"
            text = f"{name}\n{units.time_text(trace.end)}"
            place: dict[str, Any] = {"xycoords": "axes fraction", **BESIDE}
            axes.annotate(text, (1, 0.5), (8, 0), **place, fontsize=TEXT_POINTS)
            if trace is original:
                axes.tick_params(axis="x", bottom=False, labelbottom=False)
                axes.set_xlabel("")
            if budget is not None:
                axes.axvline(budget, **BUDGET)
            bottom += share + 0.5 * LANE / height
        entries = _entries(own)
        if budget is not None:
            entries.append(Line2D([], [], **BUDGET, label=f"budget {units.time_text(budget)}"))
        look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS, "handlelength": 1.5}
        look |= {"columnspacing": 1.1, "ncols": len(entries), "loc": "upper left"}
        canvas.legend(handles=entries, bbox_to_anchor=(0.02, 1 - 0.28 / height), **look)
        add_badge(canvas, own.badge)
        return Figure(canvas, words(canvas, *_proof(own, original), own.badge))


def _lanes(trace: "TraceData") -> list[Lane]:
    """Return the lanes of the host and of all devices on which something ran."""
    devices = [device for device in np.unique(trace.spans.device).tolist() if device != HOST]
    return lanes_of(trace, devices or trace.devices[:1])


def _draw(
    axes: Axes, trace: "TraceData", looks: dict, lanes: list[Lane], end: float, pixels: float
) -> None:
    """Draw the lanes of one recording.

    Args:
        looks: how each kind of spans is drawn.
        end: the right edge of the time axis, in seconds.
        pixels: the width of the axis in the picture.
    """
    axes.set(xlim=(0, end), ylim=(len(lanes), 0))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    rows = [row + 0.5 for row in range(len(lanes))]
    axes.set_yticks(rows, [lane.name for lane in lanes], fontsize=TEXT_POINTS)
    shade(axes, len(lanes))
    for row, lane in enumerate(lanes):
        draw_lane(axes, trace, kinds_of(trace), lane, row, (0.0, end), pixels, looks)
    draw_waits(axes, trace, lanes, (0.0, end), pixels)


def _entries(trace: "TraceData") -> list:
    """Return legend entries for the kinds of spans that occur in a recording."""
    found = set(np.unique(kinds_of(trace)).tolist())
    look = {"edgecolor": "white", "linewidth": 0.3}
    entries: list = []
    for kind, name in NAMES.items():
        if kind in found:
            entries.append(Patch(**{**look, **LOOKS[kind]}, label=name))
    return entries


def _add_budget(axes: Axes, budget: float) -> Line2D:
    """Draw a line at the budget, and return its legend entry."""
    axes.axhline(budget, **BUDGET)
    return Line2D([], [], **BUDGET, label=f"budget\n{units.byte_text(budget)}")


def _beside_axes(axes: Axes) -> dict[str, Any]:
    """Return keyword arguments that place a legend to the right of the axes."""
    box = axes.get_position()
    corner = box.x1 + 0.01, box.y1 + 0.02
    return {
        "frameon": False,
        "fontsize": TEXT_POINTS,
        "loc": "upper left",
        "bbox_to_anchor": corner,
    }


def _proof(own: "TraceData", original: "TraceData") -> list[str]:
    """Return sentences with the numbers that the figure of two timelines shows."""
    texts = []
    for name, trace in (("Yours", own), ("The original", original)):
        launched = int((trace.spans.device != HOST).sum())
        work = "1 kernel or copy" if launched == 1 else f"{launched} kernels and copies"
        waited = units.time_text(trace.host_waited)
        texts.append(f"{name}: {units.time_text(trace.end)}, {work}, the host waited {waited}")
    return texts
