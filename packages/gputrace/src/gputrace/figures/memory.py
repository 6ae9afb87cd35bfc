"""Figure of a device's memory over time: what was allocated for what, and the line at the peak."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gputrace import units
from gputrace.events import OOM, SourceLine
from gputrace.figures.columns import columns_of, highest
from gputrace.figures.figure import (
    BLACK,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    DOTS_PER_INCH,
    SIZE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    add_title,
    byte_ticks,
    darker,
    shortened,
    text_width,
    words,
)
from gputrace.figures.phases import add_phases
from gputrace.phases import phase_of
from gputrace.steps import Steps, steps_of

if TYPE_CHECKING:
    from gputrace.trace_data import Device, TraceData

LEFT, RIGHT = 0.135, 0.715  # the sides of the axes, as shares of the figure's width
COLUMNS = round((RIGHT - LEFT) * SIZE[0] * DOTS_PER_INCH)  # pixels of the picture
FAR = 2  # times the reserved memory. If more is in use on the device, it does not set the scale.
SEEN = 0.01  # of the peak. A smaller growth is not reported.
LINE_GREY = "#777777"
WITHIN = {
    "forward": " in the forward pass",
    "backward": " in the backward pass",
    "step": " in the optimizer's step",
}


def trace_memory(trace: "TraceData", device: "Device | None" = None) -> Figure:
    """Draw a device's memory over time: allocated by category, reserved, and used by all processes.

    The figure also has the phases and the line at the peak. By default, it is about the device with
    the highest peak.

    Raises:
        ValueError: the trace does not have this device.
    """
    seen = _Seen.of(trace, device)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, facecolor="white")
        add_title(canvas, _finding(seen))
        bottom, top = 0.2, 0.85
        if trace.phases:
            bottom = 0.25
        if seen.ooms:
            top = 0.81
        axes = canvas.add_axes((LEFT, bottom, RIGHT - LEFT, top - bottom))
        areas = _draw_layers(axes, seen)
        entries = _draw_lines(axes, seen) + areas
        corner = RIGHT + 0.01, axes.get_position().y1 + 0.02
        look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS}
        canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, **look)
        _scale(axes, seen)
        _mark_peak(axes, seen)
        _mark_out_of_memory(axes, seen)
        add_phases(axes, seen.trace.phases, float(seen.edges[-1]))
        if not len(trace.events) and not trace.seconds:
            axes.set_xticks([])
            axes.set_xlabel("")
        if trace.lost:
            lost = f"The oldest {trace.lost} events were lost"
            canvas.text(0.02, 0.03, lost, fontsize=TEXT_POINTS, color=darker(VERMILLION))
        add_badge(canvas, trace.badge)
        return Figure(canvas, words(canvas, *_proof(seen)))


def add_memory(
    canvas: Canvas,
    box: tuple[float, float, float, float],
    trace: "TraceData",
    device: int,
    window: tuple[float, float],
) -> None:
    """Draw the memory of a device as a part of another figure, with the legend next to it.

    Args:
        box: the axes in the canvas, as (left, bottom, width, height).
        window: the interval to draw, in seconds.
    """
    seen = replace(_Seen.of(trace, device, np.linspace(*window, COLUMNS + 1)), used=None)
    axes = canvas.add_axes(box)
    areas = _draw_layers(axes, seen, shares=False)
    entries = _draw_lines(axes, seen) + areas
    corner = box[0] + box[2] + 0.005, box[1] + box[3] + 0.02
    look: dict[str, Any] = {"frameon": False, "fontsize": TEXT_POINTS, "labelspacing": 0.25}
    look |= {"borderpad": 0, "handlelength": 1.3}
    canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, **look)
    _scale(axes, seen, most=3)
    axes.set_xlim(window)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


# The data of the figure


@dataclass
class _Seen:
    """A device's memory as the figure shows it.

    Each column shows the highest value in its interval, so that no peak is lost, however short.
    Times are in seconds, and sizes in bytes.

    Attributes:
        edges: the edges of the columns.
        layers: the bytes of each category that occurs, from bottom to top.
        reserved, used: bytes. `used` is None if it is not known.
        peak, peak_time: the highest number of allocated bytes, and when it was reached.
        at_peak: the bytes of each category at the peak.
        line: the line that made the peak, or None.
        ooms: the indices of the out-of-memory events.
    """

    trace: "TraceData"
    device: int
    edges: np.ndarray
    layers: dict[str, np.ndarray]
    reserved: np.ndarray
    used: np.ndarray | None
    peak: int
    peak_time: float
    at_peak: dict[str, int]
    line: SourceLine | None
    ooms: list[int]

    @classmethod
    def of(
        cls, trace: "TraceData", device: "Device | None", edges: np.ndarray | None = None
    ) -> "_Seen":
        """Read a device's memory from a trace, reduced to columns.

        By default, the columns suit the whole recording. `edges` are other edges, in seconds.
        """
        line = trace.timeline(device)
        device = trace.device_index(device)
        if edges is None:
            edges = columns_of(trace, COLUMNS)
        chosen = highest(line.times, line.allocated, edges)
        layers = trace.layers(device)
        at = int(line.allocated.argmax())
        used = None
        if (line.used >= 0).any():
            used = line.used[highest(line.times, line.used, edges)]
        refused = (trace.events.device == device) & (trace.events.action == OOM)
        return cls(
            trace,
            device,
            edges,
            {name: layers[name][chosen] for name in CATEGORY_COLOURS if layers[name].any()},
            line.reserved[highest(line.times, line.reserved, edges)],
            used,
            int(line.allocated[at]),
            float(line.times[at]),
            {name: int(layers[name][at]) for name in CATEGORY_COLOURS},
            _line(trace, trace.peak_event(device)),
            np.flatnonzero(refused).tolist(),
        )


def _line(trace: "TraceData", event: int) -> SourceLine | None:
    """Return the line of an event: the user's own, or else the innermost one, or None."""
    if event < 0:
        return None
    stack = int(trace.events.stack[event])
    return trace.line(stack) or next(iter(trace.stacks[stack]), None)


