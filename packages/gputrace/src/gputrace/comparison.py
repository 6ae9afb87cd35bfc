"""Comparison of two traces: what changed in peak and in time, by line and by kernel."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gputrace import units
from gputrace.events import SourceLine
from gputrace.lines import NO_LINE, NONE_OF_YOURS, signed
from gputrace.loading import loading_sentences
from gputrace.pages import templates
from gputrace.peak import held_at_peak
from gputrace.spans import HOST
from gputrace.tables import Table

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

MOST_ROWS = 20  # rows of a table of changes
SMALLEST = 1e-9  # seconds. Smaller changes are rounding.

# A line is the same in both traces if its file, function and text are. Of several lines with the
# same text, the last number says which it is.
LineKey = tuple[str, str, str, int]
Key = TypeVar("Key", int, str)


class Comparison:
    """The changes from one trace to another.

    It prints as text, and a notebook shows it. `save("changes.html")` writes it to a page.

    Attributes:
        finding: the change of the peak and of the time, in a sentence.
        totals: peak and time of each device.
        memory: what each line held at the peak of the device with the highest peak.
        lines: the devices' time by line.
        kernels: the devices' time by kernel.
    """

    def __init__(self, before: "TraceData", after: "TraceData") -> None:
        self._before, self._after = before, after
        self.finding = _finding(before, after)
        self.totals = _totals(before, after)
        keys = [_Keys(before), _Keys(after)]
        held = [key.sums(held_at_peak(key.trace, key.trace.device)) for key in keys]
        caption = "Allocated at the peak, by the line that allocated it"
        self.memory = _table(caption, held, units.byte_text, signed, keys)
        self.lines = self.kernels = None
        if not (before.no_timeline or after.no_timeline):
            by_line = [key.sums(_seconds_by_stack(key.trace)) for key in keys]
            self.lines = _table("The devices' time by line", by_line, *_TIME_TEXTS, keys)
            by_kernel = [_seconds_by_kernel(trace) for trace in self._both]
            self.kernels = _table("The devices' time by kernel or copy", by_kernel, *_TIME_TEXTS)

    @property
    def _both(self) -> "tuple[TraceData, TraceData]":
        """The trace before and the trace after."""
        return self._before, self._after

    @property
    def tables(self) -> list[Table]:
        """All tables of the comparison that have rows."""
        every = (self.totals, self.memory, self.lines, self.kernels)
        return [table for table in every if table is not None and table.rows]

    def __repr__(self) -> str:
        return "\n\n".join([self.finding, *map(repr, self.tables)])

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in self.tables)
        return f"<p>{escape(self.finding)}</p>{tables}"

    def page(self, names: tuple[str, str] = ("before", "after")) -> str:
        """Return an HTML page about the changes. `names` say which traces were compared."""
        from gputrace.figures.memory import trace_memory

        figures = [trace_memory(trace, trace.device) for trace in self._both]
        loading = map(loading_sentences, self._both)
        return (
            templates()
            .get_template("comparison.html")
            .render(comparison=self, parts=list(zip(names, loading, figures, strict=True)))
        )

    def save(self, path: str | Path) -> None:
        """Write the page to a file. Raise OSError if that fails."""
        Path(path).write_text(self.page(), encoding="utf-8")


def _finding(before: "TraceData", after: "TraceData") -> str:
    """Return a sentence about the change of the peak and of the time between two traces."""
    peak = _change("The peak", before.peak, after.peak, units.byte_text)
    time = _change("the time", before.end, after.end, units.time_text)
    said = f"{peak}, and {time}."
    if before.badge != after.badge:
        said += f" The GPUs differ: before {before.badge}, after {after.badge}."
    for when, trace in (("before", before), ("after", after)):
        if trace.no_timeline:
            said += f" Times by line and by kernel are not compared: {when}, {trace.no_timeline}."
    return said


def _change(
    what: str, before: float, after: float, text: Callable[[float], str], least: float = SMALLEST
) -> str:
    """Return a text that says how the quantity `what` changed.

    `text` writes a value. A change of at most `least`, in the quantity's unit, counts as none.
    """
    if abs(after - before) <= least:
        return f"{what} is the same ({text(after)})"
    verb = "fell"
    if after > before:
        verb = "rose"
    change = text(abs(after - before))
    if before:
        change += f" ({abs(after - before) / before:.0%})"
    return f"{what} {verb} by {change} to {text(after)}"


def _totals(before: "TraceData", after: "TraceData") -> Table:
    """Return a table of the peak and the time of each device, in both traces."""
    rows = []
    for device in sorted({*before.peaks, *after.peaks}):
        was, now = before.peaks.get(device, 0), after.peaks.get(device, 0)
        texts = units.byte_text(was), units.byte_text(now), _diff(was, now, signed)
        rows.append((f"peak of cuda:{device}", *texts))
    times = [("duration", before.end, after.end)]
    if not (before.no_timeline or after.no_timeline):
        for device in sorted({*before.devices} & {*after.devices}):
            times.append((f"cuda:{device} worked", before.busy(device), after.busy(device)))
        times.append(("the host waited", before.host_waited, after.host_waited))
    for name, spent, later in times:
        texts = units.time_text(spent), units.time_text(later), _diff(spent, later, signed_time)
        rows.append((name, *texts))
    caption = before.badge
    if before.badge != after.badge:
        caption = f"before: {before.badge}; after: {after.badge}"
    return Table(("", "before", "after", "change"), tuple(rows), caption)


class _Keys:
    """The user's lines of one trace, by keys that are the same in the other trace.

    Attributes:
        found: the line of each key.
    """

    def __init__(self, trace: "TraceData") -> None:
        self.trace = trace
        lines = {trace.line(stack) or NO_LINE for stack in range(len(trace.stacks))}
        self.found: dict[LineKey, SourceLine] = {}
        self._key_of: dict[SourceLine, LineKey] = {}
        count: dict[tuple[str, str, str], int] = defaultdict(int)
        for line in sorted(lines, key=lambda line: (line.filename, line.line)):
            alike = os.path.basename(line.filename), line.function, line.text
            key = (*alike, count[alike])
            count[alike] += 1
            self.found[key], self._key_of[line] = line, key

    def sums(self, by_stack: Mapping[int, float]) -> dict[LineKey, float]:
        """Add up a quantity for each line of the user's.

        `by_stack` has the quantity for each stack number.
        """
        sums: dict[LineKey, float] = defaultdict(int)
        for stack, value in by_stack.items():
            sums[self._key_of[self.trace.line(stack) or NO_LINE]] += value
        return dict(sums)


def _seconds_by(trace: "TraceData", key_of: Callable[[int], Key]) -> dict[Key, float]:
    """Return the devices' seconds, summed over the spans with the same key.

    `key_of` returns the key of a span, given the span's index.
    """
    seconds: dict[Key, float] = defaultdict(float)
    for index in np.flatnonzero(trace.spans.device != HOST).tolist():
        seconds[key_of(index)] += float(trace.spans.duration[index])
    return dict(seconds)


def _seconds_by_stack(trace: "TraceData") -> dict[int, float]:
    """Return the devices' seconds by the stack that launched the work."""
    return _seconds_by(trace, lambda index: int(trace.spans.stack[index]))


