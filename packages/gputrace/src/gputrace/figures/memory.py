"""The memory of a device over time: what was allocated, for what, and which line made the peak."""

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

LEFT, RIGHT = 0.135, 0.715  # where the axes lie, as shares of the figure's width
COLUMNS = round((RIGHT - LEFT) * SIZE[0] * DOTS_PER_INCH)  # pixels of the picture
FAR = 2  # a device that is used more than this many times what PyTorch reserved does not set the scale
SEEN = 0.01  # of the peak: a growth that is smaller is not the finding
LINE_GREY = "#777777"
WITHIN = {"forward": " in the forward pass", "backward": " in the backward pass", "step": " in the optimizer's step"}


def trace_memory(trace: "TraceData", device: "Device | None" = None) -> Figure:
    """A device's memory over time: allocated, by what it is for, reserved and used; the phases; the line that made the peak.

    `device=None` is the one with the highest peak. Raises ValueError for a device that the trace does not know.
    """
    seen = _Seen.of(trace, device)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, facecolor="white")
        add_title(canvas, _finding(seen))
        bottom, top = 0.25 if trace.phases else 0.2, 0.81 if seen.ooms else 0.85
        axes = canvas.add_axes((LEFT, bottom, RIGHT - LEFT, top - bottom))
        areas = _draw_layers(axes, seen)
        entries = _draw_lines(axes, seen) + areas
        corner = RIGHT + 0.01, axes.get_position().y1 + 0.02
        canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, frameon=False, fontsize=TEXT_POINTS)
        _scale(axes, seen)
        _mark_peak(axes, seen)
        _mark_out_of_memory(axes, seen)
        add_phases(axes, seen.trace.phases, float(seen.edges[-1]))
        if not len(trace.events) and not trace.seconds:
            axes.set_xticks([])
            axes.set_xlabel("")
        if trace.lost:
            canvas.text(0.02, 0.03, f"The oldest {trace.lost} events were lost", fontsize=TEXT_POINTS, color=darker(VERMILLION))
        add_badge(canvas, trace.badge)
        return Figure(canvas, words(canvas, *_proof(seen)))


def add_memory(
    canvas: Canvas, box: tuple[float, float, float, float], trace: "TraceData", device: int, window: tuple[float, float]
) -> None:
    """The memory of a device in a part of the recording, in seconds, drawn in a box of the canvas, without the words of its own figure.

    The legend stands next to the box.
    """
    seen = replace(_Seen.of(trace, device, np.linspace(*window, COLUMNS + 1)), used=None)
    axes = canvas.add_axes(box)
    areas = _draw_layers(axes, seen, shares=False)
    entries = _draw_lines(axes, seen) + areas
    corner = box[0] + box[2] + 0.005, box[1] + box[3] + 0.02
    look = {"frameon": False, "fontsize": TEXT_POINTS, "labelspacing": 0.25, "borderpad": 0, "handlelength": 1.3}
    canvas.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, **look)
    _scale(axes, seen, most=3)
    axes.set_xlim(window)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


# What there is to see


@dataclass
class _Seen:
    """A device's memory as the picture shows it, in columns: each has the highest moment that falls in it, so no peak is lost however
    short. `edges` and `peak_time` in seconds, the rest in bytes."""

    trace: "TraceData"
    device: int
    edges: np.ndarray
    layers: dict[str, np.ndarray]  # from the bottom up; only what occurs
    reserved: np.ndarray
    used: np.ndarray | None
    peak: int
    peak_time: float
    at_peak: dict[str, int]  # bytes of each layer
    line: SourceLine | None  # that made the peak
    ooms: list[int]  # indices of events

    @classmethod
    def of(cls, trace: "TraceData", device: "Device | None", edges: np.ndarray | None = None) -> "_Seen":
        line = trace.timeline(device)
        device = trace.device_index(device)
        edges = columns_of(trace, COLUMNS) if edges is None else edges
        chosen = highest(line.times, line.allocated, edges)
        layers = trace.layers(device)
        at = int(line.allocated.argmax())
        known = bool((line.used >= 0).any())
        return cls(
            trace,
            device,
            edges,
            {name: layers[name][chosen] for name in CATEGORY_COLOURS if layers[name].any()},
            line.reserved[highest(line.times, line.reserved, edges)],
            line.used[highest(line.times, line.used, edges)] if known else None,
            int(line.allocated[at]),
            float(line.times[at]),
            {name: int(layers[name][at]) for name in CATEGORY_COLOURS},
            _line(trace, trace.peak_event(device)),
            np.flatnonzero((trace.events.device == device) & (trace.events.action == OOM)).tolist(),
        )