def _source(line: SourceLine) -> str:
    """Return the location and the source of a line."""
    return f"{line.location}  {line.text}".rstrip()


# The words of the figure


def _finding(seen: _Seen) -> str:
    """Return the figure's title, which states the finding."""
    trace, device = seen.trace, seen.device
    where = f" on cuda:{device}" if len(trace.devices) > 1 else ""
    peak, line = units.byte_text(seen.peak), trace.timeline(device)
    steps, grows = steps_of(trace, device), ""
    if steps is not None and _is_kept(steps, line.allocated, seen.peak):
        grows = f"+{units.byte_text(steps.growth)} a step"
    if trace.error and seen.ooms:
        last = seen.ooms[-1]
        requested = units.byte_text(int(trace.events.requested[last]))
        total = units.byte_text(trace.totals[device])
        held = f"{units.byte_text(_allocated_at(seen, last))} of {total} allocated"
        title = f"Out of memory{where}: {requested} asked for with {held}"
        if grows:
            title += f", {grows}"
        return title
    if not len(trace.events):
        return f"Nothing happened in this recording: {peak} allocated{where} throughout"
    if not seen.peak:
        return f"Nothing was allocated on cuda:{device}"
    if trace.peak_event(device) < 0:
        return f"Never more than the {peak} that were allocated{where} at the start"
    largest = [name for name, nbytes in seen.at_peak.items() if nbytes > 0]
    largest.sort(key=lambda name: -seen.at_peak[name])
    if steps is not None and grows:
        title = f"{grows} in {steps.repeats} steps: peak {peak}{where}"
        return _with_shares(title, seen, largest, ", ")
    if steps is not None and not steps.growth:
        title = f"No growth over {steps.repeats} steps: peak {peak}{where}"
        return _with_shares(title, seen, largest, ", ")
    if largest[0] == "other":
        end, reserved = units.byte_text(line.allocated[-1]), units.byte_text(line.reserved[-1])
        kept = f"{end} at the end"
        if end == peak:
            kept = "kept to the end"
        return f"Peak {peak}{where}, {kept}; {reserved} reserved"
    phase = int(phase_of(trace.phases, np.array([seen.peak_time]))[0])
    within = ""
    if phase >= 0:
        within = WITHIN[trace.phases[phase].name]
    return _with_shares(f"Peak {peak}{where}{within}", seen, largest, ": ")


