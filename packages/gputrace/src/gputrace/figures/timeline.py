"""Figure of what ran when: on the host, on each stream, and on each copy engine.

It shows overlap, waits, idle time and races.
"""

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

LEFT, RIGHT = 0.17, 0.79  # the sides of the axes, as shares of the figure's width
PIXELS = (RIGHT - LEFT) * SIZE[0] * DOTS_PER_INCH  # the width of the axes
WIDTH = 72 * 0.96 * SIZE[0]  # points. Texts across the figure have this width at most.
# Heights of parts of the figure, in inches.
TITLE, LINE = 0.32, 0.18
TWO_LINES = 0.29  # a lane beside which two lines of text fit
LOWEST, HIGHEST = 0.19, 0.42  # a lane
MEMORY = 1.2  # the memory above the lanes
GAP = 0.12  # between memory and lanes
MOST_RACES = 3  # races that are listed in the figure
MOST_COMPARED = 3  # marked parts that the title compares


def trace_timeline(
    trace: "TraceData",
    device: int | None = None,
    memory: bool = False,
    start: float = 0.0,
    end: float | None = None,
) -> Figure:
    """Draw a lane for the host, for each stream in use, and for each copy engine in use.

    Args:
        trace: the recording.
        device: the device to show. The default is all devices.
        memory: whether to draw memory above the lanes, on the same axis. It is the memory of the
            device, or of the device with the highest peak.
        start, end: the part of the recording to show, in seconds. The default is all of it.

    Raises:
        ValueError: `start` and `end` are not a part of the recording.
        RuntimeError: the trace has no timeline.
    """
    trace.require_timeline()
    window = _window(trace, start, end)
    devices = _devices(trace) if device is None else [device]
    lanes, kinds = lanes_of(trace, devices), kinds_of(trace)
    # They are phases of the host. A GPU may run the kernels of a phase much later.
    phases = trace.phases if memory else []
    races = [race for race in trace.races if _is_drawn(race, devices, window)]
    marks = shown_marks(trace.marks, devices, window)
    seen, part = _part(trace, window)
    with matplotlib.rc_context(STYLE):
        entries = _entries(part, kinds[seen], [lane.within(seen) for lane in lanes], races)
        rows = 1 if sum(text_width(entry.get_label()) + 36 for entry in entries) <= WIDTH else 2
        top_of_races = TITLE
        if entries:
            top_of_races += rows * LINE + 0.06
        brackets = 0.0
        if marks:
            brackets = LINE  # the row of marks, right above the lanes
        top = top_of_races + min(len(races), MOST_RACES) * LINE + brackets
        under = 0.72  # the axis and the badge
        if phases:
            under = 0.94
        room = SIZE[1] - top - under
        if memory:
            room -= MEMORY + GAP
        busy = [seconds_of(part.spans, lane.mask[seen]) for lane in lanes]
        shown = fitting(lanes, busy, int(room / LOWEST))
        page = _Page(top, MEMORY if memory else 0.0, min(room, HIGHEST * len(shown)), under)
        canvas = Canvas(figsize=(SIZE[0], page.height), facecolor="white")
        finding = _finding(trace, part, devices, races, marks)
        add_title(canvas, shortened(finding, WIDTH, TITLE_POINTS, bold=True))
        _add_legend(canvas, entries, rows, page)
        _list_races(canvas, races, page, top_of_races)
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
        sentences = [*_proof(part, devices, races), *_marked(marks), trace.badge]
        return Figure(canvas, words(canvas, *sentences))


@dataclass(frozen=True)
class _Page:
    """The heights of the figure's parts in inches, from the top down.

    A row of marks, if there is one, is between memory and lanes. `top` includes its height.

    Attributes:
        top: the texts above.
        memory: the memory, or 0.
        lanes: all lanes together.
        under: what is below the lanes.
    """

    top: float
    memory: float
    lanes: float
    under: float

    @property
    def height(self) -> float:
        """The height of the figure."""
        height = self.top + self.lanes + self.under
        if self.memory:
            height += self.memory + GAP
        return height

    def box(self, bottom: float, height: float) -> tuple[float, float, float, float]:
        """Return the position of axes as (left, bottom, width, height), in shares of the figure."""
        return LEFT, bottom / self.height, RIGHT - LEFT, height / self.height

    def y(self, inches: float) -> float:
        """Convert a distance in inches from the top of the figure to a y coordinate from 0 to 1."""
        return 1 - inches / self.height