def _line(trace: "TraceData", event: int) -> SourceLine | None:
    """The line that an event belongs to: the user's own, else the innermost that is known."""
    if event < 0:
        return None
    stack = int(trace.events.stack[event])
    return trace.line(stack) or next(iter(trace.stacks[stack]), None)


def _source(line: SourceLine) -> str:
    return f"{line.location}  {line.text}".rstrip()


# What it finds


def _finding(seen: _Seen) -> str:
    trace, device = seen.trace, seen.device
    where = f" on cuda:{device}" if len(trace.devices) > 1 else ""
    peak, line = units.byte_text(seen.peak), trace.timeline(device)
    steps = steps_of(trace, device)
    grows = f"+{units.byte_text(steps.growth)} a step" if steps is not None and _is_kept(steps, line.allocated, seen.peak) else ""
    if trace.error and seen.ooms:
        requested, allocated = int(trace.events.requested[seen.ooms[-1]]), _allocated_at(seen, seen.ooms[-1])
        held = f"{units.byte_text(allocated)} of {units.byte_text(trace.totals[device])} allocated"
        return f"Out of memory{where}: {units.byte_text(requested)} asked for with {held}{grows and f', {grows}'}"
    if not len(trace.events):
        return f"Nothing happened in this recording: {peak} allocated{where} throughout"
    if not seen.peak:
        return f"Nothing was allocated on cuda:{device}"
    if trace.peak_event(device) < 0:
        return f"Never more than the {peak} that were allocated{where} at the start"
    largest = [name for name in sorted(seen.at_peak, key=lambda name: -seen.at_peak[name]) if seen.at_peak[name] > 0]
    if steps is not None and (grows or not steps.growth):
        found = f"{grows} in {steps.repeats} steps: " if grows else f"No growth over {steps.repeats} steps: "
        return _with_shares(f"{found}peak {peak}{where}", seen, largest, ", ")
    if largest[0] == "other":
        end, reserved = units.byte_text(line.allocated[-1]), units.byte_text(line.reserved[-1])
        return f"Peak {peak}{where}, {f'{end} at the end' if end != peak else 'kept to the end'}; {reserved} reserved"
    phase = int(phase_of(trace.phases, np.array([seen.peak_time]))[0])
    return _with_shares(f"Peak {peak}{where}{WITHIN[trace.phases[phase].name] if phase >= 0 else ''}", seen, largest, ": ")


def _with_shares(title: str, seen: _Seen, largest: list[str], joint: str) -> str:
    """The title with the two largest known parts of the peak, or as many as there is room for."""
    for name in largest[:2]:
        longer = f"{title}{joint}{_percent(seen, name)} {name}"
        if name != "other" and text_width(longer, TEXT_POINTS, bold=True) <= 0.96 * 72 * SIZE[0]:
            title, joint = longer, ", "
    return title


def _is_kept(steps: Steps, allocated: np.ndarray, peak: int) -> bool:
    """Is what the steps left behind enough to be seen, and still there at the end?"""
    left = steps.growth * (steps.repeats - 1)
    return left > SEEN * peak and allocated[-1] - allocated[0] >= left


def _percent(seen: _Seen, name: str) -> str:
    share = seen.at_peak[name] / max(seen.peak, 1)
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _allocated_at(seen: _Seen, event: int) -> int:
    """Bytes allocated on the device when an event happened."""
    before = int(np.count_nonzero(seen.trace.events.device[:event] == seen.device))
    return int(seen.trace.timeline(seen.device).allocated[before])


def _proof(seen: _Seen) -> list[str]:
    """The numbers as sentences."""
    trace, line = seen.trace, seen.trace.timeline(seen.device)
    sentences = []
    if seen.peak:
        parts = sorted(((nbytes, name) for name, nbytes in seen.at_peak.items() if nbytes > 0), reverse=True)
        made = "" if seen.line is None else f", made by {_source(seen.line)}"
        sentences.append(
            f"At the peak of {units.byte_text(seen.peak)}{made}: {', '.join(f'{units.byte_text(n)} {name}' for n, name in parts)}"
        )
    for event in seen.ooms[-1:]:
        free = units.byte_text(int(trace.events.address[event]))
        requested = units.byte_text(int(trace.events.requested[event]))
        times = f", the last of {len(seen.ooms)} times" if len(seen.ooms) > 1 else ""
        sentences.append(f"Out of memory{times}: {requested} asked for, {free} free on the device")
    kept = f"Allocated {units.byte_text(line.allocated[0])} at the start, {units.byte_text(line.allocated[-1])} at the end"
    sentences.append(f"{kept}; reserved at most {units.byte_text(seen.reserved.max())}")
    if seen.used is not None:
        sentences.append(f"All processes together use at most {units.byte_text(seen.used.max())} of the device")
    counts = {name: sum(phase.name == name for phase in trace.phases) for name in ("forward", "backward", "step")}
    passes = ", ".join(f"{count} × {name}" for name, count in counts.items() if count)
    sentences.append(
        f"{passes + ' in ' if passes else ''}{units.time_text(trace.seconds)}, {len(trace.events)} event{'s' * (len(trace.events) != 1)}"
    )
    if trace.lost:
        sentences.append(f"The oldest {trace.lost} events were lost, so the peak may have been higher")
    return [*sentences, trace.badge]