def _with_shares(title: str, seen: _Seen, largest: list[str], joint: str) -> str:
    """Append the shares of the largest categories at the peak to a title, if they fit.

    At most two categories are named. `joint` is the text between the title and the first share.
    """
    for name in largest[:2]:
        longer = f"{title}{joint}{_percent(seen, name)} {name}"
        if name != "other" and text_width(longer, TEXT_POINTS, bold=True) <= 0.96 * 72 * SIZE[0]:
            title, joint = longer, ", "
    return title


def _is_kept(steps: Steps, allocated: np.ndarray, peak: int) -> bool:
    """Return whether the memory that steps left is visible and was not freed by the end.

    `allocated` are the bytes over time, and `peak` is their maximum.
    """
    left = steps.growth * (steps.repeats - 1)
    return left > SEEN * peak and allocated[-1] - allocated[0] >= left


def _percent(seen: _Seen, name: str) -> str:
    """Write a category's share of the peak in percent."""
    share = seen.at_peak[name] / max(seen.peak, 1)
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def _allocated_at(seen: _Seen, event: int) -> int:
    """Return the bytes allocated on the device when an event happened."""
    before = int(np.count_nonzero(seen.trace.events.device[:event] == seen.device))
    return int(seen.trace.timeline(seen.device).allocated[before])


def _proof(seen: _Seen) -> list[str]:
    """Return sentences with the numbers that the memory figure shows."""
    trace, line = seen.trace, seen.trace.timeline(seen.device)
    sentences = []
    if seen.peak:
        made = ""
        if seen.line is not None:
            made = f", made by {_source(seen.line)}"
        parts = [(nbytes, name) for name, nbytes in seen.at_peak.items() if nbytes > 0]
        parts.sort(reverse=True)
        listed = ", ".join(f"{units.byte_text(nbytes)} {name}" for nbytes, name in parts)
        sentences.append(f"At the peak of {units.byte_text(seen.peak)}{made}: {listed}")
    for event in seen.ooms[-1:]:
        free = units.byte_text(int(trace.events.address[event]))
        requested = units.byte_text(int(trace.events.requested[event]))
        times = ""
        if len(seen.ooms) > 1:
            times = f", the last of {len(seen.ooms)} times"
        sentences.append(f"Out of memory{times}: {requested} asked for, {free} free on the device")
    start, end = units.byte_text(line.allocated[0]), units.byte_text(line.allocated[-1])
    kept = f"Allocated {start} at the start, {end} at the end"
    sentences.append(f"{kept}; reserved at most {units.byte_text(seen.reserved.max())}")
    if seen.used is not None:
        used = units.byte_text(seen.used.max())
        sentences.append(f"All processes together use at most {used} of the device")
    passes = []
    for name in ("forward", "backward", "step"):
        count = sum(phase.name == name for phase in trace.phases)
        if count:
            passes.append(f"{count} × {name}")
    recorded = f"{units.time_text(trace.seconds)}, {units.counted(len(trace.events), 'event')}"
    if passes:
        recorded = f"{', '.join(passes)} in {recorded}"
    sentences.append(recorded)
    if trace.lost:
        lost = f"The oldest {trace.lost} events were lost"
        sentences.append(f"{lost}, so the peak may have been higher")
    return [*sentences, trace.badge]


# The drawing


def _draw_layers(axes: Axes, seen: _Seen, shares: bool = True) -> list:
    """Draw stacked areas, and return their legend entries from top to bottom.

    The entries have shares of the peak, or with `shares=False` only the names.
    """
    entries: list = []
    if seen.peak and shares:
        entries.append(Patch(color="none", label="at the peak:"))
    top = sum(seen.layers.values(), np.zeros(len(seen.edges) - 1))
    # From top to bottom, each area over the one before, so that there are no seams.
    for name in reversed(seen.layers):
        look: dict[str, Any] = {
            "facecolor": CATEGORY_COLOURS[name],
            "hatch": CATEGORY_HATCHES.get(name),
            "edgecolor": "white",
            "linewidth": 0,
        }
        axes.stairs(top, seen.edges, fill=True, **look, zorder=2)
        label = name
        if shares:
            label = f"{_percent(seen, name)} {name}"
        entries.append(Patch(**look, label=label))
        top = top - seen.layers[name]
    return entries