def _window(trace: "TraceData", start: float, end: float | None) -> tuple[float, float]:
    """Return the part of the recording to draw, as (start, end) in seconds."""
    last = max(trace.end, 1e-6)
    until = last
    if end is not None:
        until = end
    if not 0 <= start < until:
        raise ValueError(
            f"start={start!r}, end={end!r}: give seconds from 0 to {last:.3g}, "
            "the start before the end"
        )
    return float(start), float(until)


def _is_drawn(race: RecordedRace, devices: list[int], window: tuple[float, float]) -> bool:
    """Return whether a race has a launch on one of the devices, and a launch in the window."""
    sides = (race.first, race.second)
    on_device = any(side.device in devices for side in sides)
    return on_device and any(side.start <= window[1] and side.end >= window[0] for side in sides)


def _part(trace: "TraceData", window: tuple[float, float]) -> tuple[np.ndarray, "TraceData"]:
    """Return the part of the recording that the title, the texts and the shares describe.

    Returns:
        A mask of the spans in the window, and a recording of these spans alone, cut to the window.
        If the window covers the whole recording, it is the trace itself.
    """
    spans, (start, end) = trace.spans, window
    if start == 0 and end >= trace.end:
        return np.ones(len(spans), dtype=bool), trace
    seen = (spans.start < end) & (spans.end > start)
    columns = {}
    for name in SPAN_COLUMNS:
        if name not in ("start", "duration"):
            columns[name] = getattr(spans, name)[seen]
    first, last = spans.start[seen].clip(start, end), spans.end[seen].clip(start, end)
    waits = (trace.waits.until >= start) & (trace.waits.until <= end)
    part = copy.copy(trace)
    part.spans = Spans(first - start, last - first, **columns, names=spans.names)
    part.waits = Waits(*(getattr(trace.waits, field.name)[waits] for field in fields(Waits)))
    part.seconds = end - start
    return seen, part


def _devices(trace: "TraceData") -> list[int]:
    """Return the devices on which something ran, or the first device if nothing ran."""
    used = [device for device in np.unique(trace.spans.device).tolist() if device != HOST]
    return used or trace.devices[:1]


# Drawing


def _draw(
    axes: Axes,
    trace: "TraceData",
    kinds: np.ndarray,
    lanes: list[Lane],
    races: list,
    window: tuple[float, float],
) -> bool:
    """Draw the lanes and the lines between them.

    Returns:
        Whether some spans were too many to be drawn one by one.
    """
    axes.set(xlim=window, ylim=(len(lanes), 0))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    middles = [row + 0.5 for row in range(len(lanes))]
    axes.set_yticks(middles, [lane.name for lane in lanes], fontsize=TEXT_POINTS)
    shade(axes, len(lanes))
    crowded = False
    for row, lane in enumerate(lanes):
        crowded |= draw_lane(axes, trace, kinds, lane, row, window, PIXELS)
    draw_waits(axes, trace, lanes, window, PIXELS)
    draw_collectives(axes, trace, is_collective(trace.spans), lanes, window)
    draw_races(axes, races, lanes, window)
    return crowded


def _add_shares(axes: Axes, part: "TraceData", lanes: list[Lane], inches: float) -> None:
    """Write beside each lane the share of the time in which it was busy.

    Args:
        part: the drawn part of the recording. The lanes' masks are masks of its spans.
        inches: the height of a lane.
    """
    collectives = is_collective(part.spans)
    place = axes.get_yaxis_transform()
    for row, lane in enumerate(lanes):
        text = _share_text(part, lane, collectives, inches)
        axes.annotate(text, (1, row + 0.5), (8, 0), xycoords=place, **BESIDE, fontsize=TEXT_POINTS)


def _share_text(trace: "TraceData", lane: Lane, collectives: np.ndarray, inches: float) -> str:
    """Return the text beside a lane, which says for which share of the time the lane was busy.

    For copies and collectives, the text also has the share that overlaps with other kernels, if the
    lane is high enough for two lines. `inches` is the height of the lane.
    """
    if lane.is_host:
        return f"waits {_percent(trace.host_waited, trace.end)}"
    seconds = seconds_of(trace.spans, lane.mask)
    busy = f"busy {_percent(seconds, trace.end)}"
    if lane.kind is None and not collectives[lane.mask].all():
        return busy
    if inches < TWO_LINES:
        return busy
    others = chosen(trace.spans, lane.device, KIND_GROUPS["kernel"]) & ~lane.mask
    hidden = seconds_of_both(trace.spans, lane.mask, others)
    return f"{busy}, of which\n{_percent(hidden, seconds)} overlapped"