# How it is drawn


def _draw_layers(axes: Axes, seen: _Seen, shares: bool = True) -> list:
    """Draw stacked areas; returns their legend entries, from the top down: their shares of the peak, or their names."""
    entries: list = [Patch(color="none", label="at the peak:")] if seen.peak and shares else []
    top = sum(seen.layers.values(), np.zeros(len(seen.edges) - 1))
    # From the top down, each over the one before: no seams between neighbours.
    for name in reversed(seen.layers):
        look: dict[str, Any] = {
            "facecolor": CATEGORY_COLOURS[name],
            "hatch": CATEGORY_HATCHES.get(name),
            "edgecolor": "white",
            "linewidth": 0,
        }
        axes.stairs(top, seen.edges, fill=True, **look, zorder=2)
        entries.append(Patch(**look, label=f"{_percent(seen, name)} {name}" if shares else name))
        top = top - seen.layers[name]
    return entries


def _draw_lines(axes: Axes, seen: _Seen) -> list:
    """Draw what PyTorch reserved, and what all processes use of the device where that is known; returns the legend entries."""
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
    """Is the device used so much more than PyTorch reserved that on one scale nothing else would be seen?"""
    held = max(seen.reserved.max(), seen.peak)
    return seen.used is not None and bool(0 < FAR * held < seen.used.max())


def _scale(axes: Axes, seen: _Seen, most: int = 5) -> None:
    """Bytes upwards, with their unit."""
    drawn = [seen.peak, seen.reserved.max(), 0 if _far(seen) or seen.used is None else seen.used.max(), 1]
    byte_ticks(axes, 1.05 * float(max(drawn)), most)
    axes.set_ylabel("memory" if len(seen.trace.devices) == 1 else f"memory of cuda:{seen.device}")
    axes.grid(axis="x", visible=False)


def _mark_peak(axes: Axes, seen: _Seen) -> None:
    """A dot at the peak, and above the axes its bytes and the line that made it."""
    if not seen.peak:
        return
    axes.plot([seen.peak_time] * 2, [seen.peak, axes.get_ylim()[1]], color=BLACK, linewidth=0.8, zorder=4, clip_on=False)
    axes.plot([seen.peak_time], [seen.peak], "o", color=BLACK, markersize=4, zorder=5, clip_on=False)
    source = "" if seen.line is None else f"  {_source(seen.line)}"
    _above(axes, seen, seen.peak_time, f"peak {units.byte_text(seen.peak)}{source}", 0, BLACK)


def _mark_out_of_memory(axes: Axes, seen: _Seen) -> None:
    if not seen.ooms:
        return
    events = seen.trace.events
    times = events.time[seen.ooms]
    axes.vlines(times, 0, axes.get_ylim()[1], color=VERMILLION, linewidth=0.8, zorder=4)
    axes.plot(times, [axes.get_ylim()[1]] * len(times), "X", color=VERMILLION, markersize=7, zorder=6, clip_on=False)
    line = _line(seen.trace, seen.ooms[-1])
    source = "" if line is None else f"  {_source(line)}"
    _above(axes, seen, float(times[-1]), f"out of memory{source}", 1, darker(VERMILLION))


def _above(axes: Axes, seen: _Seen, moment: float, text: str, row: int, colour: object) -> None:
    """A text above the axes, over its moment as far as the figure's edges allow."""
    inches = SIZE[0] * 72
    text = shortened(text, 0.95 * inches)
    half = text_width(text) / 2 / inches
    middle = LEFT + (RIGHT - LEFT) * moment / seen.edges[-1]
    x = min(max(middle, 0.02 + half), 0.98 - half)
    y = axes.get_position().y1 + (7 + 13 * row) / 72 / SIZE[1]
    axes.figure.text(x, y, text, ha="center", va="bottom", fontsize=TEXT_POINTS, color=colour, parse_math=False)
