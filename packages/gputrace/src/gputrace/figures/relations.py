"""Relations between two lanes of a timeline: waits, collectives and races."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke

from gputrace.figures.figure import BLACK, TEXT_POINTS
from gputrace.figures.lanes import FILLED, RACE, Lane
from gputrace.spans import HOST, RacingSpan, RecordedRace

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

MANY = 30  # arrows. If there are more, only those of waits that took no time are drawn.
NEAR, FAR = 2, 8  # pixels. Of several arrows within them, one is drawn. FAR is for many arrows.
EDGE = (1 - FILLED) / 2  # from the border of a lane to its boxes


def draw_waits(
    axes: Axes,
    trace: "TraceData",
    lanes: list[Lane],
    window: tuple[float, float],
    pixels: float,
) -> None:
    """Draw an arrow for each wait of a stream for another.

    It leads from the event to the moment from which the waiting stream may go on. Several arrows in
    the same pixels are drawn once. There is no arrow from a stream that has done nothing yet.
    """
    rows = {
        (lane.device, lane.stream): row for row, lane in enumerate(lanes) if lane.stream is not None
    }
    first_ends = [float(trace.spans.end[lane.mask].min(initial=np.inf)) for lane in lanes]
    waits, pixel = trace.waits, (window[1] - window[0]) / pixels
    seen = np.flatnonzero((waits.until >= window[0]) & (waits.time <= window[1])).tolist()
    near = NEAR * pixel
    if len(seen) > MANY:
        near = FAR * pixel
        seen = [index for index in seen if waits.until[index] - waits.time[index] < pixel]
    drawn: dict[tuple, tuple] = {}
    for index in seen:
        source = rows.get((int(waits.device[index]), int(waits.stream[index])))
        target = rows.get((int(waits.to_device[index]), int(waits.to_stream[index])))
        begin, end = float(waits.time[index]), float(waits.until[index])
        if source is None or target is None or source == target:
            continue
        if begin > first_ends[source] - pixel:
            key = source, target, round(begin / near), round(end / near)
            drawn.setdefault(key, (begin, source, end, target))
    lines = [((begin, _edge(a, b)), (end, _edge(b, a))) for begin, a, end, b in drawn.values()]
    width, size, around = 0.6, 3, None
    if len(lines) <= MANY:
        width, size, around = 1.0, 4, [withStroke(linewidth=2.5, foreground="white")]
    arrows = LineCollection(lines, colors=BLACK, linewidths=width, zorder=6, path_effects=around)
    axes.add_collection(arrows, autolim=False)
    for down, marker in ((True, "v"), (False, "^")):
        heads = []
        for line, (_, a, _, b) in zip(lines, drawn.values(), strict=True):
            if (b > a) is down:
                heads.append(line[1])
        if heads:
            x, y = zip(*heads, strict=True)
            look: dict[str, Any] = {"linestyle": "", "markeredgewidth": 0, "markersize": size}
            axes.plot(x, y, marker, color=BLACK, **look, zorder=7)


def _edge(row: int, other: int) -> float:
    """Return the y coordinate of the edge of a row's boxes that faces the row `other`."""
    if other > row:
        return row + 1 - EDGE
    return row + EDGE


def draw_collectives(
    axes: Axes,
    trace: "TraceData",
    collectives: np.ndarray,
    lanes: list[Lane],
    window: tuple[float, float],
) -> None:
    """Draw a line from rank to rank at the end of each collective, which all ranks share.

    If there are many, only the longest are drawn.

    Args:
        collectives: which of the trace's spans are collectives, as a mask.
    """
    spans = trace.spans
    rows = {
        (lane.device, lane.stream): row for row, lane in enumerate(lanes) if lane.stream is not None
    }
    durations: dict[tuple[int, float], dict[int, float]] = {}  # by name and end, in each lane
    for index in np.flatnonzero(collectives).tolist():
        end = float(spans.end[index])
        row = rows.get((int(spans.device[index]), int(spans.stream[index])))
        if row is not None and window[0] <= end <= window[1]:
            key = int(spans.name[index]), round(end, 9)
            durations.setdefault(key, {})[row] = float(spans.duration[index])
    shared = [key for key in durations if len(durations[key]) > 1]
    shared.sort(key=lambda key: -max(durations[key].values()))
    lines = []
    for key in shared[:MANY]:
        end = key[1]
        lines.append(((end, min(durations[key]) + EDGE), (end, max(durations[key]) + 1 - EDGE)))
    if lines:
        look: dict[str, Any] = {"colors": BLACK, "linewidths": 0.6, "linestyles": "dotted"}
        axes.add_collection(LineCollection(lines, **look, zorder=5), autolim=False)


def draw_races(
    axes: Axes, races: list[RecordedRace], lanes: list[Lane], window: tuple[float, float]
) -> None:
    """Draw a red frame around both launches of each race, a line between them, and a number.

    `lanes` are the lanes of the figure, and `window` is the interval that it shows, in seconds.
    """
    for number, race in enumerate(races, 1):
        ends = [_drawn_at(side, lanes) for side in (race.first, race.second)]
        for drawn in ends:
            if drawn is not None:
                row, start, end = drawn
                least = (window[1] - window[0]) / 200  # so that the shortest can be seen
                box = [(start, max(end - start, least))], (row + EDGE, FILLED)
                axes.broken_barh(*box, facecolor="none", edgecolor=RACE, linewidth=2, zorder=8)
        one, other = ends
        if one is not None and other is not None:
            (a, *first), (b, *second) = one, other
            x = sum(first) / 2, sum(second) / 2
            y = (a + 0.5, b + 0.5) if a == b else (_edge(a, b), _edge(b, a))
            axes.plot(x, y, color=RACE, linewidth=1.8, zorder=8)
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_POINTS}
            circle = {"boxstyle": "circle,pad=0.15", "fc": RACE, "ec": "none"}
            look |= {"color": "white", "weight": "bold", "bbox": circle}
            axes.text(sum(x) / 2, sum(y) / 2, str(number), **look, zorder=9)


def _drawn_at(side: RacingSpan, lanes: list[Lane]) -> tuple[int, float, float] | None:
    """Return the row, the start and the end at which a launch is drawn.

    Return None if the launch is in none of the lanes.
    """
    for row, lane in enumerate(lanes):
        if lane.device == side.device and (side.device == HOST or lane.stream == side.stream):
            return row, side.start, side.end
    return None


def race_text(race: RecordedRace) -> str:
    """Describe a race: its kind, and both launches with their lines."""
    sides = []
    for side in (race.first, race.second):
        sides.append(f"{side.name} ({side.line})" if side.line else side.name)
    return f"{race.kind or 'not ordered'}: {' and '.join(sides)}"