def _draw_lines(axes: Axes, seen: _Seen) -> list:
    """Draw lines for the reserved memory and for the memory in use, if it is known.

    Return their legend entries.
    """
    axes.stairs(seen.reserved, seen.edges, baseline=None, color=BLACK, linewidth=1.6, zorder=3)
    entries = [Line2D([], [], color=BLACK, linewidth=1.6, label="reserved")]
    if seen.used is None:
        return entries
    if _far(seen):
        label = f"used on the device:\n{units.byte_text(seen.used.max())}, off scale"
        return [Line2D([], [], linestyle="", marker="^", color=LINE_GREY, label=label), *entries]
    axes.stairs(seen.used, seen.edges, baseline=None, color=LINE_GREY, linewidth=1.2, zorder=3)
    return [Line2D([], [], color=LINE_GREY, linewidth=1.2, label="used on the device"), *entries]


def _far(seen: _Seen) -> bool:
    """Return whether the memory in use is so high that it would flatten the other curves."""
    held = max(seen.reserved.max(), seen.peak)
    return seen.used is not None and bool(0 < FAR * held < seen.used.max())


def _scale(axes: Axes, seen: _Seen, most: int = 5) -> None:
    """Scale and label the axis of memory, with at most `most` ticks."""
    drawn = [seen.peak, seen.reserved.max(), 1]
    if seen.used is not None and not _far(seen):
        drawn.append(seen.used.max())
    byte_ticks(axes, 1.05 * float(max(drawn)), most)
    axes.set_ylabel("memory" if len(seen.trace.devices) == 1 else f"memory of cuda:{seen.device}")
    axes.grid(axis="x", visible=False)


def _mark_peak(axes: Axes, seen: _Seen) -> None:
    """Draw a dot at the peak, and write its bytes and its line above the axes."""
    if not seen.peak:
        return
    heights = [seen.peak, axes.get_ylim()[1]]
    look: dict[str, Any] = {"color": BLACK, "clip_on": False}
    axes.plot([seen.peak_time] * 2, heights, **look, linewidth=0.8, zorder=4)
    axes.plot([seen.peak_time], [seen.peak], "o", **look, markersize=4, zorder=5)
    text = f"peak {units.byte_text(seen.peak)}"
    if seen.line is not None:
        text += f"  {_source(seen.line)}"
    _above(axes, seen, seen.peak_time, text, 0, BLACK)


def _mark_out_of_memory(axes: Axes, seen: _Seen) -> None:
    """Mark each time when memory ran out. Write the line of the last failure above the axes."""
    if not seen.ooms:
        return
    events = seen.trace.events
    times = events.time[seen.ooms]
    top = axes.get_ylim()[1]
    axes.vlines(times, 0, top, color=VERMILLION, linewidth=0.8, zorder=4)
    look: dict[str, Any] = {"color": VERMILLION, "markersize": 7, "clip_on": False}
    axes.plot(times, [top] * len(times), "X", **look, zorder=6)
    line = _line(seen.trace, seen.ooms[-1])
    text = "out of memory"
    if line is not None:
        text += f"  {_source(line)}"
    _above(axes, seen, float(times[-1]), text, 1, darker(VERMILLION))


def _above(axes: Axes, seen: _Seen, moment: float, text: str, row: int, colour: object) -> None:
    """Write a text above the axes at a moment in seconds, moved so that it stays in the figure.

    `row` counts the rows of texts above the axes.
    """
    inches = SIZE[0] * 72
    text = shortened(text, 0.95 * inches)
    half = text_width(text) / 2 / inches
    middle = LEFT + (RIGHT - LEFT) * moment / seen.edges[-1]
    x = min(max(middle, 0.02 + half), 0.98 - half)
    y = axes.get_position().y1 + (7 + 13 * row) / 72 / SIZE[1]
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": TEXT_POINTS}
    axes.figure.text(x, y, text, **look, color=colour, parse_math=False)
