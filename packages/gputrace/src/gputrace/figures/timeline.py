"""What ran when on the host and on each stream and copy engine: overlap, waits, idle time and races to look at."""

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gputrace import units
from gputrace.figures import memory as memory_figure
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    DOTS_PER_INCH,
    SIZE,
    STYLE,
    TEXT_POINTS,
    TITLE_POINTS,
    Figure,
    add_badge,
    add_title,
    darker,
    shortened,
    text_width,
    words,
)
from gputrace.figures.lanes import (
    LOOKS,
    NAMES,
    RACE,
    Lane,
    draw_lane,
    fitting,
    kinds_of,
    lanes_of,
    shade,
)
from gputrace.figures.marks import add_marks, shown_marks
from gputrace.figures.phases import add_phases
from gputrace.figures.relations import draw_collectives, draw_races, draw_waits, race_text
from gputrace.spans import (
    HOST,
    KIND_GROUPS,
    SPAN_COLUMNS,
    Mark,
    RecordedRace,
    Spans,
    Waits,
    chosen,
    is_collective,
    seconds_of,
    seconds_of_both,
)

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

LEFT, RIGHT = 0.17, 0.79  # where the axes lie, as shares of the figure's width
PIXELS = (RIGHT - LEFT) * SIZE[0] * DOTS_PER_INCH
WIDTH = 72 * 0.96 * SIZE[0]  # points: what is written across the figure
TITLE, LINE = 0.32, 0.18  # inches: the title, and a line of text
TWO_LINES = 0.29  # inches: next to such a lane two lines of text fit
LOWEST, HIGHEST = 0.19, 0.42  # inches: a lane
MEMORY = 1.2  # inches: the memory above the lanes
GAP = 0.12  # inches between the two
MOST_RACES = 3  # that are listed in the picture
MOST_COMPARED = 3  # marked parts that the title compares


def trace_timeline(
    trace: "TraceData",
    device: int | None = None,
    memory: bool = False,
    start: float = 0.0,
    end: float | None = None,
) -> Figure:
    """The host, the streams in use and the copy engines in use of one device, or of all, a lane each.

    `memory=True` draws the memory of the device, or of that with the highest peak, above on the same axis. `start` and `end`, in
    seconds, cut out a part. Raises ValueError for a part that is none, RuntimeError where the trace has no timeline.
    """
    trace.require_timeline()
    window = _window(trace, start, end)
    devices = _devices(trace) if device is None else [device]
    lanes, kinds = lanes_of(trace, devices), kinds_of(trace)
    phases = (
        trace.phases if memory else []
    )  # the host's: a GPU may run a phase's kernels much later
    races = [race for race in trace.races if _is_drawn(race, devices, window)]
    seen, part = _part(trace, window)
    with matplotlib.rc_context(STYLE):
        entries = _entries(part, kinds[seen], [lane.within(seen) for lane in lanes], races)
        rows = 1 if sum(text_width(entry.get_label()) + 36 for entry in entries) <= WIDTH else 2
        listed = min(len(races), MOST_RACES)
        marks = shown_marks(trace.marks, devices, window)
        above = TITLE + (rows * LINE + 0.06 if entries else 0) + listed * LINE  # inches: the texts
        brackets = LINE if marks else 0.0  # inches: the row of marks, right above the lanes
        top = above + brackets
        under = 0.94 if phases else 0.72  # inches for the phases, the axis and the badge
        room = SIZE[1] - top - under - (MEMORY + GAP if memory else 0)
        shown = fitting(
            lanes, [seconds_of(part.spans, lane.mask[seen]) for lane in lanes], int(room / LOWEST)
        )
        page = _Page(top, MEMORY if memory else 0.0, min(room, HIGHEST * len(shown)), under)
        canvas = Canvas(figsize=(SIZE[0], page.height), facecolor="white")
        add_title(
            canvas,
            shortened(_finding(trace, part, devices, races, marks), WIDTH, TITLE_POINTS, bold=True),
        )
        _add_legend(canvas, entries, rows, page)
        _list_races(canvas, races, page, above - listed * LINE)
        axes = canvas.add_axes(page.box(under, page.lanes))
        crowded = _draw(axes, trace, kinds, shown, races, window)
        _add_shares(axes, part, [lane.within(seen) for lane in shown], page.lanes / len(shown))
        add_marks(axes, marks, window, LINE / page.lanes)
        add_phases(axes, phases, window[1], start=window[0])
        if memory:
            box = page.box(under + page.lanes + brackets + GAP, MEMORY)
            memory_figure.add_memory(canvas, box, trace, trace.device_index(device), window)
        _add_note(canvas, trace, crowded, len(lanes) - len(shown))
        add_badge(canvas, trace.badge)
        return Figure(
            canvas, words(canvas, *_proof(part, devices, races), *_marked(marks), trace.badge)
        )


