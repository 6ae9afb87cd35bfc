"""A trace in Chrome's format, which Perfetto and chrome://tracing open: a process for the host and for each device, a thread for each
stream and copy engine, arrows for launches, waits and races, a counter for the memory.

The format is that of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format"), as
https://perfetto.dev/docs/getting-started/other-formats says that Perfetto reads it: an arrow ("s" to "f") joins the slices in which its
ends lie, so both lie at the start of a slice; slices of a thread lie in one another or apart.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gputrace.files.archive import written_whole
from gputrace.spans import COPIES, HOST, KINDS, RacingSpan

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

ENGINES = 1000  # the first thread of the copy engines; streams and threads of the host count from 1
_ENGINE_NAMES = dict(zip(COPIES, ("host to device", "device to host", "device to device"), strict=True))
Entry = dict[str, Any]


def write(trace: "TraceData", path: str | Path) -> None:
    """Write a trace to a file, whole or not at all. Raises OSError where it cannot be written."""
    with written_whole(path) as file:
        file.writelines(content(trace))


def content(trace: "TraceData") -> Iterator[bytes]:
    """The file, piece by piece."""
    head = {"displayTimeUnit": "ms", "otherData": {"badge": trace.badge, **trace.origin}}
    encode = json.JSONEncoder(ensure_ascii=False).encode
    yield (json.dumps(head)[:-1] + ', "traceEvents": [\n').encode()
    comma = ""
    for event in events_of(trace):
        yield f"{comma}{encode(event)}".encode()
        comma = ",\n"
    yield b"\n]}\n"


def events_of(trace: "TraceData") -> Iterator[Entry]:
    """All entries of the file; times in µs from the start of the recording, exact to the ns."""
    lanes = _Lanes(trace)
    yield from lanes.names()
    yield from lanes.slices()
    yield from lanes.launches()
    yield from lanes.waits()
    yield from lanes.races()
    for device in trace.devices:
        yield from _memory(trace, device)


class _Lanes:
    """The threads of the file, and what lies in them. A copy lies in two: its stream and its engine."""

    def __init__(self, trace: "TraceData") -> None:
        self.trace = trace
        spans = trace.spans
        self.start, self.end = (np.round(column * 1e9).astype(np.int64) for column in (spans.start, spans.end))
        self.threads: dict[tuple[int, int], int] = {}  # the number of (device, stream), and of (HOST, thread)
        for device in [HOST, *trace.devices]:
            found = np.unique(spans.stream[spans.device == device]).tolist()
            streams = found if device == HOST else [stream for stream in trace.stream_names(device) if stream in found]
            self.threads |= {(device, stream): number for number, stream in enumerate(streams, 1)}
        self.of_lane = {
            lane: np.flatnonzero((spans.device == lane[0]) & (spans.stream == lane[1])) for lane in self.threads
        }  # in order of start
        for mine in self.of_lane.values():  # seconds are rounded to ns: what touches must not overlap
            self.start[mine[1:]] = np.maximum(self.start[mine[1:]], np.minimum(self.end[mine[:-1]], self.start[mine[1:]] + 1))
        threads = zip(spans.device.tolist(), spans.stream.tolist(), (self.start / 1000).tolist(), strict=True)
        self.starts: list[Entry] = [
            {"pid": _process(device), "tid": self.threads[device, stream], "ts": time} for device, stream, time in threads
        ]

    def names(self) -> Iterator[Entry]:
        for device in [HOST, *self.trace.devices]:
            name = "host" if device == HOST else f"cuda:{device}"
            yield _metadata("process_name", device, name=name)
            yield _metadata("process_sort_index", device, sort_index=_process(device))
        for (device, stream), number in self.threads.items():
            name = f"thread {number}" if device == HOST else self.trace.stream_names(device)[stream]
            yield _metadata("thread_name", device, number, name=name)
            yield _metadata("thread_sort_index", device, number, sort_index=number)
        for device, kind in self._engines():
            yield _metadata("thread_name", device, ENGINES + kind, name=f"copy engine, {_ENGINE_NAMES[kind]}")
            yield _metadata("thread_sort_index", device, ENGINES + kind, sort_index=ENGINES + kind)

    def _engines(self) -> list[tuple[int, int]]:
        spans = self.trace.spans
        copies = np.isin(spans.kind, COPIES)
        return sorted(set(zip(spans.device[copies].tolist(), spans.kind[copies].tolist(), strict=True)))

    def slices(self) -> Iterator[Entry]:
        spans, lines = self.trace.spans, [self.trace.line(stack) for stack in range(len(self.trace.stacks))]
        args = [{} if line is None else {"line": line.location, "source": line.text} for line in lines]
        durations = (np.maximum(self.end - self.start, 0) / 1000).tolist()
        rows = zip(spans.name.tolist(), spans.kind.tolist(), spans.stack.tolist(), self.starts, durations, strict=True)
        for name, kind, stack, at, duration in rows:
            slice_ = {"ph": "X", "name": spans.names[name], "cat": KINDS[kind], **at, "dur": duration, "args": args[stack]}
            yield slice_
            if kind in COPIES:
                yield slice_ | {"cat": "copy engine", "tid": ENGINES + kind}

    def launches(self) -> Iterator[Entry]:
        launch = self.trace.spans.launch
        for index in np.flatnonzero(launch >= 0).tolist():
            yield from self._arrow(f"launch {index}", "launch", int(launch[index]), index)

    def waits(self) -> Iterator[Entry]:
        """From the last piece of work before the event to the first after the wait."""
        waits = self.trace.waits
        for index in range(len(waits)):
            source = self._last((int(waits.device[index]), int(waits.stream[index])), float(waits.time[index]))
            target = self._first((int(waits.to_device[index]), int(waits.to_stream[index])), float(waits.until[index]))
            if source is not None and target is not None:
                yield from self._arrow(f"wait {index}", "wait", source, target)

    def races(self) -> Iterator[Entry]:
        for index, race in enumerate(self.trace.races):
            ends = [self._of_side(side) for side in (race.first, race.second)]
            text = f"race: {race.first.name} ({race.first.line}) and {race.second.name} ({race.second.line})"
            if ends[0] is not None and ends[1] is not None:
                yield from self._arrow(f"race {index}", "race", ends[0], ends[1])
            span = ends[1] if ends[1] is not None else ends[0]
            moment = _microseconds(round(race.second.seconds * 1e9))
            at = {"pid": _process(HOST), "tid": 1, "ts": moment} if span is None else self.starts[span]
            yield {"ph": "i", "s": "t", "name": text, "cat": "race", **at}

    def _last(self, lane: tuple[int, int], seconds: float) -> int | None:
        mine = self.of_lane.get(lane, np.zeros(0, np.int64))
        before = int(np.searchsorted(self.end[mine], round(seconds * 1e9) + 1, side="right"))
        return int(mine[before - 1]) if before else None

    def _first(self, lane: tuple[int, int], seconds: float) -> int | None:
        mine = self.of_lane.get(lane, np.zeros(0, np.int64))
        after = int(np.searchsorted(self.start[mine], round(seconds * 1e9) - 1, side="left"))
        return int(mine[after]) if after < len(mine) else None

    def _of_side(self, side: RacingSpan) -> int | None:
        """The span of a side of a race; None where it ran before the recording, or is the host."""
        return None if side.device == HOST else self._first((side.device, side.stream), side.start)

    def _arrow(self, identity: str, name: str, source: int, target: int) -> Iterable[Entry]:
        same = {"name": name, "cat": name, "id": identity}
        return ({"ph": "s", **same, **self.starts[source]}, {"ph": "f", "bp": "e", **same, **self.starts[target]})


def _process(device: int) -> int:
    """The number of a device's process, from 2 on; the host's is 1. Perfetto takes 0 for the idle process."""
    return device - HOST + 1


def _metadata(what: str, device: int, thread: int = 0, **args: Any) -> Entry:
    return {"ph": "M", "name": what, "pid": _process(device), "tid": thread, "args": args}


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _memory(trace: "TraceData", device: int) -> Iterator[Entry]:
    """The counter of a device's memory, in bytes."""
    line = trace.timeline(device)
    for time, allocated, reserved in zip(line.times.tolist(), line.allocated.tolist(), line.reserved.tolist(), strict=True):
        at = {"pid": _process(device), "tid": 0, "ts": _microseconds(round(time * 1e9))}
        yield {"ph": "C", "name": "memory, bytes", **at, "args": {"allocated": allocated, "reserved": reserved}}
