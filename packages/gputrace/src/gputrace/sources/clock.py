"""Spans of a virtual machine, from its clock."""

import sys
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np

from gputrace.events import StackTable
from gputrace.spans import (
    HOST,
    KERNEL,
    KIND_OF,
    LAUNCH,
    WAIT,
    Execution,
    Moved,
    RacingSpan,
    RecordedRace,
    Spans,
    Waits,
)
from virtualgpu import instruments

ROUNDING = 1e-12  # seconds. Times closer than this are equal.
EARLIER = "launched before the recording"
GRAPH = "cudaGraphLaunch"  # the name that CUDA gives to the launch of a graph


class ClockSource:
    """Source that listens to the clock of the virtual machine in use.

    It keeps the newest `most` spans and waits.
    """

    def __init__(self, table: StackTable, most: int) -> None:
        self._machine = instruments.machine()
        self._span = instruments.Span
        self._table = table
        self._records: deque[tuple[Any, int, int]] = deque(maxlen=most)
        self._count = 0
        self._earlier: list[tuple[Any, float]] = []
        self._listener: Callable[[Any], None] | None = None

    def start(self) -> None:
        """Listen to the clock, if that has not begun yet."""
        if self._listener is not None:
            return
        streams = [stream for gpu in self._machine.gpus for stream in gpu.streams.values()]
        self._earlier = [(stream, stream.ready) for stream in streams]
        records, number, count = self._records, self._table.of_frame, self._counted

        def listen(what: Any) -> None:
            count()
            records.append((what, number(sys._getframe(1)), get_ident()))

        self._listener = listen
        self._machine.clock.listen(listen)

    def stop(self) -> None:
        """Stop listening, even if `start` was interrupted."""
        if self._listener is not None:
            self._machine.clock.unlisten(self._listener)
            self._listener = None

    def finish(self, origin: float) -> Execution:
        """Return the spans, waits and races, in seconds from `origin` on the machine's clock."""
        self.stop()
        records = list(self._records)
        rows: list[tuple] = []
        for stream, ready in self._earlier:
            if ready > origin:  # work that had begun before the recording, which is not known
                unknown = stream.device_index, stream.stream_id, KERNEL, EARLIER
                rows.append((0.0, ready - origin, *unknown, 0, -1))
        moved: dict[int, Moved] = {}
        waits: list[tuple] = []
        threads: dict[int, int] = {}
        graphs: dict[int, int] = {}  # rows of the host's launches of CUDA graphs
        for what, stack, identity in records:
            thread = threads.setdefault(identity, len(threads))
            if type(what) is self._span:
                launched = what.launched - what.overhead - origin
                launch = graphs.get(what.graph, len(rows))
                if launch == len(rows):
                    host = HOST, thread, LAUNCH, GRAPH if what.graph else what.name
                    rows.append((launched, what.overhead, *host, stack, -1))
                if what.graph:
                    graphs[what.graph] = launch
                where = what.device, what.stream, KIND_OF[what.kind], what.name
                if what.nbytes or what.meeting:
                    since = None if what.ready is None else what.ready - origin
                    moved[len(rows)] = Moved(what.nbytes, since, what.meeting)
                rows.append((what.start - origin, what.duration, *where, stack, launch))
            elif what.waiter is None:
                host = HOST, thread, WAIT, what.name
                rows.append((what.asked - origin, what.until - what.asked, *host, stack, -1))
            else:
                event = what.time - origin, what.device, what.stream
                waiter = what.waiter.device_index, what.waiter.stream_id
                waits.append((*event, what.until - origin, *waiter, stack))
        spans = Spans.of(rows, moved)
        return Execution(
            spans, Waits.of(waits), self._races(origin, spans), self._count - len(records)
        )

    def _counted(self) -> None:
        """Count one more span or wait, for which the oldest one may be dropped."""
        self._count += 1

    def _races(self, origin: float, spans: Spans) -> list[RecordedRace]:
        """Return the races of the machine that were found in this recording."""
        detector = self._machine.races  # it exists from the first operator on
        if not detector:
            return []
        found = []
        for race in detector.races:
            if race.second.seconds >= origin:
                first, second = (_side(side, origin, spans) for side in (race.first, race.second))
                found.append(RecordedRace(first, second, race.kind, str(race), race.missing))
        return found


def _side(side: Any, origin: float, spans: Spans) -> RacingSpan:
    """Return the description of one launch of a race.

    A race is found before the second launch runs. The time of the second launch follows from the
    next span on its stream.
    """
    seconds, start, end = side.seconds - origin, side.start - origin, side.end - origin
    if seconds >= 0:
        on_stream = (spans.device == side.device) & (spans.stream == side.stream)
        ran = np.flatnonzero(on_stream & (spans.launch >= 0))
        ran = ran[spans.start[spans.launch[ran]] >= seconds - ROUNDING]
        if len(ran):
            start, end = float(spans.start[ran[0]]), float(spans.end[ran[0]])
    where = side.device, side.stream, side.name, side.line
    return RacingSpan(*where, seconds, start, end, side.text, side.queue)
