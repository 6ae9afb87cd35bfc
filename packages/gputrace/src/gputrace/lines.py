"""The memory of a recording by line of the user's source, and its summary."""

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

NO_LINE = SourceLine("", 0, "")  # of what happens while no line of the user's runs, such as a free after the last one

NONE_OF_YOURS = "no line of yours"
MOST_ROWS = 15  # of a table of times
_NONE = "no line of yours allocated or freed memory"


@dataclass(frozen=True)
class LineMemory:
    """What one line did to the memory of a device, in bytes: `delta` is what it added in all, `peak` the most that was allocated on
    the device while it worked, `allocated` what it allocated in all, in `count` allocations. What a backward pass or an optimizer's
    step does belongs to the line that called it, and a free whose line is not known to the line that allocated."""

    line: SourceLine
    delta: int
    peak: int
    allocated: int
    count: int


class Lines(Tabulated, list[LineMemory]):
    """The lines in order of the source; prints as a table."""

    def __init__(self, lines: list[LineMemory], caption: str) -> None:
        super().__init__(lines)
        self._caption = caption

    def table(self) -> Table:
        header = ("line", "change", "peak", "allocated", "times", "source")
        rows = tuple(
            (
                NONE_OF_YOURS if entry.line is NO_LINE else entry.line.location,
                signed(entry.delta),
                units.byte_text(entry.peak),
                units.byte_text(entry.allocated),
                str(entry.count),
                entry.line.text,
            )
            for entry in self
        )
        return Table(header, rows, self._caption) if self else Table((), (), f"{_NONE} ({self._caption})")


def by_line(trace: "TraceData", device: int) -> Lines:
    """What each line of the user's did to the memory of one device."""
    events = trace.events
    mine = np.flatnonzero(events.device == device)
    changes = np.isin(events.action[mine], [ALLOC, FREE_REQUESTED])
    chosen = mine[changes]
    births, rises = events.action[chosen] == ALLOC, events.rises[chosen]
    allocated = trace.timeline(device).allocated[1:][changes]  # after each event; the timeline has one more entry, the start
    lines = [trace.line(stack) or NO_LINE for stack in range(len(trace.stacks))]
    order = sorted(set(lines), key=lambda line: (line.filename, line.line, line.function))
    number = {line: index for index, line in enumerate(order)}
    of_event = np.array([number[line] for line in lines], dtype=np.int64)[_stacks(events)[chosen]]
    delta, taken, count, peak = (np.zeros(len(order), np.int64) for _ in range(4))
    np.add.at(delta, of_event, rises)
    np.add.at(taken, of_event, np.where(births, rises, 0))
    np.add.at(count, of_event, births)
    np.maximum.at(peak, of_event, allocated)
    seen = np.unique(of_event)
    listed = [LineMemory(order[i], int(delta[i]), int(peak[i]), int(taken[i]), int(count[i])) for i in seen.tolist()]
    return Lines(listed, f"cuda:{device}, {trace.badge}")


def times_of(trace: "TraceData") -> list[Table]:
    """What took the devices' time: a table by line of the user's and one by kernel, those that took most first."""
    spans = trace.spans
    lines = [trace.line(stack) or NO_LINE for stack in range(len(trace.stacks))]
    told = [(NONE_OF_YOURS if line is NO_LINE else line.location, line.text) for line in lines]
    by_line: dict[tuple[str, ...], list[float]] = defaultdict(list)
    by_kernel: dict[tuple[str, ...], list[float]] = defaultdict(list)
    ran = np.flatnonzero(spans.device != HOST)
    for stack, name, seconds in zip(spans.stack[ran].tolist(), spans.name[ran].tolist(), spans.duration[ran].tolist(), strict=True):
        by_line[told[stack]].append(seconds)
        by_kernel[spans.names[name],].append(seconds)
    return [_times("line", by_line, ("source",), trace.badge), _times("kernel or copy", by_kernel, (), trace.badge)]


def _times(what: str, seconds: dict[tuple[str, ...], list[float]], source: tuple[str, ...], badge: str) -> Table:
    sums = {key: round(sum(taken), 9) for key, taken in seconds.items()}  # to the nanosecond: less is only how floats round
    order, whole = sorted(sums, key=lambda key: (-sums[key], key)), sum(sums.values()) or 1.0
    rows = [(key[0], units.time_text(sums[key]), f"{sums[key] / whole:.0%}", str(len(seconds[key])), *key[1:]) for key in order]
    more = f"; and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    return Table((what, "time", "share", "times", *source), tuple(rows[:MOST_ROWS]), f"The devices' time by {what}, {badge}{more}")


def _stacks(events: Events) -> np.ndarray:
    """The stack of each event; a free of which none is known has that of its block's allocation."""
    return np.where((events.stack == 0) & (events.birth >= 0), events.stack[events.birth], events.stack)


def summary(trace: "TraceData") -> str:
    """A trace in a few lines of text."""
    rows = []
    for device in trace.devices:
        line = trace.timeline(device)
        rows.append(
            f"cuda:{device}: {units.byte_text(line.allocated[0])} allocated at the start, peak {units.byte_text(trace.peaks[device])}, "
            f"{units.byte_text(line.allocated[-1])} at the end ({units.byte_text(line.reserved[-1])} reserved)"
        )
    if trace.lost:
        rows.append(f"{trace.lost} events were lost: peaks may be higher, and segments are not known")
    return "\n".join([f"Trace of {units.time_text(trace.seconds)}, {len(trace.events)} events, {trace.badge}", *rows])


def signed(nbytes: int) -> str:
    """+2 MiB, -1 KiB, 0 B."""
    return units.byte_text(0) if not nbytes else f"{'+' if nbytes > 0 else '-'}{units.byte_text(abs(nbytes))}"