@dataclass(frozen=True)
class _Page:
    """How the height of the picture is divided, in inches, from the top down; a gap lies between memory and lanes.

    `top` includes the row of marks, which lies between memory and lanes, too.
    """

    top: float
    memory: float
    lanes: float
    under: float

    @property
    def height(self) -> float:
        return self.top + (self.memory + GAP if self.memory else 0) + self.lanes + self.under

    def box(self, bottom: float, height: float) -> tuple[float, float, float, float]:
        """Where axes lie, as shares of the figure."""
        return LEFT, bottom / self.height, RIGHT - LEFT, height / self.height

    def y(self, inches: float) -> float:
        """The height of what lies so far below the top, as a share of the figure's."""
        return 1 - inches / self.height


def _window(trace: "TraceData", start: float, end: float | None) -> tuple[float, float]:
    """The part of the recording that is drawn, in seconds."""
    last = max(trace.end, 1e-6)
    until = last if end is None else end
    if not 0 <= start < until:
        raise ValueError(
            f"start={start!r}, end={end!r}: give seconds from 0 to {last:.3g}, the start before the end"
        )
    return float(start), float(until)


def _is_drawn(race: RecordedRace, devices: list[int], window: tuple[float, float]) -> bool:
    """Whether one side of the race ran on one of these devices, and one side in the window."""
    sides = (race.first, race.second)
    on_device = any(side.device in devices for side in sides)
    return on_device and any(side.start <= window[1] and side.end >= window[0] for side in sides)


def _part(trace: "TraceData", window: tuple[float, float]) -> tuple[np.ndarray, "TraceData"]:
    """The part of the recording that is drawn, from which the title, the words and the shares come.

    Returns which spans of the trace lie in the window, and a recording of these spans alone, cut to the window. If the window covers the
    whole recording, it is the trace itself.
    """
    spans, (start, end) = trace.spans, window
    if start == 0 and end >= trace.end:
        return np.ones(len(spans), dtype=bool), trace
    part = copy.copy(trace)
    seen = (spans.start < end) & (spans.end > start)
    columns = {
        name: getattr(spans, name)[seen]
        for name in SPAN_COLUMNS
        if name not in ("start", "duration")
    }
    begin, finish = spans.start[seen].clip(start, end), spans.end[seen].clip(start, end)
    part.spans = Spans(begin - start, finish - begin, **columns, names=spans.names)
    shown = (trace.waits.until >= start) & (trace.waits.until <= end)
    part.waits = Waits(*(getattr(trace.waits, field.name)[shown] for field in fields(Waits)))
    part.seconds = end - start
    return seen, part


def _devices(trace: "TraceData") -> list[int]:
    """The devices on which something ran; the first of all if on none."""
    return [
        device for device in np.unique(trace.spans.device).tolist() if device != HOST
    ] or trace.devices[:1]


# How it is drawn


def _draw(
    axes: Axes,
    trace: "TraceData",
    kinds: np.ndarray,
    lanes: list[Lane],
    races: list,
    window: tuple[float, float],
) -> bool:
    """Draw the lanes, and what connects them. Return whether some spans were too many to be drawn one by one."""
    axes.set(xlim=window, ylim=(len(lanes), 0))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(
        [row + 0.5 for row in range(len(lanes))],
        [lane.name for lane in lanes],
        fontsize=TEXT_POINTS,
    )
    shade(axes, len(lanes))
    crowded, collectives = False, is_collective(trace.spans)
    for row, lane in enumerate(lanes):
        crowded |= draw_lane(axes, trace, kinds, lane, row, window, PIXELS)
    draw_waits(axes, trace, lanes, window, PIXELS)
    draw_collectives(axes, trace, collectives, lanes, window)
    draw_races(axes, races, lanes, window)
    return crowded


