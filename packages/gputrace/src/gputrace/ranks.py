"""The traces of several ranks as one, in which cuda:2 is the GPU of rank 2.

Each rank recorded in its own process; virtual GPUs have one clock for all. What the ranks' hosts did is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gputrace.events import Events
from gputrace.files.archive import BY_DEVICE
from gputrace.spans import HOST, SPAN_COLUMNS, WAIT_COLUMNS, Execution, Mark, RacingSpan, RecordedRace, Spans, Waits
from gputrace.trace import Trace


def together(by_rank: Mapping[int, Trace], per_node: int) -> Trace:
    """One trace of the ranks' traces; each node has `per_node` ranks. It holds the memory that each rank took on its own GPU, and all that
    it ran on any."""
    traces = list(by_rank.values())
    parts = [_Part(by_rank[rank], rank, per_node, sum(len(each.stacks) for each in traces[:n])) for n, rank in enumerate(by_rank)]
    first = traces[0]
    return Trace(
        events=_joined_events([part.events() for part in parts]),
        stacks=[stack for trace in traces for stack in trace.stacks],
        start=[segment for part in parts for segment in part.start()],
        settings=first.settings,
        phases=[],
        used=sorted(row for part in parts for row in part.used()),
        **{name: {0: 0} | {device: n for part in parts for device, n in part.by_device(name).items()} for name in BY_DEVICE},
        seconds=max(trace.seconds for trace in traces),
        lost=sum(trace.lost for trace in traces),
        error=next((trace.error for trace in traces if trace.error), ""),
        badge=f"{len(traces)} rank{'s' * (len(traces) > 1)}: {first.badge}",
        origin=first.origin,
        census=None,
        execution=Execution(
            _joined_spans([part.spans() for part in parts]),
            _joined(Waits, WAIT_COLUMNS, [part.waits() for part in parts], "until"),
            [race for part in parts for race in part.races()],
            sum(trace.lost_spans for trace in traces),
            first.no_timeline,
            [mark for part in parts for mark in part.marks()],
        ),
    )


class _Part:
    """What of a rank's trace belongs to the whole, with the whole's numbers of devices and stacks."""

    def __init__(self, trace: Trace, rank: int, per_node: int, stacks: int) -> None:
        self._trace, self._stacks = trace, stacks
        self._rank, self._own, self._first = rank, rank % per_node, rank - rank % per_node

    def events(self) -> Events:
        """Those of the rank's own GPU; births are positions among them."""
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
        return [replace(segment, device=self._rank) for segment in self._trace.start if segment.device == self._own]

    def used(self) -> list[tuple[float, int, int]]:
        return [(time, self._rank, nbytes) for time, device, nbytes in self._trace.used if device == self._own]

    def by_device(self, name: str) -> dict[int, int]:
        return {self._rank: getattr(self._trace, name).get(self._own, 0)}

    def spans(self) -> Spans:
        spans = self._trace.spans
        mine = spans.device != HOST
        columns = {name: getattr(spans, name)[mine] for name in SPAN_COLUMNS}
        columns["device"] = columns["device"] + self._first
        columns["stack"] = columns["stack"] + self._stacks
        columns["launch"] = np.full(len(columns["launch"]), -1, columns["launch"].dtype)
        return Spans(**columns, names=spans.names)

    def waits(self) -> dict[str, np.ndarray]:
        waits = self._trace.waits
        moved = {"device": self._first, "to_device": self._first, "stack": self._stacks}
        return {name: getattr(waits, name) + moved.get(name, 0) for name in WAIT_COLUMNS}

    def races(self) -> list[RecordedRace]:
        return [replace(race, first=self._moved(race.first), second=self._moved(race.second)) for race in self._trace.races]

    def marks(self) -> list[Mark]:
        return [replace(mark, device=mark.device + self._first) for mark in self._trace.marks]

    def _moved(self, side: RacingSpan) -> RacingSpan:
        return side if side.device == HOST else replace(side, device=side.device + self._first)


def _joined_events(parts: list[Events]) -> Events:
    offsets = np.cumsum([0, *map(len, parts)])[:-1].tolist()
    births = np.concatenate([np.where(part.birth >= 0, part.birth + offset, -1) for part, offset in zip(parts, offsets, strict=True)])
    columns = {column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Events)}
    order = np.argsort(columns["time"], kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    columns["birth"] = np.where(births >= 0, position[births], -1).astype(columns["birth"].dtype)
    return Events(**{name: column[order] for name, column in columns.items()})


def _joined_spans(parts: list[Spans]) -> Spans:
    names = list(dict.fromkeys(name for part in parts for name in part.names))
    number = {name: index for index, name in enumerate(names)}
    renamed = [{name: getattr(part, name) for name in SPAN_COLUMNS} for part in parts]
    for columns, part in zip(renamed, parts, strict=True):
        own = np.array([number[name] for name in part.names], columns["name"].dtype)
        columns["name"] = own[columns["name"]] if len(own) else columns["name"]
    return _joined(Spans, SPAN_COLUMNS, renamed, "start", names=names)


def _joined(kind: Any, columns_of: Sequence[str], parts: list[dict[str, np.ndarray]], by: str, **more: Any) -> Any:
    """The rows of all, in the order of one column."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in columns_of}
    order = np.argsort(columns[by], kind="stable")
    return kind(**{name: column[order] for name, column in columns.items()}, **more)
