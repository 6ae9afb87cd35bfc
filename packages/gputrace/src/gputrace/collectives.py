"""Collectives of several ranks: which spans belong together, and which rank waited for which."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gputrace import units
from gputrace.spans import is_collective
from gputrace.tables import Table

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

MOST_ROWS = 12  # pairs of ranks in the table
SHORTEST = 1e-9  # seconds. Shorter waits are rounding.


@dataclass(frozen=True)
class Collective:
    """One collective, or one message from rank to rank, with its span on each rank.

    Attributes:
        spans: the indices of its spans, in order of their devices.
        nbytes: the bytes of one rank's part. 0 if they are not known.
        last: the index of the span of the rank that was ready last.
        waited: how long each span's rank waited for the last one, in seconds.
    """

    name: str
    spans: list[int]
    nbytes: int
    last: int
    waited: list[float]


def collectives_of(trace: "TraceData") -> list[Collective]:
    """Return the collectives that several devices ran together, sorted by the time of their end."""
    spans = trace.spans
    together: dict[tuple, list[int]] = defaultdict(list)
    for index in np.flatnonzero(is_collective(spans)).tolist():
        meeting, name = int(spans.meeting[index]), int(spans.name[index])
        together[round(float(spans.end[index]), 9), name, meeting].append(index)
    found = []
    for key in sorted(together):
        indices = sorted(together[key], key=lambda index: int(spans.device[index]))
        if len(indices) < 2:
            continue
        last = max(indices, key=lambda index: float(spans.ready[index]))
        waited = [float(spans.ready[last] - spans.ready[index]) for index in indices]
        nbytes = int(spans.nbytes[indices].max())
        found.append(Collective(spans.names[key[1]], indices, nbytes, last, waited))
    return found


def waits_for_ranks(trace: "TraceData", collectives: list[Collective]) -> Table | None:
    """Return a table of which rank waited for which and for how long, or None if none waited.

    The pairs of ranks that waited longest come first. The last columns say at which line the late
    rank entered the collective that the others awaited longest.
    """
    spans = trace.spans
    waits: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for collective in collectives:
        late = int(spans.device[collective.last])
        for index, seconds in zip(collective.spans, collective.waited, strict=True):
            if seconds > SHORTEST:
                waits[int(spans.device[index]), late].append((seconds, collective.last))
    if not waits:
        return None
    pairs = sorted(waits, key=lambda pair: (-sum(seconds for seconds, _ in waits[pair]), pair))
    rows = []
    for pair in pairs[:MOST_ROWS]:
        longest, last = max(waits[pair])
        line = trace.line(int(spans.stack[last]))
        location, text = ("", "") if line is None else (line.location, line.text)
        total = sum(seconds for seconds, _ in waits[pair])
        rows.append(
            (
                f"rank {pair[0]}",
                f"rank {pair[1]}",
                units.time_text(total),
                str(len(waits[pair])),
                units.time_text(longest),
                spans.names[spans.name[last]],
                location,
                text,
            )
        )
    caption = f"Who waited for whom, {trace.badge}"
    if len(pairs) > MOST_ROWS:
        caption += f"; and {len(pairs) - MOST_ROWS} more pairs"
    header = ("waited", "for", "in total", "times", "longest", "in", "late rank's line", "source")
    return Table(header, tuple(rows), caption)


def hosts_table(trace: "TraceData") -> Table:
    """Return a table with the phases and the waits of each rank's host."""
    rows = []
    for host in trace.hosts:
        seconds: dict[str, float] = defaultdict(float)
        for phase in host.phases:
            seconds[phase.name] += phase.end - phase.start
        phases = [units.time_text(seconds[name]) for name in ("forward", "backward", "step")]
        in_collectives, hidden = trace.collectives(host.rank)
        times = (trace.waited_by_host(host.threads), in_collectives, hidden)
        rows.append((f"rank {host.rank}", *phases, *map(units.time_text, times)))
    header = ("rank", "forward", "backward", "step", "host waits", "collectives", "of which hidden")
    return Table(header, tuple(rows), f"The ranks' phases and waits, {trace.badge}")
