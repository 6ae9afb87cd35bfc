"""The clock of one machine: a host that queues work, and devices that do it.

Nothing here waits or reads a real clock. The end of a launch is known as soon as it is queued, so
the same program has the same times on every computer.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any, Protocol

from virtualgpu.clock.occupancy import Occupancy

# A vector clock: for each stream, the number of its launches that are done before something else.
Known = dict["StreamTime", int]

# The number of launches of one stream that may be unfinished. Another launch blocks the host until
# the oldest of them has ended. Measured on an H100 (driver 580.159, CUDA 13.0) by
# benchmarks/timing/launch_queue.py. Kernels, memsets, asynchronous copies, timed events and graphs
# count as one launch each. Other events and waits do not count. Each stream has its own queue.
QUEUE_LENGTH = 1022


class StreamTime:
    """The queue of one stream, reduced to its times.

    Work that is queued now starts at `ready` or later. Streams do not wait for each other without
    an event. This is CUDA's rule for PyTorch's streams. They are created as non-blocking, so the
    legacy default stream (stream 0) neither waits for them nor makes them wait.

    count: the number of launches queued so far
    ends: the times at which the last launches end, oldest first
    known: for each other stream, how many of its launches are done before the next launch here
    learned: the version of the host's `known` that `known` includes, -1 during a capture
    capture: the capture that records the work queued here, or None
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
        self.ends: deque[float] = deque(maxlen=QUEUE_LENGTH)
        self.count = 0
        self.known: Known = {}
        self.learned = 0
        self.capture: Recorder | None = None

    def __repr__(self) -> str:
        return (
            f"StreamTime(device_index={self.device_index}, stream_id={self.stream_id}, "
            f"ready={self.ready!r})"
        )


@dataclass(slots=True, eq=False, repr=False)
class EventTime:
    """The time at which all work that was queued on a stream before the event is done.

    `time` is in seconds of the machine's clock. `known` tells for each stream how many of its
    launches are done then. An event of a `capture` happens at every replay of the graph.
    """

    stream: StreamTime
    time: float
    known: Known
    capture: "Recorder | None" = None

    def __repr__(self) -> str:
        return f"EventTime(stream={self.stream!r}, time={self.time!r})"


@dataclass(slots=True, eq=False, repr=False)
class Span:
    """One launch on a device.

    kind: "kernel" or the name of the copy engine
    start, duration: in seconds
    launched: the host's time after the launch
    overhead: the seconds that the launch took on the host
    nbytes: the bytes that a copy or a collective moves
    ready: when a rank's own part of a collective could have started, or None
    meeting: a number that the ranks' spans of one collective share, or 0
    graph: a number that the spans of one replay of a CUDA graph share, or 0. The replay is one
        launch of the host, and each span has its times.
    """

    device: int
    stream: int
    kind: str
    name: str
    start: float
    duration: float
    launched: float = 0.0
    overhead: float = 0.0
    nbytes: int = 0
    ready: float | None = None
    meeting: int = 0
    graph: int = 0

    @property
    def end(self) -> float:
        """The time at which the launch ends, in seconds."""
        return self.start + self.duration

    def __repr__(self) -> str:
        return (
            f"Span({self.kind} {self.name!r} on cuda:{self.device} stream {self.stream}, "
            f"{self.start!r} s + {self.duration!r} s)"
        )


@dataclass(slots=True, eq=False, repr=False)
class Wait:
    """A wait of the host or a stream for work of a device.

    device, stream: whose work is awaited. `stream` is None for all streams of the device.
    time: when this work is done
    waiter: the stream that waits, or None for the host
    name: the name of the call that waits
    asked: the host's time at the call
    until: when the waiter continues
    """

    device: int
    stream: int | None
    time: float
    waiter: StreamTime | None
    name: str
    asked: float
    until: float

    def __repr__(self) -> str:
        waiter = self.waiter or "the host"
        return (
            f"Wait({waiter} for cuda:{self.device} stream {self.stream}, "
            f"{self.asked!r} s to {self.until!r} s)"
        )


WorkListener = Callable[[Span | Wait], None]