def _percent(part: float, whole: float) -> str:
    """Write a part as a share of a whole, such as "12%". A share that would be 0% is "<1%"."""
    if not whole:
        return "0%"
    share = part / whole
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def _entries(trace: "TraceData", kinds: np.ndarray, lanes: list[Lane], races: list) -> list:
    """Return the entries of the legend.

    A kind of spans has an entry if its spans are a pixel wide or more in total.
    """
    shown = np.logical_or.reduce([lane.mask for lane in lanes])
    found = set(kinds[shown].tolist())
    wide = set()
    for kind in found:
        seconds = trace.spans.duration[shown & (kinds == kind)].sum()
        if seconds * PIXELS >= trace.end:
            wide.add(kind)
    entries: list = []
    for kind, name in NAMES.items():
        if kind in (wide or found):
            look = {"edgecolor": "white", "linewidth": 0.3, **LOOKS[kind]}
            entries.append(Patch(**look, label=name))
    if len(trace.waits):
        look = {"color": BLACK, "marker": ">", "markersize": 4, "linewidth": 1}
        entries.append(Line2D([], [], **look, label="stream waits"))
    if races:
        look = {"color": RACE, "marker": "o", "markersize": 4, "linewidth": 1.5}
        entries.append(Line2D([], [], **look, label="race"))
    return entries


