"""Join the traces of several ranks in one trace, in which cuda:2 is the GPU of rank 2.

Each rank recorded in its own process. The virtual GPUs of all ranks have the same clock. `hosts` of
the joined trace says which threads and which phases are those of which rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gputrace.events import Events
from gputrace.files.archive import BY_DEVICE
from gputrace.spans import (
    HOST,
    SPAN_COLUMNS,
    WAIT_COLUMNS,
    Execution,
    Mark,
    RacingSpan,
    RankHost,
    RecordedRace,
    Spans,
    Waits,
)
from gputrace.trace import Trace


def together(by_rank: Mapping[int, Trace], per_node: int) -> Trace:
    """Join traces by rank. There are `per_node` ranks on each node.

    The result has the memory that each rank took on its own GPU, and all that it ran on any GPU.
    """
    traces = list(by_rank.values())
    parts, stacks, threads = [], 0, 0
    for rank, trace in by_rank.items():
        part = _Part(trace, rank, per_node, stacks, threads)
        parts.append(part)
        stacks += len(trace.stacks)
        threads += part.thread_count
    memory: dict[str, dict[int, int]] = {}
    for name in BY_DEVICE:
        memory[name] = {0: 0}
        for part in parts:
            memory[name] |= part.by_device(name)
    plural = "s" if len(traces) > 1 else ""
    first = traces[0]
    return Trace(
        events=_joined_events([part.events() for part in parts]),
        stacks=[stack for trace in traces for stack in trace.stacks],
        start=[segment for part in parts for segment in part.start()],
        settings=first.settings,
        phases=[],
        used=sorted(row for part in parts for row in part.used()),
        **memory,
        seconds=max(trace.seconds for trace in traces),
        lost=sum(trace.lost for trace in traces),
        error=next((trace.error for trace in traces if trace.error), ""),
        badge=f"{len(traces)} rank{plural}: {first.badge}",
        origin=first.origin,
        census=None,
        execution=Execution(
            _joined_spans([part.spans() for part in parts]),
            _joined(Waits, WAIT_COLUMNS, [part.waits() for part in parts], "until"),
            [race for part in parts for race in part.races()],
            sum(trace.lost_spans for trace in traces),
            first.no_timeline,
            [mark for part in parts for mark in part.marks()],
            [part.host() for part in parts],
        ),
        computers=[
            replace(computer, rank=rank)
            for rank, trace in by_rank.items()
            for computer in trace.computers
        ],
    )


class _Part:
    """One rank's part of the joined trace. Its devices, stacks and threads get new numbers.

    `stacks` is the number of stacks of the ranks before it, and `threads` that of their threads.
    `thread_count` is the number of threads of this rank.
    """

    def __init__(self, trace: Trace, rank: int, per_node: int, stacks: int, threads: int) -> None:
        self._trace, self._stacks, self._threads = trace, stacks, threads
        on_host = trace.spans.stream[trace.spans.device == HOST]
        self.thread_count = int(on_host.max(initial=-1)) + 1
        # The number of the rank's GPU in its own process, and the first rank of its node.
        self._own, self._first = rank % per_node, rank - rank % per_node
        self._rank = rank

    def events(self) -> Events:
        """Return the events of the rank's own GPU, with births as indices of these events."""
        events = self._trace.events
        mine = events.device == self._own
        position = np.where(mine, np.cumsum(mine) - 1, -1)
        columns = {column.name: getattr(events, column.name)[mine] for column in fields(Events)}
        birth = columns["birth"]
        columns["birth"] = np.where(birth >= 0, position[birth], -1)
        columns["device"] = columns["device"] + self._first
        columns["stack"] = columns["stack"] + self._stacks
        return Events(**columns)

    def start(self) -> list[Any]:
        """Return the segments of the rank's own GPU at the start."""
        own = [segment for segment in self._trace.start if segment.device == self._own]
        return [replace(segment, device=self._rank) for segment in own]

    def used(self) -> list[tuple[float, int, int]]:
        """Return the measurements of the memory in use on the rank's own GPU."""
        own = [row for row in self._trace.used if row[1] == self._own]
        return [(time, self._rank, nbytes) for time, _, nbytes in own]

    def by_device(self, name: str) -> dict[int, int]:
        """Return {rank: value} for an attribute of the trace that has a value for each device.

        The value is that of the rank's own GPU.
        """
        return {self._rank: getattr(self._trace, name).get(self._own, 0)}

    def spans(self) -> Spans:
        """Return the spans of GPUs and of the host."""
        spans = self._trace.spans
        columns = {name: getattr(spans, name) for name in SPAN_COLUMNS}
        on_host = spans.device == HOST
        columns["device"] = np.where(on_host, HOST, columns["device"] + self._first)
        columns["stream"] = columns["stream"] + np.where(on_host, self._threads, 0)
        columns["stack"] = columns["stack"] + self._stacks
        return Spans(**columns, names=spans.names)

    def host(self) -> RankHost:
        """Return the threads and the phases of the rank's host."""
        phases = []
        for phase in self._trace.phases:
            phases.append(replace(phase, stack=phase.stack + self._stacks))
        threads = range(self._threads, self._threads + self.thread_count)
        return RankHost(self._rank, list(threads), phases)

    def waits(self) -> dict[str, np.ndarray]:
        """Return the columns of the waits, with the joined numbers of devices and stacks."""
        waits = self._trace.waits
        moved = {"device": self._first, "to_device": self._first, "stack": self._stacks}
        return {name: getattr(waits, name) + moved.get(name, 0) for name in WAIT_COLUMNS}

    def races(self) -> list[RecordedRace]:
        """Return the rank's races with the new numbers."""
        found = []
        for race in self._trace.races:
            first, second = self._moved(race.first), self._moved(race.second)
            found.append(replace(race, first=first, second=second))
        return found

    def marks(self) -> list[Mark]:
        """Return the parts that the program's author has named."""
        return [replace(mark, device=mark.device + self._first) for mark in self._trace.marks]

    def _moved(self, side: RacingSpan) -> RacingSpan:
        """Return one launch of a race with the joined numbers of its device and thread."""
        queue = f"{side.queue} in rank {self._rank}" if side.queue else ""
        if side.device == HOST:
            return replace(side, stream=side.stream + self._threads, queue=queue)
        return replace(side, device=side.device + self._first, queue=queue)


