"""Trace in Chrome's format, which Perfetto and chrome://tracing open.

It has a process for the host and for each device, a thread for each stream and each copy engine,
arrows for launches, waits and races, and a counter for the memory.

The format ("Trace Event Format") is described in
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. How Perfetto reads
it is described in https://perfetto.dev/docs/getting-started/other-formats. An arrow ("s" to "f")
joins the slices at its ends, so both ends are at the start of a slice. Slices of a thread are
nested or apart.
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

ENGINES = 1000  # the first thread of the copy engines. Streams and host threads count from 1.
_ENGINE_NAMES = dict(
    zip(COPIES, ("host to device", "device to host", "device to device"), strict=True)
)
Entry = dict[str, Any]


def write(trace: "TraceData", path: str | Path) -> None:
    """Write a trace to a file, completely or not at all. Raise OSError if that fails."""
    with written_whole(path) as file:
        file.writelines(content(trace))


def content(trace: "TraceData") -> Iterator[bytes]:
    """Yield the content of the file in parts."""
    head = {"displayTimeUnit": "ms", "otherData": {"badge": trace.badge, **trace.origin}}
    encode = json.JSONEncoder(ensure_ascii=False).encode
    yield (json.dumps(head)[:-1] + ', "traceEvents": [\n').encode()
    comma = ""
    for event in events_of(trace):
        yield f"{comma}{encode(event)}".encode()
        comma = ",\n"
    yield b"\n]}\n"


def events_of(trace: "TraceData") -> Iterator[Entry]:
    """Yield all entries of the file. Times are in µs from the start, exact to a nanosecond."""
    lanes = _Lanes(trace)
    yield from lanes.names()
    yield from lanes.slices()
    yield from lanes.launches()
    yield from lanes.waits()
    yield from lanes.races()
    for device in trace.devices:
        yield from _memory(trace, device)


class _Lanes:
    """The threads of the file and their content.

    A copy is in two threads, that of its stream and that of its copy engine.
    """

    def __init__(self, trace: "TraceData") -> None:
        self.trace = trace
        spans = trace.spans
        # In nanoseconds.
        self.start = np.round(spans.start * 1e9).astype(np.int64)
        self.end = np.round(spans.end * 1e9).astype(np.int64)
        # The number of the thread for each (device, stream), and for each (HOST, thread).
        self.threads: dict[tuple[int, int], int] = {}
        for device in [HOST, *trace.devices]:
            streams = np.unique(spans.stream[spans.device == device]).tolist()
            if device != HOST:
                streams = [stream for stream in trace.stream_names(device) if stream in streams]
            for number, stream in enumerate(streams, 1):
                self.threads[device, stream] = number
        # The indices of the spans in each thread, in order of their start.
        self.of_lane: dict[tuple[int, int], np.ndarray] = {}
        for device, stream in self.threads:
            of_lane = (spans.device == device) & (spans.stream == stream)
            self.of_lane[device, stream] = np.flatnonzero(of_lane)
        # Rounding may let spans overlap that touch each other.
        for mine in self.of_lane.values():
            later, ends = self.start[mine[1:]], self.end[mine[:-1]]
            self.start[mine[1:]] = np.maximum(later, np.minimum(ends, later + 1))
        times = (self.start / 1000).tolist()
        self.starts: list[Entry] = []
        for device, stream, time in zip(
            spans.device.tolist(), spans.stream.tolist(), times, strict=True
        ):
            thread = self.threads[device, stream]
            self.starts.append({"pid": _process(device), "tid": thread, "ts": time})

    def names(self) -> Iterator[Entry]:
        """Yield metadata entries that name the processes and threads, and give their order."""
        for device in [HOST, *self.trace.devices]:
            name = "host" if device == HOST else f"cuda:{device}"
            yield _metadata("process_name", device, name=name)
            yield _metadata("process_sort_index", device, sort_index=_process(device))
        for (device, stream), number in self.threads.items():
            name = f"thread {number}"
            for host in self.trace.hosts:
                if device == HOST and stream in host.threads:
                    name = f"rank {host.rank}, thread {stream - host.threads[0] + 1}"
            if device != HOST:
                name = self.trace.stream_names(device)[stream]
            yield _metadata("thread_name", device, number, name=name)
            yield _metadata("thread_sort_index", device, number, sort_index=number)
        for device, kind in self._engines():
            yield _metadata(
                "thread_name", device, ENGINES + kind, name=f"copy engine, {_ENGINE_NAMES[kind]}"
            )
            yield _metadata("thread_sort_index", device, ENGINES + kind, sort_index=ENGINES + kind)

    def _engines(self) -> list[tuple[int, int]]:
        """Return the copy engines that were used, as (device, kind of span)."""
        spans = self.trace.spans
        copies = np.isin(spans.kind, COPIES)
        return sorted(
            set(zip(spans.device[copies].tolist(), spans.kind[copies].tolist(), strict=True))
        )

    def slices(self) -> Iterator[Entry]:
        """Yield the entries of all spans ("slices" in Chrome's format)."""
        spans = self.trace.spans
        args: list[dict[str, str]] = []
        for stack in range(len(self.trace.stacks)):
            line = self.trace.line(stack)
            args.append({} if line is None else {"line": line.location, "source": line.text})
        durations = (np.maximum(self.end - self.start, 0) / 1000).tolist()
        columns = (spans.name.tolist(), spans.kind.tolist(), spans.stack.tolist())
        for name, kind, stack, at, duration in zip(*columns, self.starts, durations, strict=True):
            what = {"ph": "X", "name": spans.names[name], "cat": KINDS[kind]}
            slice_ = {**what, **at, "dur": duration, "args": args[stack]}
            slice_ = {
                "ph": "X",
                "name": spans.names[name],
                "cat": KINDS[kind],
                **at,
                "dur": duration,
                "args": args[stack],
            }
            yield slice_
            if kind in COPIES:
                yield slice_ | {"cat": "copy engine", "tid": ENGINES + kind}

    def launches(self) -> Iterator[Entry]:
        """Yield arrows from launches to the work that they launched."""
        launch = self.trace.spans.launch
        for index in np.flatnonzero(launch >= 0).tolist():
            yield from self._arrow(f"launch {index}", "launch", int(launch[index]), index)

    def waits(self) -> Iterator[Entry]:
        """Yield an arrow for each wait of a stream.

        It leads from the last span before the event to the first span after the wait.
        """
        waits = self.trace.waits
        for index in range(len(waits)):
            stream = int(waits.device[index]), int(waits.stream[index])
            to_stream = int(waits.to_device[index]), int(waits.to_stream[index])
            source = self._last(stream, float(waits.time[index]))
            target = self._first(to_stream, float(waits.until[index]))
            if source is not None and target is not None:
                yield from self._arrow(f"wait {index}", "wait", source, target)

    def races(self) -> Iterator[Entry]:
        """Yield an arrow between the two launches of each race, and a marker with its description.

        There is no arrow if one of the two launches is not in the recording.
        """
        for index, race in enumerate(self.trace.races):
            ends = [self._of_side(side) for side in (race.first, race.second)]
            sides = [f"{side.name} ({side.line})" for side in (race.first, race.second)]
            text = f"race: {' and '.join(sides)}"
            if ends[0] is not None and ends[1] is not None:
                yield from self._arrow(f"race {index}", "race", ends[0], ends[1])
            span = ends[0] if ends[1] is None else ends[1]
            if span is None:
                moment = _microseconds(round(race.second.seconds * 1e9))
                at = {"pid": _process(HOST), "tid": 1, "ts": moment}
            else:
                at = self.starts[span]
            yield {"ph": "i", "s": "t", "name": text, "cat": "race", **at}

    def _last(self, lane: tuple[int, int], seconds: float) -> int | None:
        """Return the last span of a lane that ended at or before this time, or None."""
        mine = self.of_lane.get(lane, np.zeros(0, np.int64))
        before = int(np.searchsorted(self.end[mine], round(seconds * 1e9) + 1, side="right"))
        if not before:
            return None
        return int(mine[before - 1])

    def _first(self, lane: tuple[int, int], seconds: float) -> int | None:
        """Return the first span of a lane that started at or after this time, or None."""
        mine = self.of_lane.get(lane, np.zeros(0, np.int64))
        after = int(np.searchsorted(self.start[mine], round(seconds * 1e9) - 1, side="left"))
        if after == len(mine):
            return None
        return int(mine[after])

    def _of_side(self, side: RacingSpan) -> int | None:
        """Return the span of one launch of a race.

        Return None if the launch ran before the recording, or if it is an access by the host.
        """
        if side.device == HOST:
            return None
        return self._first((side.device, side.stream), side.start)

    def _arrow(self, identity: str, name: str, source: int, target: int) -> Iterable[Entry]:
        """Return the two entries (start and end) of an arrow from one span to another.

        `identity` is the arrow's id. `source` and `target` are the indices of the spans.
        """
        same = {"name": name, "cat": name, "id": identity}
        begin = {"ph": "s", **same, **self.starts[source]}
        return begin, {"ph": "f", "bp": "e", **same, **self.starts[target]}


def _process(device: int) -> int:
    """Return the number of a device's process: 1 for the host, and from 2 on for devices.

    Perfetto takes 0 for the idle process.
    """
    return device - HOST + 1


def _metadata(what: str, device: int, thread: int = 0, **args: Any) -> Entry:
    """Return an entry that describes a process or a thread.

    `what` is the kind of metadata, such as "thread_name", and `args` is its content.
    """
    return {"ph": "M", "name": what, "pid": _process(device), "tid": thread, "args": args}


def _microseconds(nanoseconds: int) -> float:
    """Convert nanoseconds to microseconds."""
    return nanoseconds / 1000


def _memory(trace: "TraceData", device: int) -> Iterator[Entry]:
    """Yield the counter of a device's memory, in bytes."""
    line = trace.timeline(device)
    columns = (line.times.tolist(), line.allocated.tolist(), line.reserved.tolist())
    for time, allocated, reserved in zip(*columns, strict=True):
        at = {"pid": _process(device), "tid": 0, "ts": _microseconds(round(time * 1e9))}
        args = {"allocated": allocated, "reserved": reserved}
        yield {"ph": "C", "name": "memory, bytes", **at, "args": args}