def _add_legend(canvas: Canvas, entries: list, rows: int, page: _Page) -> None:
    """Draw the legend in this number of rows, below the title."""
    if not entries:
        return
    canvas.legend(
        handles=entries,
        ncols=-(-len(entries) // rows),
        loc="upper left",
        bbox_to_anchor=(0.02, page.y(TITLE)),
        frameon=False,
        fontsize=TEXT_POINTS,
        handlelength=1.5,
        columnspacing=1.1,
        handletextpad=0.5,
        labelspacing=0.3,
        borderpad=0,
        borderaxespad=0,
    )


def _list_races(canvas: Canvas, races: list, page: _Page, top: float) -> None:
    """Write a line for each race with both source lines, starting `top` inches from the top."""
    look: dict[str, Any] = {"va": "top", "fontsize": TEXT_POINTS, "color": darker(RACE)}
    look |= {"weight": "bold", "parse_math": False}
    listed = races[:MOST_RACES]
    more = ""
    if len(races) > len(listed):
        more = f"; and {len(races) - len(listed)} more"
    width = WIDTH - text_width(more, bold=True)
    for number, race in enumerate(listed, 1):
        text = shortened(f"{number}  {race_text(race)}", width, bold=True)
        if number == len(listed):
            text += more
        canvas.text(0.02, page.y(top + (number - 1) * LINE), text, **look)


def _add_note(canvas: Canvas, trace: "TraceData", crowded: bool, left_out: int) -> None:
    """Write what the picture leaves out, in the lower left corner beside the badge.

    Args:
        crowded: whether some spans are drawn as columns.
        left_out: the number of lanes that did not fit.
    """
    texts = []
    if trace.lost_spans:
        texts.append(f"oldest {trace.lost_spans} spans lost")
    if left_out:
        texts.append(f"{left_out} lane{'s' * (left_out != 1)} left out")
    if crowded:
        texts.append("low bars: share of time")
    note = shortened("; ".join(texts), WIDTH - text_width(trace.badge) - 20)
    look: dict[str, Any] = {"fontsize": TEXT_POINTS, "color": "#444444", "parse_math": False}
    canvas.text(0.02, 0.03, note, **look)


# Texts


def _finding(
    whole: "TraceData", trace: "TraceData", devices: list[int], races: list, marks: list[Mark]
) -> str:
    """Return the title: races, hidden collectives, or how busy the devices were.

    Args:
        whole: the whole recording.
        trace: the part of it that is drawn.
    """
    if races:
        first, second = races[0].first, races[0].second
        count = "A race"
        if len(races) > 1:
            count = f"{len(races)} races"
        earlier, later = first.line or first.name, second.line or second.name
        return f"{count}: nothing orders {earlier} before {later}"
    if not any(trace.busy(device) for device in devices):
        names = " or ".join(f"cuda:{device}" for device in devices)
        return f"Nothing ran on {names} in {units.time_text(trace.end)}"
    hidden = _hidden_shares(whole, devices, marks)
    if hidden:
        in_first, *in_others = hidden
        in_first = in_first.replace(" in", " of the collectives in", 1)
        return f"Hidden behind kernels: {in_first}, {', '.join(in_others)}"
    share = _hidden_share(trace, devices)
    if share is not None:
        return f"Of the time in collectives, {share} is hidden behind other kernels"
    return _finding_about_busy_devices(trace, devices)


def _finding_about_busy_devices(trace: "TraceData", devices: list[int]) -> str:
    """Return a title that says for which share of the time the devices worked."""
    end = units.time_text(trace.end)
    shares = {device: _percent(trace.busy(device), trace.end) for device in devices}
    if len(devices) > 2:
        least, most = (shares[choose(devices, key=trace.busy)] for choose in (min, max))
        if least == most:
            return f"{len(devices)} GPUs worked {least} of {end}"
        return f"{len(devices)} GPUs worked {least} to {most} of {end}"
    if len(devices) == 2:
        first, second = devices
        on_first, on_second = trace.spans.device == first, trace.spans.device == second
        both = _percent(seconds_of_both(trace.spans, on_first, on_second), trace.end)
        worked = f"cuda:{first} worked {shares[first]}, cuda:{second} {shares[second]} of {end}"
        return f"{worked}, both at once {both}"
    (device,) = devices
    name = "The GPU"
    if len(trace.devices) > 1:
        name = f"cuda:{device}"
    worked = f"{name} worked {shares[device]} of {end}"
    copied = trace.busy(device, "copy")
    if not copied:
        return worked
    return f"{worked}; kernels overlap {_percent(trace.overlap(device), copied)} of its copying"


def _hidden_share(trace: "TraceData", devices: list[int]) -> str | None:
    """Return which share of the devices' time in collectives was hidden behind other kernels.

    Return None if there are no collectives.
    """
    in_collectives = [trace.collectives(device) for device in devices]
    total = sum(seconds for seconds, _ in in_collectives)
    if not total:
        return None
    return _percent(sum(hidden for _, hidden in in_collectives), total)


def _hidden_shares(trace: "TraceData", devices: list[int], marks: list[Mark]) -> list[str]:
    """Return the hidden share of collectives in each marked part, such as "60% in step 1".

    The list is empty if a part has no collectives, or if there are too few or too many parts.
    """
    if not 2 <= len(marks) <= MOST_COMPARED:
        return []
    texts = []
    for mark in marks:
        _, part = _part(trace, (mark.start, mark.end))
        share = _hidden_share(part, devices)
        if share is None:
            return []
        texts.append(f"{share} in {mark.name}")
    return texts


def _proof(trace: "TraceData", devices: list[int], races: list) -> list[str]:
    """Return sentences with the numbers that the timeline shows."""
    time_text = units.time_text
    sentences = [f"Race: {race_text(race)}" for race in races]
    for device in devices:
        parts = [f"kernels {time_text(trace.busy(device, 'kernel'))}"]
        copied = trace.busy(device, "copy")
        if copied:
            overlap = time_text(trace.overlap(device))
            parts.append(f"copies {time_text(copied)}, of which {overlap} while kernels ran")
        in_collectives, hidden = trace.collectives(device)
        if in_collectives:
            parts.append(
                f"collectives {time_text(in_collectives)}, "
                f"of which {time_text(hidden)} while other kernels ran"
            )
        parts.append(f"idle {time_text(trace.idle(device))} of {time_text(trace.end)}")
        sentences.append(f"Cuda:{device}: {'; '.join(parts)}")
    count = len(trace.waits)
    waits = f"{count} wait{'s' * (count != 1)} of a stream for another"
    if trace.tells_of_host:
        waits = f"The host waited {time_text(trace.host_waited)}; {waits}"
    sentences.append(waits)
    sentences.append(f"{int((trace.spans.device != HOST).sum())} kernels and copies")
    if trace.lost_spans:
        sentences.append(f"The oldest {trace.lost_spans} spans and waits were lost")
    return sentences


def _marked(marks: list[Mark]) -> list[str]:
    """Return a list with a sentence about the marked parts of the program, or [] without marks."""
    if not marks:
        return []
    parts = []
    for mark in marks:
        start, end = units.time_text(mark.start), units.time_text(mark.end)
        parts.append(f"{mark.name} from {start} to {end}")
    return [f"Marked: {', '.join(parts)}"]