def _joined_events(parts: list[Events]) -> Events:
    """Join events in order of time, with births as indices of the joined events."""
    births, offset = [], 0
    for part in parts:
        births.append(np.where(part.birth >= 0, part.birth + offset, -1))
        offset += len(part)
    birth = np.concatenate(births)
    columns = {}
    for column in fields(Events):
        columns[column.name] = np.concatenate([getattr(part, column.name) for part in parts])
    order = np.argsort(columns["time"], kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    columns["birth"] = np.where(birth >= 0, position[birth], -1).astype(columns["birth"].dtype)
    return Events(**{name: column[order] for name, column in columns.items()})


def _joined_spans(parts: list[Spans]) -> Spans:
    """Join spans in order of their start, with launches as indices of the joined spans."""
    names = list(dict.fromkeys(name for part in parts for name in part.names))
    number = {name: index for index, name in enumerate(names)}
    renamed = [{name: getattr(part, name) for name in SPAN_COLUMNS} for part in parts]
    offset = 0
    for columns, part in zip(renamed, parts, strict=True):
        if part.names:
            own = np.array([number[name] for name in part.names], columns["name"].dtype)
            columns["name"] = own[columns["name"]]
        columns["launch"] = np.where(part.launch >= 0, part.launch + offset, -1)
        offset += len(part)
    joined = _joined(Spans, SPAN_COLUMNS, renamed, "start", names=names)
    order = np.argsort(np.concatenate([part.start for part in parts]), kind="stable")
    position = np.empty(offset, np.int32)
    position[order] = np.arange(offset)
    launch = np.full(offset, -1, np.int32)
    known = joined.launch >= 0
    launch[known] = position[joined.launch[known]]
    return replace(joined, launch=launch)


def _joined(
    kind: Any, columns_of: Sequence[str], parts: list[dict[str, np.ndarray]], by: str, **more: Any
) -> Any:
    """Join the rows of several tables, sorted by the column `by`, into an object of class `kind`.

    `columns_of` are the names of the columns, and `more` are further arguments of the class.
    """
    columns = {name: np.concatenate([part[name] for part in parts]) for name in columns_of}
    order = np.argsort(columns[by], kind="stable")
    return kind(**{name: column[order] for name, column in columns.items()}, **more)