def _add_shares(axes: Axes, part: "TraceData", lanes: list[Lane], inches: float) -> None:
    """Write next to each lane, `inches` high, its share of the time in the part that is drawn. The lanes' masks are of `part`."""
    collectives = is_collective(part.spans)
    for row, lane in enumerate(lanes):
        text, place = _share_text(part, lane, collectives, inches), axes.get_yaxis_transform()
        axes.annotate(text, (1, row + 0.5), (8, 0), xycoords=place, **BESIDE, fontsize=TEXT_POINTS)


def _share_text(trace: "TraceData", lane: Lane, collectives: np.ndarray, inches: float) -> str:
    """The share of the time that is written next to a lane of this height."""
    if lane.is_host:
        return f"waits {_percent(trace.host_waited, trace.end)}"
    taken = seconds_of(trace.spans, lane.mask)
    if lane.kind is None and not collectives[lane.mask].all():
        return f"busy {_percent(taken, trace.end)}"
    hidden = seconds_of_both(
        trace.spans, lane.mask, chosen(trace.spans, lane.device, KIND_GROUPS["kernel"]) & ~lane.mask
    )
    busy = f"busy {_percent(taken, trace.end)}"
    return (
        f"{busy}, of which\n{_percent(hidden, taken)} overlapped" if inches >= TWO_LINES else busy
    )


