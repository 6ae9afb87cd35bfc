"""Record a block of code with `record()`."""

import datetime
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType

import numpy as np
import torch

import virtualgpu
from gputrace.attribution import with_allocators_streams, with_lines, with_marks, with_phases
from gputrace.categories import categorised, held, workspace_sizes
from gputrace.certainty import HOST_SPEED
from gputrace.events import StackTable
from gputrace.holders.tensors import Census, alive, relevant_objects
from gputrace.options import MAX_EVENTS
from gputrace.phases import NotedMark, NotedPhase, noted
from gputrace.replay import complete, complete_without_start
from gputrace.sources.clock import ClockSource
from gputrace.sources.kineto import KinetoSource
from gputrace.sources.memory import CudaSource, VirtualSource
from gputrace.sources.this_computer import ComputerClock, ComputerTime
from gputrace.spans import HOST, Execution
from gputrace.trace import Trace
from virtualgpu import front_end
from virtualgpu.machines import badge

_NO_TIMELINE = Execution.none(
    "it was asked for memory alone; record(timeline=True) and %%gpu_timeline record both"
)


def record(
    max_events: int = MAX_EVENTS, *, timeline: bool | None = None
) -> AbstractContextManager[Trace]:
    """Record the memory of all GPUs in this process, and what runs on them, in a `with` block.

    The block gets a `Trace`::

        with gputrace.record() as trace:
            model(batch).sum().backward()
        print(trace.peak, trace.peak_line)

    The trace gets its numbers when the block ends, also if an exception ends it. Recordings may be
    nested or overlap. They do not change the peaks that `torch.cuda` keeps, nor a memory history
    that is already on. A process that is forked in the block records nothing.

    Args:
        max_events: how many events to keep, for each real GPU, or for all virtual ones together.
            Older events are dropped, and `trace.lost` counts them. For virtual GPUs, this is also
            the number of spans to keep.
        timeline: whether to record kernels and copies, too. None means yes on virtual GPUs and no
            on real ones. On real GPUs they come from PyTorch's profiler. Its first start takes a
            second or more, and it slows down each launch a little. Only one profiler can run in a
            process. If the program uses it, there is no timeline, and `trace.no_timeline` says why.
            The profiler keeps the first 128 MiB of its events (libkineto/src/Config.cpp), which is
            a few hundred thousand launches.

    Raises:
        ValueError: `max_events` is not a positive whole number.
        RuntimeError: there is no GPU, neither real nor virtual.
    """
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
        raise ValueError(f"max_events={max_events!r}: expected a whole number from 1")
    return _recorded(max_events, timeline, measures=False)


def record_and_measure(
    max_events: int = MAX_EVENTS, *, timeline: bool | None = None
) -> AbstractContextManager[Trace]:
    """Record as `record` does, and also measure this computer's time.

    The arguments are those of `record`. `trace.computers` has the measurement, which differs from
    run to run.
    """
    return _recorded(max_events, timeline, measures=True)


@contextmanager
def _recorded(max_events: int, timeline: bool | None, measures: bool) -> Iterator[Trace]:
    """Record a block, and fill its trace when it ends.

    The first two arguments are those of `record`. `measures` says whether to measure this
    computer's time as well.
    """
    recording = _Recorder(max_events, timeline, measures)
    trace = Trace.__new__(Trace)  # it has no attributes until the block has ended
    error, process = "", os.getpid()
    with ExitStack() as undo:
        undo.callback(recording.stop)
        recording.start()
        undo.enter_context(noted(recording.note, recording.note_mark))
        try:
            yield trace
        except BaseException as raised:
            error = _out_of_memory(raised)
            raise
        finally:
            if os.getpid() == process:
                vars(trace).update(vars(recording.finish(error)))


