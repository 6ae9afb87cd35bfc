"""Lines between the explorer's lanes: races, collectives of several ranks, waits of streams."""

from typing import TYPE_CHECKING, Any

from gputrace.collectives import Collective
from gputrace.spans import HOST, RacingSpan, RecordedRace

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

Rows = dict[tuple[int, int], int]  # the number of a lane by (device, stream) or (HOST, thread)
Link = dict[str, Any]


def links_of(trace: "TraceData", rows: Rows, collectives: list[Collective]) -> list[Link]:
    """Return the lines between lanes. Times are in nanoseconds from the start of the recording.

    Each end of a line has the number of its lane, and when its span started and ended. A race has
    all ends that have a lane, so its line may be missing. Its `number` counts from 1. `rows` has
    the number of each lane.
    """
    links: list[Link] = []
    for number, race in enumerate(trace.races, 1):
        ends = []
        for side in (race.first, race.second):
            row = _row_of(side, rows)
            if row is not None:
                ends.append([row, _nanoseconds(side.start), _nanoseconds(side.end)])
        if ends:
            told = _described(race, number)
            links.append({"kind": "race", "number": number, "ends": ends, "told": told})
    spans = trace.spans
    for collective in collectives:
        ends = []
        for index in collective.spans:
            row = rows.get((int(spans.device[index]), int(spans.stream[index])))
            if row is not None:
                end = _nanoseconds(float(spans.end[index]))
                ends.append([row, _nanoseconds(float(spans.start[index])), end])
        links.append({"kind": "collective", "ends": ends})
    waits = trace.waits
    for index in range(len(waits)):
        source = rows.get((int(waits.device[index]), int(waits.stream[index])))
        target = rows.get((int(waits.to_device[index]), int(waits.to_stream[index])))
        if source is not None and target is not None and source != target:
            happens = _nanoseconds(float(waits.time[index]))
            goes_on = _nanoseconds(float(waits.until[index]))
            ends = [[source, happens, happens], [target, goes_on, goes_on]]
            links.append({"kind": "wait", "ends": ends})
    return links


def _described(race: RecordedRace, number: int) -> list[tuple[str, str]]:
    """Return what the explorer says about a race, as rows of a term and a text.

    `number` is the number of the race in the figure.
    """
    rows = [(f"race {number}", race.kind or "not ordered")]
    for when, side in (("first", race.first), ("second", race.second)):
        where = f" on {side.queue}" if side.queue else ""
        rows.append((when, f"{side.name}{where}, {side.line}  {side.text}".strip()))
    if race.missing:
        rows.append(("missing", f"{race.missing}, before {race.second.line}"))
    return rows


def _row_of(side: RacingSpan, rows: Rows) -> int | None:
    """Return the number of the lane in which a launch of a race ran, or None if it has no lane."""
    if (side.device, side.stream) in rows:
        return rows[side.device, side.stream]
    if side.device == HOST:  # a thread that launched nothing
        return next((row for (device, _), row in rows.items() if device == HOST), None)
    return None


def _nanoseconds(seconds: float) -> int:
    """Convert seconds to whole nanoseconds."""
    return round(seconds * 1e9)
