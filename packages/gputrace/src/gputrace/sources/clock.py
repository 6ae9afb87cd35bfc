"""The spans of a virtual machine, from its clock."""

import sys
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np

from gputrace.events import StackTable
from gputrace.spans import HOST, KERNEL, KIND_OF, LAUNCH, WAIT, Execution, RacingSpan, RecordedRace, Spans, Waits
from virtualgpu import instruments

ROUNDING = 1e-12  # seconds: times closer than this are the same
EARLIER = "launched before the recording"


class ClockSource:
    """Listens to the clock of the virtual machine in use. It drops the oldest spans and waits beyond `most`."""

    def __init__(self, table: StackTable, most: int) -> None:
        self._machine = instruments.machine()
        self._span = instruments.Span
        self._table = table
        self._records: deque[tuple[Any, int, int]] = deque(maxlen=most)
        self._count = 0
        self._earlier: list[tuple[Any, float]] = []
        self._listener: Callable[[Any], None] | None = None

    def start(self) -> None:
        """Listen, unless it does already."""
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
        """Stop listening, however far `start` came."""
        if self._listener is not None:
            self._machine.clock.unlisten(self._listener)
            self._listener = None

    def finish(self, origin: float) -> Execution:
        """The spans, waits and races, in seconds from `origin`, a time of the machine's clock."""
        self.stop()
        records = list(self._records)
        # What was under way when the recording began: the clock does not know what it was.
        rows: list[tuple] = [
            (0.0, ready - origin, stream.device_index, stream.stream_id, KERNEL, EARLIER, 0, -1)
            for stream, ready in self._earlier
            if ready > origin
        ]
        waits: list[tuple] = []
        threads: dict[int, int] = {}
        for what, stack, identity in records:
            thread = threads.setdefault(identity, len(threads))
            if type(what) is self._span:
                rows.append((what.launched - what.overhead - origin, what.overhead, HOST, thread, LAUNCH, what.name, stack, -1))
                where = what.device, what.stream, KIND_OF[what.kind], what.name
                rows.append((what.start - origin, what.duration, *where, stack, len(rows) - 1))
            elif what.waiter is None:
                rows.append((what.asked - origin, what.until - what.asked, HOST, thread, WAIT, what.name, stack, -1))
            else:
                waiter = what.waiter.device_index, what.waiter.stream_id
                waits.append((what.time - origin, what.device, what.stream, what.until - origin, *waiter, stack))
        spans = Spans.of(rows)
        return Execution(spans, Waits.of(waits), self._races(origin, spans), self._count - len(records))

    def _counted(self) -> None:
        self._count += 1

    def _races(self, origin: float, spans: Spans) -> list[RecordedRace]:
        """The machine's races that showed in this recording. It is here alone that the trace meets the machine's own."""
        detector = self._machine.races  # there from the first operator on
        found = [race for race in (detector.races if detector else ()) if race.second.seconds >= origin]
        return [RecordedRace(_side(race.first, origin, spans), _side(race.second, origin, spans), race.kind) for race in found]


def _side(side: Any, origin: float, spans: Spans) -> RacingSpan:
    """A side of a race. A race is found before its second side runs: when that was follows from what was launched next on its stream."""
    seconds, start, end = side.seconds - origin, side.start - origin, side.end - origin
    if seconds >= 0:
        ran = np.flatnonzero((spans.device == side.device) & (spans.stream == side.stream) & (spans.launch >= 0))
        ran = ran[spans.start[spans.launch[ran]] >= seconds - ROUNDING]
        if len(ran):
            start, end = float(spans.start[ran[0]]), float(spans.end[ran[0]])
    return RacingSpan(side.device, side.stream, side.name, side.line, seconds, start, end)