class _Recorder:
    """A recording that is in progress."""

    def __init__(self, max_events: int, timeline: bool | None, measures: bool) -> None:
        virtual = virtualgpu.current() is not None
        if not virtual and not torch.cuda.is_available():
            cure = f"{front_end.name()}.use(gpus=1) gives you one, real or virtual"
            raise RuntimeError(f"there is no GPU to record: {cure}")
        if timeline is None:
            timeline = virtual
        self._table = StackTable()
        self._source: VirtualSource | CudaSource
        self._clock: ClockSource | KinetoSource | None = None
        if virtual:
            self._source = VirtualSource(self._table, max_events)
            if timeline:
                self._clock = ClockSource(self._table, max_events)
        else:
            self._source = CudaSource(self._table, max_events, frees=not timeline)
            if timeline:
                self._clock = KinetoSource()
        self._computer = ComputerClock(self._source.now) if measures else None
        self._phases: list[NotedPhase] = []
        self._marks: list[NotedMark] = []
        # These are looked up now, because the block may remove the machine.
        self._badge, self._origin = _badge(), _origin()

    def start(self) -> None:
        """Start to record."""
        objects = relevant_objects()
        self._at_start = held(objects, alive(objects))
        del objects
        if self._clock is not None:
            self._clock.start()  # this may take long, so it comes before the recording's own clock
        self._source.start()
        if self._computer is not None:
            self._computer.start()

    def stop(self) -> None:
        """Switch off everything, even if `start` was interrupted."""
        if self._computer is not None:
            self._computer.stop()
        self._source.stop()
        if self._clock is not None:
            self._clock.stop()

    def note(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        """Note that a phase starts. Return the function to call when it ends.

        `frame` is the frame that called it.
        """
        phase = NotedPhase(name, self._source.now(), self._table.of_frame(frame))
        self._phases.append(phase)

        def end() -> None:
            phase.end = self._source.now()

        return end

    def note_mark(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        """Note that a part named with `record_function` starts.

        Return the function to call at its end.
        """
        mark = NotedMark(name, self._source.now())
        self._marks.append(mark)

        def end() -> None:
            mark.end = self._source.now()

        return end

    def finish(self, error: str) -> Trace:
        """End the recording, and make its trace. `error` is the text of an out-of-memory error."""
        seconds = self._source.now()
        recorded = self._source.finish()
        execution = _NO_TIMELINE
        if self._clock is not None:
            execution = self._clock.finish(self._source.origin)
        computers = self._measured(execution)
        self.stop()
        objects = relevant_objects()
        living = alive(objects)
        at_end, census = held(objects, living), Census(living)
        del objects, living
        stacks = self._table.stacks()
        events, phases = with_phases(recorded.events, self._phases, seconds, stacks)
        if recorded.lost:
            events = complete_without_start(events, recorded.settings)
        else:
            events = complete(events, recorded.segments, recorded.settings)
        if isinstance(self._clock, KinetoSource):
            execution = with_allocators_streams(execution, events)
        execution = with_lines(execution, events, phases, stacks)
        execution = with_marks(execution, phases, self._marks, seconds)
        workspaces = workspace_sizes(recorded.capability)
        at_start = self._at_start
        return Trace(
            events=categorised(
                events, recorded.segments, stacks, phases, at_start, at_end, workspaces
            ),
            stacks=stacks,
            start=recorded.segments,
            settings=recorded.settings,
            phases=phases,
            used=recorded.used,
            allocated_at_end=recorded.allocated,
            reserved_at_end=recorded.reserved,
            totals=recorded.totals,
            seconds=seconds,
            lost=recorded.lost,
            error=error,
            badge=self._badge,
            origin=self._origin,
            census=census,
            execution=execution,
            computers=computers,
        )

    def _measured(self, execution: Execution) -> list[ComputerTime]:
        """Return the measurement of this computer's time, if there is one."""
        if self._computer is None:
            return []
        spans = execution.spans
        on_host = spans.device == HOST
        if not isinstance(self._clock, KinetoSource):
            on_host[:] = False  # the waits of virtual GPUs take no time here
        waits = np.stack([spans.start[on_host], spans.end[on_host]], axis=1)
        return [self._computer.finish(waits)]


def _out_of_memory(error: BaseException) -> str:
    """Return the text of an out-of-memory error, or "" for another error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    return str(error)


def _badge() -> str:
    """Return the badge of the GPUs in use."""
    used = virtualgpu.current()
    if used is not None:
        return used.badge
    return badge(torch.cuda.get_device_name(0), virtual=False)


def _origin() -> dict[str, str]:
    """Return the versions, and the date or the host's speed, as the origin of a trace.

    The numbers of a virtual GPU do not depend on the date. They depend on the host's speed.
    """
    origin = {"torch": torch.__version__, "python": platform.python_version()}
    used = virtualgpu.current()
    if used is None:
        origin["date"] = datetime.date.today().isoformat()
    elif used.request.host != 1:
        origin[HOST_SPEED] = f"{used.request.host:g}"
    return origin