def _seconds_by_kernel(trace: "TraceData") -> dict[str, float]:
    """Return the devices' seconds by the name of the kernel or copy."""
    return _seconds_by(trace, lambda index: trace.spans.names[trace.spans.name[index]])


def signed_time(seconds: float) -> str:
    """Write a change in seconds with its sign, such as +2 ms."""
    if abs(seconds) < SMALLEST:
        return units.time_text(0)
    sign = "+" if seconds > 0 else "-"
    return f"{sign}{units.time_text(abs(seconds))}"


_TIME_TEXTS = units.time_text, signed_time


def _diff(before: float, after: float, text: Callable[[float], str]) -> str:
    """Write the change of a value, also as a share of the value before.

    `text` writes a change with its sign.
    """
    change = text(after - before)
    if before and after != before:
        change += f" ({(after - before) / before:+.0%})"
    return change


def _table(
    caption: str,
    both: list[dict],
    text: Callable[[float], str],
    change_text: Callable[[float], str],
    keys: list[_Keys] | None = None,
) -> Table:
    """Return a table of the changes of a quantity, the largest first.

    Entries that did not change are left out. The caption counts them.

    Args:
        both: the values before and after, by line or by name.
        text: writes a value.
        change_text: writes a change with its sign.
        keys: the lines of both traces, if the values are by line.
    """
    before, after = both
    changes = {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}
    changed = [key for key in changes if abs(changes[key]) > SMALLEST]
    changed.sort(key=lambda key: (-abs(changes[key]), key))
    rows = []
    for key in changed[:MOST_ROWS]:
        values = before.get(key, 0), after.get(key, 0)
        cells = (*map(text, values), _diff(*values, change_text))
        if keys is None:
            rows.append((key, *cells))
        else:
            was, now = (each.found.get(key) for each in keys)
            rows.append((_place(was, now), *cells, key[2]))
    header: tuple[str, ...] = ("kernel or copy", "before", "after", "change")
    if keys is not None:
        header = ("line", "before", "after", "change", "source")
    caption += f": {len(changed)} changed, {len(changes) - len(changed)} did not"
    if len(changed) > MOST_ROWS:
        caption += f". These changed most: {MOST_ROWS}"
    return Table(header, tuple(rows), caption)


def _place(was: SourceLine | None, now: SourceLine | None) -> str:
    """Return the location of a line in the new trace, and its old location if that differs.

    `was` is the line in the old trace, and `now` the line in the new one. Either may be None.
    """
    if NO_LINE in (was, now):
        return NONE_OF_YOURS
    if now is None:
        return "" if was is None else f"{was.location}, only before"
    if was is None:
        return f"{now.location}, only after"
    if was.location != now.location:
        return f"{now.location}, before {was.location.rpartition(':')[2]}"
    return now.location