def _percent(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _entries(trace: "TraceData", kinds: np.ndarray, lanes: list[Lane], races: list) -> list:
    """The legend's entries: the kinds in the part that is drawn that take a pixel of its width or more."""
    shown = np.logical_or.reduce([lane.mask for lane in lanes])
    found = set(kinds[shown].tolist())
    wide = {
        kind
        for kind in found
        if trace.spans.duration[shown & (kinds == kind)].sum() * PIXELS >= trace.end
    }
    there = wide or found
    look = {"edgecolor": "white", "linewidth": 0.3}
    entries: list = [
        Patch(**{**look, **LOOKS[kind]}, label=NAMES[kind]) for kind in NAMES if kind in there
    ]
    if len(trace.waits):
        entries.append(
            Line2D([], [], color=BLACK, marker=">", markersize=4, linewidth=1, label="stream waits")
        )
    if races:
        entries.append(
            Line2D([], [], color=RACE, marker="o", markersize=4, linewidth=1.5, label="race")
        )
    return entries


def _add_legend(canvas: Canvas, entries: list, rows: int, page: _Page) -> None:
    if entries:
        look: dict[str, Any] = {
            "frameon": False,
            "fontsize": TEXT_POINTS,
            "handlelength": 1.5,
            "columnspacing": 1.1,
            "handletextpad": 0.5,
            "borderpad": 0,
        }
        corner: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (0.02, page.y(TITLE)),
            "borderaxespad": 0,
        }
        canvas.legend(
            handles=entries, ncols=-(-len(entries) // rows), labelspacing=0.3, **corner, **look
        )


def _list_races(canvas: Canvas, races: list, page: _Page, top: float) -> None:
    """A line for each race, with both source lines, from so many inches below the top."""
    texts = [f"{number}  {race_text(race)}" for number, race in enumerate(races[:MOST_RACES], 1)]
    more = f"; and {len(races) - MOST_RACES} more" if len(races) > MOST_RACES else ""
    for number, text in enumerate(texts):
        look: dict[str, Any] = {
            "va": "top",
            "fontsize": TEXT_POINTS,
            "color": darker(RACE),
            "weight": "bold",
            "parse_math": False,
        }
        text = shortened(text, WIDTH - text_width(more, bold=True), bold=True) + (
            more if number == len(texts) - 1 else ""
        )
        canvas.text(0.02, page.y(top + number * LINE), text, **look)


def _add_note(canvas: Canvas, trace: "TraceData", crowded: bool, left_out: int) -> None:
    """What the picture does not show, in the lower left corner as far as the badge leaves room."""
    texts = [f"oldest {trace.lost_spans} spans lost"] if trace.lost_spans else []
    texts += [f"{left_out} lane{'s' * (left_out != 1)} left out"] if left_out else []
    texts += ["low bars: share of time"] if crowded else []
    room = WIDTH - text_width(trace.badge) - 20
    canvas.text(
        0.02,
        0.03,
        shortened("; ".join(texts), room),
        fontsize=TEXT_POINTS,
        color="#444444",
        parse_math=False,
    )


# What it finds


def _finding(
    whole: "TraceData", trace: "TraceData", devices: list[int], races: list, marks: list[Mark]
) -> str:
    """The title. `trace` is the part of the whole recording that is drawn."""
    if races:
        first, second = races[0].first, races[0].second
        count = "A race" if len(races) == 1 else f"{len(races)} races"
        return f"{count}: nothing orders {first.line or first.name} before {second.line or second.name}"
    end = units.time_text(trace.end)
    if not any(map(trace.busy, devices)):
        return f"Nothing ran on {' or '.join(f'cuda:{device}' for device in devices)} in {end}"
    in_collectives = [trace.collectives(device) for device in devices]
    hidden = _hidden_shares(whole, devices, marks)
    if hidden:
        in_first, *in_others = hidden
        return f"Hidden behind kernels: {in_first.replace(' in', ' of the collectives in', 1)}, {', '.join(in_others)}"
    if taken := sum(seconds for seconds, _ in in_collectives):
        return f"Of the time in collectives, {_percent(sum(both for _, both in in_collectives), taken)} is hidden behind other kernels"
    shares = {device: _percent(trace.busy(device), trace.end) for device in devices}
    if len(devices) > 2:
        least, most = (shares[choose(devices, key=trace.busy)] for choose in (min, max))
        return (
            f"{len(devices)} GPUs worked {least}{f' to {most}' if most != least else ''} of {end}"
        )
    if len(devices) == 2:
        first, second = devices
        both = seconds_of_both(
            trace.spans, trace.spans.device == first, trace.spans.device == second
        )
        return f"cuda:{first} worked {shares[first]}, cuda:{second} {shares[second]} of {end}, both at once {_percent(both, trace.end)}"
    copied, overlapped = trace.busy(devices[0], "copy"), trace.overlap(devices[0])
    where = f"cuda:{devices[0]}" if len(trace.devices) > 1 else "The GPU"
    most = f"{where} worked {shares[devices[0]]} of {end}"
    return (
        f"{most}; kernels overlap {_percent(overlapped, copied)} of its copying" if copied else most
    )


def _hidden_shares(trace: "TraceData", devices: list[int], marks: list[Mark]) -> list[str]:
    """How much of the collectives is hidden in each of a few marked parts; nothing if a part has no collective."""
    texts = []
    for mark in marks:
        _, part = _part(trace, (mark.start, mark.end))
        in_collectives = [part.collectives(device) for device in devices]
        taken = sum(seconds for seconds, _ in in_collectives)
        if taken:
            texts.append(
                f"{_percent(sum(both for _, both in in_collectives), taken)} in {mark.name}"
            )
    return texts if len(texts) == len(marks) and 2 <= len(marks) <= MOST_COMPARED else []


def _proof(trace: "TraceData", devices: list[int], races: list) -> list[str]:
    """The numbers as sentences."""
    texts = [f"Race: {race_text(race)}" for race in races]
    for device in devices:
        parts = [f"kernels {units.time_text(trace.busy(device, 'kernel'))}"]
        if copied := trace.busy(device, "copy"):
            parts.append(
                f"copies {units.time_text(copied)}, of which {units.time_text(trace.overlap(device))} while kernels ran"
            )
        in_collectives, hidden = trace.collectives(device)
        if in_collectives:
            parts.append(
                f"collectives {units.time_text(in_collectives)}, of which {units.time_text(hidden)} while other kernels ran"
            )
        parts.append(f"idle {units.time_text(trace.idle(device))} of {units.time_text(trace.end)}")
        texts.append(f"Cuda:{device}: {'; '.join(parts)}")
    waits = len(trace.waits)
    host = f"The host waited {units.time_text(trace.host_waited)}; " if trace.tells_of_host else ""
    texts.append(f"{host}{waits} wait{'s' * (waits != 1)} of a stream for another")
    texts.append(f"{int((trace.spans.device != HOST).sum())} kernels and copies")
    if trace.lost_spans:
        texts.append(f"The oldest {trace.lost_spans} spans and waits were lost")
    return texts


def _marked(marks: list[Mark]) -> list[str]:
    """The marked parts as a sentence."""
    if not marks:
        return []
    parts = [
        f"{mark.name} from {units.time_text(mark.start)} to {units.time_text(mark.end)}"
        for mark in marks
    ]
    return [f"Marked: {', '.join(parts)}"]