class Recorder(Protocol):
    """Interface of a running capture of a CUDA graph, which records the work of its streams.

    The clock passes such work to the capture instead of giving it a time.
    """

    def launch(self, stream: StreamTime, seconds: float, name: str, share: float) -> Span:
        """Record a kernel of `seconds` on a captured stream, which uses a `share` of the GPU."""

    def copy(
        self, stream: StreamTime, engine: str, seconds: float, blocking: bool, name: str
    ) -> Span:
        """Record a copy of `seconds` on a captured stream and on a copy engine such as "h2d"."""

    def record(self, stream: StreamTime) -> EventTime:
        """Record an event on a captured stream, and return it."""

    def wait(self, stream: StreamTime, event: EventTime) -> None:
        """Record that a stream waits for an event."""

    def run(self, call: Any) -> Any:
        """Record an operator, and return the results that it has during the capture."""

    def note(self, call: Any, do: Callable[[Any], Any]) -> Any:
        """Record a call that every replay repeats, and return its results without values.

        `do(call)` makes the results.
        """

    def draw(self, generator: Any) -> None:
        """Record that an operator of the graph draws numbers from `generator`."""

    def made(self, tensor: Any) -> Any:
        """Record that the program made `tensor` during the capture, and return the tensor."""

    def happens(self, event: EventTime, of_program: Any) -> None:
        """Record that an external event of the program happens at every replay.

        `event` is its time in the capture, and `of_program` is the program's object.
        """

    def check_wait(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        """Raise CUDA's error if the capture forbids waiting for this stream, event or device.

        With `asks`, raise it if the capture forbids asking whether the work is done.
        """


class Clock:
    """The times of the host and of the devices of one machine. Any thread may call any method.

    Copies of one engine run one after the other, and so do kernels of one stream. Kernels of
    several streams run at the same time while multiprocessors are free (see
    `virtualgpu.clock.occupancy`).

    `host` is the host's time in seconds since the machine was created. All durations and overheads
    are in seconds. A negative or infinite one raises ValueError and changes nothing.

    The clock also keeps vector clocks, which tell which launches are ordered, independent of the
    times. `known` holds the launches that the host has waited for. All later launches are ordered
    after these.
    """

    __slots__ = (
        "_devices", "_engines", "_graphs", "_learner", "_listeners", "_lock", "_occupancies",
        "_streams", "_version", "_watcher", "captures", "host", "known",
    )  # fmt: skip

    def __init__(self) -> None:
        self.host = 0.0
        self.captures: tuple[Recorder, ...] = ()  # the running ones
        self._devices: dict[int, float] = {}  # when the last launch on a device ends
        self._engines: dict[tuple[int, str], float] = {}  # when a copy engine is free again
        self._occupancies: dict[int, Occupancy] = {}
        self._streams: dict[int, list[StreamTime]] = {}  # a device's streams that have had work
        self.known: Known = {}
        self._version = 0
        self._graphs = 0  # the replays of CUDA graphs so far
        self._learner: Callable[[], None] | None = None
        self._watcher: Callable[[], None] | None = None
        self._listeners: tuple[WorkListener, ...] = ()
        self._lock = Lock()

    def listen(self, listener: WorkListener) -> None:
        """Call `listener` with every later span and wait, after the other listeners.

        The listener is called outside the clock's lock.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: WorkListener) -> None:
        """Stop calling `listener`. Raises ValueError if it does not listen."""
        with self._lock:
            if listener not in self._listeners:
                raise ValueError(f"{listener} does not listen to this clock")
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def call_when_learned(self, learner: Callable[[], None] | None) -> None:
        """Call `learner` each time the host learns that more work of the GPUs is done.

        None removes the function. It is called outside the clock's lock.
        """
        self._learner = learner

    def call_when_host_works(self, watcher: Callable[[], None] | None) -> None:
        """Call `watcher` each time the host has spent time on work of its own.

        None removes the function. It is called outside the clock's lock.
        """
        self._watcher = watcher

    def before(self, stream: StreamTime) -> Known:
        """Return, by stream, how many launches are done before the next one on `stream`."""
        with self._lock:
            self._note_known(stream)
        return {**stream.known, stream: stream.count}

    def advance_host(self, seconds: float) -> None:
        """Advance the host's time by `seconds` of its own work.

        Raises ValueError if `seconds` is negative or infinite.
        """
        if not 0.0 <= seconds < inf:
            _check(seconds)
        with self._lock:
            self.host += seconds
        if self._watcher is not None:
            self._watcher()

    def launch(
        self,
        stream: StreamTime,
        seconds: float,
        overhead: float,
        name: str = "kernel",
        share: float = 1.0,
    ) -> Span:
        """Queue a kernel on a stream. The host continues after `overhead` seconds.

        The kernel uses a `share` of the GPU, above 0 and at most 1, and takes `seconds` if this
        share is free. Raises ValueError for another share or a negative duration.
        """
        # This method does not share code with `copy`. Every operator calls it, and one more
        # function call would cost a tenth of it.
        if not (0.0 <= seconds < inf and 0.0 <= overhead < inf):
            _check(seconds, overhead)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"expected a share above 0 and at most 1, got {share!r}")
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
        duration = seconds
        if end != start + seconds:
            duration = end - start
        number = stream.stream_id
        span = Span(device, number, "kernel", name, start, duration, launched, overhead)
        for listener in self._listeners:
            if full is not None:
                listener(full)
            listener(span)
        return span

    def copy(
        self,
        stream: StreamTime,
        engine: str,
        seconds: float,
        overhead: float,
        blocking: bool,
        name: str = "copy",
        nbytes: int = 0,
    ) -> Span:
        """Queue a copy on a stream and on a copy engine ("h2d", "d2h" or "p2p") of its device.

        The copy starts when the stream and the engine are both free. A blocking copy makes the host
        wait until its end. Raises ValueError for a negative duration.
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
        where = device, stream.stream_id, engine, name
        span = Span(*where, start, seconds, launched, overhead, nbytes)
        if self._listeners:
            if full is not None:
                self._notify(full)
            self._notify(span)
            if blocking:
                self._notify(Wait(device, stream.stream_id, end, None, name, launched, end))
        return span

    def launch_together(
        self,
        stream: StreamTime,
        name: str,
        launched: float,
        start: float,
        seconds: float,
        nbytes: int = 0,
        ready: float | None = None,
        meeting: int = 0,
    ) -> EventTime:
        """Queue a collective on `stream` and return the event at its end.

        It was launched at the time `launched` and starts at `start`, when its last rank has
        arrived. This rank arrived at `ready`. The collective takes `seconds` and moves `nbytes`
        bytes. All ranks give the same number `meeting`. What the stream was made to wait for after
        the launch does not delay it. The collective uses no share of the GPU, because NCCL's
        kernels use only a few multiprocessors. Raises ValueError for a negative time.
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
        where = device, stream.stream_id, "kernel", name
        self._notify(Span(*where, start, seconds, launched, 0.0, nbytes, ready, meeting))
        return event

    @contextmanager
    def one_launch(self, stream: StreamTime, overhead: float) -> Iterator[None]:
        """Count all work that a `with` block queues on the stream as one launch, as for a graph.

        The host continues after `overhead` seconds.
        """
        with self._lock:
            self.host += overhead
            full = self._wait_for_place(stream)
            launched, listeners = self.host, self._listeners
            self._graphs = number = self._graphs + 1

        def of_graph(what: Span | Wait) -> None:
            """Mark a span as part of this launch of a CUDA graph, and pass it to the listeners."""
            if isinstance(what, Span):
                what.graph, what.launched, what.overhead = number, launched, overhead
            for listener in listeners:
                listener(what)

        if full is not None:
            self._notify(full)
        ends = stream.ends
        stream.ends = deque(maxlen=1)
        if listeners:
            self._listeners = (of_graph,)
        try:
            yield
        finally:
            self._listeners = listeners
            stream.ends = ends
            ends.append(stream.ready)

    def record(self, stream: StreamTime, overhead: float = 0.0, timed: bool = False) -> EventTime:
        """Return an event at the end of the work on the stream, or now if the stream is idle.

        A `timed` event counts as a launch in the stream's queue. Raises ValueError for a negative
        overhead.
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
            time = max(self.host, stream.ready)
            event = EventTime(stream, time, {**stream.known, stream: stream.count})
            if timed:
                stream.ends.append(event.time)
            self.host += overhead
        if full is not None:
            self._notify(full)
        return event

    def wait(self, stream: StreamTime, event: EventTime) -> None:
        """Make all later work on `stream` start after `event`. The host does not wait."""
        capture = event.capture or stream.capture
        if capture is not None:
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
            device, number = source.device_index, source.stream_id
            self._notify(Wait(device, number, event.time, stream, "wait", asked, until))

    def query(self, event: EventTime, overhead: float = 1e-6) -> bool:
        """Return whether the event has happened.

        The question takes `overhead` seconds of the host's time. Otherwise a loop that asks until
        the event has happened would never end. Raises ValueError for a negative overhead.
        """
        _check(overhead)
        self._check_captures(event, asks=True)
        with self._lock:
            self.host += overhead
            done = event.time <= self.host
        if done:
            self._learn(event.known)
        return done

    def synchronize_stream(self, stream: StreamTime, overhead: float) -> None:
        """Let the host wait until all work queued on `stream` is done.

        The call itself takes `overhead` seconds of the host.
        """
        self._check_captures(stream)
        device, number = stream.device_index, stream.stream_id
        self._hold_host(stream.ready, overhead, "synchronize stream", device, number)
        self._learn({**stream.known, stream: stream.count})

    def synchronize_device(self, device_index: int, overhead: float) -> None:
        """Let the host wait until all work queued on any stream of the device is done.

        The call itself takes `overhead` seconds of the host.
        """
        self._check_captures(device_index)
        done = self._devices.get(device_index, 0.0)
        self._hold_host(done, overhead, "synchronize device", device_index)
        self._learn({stream: stream.count for stream in self._streams.get(device_index, ())})

    def synchronize_event(self, event: EventTime, overhead: float) -> None:
        """Let the host wait until `event` has happened.

        The call itself takes `overhead` seconds of the host.
        """
        self._check_captures(event)
        device, number = event.stream.device_index, event.stream.stream_id
        self._hold_host(event.time, overhead, "synchronize event", device, number)
        self._learn(event.known)

    def _note_known(self, stream: StreamTime) -> None:
        """Add the launches that the host knows to be done to those that `stream` knows.

        They precede all work that the host queues from now on.
        """
        if not stream.count:
            mine = self._streams.setdefault(stream.device_index, [])
            if stream not in mine:
                mine.append(stream)
        if stream.learned != self._version and stream.capture is None:
            stream.learned = self._version
            _add(stream.known, self.known)

    def _wait_for_place(self, stream: StreamTime) -> Wait | None:
        """Let the host wait while the launch queue of `stream` is full, and return this wait.

        Returns None if the queue is not full. The caller holds the clock's lock.
        """
        ends = stream.ends
        if len(ends) < QUEUE_LENGTH or ends[0] <= self.host:
            return None
        asked, self.host = self.host, ends[0]
        device, number = stream.device_index, stream.stream_id
        return Wait(device, number, ends[0], None, "full queue", asked, self.host)

    def _check_captures(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        """Raise CUDA's error if a running graph capture forbids this wait.

        `awaited` is the stream, the event or the device index that the program waits for. With
        `asks`, the program only asks whether the work is done.
        """
        for capture in self.captures:
            capture.check_wait(awaited, asks)

    def _learn(self, known: Known) -> None:
        """Add `known` to the launches that the host knows to be done.

        `known` has the number of finished launches for each stream.
        """
        with self._lock:
            more = _add(self.known, known)
            self._version += more
        if more and self._learner is not None:
            self._learner()

    def _hold_host(
        self, done: float, overhead: float, name: str, device: int, stream: int | None = None
    ) -> None:
        """Let the host wait until the time `done`, in a call named `name`.

        The call takes `overhead` seconds of the host. `device` and `stream` say whose work is
        awaited.
        """
        _check(overhead)
        with self._lock:
            asked = self.host
            self.host = until = max(asked, done) + overhead
        if self._listeners:
            self._notify(Wait(device, stream, done, None, name, asked, until))

    def _notify(self, what: Span | Wait) -> None:
        """Call all listeners with a new span or wait."""
        for listener in self._listeners:
            listener(what)


def _add(known: Known, more: Known) -> bool:
    """Merge the vector clock `more` into `known`, and return whether anything changed."""
    grown = False
    for stream, count in more.items():
        if count > known.get(stream, 0):
            known[stream] = count
            grown = True
    return grown


def _check(*durations: float) -> None:
    """Raise ValueError unless all durations, in seconds, are finite and not negative."""
    for seconds in durations:
        if not 0.0 <= seconds < inf:
            raise ValueError(f"expected a finite number of seconds from 0 on, got {seconds!r}")


class StreamEvents:
    """The events of a device's streams, for its allocator. Streams are given by their ids."""

    def __init__(self, clock: Clock, streams: dict[int, StreamTime]) -> None:
        self._clock = clock
        self._streams = streams

    def record(self, stream: int) -> EventTime:
        """Return an event at the end of the work queued so far on the stream with this id."""
        return self._clock.record(self._streams[stream])

    def done(self, event: EventTime) -> bool:
        """Return whether the event has happened, that is, all work before it is done."""
        return self._clock.query(event, 0.0)

    def wait(self, event: EventTime) -> None:
        """Let the host wait for the event."""
        self._clock.synchronize_event(event, 0.0)
