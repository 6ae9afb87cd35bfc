"""The clock of one machine: a host that queues work, and devices that work through their queues.

Nothing here waits or reads a real clock. When a piece of work will end is known as soon as it is queued, so the same program has the
same times everywhere.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any, Protocol

from virtualgpu.clock.occupancy import Occupancy

# A vector clock: by stream, the number of its pieces of work that are done before something else.
Known = dict["StreamTime", int]

# Launches of one stream that may be unfinished. Another launch holds the host until the oldest of
# them has ended. Measured on an H100 (driver 580.159, CUDA 13.0) by benchmarks/timing/launch_queue.py:
# kernels, memsets, asynchronous copies, timed events and graphs count one each. Other events and
# waits count nothing. Each stream has a queue of its own.
QUEUE_LENGTH = 1022


class StreamTime:
    """The queue of one stream, as far as time is concerned: work queued now starts at `ready` or later.

    Streams order nothing among each other without an event. That is CUDA's rule for the streams that PyTorch makes: they are
    created non-blocking, so even the legacy default stream (stream 0) neither waits for them nor makes them wait.
    """

    __slots__ = (
        "capture",
        "count",
        "device_index",
        "ends",
        "known",
        "learned",
        "ready",
        "stream_id",
    )

    def __init__(self, device_index: int, stream_id: int = 0) -> None:
        self.device_index = device_index
        self.stream_id = stream_id
        self.ready = 0.0
        # The times at which the last launches end, the oldest first.
        self.ends: deque[float] = deque(maxlen=QUEUE_LENGTH)
        self.count = 0  # pieces of work queued so far
        self.known: Known = {}  # of other streams: how many of their pieces are done before what is queued here next
        self.learned = 0  # the version of the host's `known` that is included in this stream's; -1 while it is captured
        self.capture: Recorder | None = None  # that takes what is queued here

    def __repr__(self) -> str:
        return f"StreamTime(device_index={self.device_index}, stream_id={self.stream_id}, ready={self.ready!r})"


@dataclass(slots=True, eq=False, repr=False)
class EventTime:
    """The moment (seconds of the machine's clock) when all that was queued on a stream before the event is done.

    `known` says of each stream how many pieces of its work are done then. One of a `capture` happens whenever that is replayed.
    """

    stream: StreamTime
    time: float
    known: Known
    capture: "Recorder | None" = None

    def __repr__(self) -> str:
        return f"EventTime(stream={self.stream!r}, time={self.time!r})"


@dataclass(slots=True, eq=False, repr=False)
class Span:
    """A piece of work on a device: `kind` is "kernel" or the copy engine's name; `start` and `duration` are in seconds.

    The host went on at `launched`; `overhead` is what it had worked to launch it.
    """

    device: int
    stream: int
    kind: str
    name: str
    start: float
    duration: float
    launched: float = 0.0
    overhead: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.duration

    def __repr__(self) -> str:
        return f"Span({self.kind} {self.name!r} on cuda:{self.device} stream {self.stream}, {self.start!r} s + {self.duration!r} s)"


@dataclass(slots=True, eq=False, repr=False)
class Wait:
    """The host or a stream waits for work of `device`, on `stream`, or on all its streams where that is None, that is done at `time`.

    `waiter` is the stream that waits, None for the host, which waits by what is called `name`. The host asked at `asked`; the waiter
    may go on at `until`.
    """

    device: int
    stream: int | None
    time: float
    waiter: StreamTime | None
    name: str
    asked: float
    until: float

    def __repr__(self) -> str:
        return f"Wait({self.waiter or 'the host'} for cuda:{self.device} stream {self.stream}, {self.asked!r} s to {self.until!r} s)"


WorkListener = Callable[[Span | Wait], None]


class Recorder(Protocol):
    """A capture that is under way: it gets the work of its streams in the clock's place."""

    def launch(self, stream: StreamTime, seconds: float, name: str, share: float) -> Span: ...
    def copy(self, stream: StreamTime, engine: str, seconds: float, blocking: bool, name: str) -> Span: ...
    def record(self, stream: StreamTime) -> EventTime: ...
    def wait(self, stream: StreamTime, event: EventTime) -> None: ...
    def run(self, call: Any) -> Any: ...
    def note(self, call: Any, do: Callable[[Any], Any]) -> Any: ...
    def draw(self, generator: Any) -> None: ...
    def made(self, tensor: Any) -> Any: ...
    def happens(self, event: EventTime, of_program: Any) -> None: ...

    def check_wait(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        """Raises CUDA's error if nobody may wait for this stream, event or device now, or (`asks`) look whether it is done."""


class Clock:
    """Host time and device time of one machine. Every method may be called from any thread.

    Copies of one engine run one after the other, and so do kernels of one stream. Kernels of several streams run at once while the GPU
    has multiprocessors free: see `virtualgpu.clock.occupancy`.

    `host` is the host's time in seconds since the machine was put in place. Durations and overheads are in seconds, finite and
    not negative; anything else raises ValueError and changes nothing.

    Besides times it keeps vector clocks, which say what is ordered before what whatever the times: `known` is what the host has waited
    for; all that it launches from then on comes after that.
    """

    __slots__ = (
        "_devices", "_engines", "_learner", "_listeners", "_lock", "_occupancies", "_streams", "_version", "_watcher", "captures", "host",
        "known",
    )  # fmt: skip

    def __init__(self) -> None:
        self.host = 0.0
        self.captures: tuple[Recorder, ...] = ()  # those under way
        self._devices: dict[int, float] = {}  # when the last work queued on a device ends
        self._engines: dict[tuple[int, str], float] = {}  # when a copy engine is free again
        self._occupancies: dict[int, Occupancy] = {}
        self._streams: dict[int, list[StreamTime]] = {}  # those of a device that have had work
        self.known: Known = {}
        self._version = 0
        self._learner: Callable[[], None] | None = None
        self._watcher: Callable[[], None] | None = None
        self._listeners: tuple[WorkListener, ...] = ()
        self._lock = Lock()

    def listen(self, listener: WorkListener) -> None:
        """Call `listener` with every span and every wait from now on, outside the clock's lock, after those that listen already."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: WorkListener) -> None:
        """Call `listener` no more. Raises ValueError if it does not listen."""
        with self._lock:
            if listener not in self._listeners:
                raise ValueError(f"{listener} does not listen to this clock")
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def call_when_learned(self, learner: Callable[[], None] | None) -> None:
        """Call `learner` whenever the host gets to know that more work is done, outside the clock's lock; None ends it."""
        self._learner = learner

    def call_when_host_works(self, watcher: Callable[[], None] | None) -> None:
        """Call `watcher` whenever the host has worked by itself, outside the clock's lock; None ends it."""
        self._watcher = watcher

    def before(self, stream: StreamTime) -> Known:
        """What is done before the work that is queued on the stream next: of each stream, so many pieces of work."""
        with self._lock:
            self._note_known(stream)
        return {**stream.known, stream: stream.count}

    def advance_host(self, seconds: float) -> None:
        """Let the host work for `seconds` by itself."""
        if not 0.0 <= seconds < inf:
            _check(seconds)
        with self._lock:
            self.host += seconds
        if self._watcher is not None:
            self._watcher()

    def launch(self, stream: StreamTime, seconds: float, overhead: float, name: str = "kernel", share: float = 1.0) -> Span:
        """Queue a kernel on a stream; the host goes on after `overhead`.

        It fills a `share` of the GPU, above 0 and at most 1, and takes `seconds` if that much is free. Raises ValueError for another
        share.
        """
        # Written out, not through _queue: every operator comes here, and a call more costs a tenth of the whole.
        if not (0.0 <= seconds < inf and 0.0 <= overhead < inf):
            _check(seconds, overhead)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"a kernel fills a share of the GPU above 0 and at most 1, not {share!r}")
        device = stream.device_index
        full: Wait | None = None
        with self._lock:
            self.host = launched = start = self.host + overhead
            if stream.learned != self._version or not stream.count:
                if stream.capture is not None:
                    return stream.capture.launch(stream, seconds, name, share)
                self._note_known(stream)
            ends = stream.ends
            if len(ends) == QUEUE_LENGTH and ends[0] > launched:
                full = self._wait_for_place(stream)
                launched = start = self.host
            stream.count += 1
            if stream.ready > start:
                start = stream.ready
            occupancy = self._occupancies.get(device)
            if occupancy is None:
                occupancy = self._occupancies[device] = Occupancy()
            start, end = occupancy.take(launched, start, seconds, share)
            stream.ready = end
            ends.append(end)
            if end > self._devices.get(device, 0.0):
                self._devices[device] = end
        span = Span(device, stream.stream_id, "kernel", name, start, seconds if end == start + seconds else end - start, launched, overhead)
        for listener in self._listeners:
            if full is not None:
                listener(full)
            listener(span)
        return span

    def copy(self, stream: StreamTime, engine: str, seconds: float, overhead: float, blocking: bool, name: str = "copy") -> Span:
        """Queue a copy on a stream and on a copy engine ("h2d", "d2h" or "p2p") of the stream's device.

        It starts when the stream and the engine are both free. A blocking copy keeps the host until its end.
        """
        _check(seconds, overhead)
        if stream.capture is not None:
            self.advance_host(overhead)
            return stream.capture.copy(stream, engine, seconds, blocking, name)
        device = stream.device_index
        with self._lock:
            self._note_known(stream)
            stream.count += 1
            self.host += overhead
            ends = stream.ends
            full: Wait | None = None
            if len(ends) == QUEUE_LENGTH:
                full = self._wait_for_place(stream)
            launched = self.host
            start = max(launched, stream.ready, self._engines.get((device, engine), 0.0))
            stream.ready = self._engines[device, engine] = end = start + seconds
            ends.append(end)
            self._devices[device] = max(end, self._devices.get(device, 0.0))
            if blocking:
                self.host = end
        if blocking:
            self._learn({**stream.known, stream: stream.count})
        span = Span(device, stream.stream_id, engine, name, start, seconds, launched, overhead)
        if self._listeners:
            if full is not None:
                self._notify(full)
            self._notify(span)
            if blocking:
                self._notify(Wait(device, stream.stream_id, end, None, name, launched, end))
        return span

    def launch_together(self, stream: StreamTime, name: str, launched: float, start: float, seconds: float) -> EventTime:
        """Queue a collective that was launched at `launched` and starts at `start`, when its last rank is there; returns its end.

        What the stream was told to wait for after the launch is no matter. It fills no part of the GPU: NCCL's kernels have a few
        multiprocessors.
        """
        _check(launched, start, seconds)
        device = stream.device_index
        with self._lock:
            self._note_known(stream)
            stream.count += 1
            end = start + seconds
            stream.ready = max(stream.ready, end)
            stream.ends.append(end)
            self._devices[device] = max(end, self._devices.get(device, 0.0))
            event = EventTime(stream, end, {**stream.known, stream: stream.count})
        self._notify(Span(device, stream.stream_id, "kernel", name, start, seconds, launched))
        return event

    @contextmanager
    def one_launch(self, stream: StreamTime) -> Iterator[None]:
        """Count everything that the block queues on the stream as one launch, as for a graph."""
        with self._lock:
            full = self._wait_for_place(stream)
        if full is not None:
            self._notify(full)
        ends = stream.ends
        stream.ends = deque(maxlen=1)
        try:
            yield
        finally:
            stream.ends = ends
            ends.append(stream.ready)

    def record(self, stream: StreamTime, overhead: float = 0.0, timed: bool = False) -> EventTime:
        """Return an event at the end of what is queued on the stream; now, if the stream is idle.

        A `timed` event takes a place in the stream's queue of launches.
        """
        _check(overhead)
        if stream.capture is not None:
            self.advance_host(overhead)
            return stream.capture.record(stream)
        full: Wait | None = None
        with self._lock:
            self._note_known(stream)
            if timed:
                full = self._wait_for_place(stream)
            event = EventTime(stream, max(self.host, stream.ready), {**stream.known, stream: stream.count})
            if timed:
                stream.ends.append(event.time)
            self.host += overhead
        if full is not None:
            self._notify(full)
        return event

    def wait(self, stream: StreamTime, event: EventTime) -> None:
        """Work queued on the stream from now on starts after the event. The host does not wait."""
        if (capture := event.capture or stream.capture) is not None:
            return capture.wait(stream, event)
        with self._lock:
            self._note_known(stream)
            _add(stream.known, event.known)
            stream.ready = max(stream.ready, event.time)
            device = stream.device_index
            self._devices[device] = max(stream.ready, self._devices.get(device, 0.0))
            asked, until = self.host, max(self.host, stream.ready)
        if self._listeners:
            source = event.stream
            self._notify(Wait(source.device_index, source.stream_id, event.time, stream, "wait", asked, until))

    def query(self, event: EventTime, overhead: float = 1e-6) -> bool:
        """Whether the event has happened. Asking takes host time, or a loop that asks until it has would never end."""
        _check(overhead)
        self._check_captures(event, asks=True)
        with self._lock:
            self.host += overhead
            done = event.time <= self.host
        if done:
            self._learn(event.known)
        return done

    def synchronize_stream(self, stream: StreamTime, overhead: float) -> None:
        """The host waits until all that is queued on the stream is done."""
        self._check_captures(stream)
        self._hold_host(stream.ready, overhead, "synchronize stream", stream.device_index, stream.stream_id)
        self._learn({**stream.known, stream: stream.count})

    def synchronize_device(self, device_index: int, overhead: float) -> None:
        """The host waits until all that is queued on any stream of the device is done."""
        self._check_captures(device_index)
        self._hold_host(self._devices.get(device_index, 0.0), overhead, "synchronize device", device_index)
        self._learn({stream: stream.count for stream in self._streams.get(device_index, ())})

    def synchronize_event(self, event: EventTime, overhead: float) -> None:
        """The host waits for the event."""
        self._check_captures(event)
        self._hold_host(event.time, overhead, "synchronize event", event.stream.device_index, event.stream.stream_id)
        self._learn(event.known)

    def _note_known(self, stream: StreamTime) -> None:
        """Note on a stream what the host knows to be done: it is done before all that the host queues from now on."""
        if not stream.count:
            mine = self._streams.setdefault(stream.device_index, [])
            if stream not in mine:
                mine.append(stream)
        if stream.learned != self._version and stream.capture is None:
            stream.learned = self._version
            _add(stream.known, self.known)

    def _wait_for_place(self, stream: StreamTime) -> Wait | None:
        """Hold the host while the stream's queue of launches is full. Return the wait, if any.

        The caller holds the clock's lock.
        """
        ends = stream.ends
        if len(ends) < QUEUE_LENGTH or ends[0] <= self.host:
            return None
        asked, self.host = self.host, ends[0]
        device, number = stream.device_index, stream.stream_id
        return Wait(device, number, ends[0], None, "full queue", asked, self.host)

    def _check_captures(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        for capture in self.captures:
            capture.check_wait(awaited, asks)

    def _learn(self, known: Known) -> None:
        with self._lock:
            more = _add(self.known, known)
            self._version += more
        if more and self._learner is not None:
            self._learner()

    def _hold_host(self, done: float, overhead: float, name: str, device: int, stream: int | None = None) -> None:
        """The host waits, by what is called `name`, for work that is done at `done`."""
        _check(overhead)
        with self._lock:
            asked = self.host
            self.host = until = max(asked, done) + overhead
        if self._listeners:
            self._notify(Wait(device, stream, done, None, name, asked, until))

    def _notify(self, what: Span | Wait) -> None:
        for listener in self._listeners:
            listener(what)


def _add(known: Known, more: Known) -> bool:
    """Join the vector clock `more` into `known`; returns whether anything changed."""
    grown = False
    for stream, count in more.items():
        if count > known.get(stream, 0):
            known[stream] = count
            grown = True
    return grown


def _check(*durations: float) -> None:
    for seconds in durations:
        if not 0.0 <= seconds < inf:
            raise ValueError(f"a duration is a finite number of seconds, 0 or more, not {seconds!r}")


class StreamEvents:
    """Tells the allocator of a device when the work on the device's streams, given by their numbers, is done."""

    def __init__(self, clock: Clock, streams: dict[int, StreamTime]) -> None:
        self._clock = clock
        self._streams = streams

    def record(self, stream: int) -> EventTime:
        return self._clock.record(self._streams[stream])

    def done(self, event: EventTime) -> bool:
        return self._clock.query(event, 0.0)

    def wait(self, event: EventTime) -> None:
        self._clock.synchronize_event(event, 0.0)
