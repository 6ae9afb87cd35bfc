"""What stands between two lanes of a timeline: a stream that waits for another, and two pieces of work that race."""

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

MANY = 30  # arrows: of more only those are drawn for which the stream really waited,
NEAR, FAR = 2, 8  # thinner, and one for those within so many pixels
EDGE = (1 - FILLED) / 2  # from a lane's border to its boxes


def draw_waits(axes: Axes, trace: "TraceData", lanes: list[Lane], window: tuple[float, float], pixels: float) -> None:
    """An arrow from the event in its stream's lane to the moment from which the waiting stream may go on, one where several fall in the
    same pixels; none from a stream that had done nothing yet."""
    rows = {(lane.device, lane.stream): row for row, lane in enumerate(lanes) if lane.stream is not None}
    first_ends = [float(trace.spans.end[lane.mask].min(initial=np.inf)) for lane in lanes]
    waits, pixel = trace.waits, (window[1] - window[0]) / pixels
    seen = np.flatnonzero((waits.until >= window[0]) & (waits.time <= window[1])).tolist()
    near = NEAR * pixel
    if len(seen) > MANY:
        seen, near = [index for index in seen if waits.until[index] - waits.time[index] < pixel], FAR * pixel
    drawn: dict[tuple, tuple] = {}
    for index in seen:
        source = rows.get((int(waits.device[index]), int(waits.stream[index])))
        target = rows.get((int(waits.to_device[index]), int(waits.to_stream[index])))
        begin, end = float(waits.time[index]), float(waits.until[index])
        if source is not None and target is not None and source != target and begin > first_ends[source] - pixel:
            drawn.setdefault((source, target, round(begin / near), round(end / near)), (begin, source, end, target))
    lines = [((begin, _edge(a, b)), (end, _edge(b, a))) for begin, a, end, b in drawn.values()]
    few = len(lines) <= MANY
    around = [withStroke(linewidth=2.5, foreground="white")] if few else None
    axes.add_collection(LineCollection(lines, colors=BLACK, linewidths=1.0 if few else 0.6, zorder=6, path_effects=around), autolim=False)
    for down, marker in ((True, "v"), (False, "^")):
        heads = [line[1] for line, (_, a, _, b) in zip(lines, drawn.values(), strict=True) if (b > a) is down]
        if heads:
            x, y = zip(*heads, strict=True)
            axes.plot(x, y, marker, color=BLACK, markersize=4 if few else 3, zorder=7, linestyle="", markeredgewidth=0)


def _edge(row: int, other: int) -> float:
    """The height of the border of a row's boxes that faces the other row."""
    return row + 1 - EDGE if other > row else row + EDGE


def draw_collectives(axes: Axes, trace: "TraceData", collectives: np.ndarray, lanes: list[Lane], window: tuple[float, float]) -> None:
    """A line from rank to rank at the end of each collective, which is the same on all; of many, those of the longest.

    `collectives` marks them among the trace's spans.
    """
    spans, rows = trace.spans, {(lane.device, lane.stream): row for row, lane in enumerate(lanes) if lane.stream is not None}
    durations: dict[tuple[int, float], dict[int, float]] = {}  # by name and end, in each lane
    for index in np.flatnonzero(collectives).tolist():
        end, row = float(spans.end[index]), rows.get((int(spans.device[index]), int(spans.stream[index])))
        if row is not None and window[0] <= end <= window[1]:
            durations.setdefault((int(spans.name[index]), round(end, 9)), {})[row] = float(spans.duration[index])
    shared = sorted((key for key in durations if len(durations[key]) > 1), key=lambda key: -max(durations[key].values()))[:MANY]
    lines = [((key[1], min(durations[key]) + EDGE), (key[1], max(durations[key]) + 1 - EDGE)) for key in shared]
    if lines:
        axes.add_collection(LineCollection(lines, colors=BLACK, linewidths=0.6, linestyles="dotted", zorder=5), autolim=False)


def draw_races(axes: Axes, races: list[RecordedRace], lanes: list[Lane], window: tuple[float, float]) -> None:
    """Both pieces of work framed in red, a red line between them, and the number of the race."""
    for number, race in enumerate(races, 1):
        ends = [_drawn_at(side, lanes) for side in (race.first, race.second)]
        for drawn in ends:
            if drawn is not None:
                row, start, end = drawn
                least = (window[1] - window[0]) / 200  # so that the shortest is seen
                axes.broken_barh(
                    [(start, max(end - start, least))], (row + EDGE, FILLED), facecolor="none", edgecolor=RACE, linewidth=2, zorder=8
                )
        one, other = ends
        if one is not None and other is not None:
            (a, *first), (b, *second) = one, other
            x, y = (sum(first) / 2, sum(second) / 2), ((a + 0.5, b + 0.5) if a == b else (_edge(a, b), _edge(b, a)))
            axes.plot(x, y, color=RACE, linewidth=1.8, zorder=8)
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT_POINTS, "color": "white", "weight": "bold"}
            axes.text(sum(x) / 2, sum(y) / 2, str(number), **look, zorder=9, bbox={"boxstyle": "circle,pad=0.15", "fc": RACE, "ec": "none"})


def _drawn_at(side: RacingSpan, lanes: list[Lane]) -> tuple[int, float, float] | None:
    """The row of a side, and from when to when it is drawn there; None where it has no lane."""
    for row, lane in enumerate(lanes):
        if lane.device == side.device and (side.device == HOST or lane.stream == side.stream):
            return row, side.start, side.end
    return None


def race_text(race: RecordedRace) -> str:
    """Both sides with their lines, and what is wrong between them."""
    sides = " and ".join(f"{side.name}{f' ({side.line})' if side.line else ''}" for side in (race.first, race.second))
    return f"{race.kind or 'not ordered'}: {sides}"
