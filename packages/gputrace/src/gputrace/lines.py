"""Memory of a recording by line of the user's source, and the summary of a recording."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gputrace import units
from gputrace.events import ALLOC, FREE_REQUESTED, Events, SourceLine
from gputrace.spans import HOST
from gputrace.tables import Table, Tabulated

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

# The line of events during which no line of the user's ran, such as a free after the last line.
NO_LINE = SourceLine("", 0, "")

NONE_OF_YOURS = "no line of yours"
MOST_ROWS = 15  # rows of a table of times
_NONE = "no line of yours allocated or freed memory"


@dataclass(frozen=True)
class LineMemory:
    """The effect of one line on the memory of a device, in bytes.

    A backward pass or an optimizer's step belongs to the line that called it. If the line of a free
    is not known, the free belongs to the line that allocated.

    Attributes:
        delta: bytes allocated by the line, minus bytes freed.
        peak: the most bytes that were allocated on the device while the line ran.
        allocated: bytes allocated by the line in total.
        count: the number of its allocations.
    """

    line: SourceLine
    delta: int
    peak: int
    allocated: int
    count: int


class Lines(Tabulated, list[LineMemory]):
    """List of lines in order of the source, which prints as a table."""

    def __init__(self, lines: list[LineMemory], caption: str) -> None:
        super().__init__(lines)
        self._caption = caption

    def table(self) -> Table:
        """Return a table with a row per line."""
        if not self:
            return Table((), (), f"{_NONE} ({self._caption})")
        header = ("line", "change", "peak", "allocated", "times", "source")
        rows = []
        for entry in self:
            row = (
                _location(entry.line),
                signed(entry.delta),
                units.byte_text(entry.peak),
                units.byte_text(entry.allocated),
                str(entry.count),
                entry.line.text,
            )
            rows.append(row)
        return Table(header, tuple(rows), self._caption)


def _location(line: SourceLine) -> str:
    """Return the location of a line in words."""
    if line is NO_LINE:
        return NONE_OF_YOURS
    return line.location


def by_line(trace: "TraceData", device: int) -> Lines:
    """Return the effect of each of the user's lines on the memory of one device."""
    events = trace.events
    mine = np.flatnonzero(events.device == device)
    changes = np.isin(events.action[mine], [ALLOC, FREE_REQUESTED])
    chosen = mine[changes]
    births, rises = events.action[chosen] == ALLOC, events.rises[chosen]
    # The bytes after each event. The first entry of the timeline is the start.
    allocated = trace.timeline(device).allocated[1:][changes]
    lines = [trace.line(stack) or NO_LINE for stack in range(len(trace.stacks))]
    order = sorted(set(lines), key=lambda line: (line.filename, line.line, line.function))
    number = {line: index for index, line in enumerate(order)}
    line_of_stack = np.array([number[line] for line in lines], dtype=np.int64)
    of_event = line_of_stack[_stacks(events)[chosen]]
    delta, taken, count, peak = (np.zeros(len(order), np.int64) for _ in range(4))
    np.add.at(delta, of_event, rises)
    np.add.at(taken, of_event, np.where(births, rises, 0))
    np.add.at(count, of_event, births)
    np.maximum.at(peak, of_event, allocated)
    listed = []
    for i in np.unique(of_event).tolist():
        numbers = int(delta[i]), int(peak[i]), int(taken[i]), int(count[i])
        listed.append(LineMemory(order[i], *numbers))
    return Lines(listed, f"cuda:{device}, {trace.badge}")


def times_of(trace: "TraceData") -> list[Table]:
    """Return a table of the devices' time by line of the user's, and one by kernel.

    The rows with most time come first.
    """
    spans = trace.spans
    lines = [trace.line(stack) or NO_LINE for stack in range(len(trace.stacks))]
    cells = [(_location(line), line.text) for line in lines]
    by_line: dict[tuple[str, ...], list[float]] = defaultdict(list)
    by_kernel: dict[tuple[str, ...], list[float]] = defaultdict(list)
    ran = np.flatnonzero(spans.device != HOST)
    columns = (spans.stack, spans.name, spans.duration)
    for stack, name, seconds in zip(*(column[ran].tolist() for column in columns), strict=True):
        by_line[cells[stack]].append(seconds)
        by_kernel[spans.names[name],].append(seconds)
    return [
        _times("line", by_line, ("source",), trace.badge),
        _times("kernel or copy", by_kernel, (), trace.badge),
    ]


def _times(
    what: str, seconds: dict[tuple[str, ...], list[float]], source: tuple[str, ...], badge: str
) -> Table:
    """Return a table of times with the headers `what`, the numbers, and `source`.

    Args:
        what: the header of the first column.
        seconds: the times by the texts of a row: the first cell, and the cells after the numbers.
        source: the headers of the cells after the numbers.
        badge: where the numbers come from.
    """
    # Anything below a nanosecond is rounding.
    sums = {key: round(sum(taken), 9) for key, taken in seconds.items()}
    whole = sum(sums.values()) or 1.0
    rows = []
    for key in sorted(sums, key=lambda key: (-sums[key], key)):
        share = f"{sums[key] / whole:.0%}"
        rows.append((key[0], units.time_text(sums[key]), share, str(len(seconds[key])), *key[1:]))
    caption = f"The devices' time by {what}"
    if len(rows) > MOST_ROWS:
        caption += f", the first {MOST_ROWS} of {len(rows)}"
    caption += f", {badge}"
    return Table((what, "time", "share", "times", *source), tuple(rows[:MOST_ROWS]), caption)


def _stacks(events: Events) -> np.ndarray:
    """Return the stack of each event. A free without a stack has its allocation's stack."""
    is_unknown = (events.stack == 0) & (events.birth >= 0)
    return np.where(is_unknown, events.stack[events.birth], events.stack)


def summary(trace: "TraceData") -> str:
    """Describe a trace in a few lines of text."""
    rows = []
    for device in trace.devices:
        line = trace.timeline(device)
        start, end = units.byte_text(line.allocated[0]), units.byte_text(line.allocated[-1])
        peak, reserved = units.byte_text(trace.peaks[device]), units.byte_text(line.reserved[-1])
        rows.append(
            f"cuda:{device}: {start} allocated at the start, peak {peak}, "
            f"{end} at the end ({reserved} reserved)"
        )
    if trace.lost:
        lost = f"{trace.lost} events were lost"
        rows.append(f"{lost}: peaks may be higher, and segments are not known")
    recorded = f"Trace of {units.time_text(trace.seconds)}, {len(trace.events)} events"
    return "\n".join([f"{recorded}, {trace.badge}", *rows])


def signed(nbytes: float) -> str:
    """Write a change in bytes with its sign, such as +2 MiB or -1 KiB. No change is 0 B."""
    if not nbytes:
        return units.byte_text(0)
    sign = "+" if nbytes > 0 else "-"
    return f"{sign}{units.byte_text(abs(nbytes))}"
