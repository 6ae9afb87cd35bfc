"""`record()`: record a block of code."""

import datetime
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType

import torch

import virtualgpu
from gputrace.attribution import with_allocators_streams, with_lines, with_marks, with_phases
from gputrace.categories import categorised, held, workspace_sizes
from gputrace.events import StackTable
from gputrace.holders.tensors import Census, alive, relevant_objects
from gputrace.options import MAX_EVENTS
from gputrace.phases import NotedMark, NotedPhase, noted
from gputrace.replay import complete, complete_without_start
from gputrace.sources.clock import ClockSource
from gputrace.sources.kineto import KinetoSource
from gputrace.sources.memory import CudaSource, VirtualSource
from gputrace.spans import Execution
from gputrace.trace import Trace
from virtualgpu import front_end
from virtualgpu.machines import badge

_NO_TIMELINE = Execution.none("it was asked for memory alone; record(timeline=True) and %%gpu_timeline record both")


def record(max_events: int = MAX_EVENTS, *, timeline: bool | None = None) -> AbstractContextManager[Trace]:
    """Record the memory of all GPUs in this process, and what runs on them, until the `with` block ends.

    The trace has its numbers when the block has ended, also by an exception. Recordings may be nested or overlap. They leave the peaks
    that `torch.cuda` keeps, and a memory history that was on before, as they are. A child process forked in the block records nothing.

    Args:
        max_events: the newest events of each real GPU, or of all virtual ones, that are kept; `trace.lost` counts the others. Of the
            spans of virtual GPUs as many are kept.
        timeline: record kernels and copies too. None records them on virtual GPUs alone: on real ones they come from PyTorch's
            profiler, whose first start takes a second or more, and which costs a little at each launch. Only one can run in a process,
            so where the program uses it itself there is no timeline, and `trace.no_timeline` says why. It keeps the first 128 MiB of
            its events (libkineto/src/Config.cpp), which is some hundred thousand launches.

    Raises:
        ValueError: `max_events` is not a positive whole number.
        RuntimeError: there is no GPU, real or virtual.
    """
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
        raise ValueError(f"max_events={max_events!r}: give a whole number, 1 or more")
    return _recorded(max_events, timeline)


@contextmanager
def _recorded(max_events: int, timeline: bool | None) -> Iterator[Trace]:
    recording = _Recorder(max_events, timeline)
    trace = Trace.__new__(Trace)  # without attributes until the block has ended
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
    """A recording under way."""

    def __init__(self, max_events: int, timeline: bool | None) -> None:
        virtual = virtualgpu.current() is not None
        if not virtual and not torch.cuda.is_available():
            raise RuntimeError(f"there is no GPU to record: {front_end.name()}.use(gpus=1) gives you one, real or virtual")
        timeline = virtual if timeline is None else timeline
        self._table = StackTable()
        self._source: VirtualSource | CudaSource
        self._clock: ClockSource | KinetoSource | None = None
        if virtual:
            self._source = VirtualSource(self._table, max_events)
            self._clock = ClockSource(self._table, max_events) if timeline else None
        else:
            self._source = CudaSource(self._table, max_events, frees=not timeline)
            self._clock = KinetoSource() if timeline else None
        self._phases: list[NotedPhase] = []
        self._marks: list[NotedMark] = []
        self._badge, self._origin = _badge(), _origin()  # now, for the block may take the machine away

    def start(self) -> None:
        objects = relevant_objects()
        self._at_start = held(objects, alive(objects))
        del objects
        if self._clock is not None:
            self._clock.start()  # before the recording's own clock, for a first start takes long
        self._source.start()

    def stop(self) -> None:
        """Leave nothing switched on, however far `start` came."""
        self._source.stop()
        if self._clock is not None:
            self._clock.stop()

    def note(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        """Note that a phase starts; returns what to call when it ends."""
        phase = NotedPhase(name, self._source.now(), self._table.of_frame(frame))
        self._phases.append(phase)

        def end() -> None:
            phase.end = self._source.now()

        return end

    def note_mark(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        """Note that a part which the user has named starts; returns what to call when it ends."""
        mark = NotedMark(name, self._source.now())
        self._marks.append(mark)

        def end() -> None:
            mark.end = self._source.now()

        return end

    def finish(self, error: str) -> Trace:
        """End the recording, and make the trace of it."""
        seconds = self._source.now()
        recorded = self._source.finish()
        execution = _NO_TIMELINE if self._clock is None else self._clock.finish(self._source.origin)
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
        workspaces = workspace_sizes(recorded.capability)
        return Trace(
            events=categorised(events, recorded.segments, stacks, phases, self._at_start, at_end, workspaces),
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
            execution=with_marks(with_lines(execution, events, phases, stacks), phases, self._marks, seconds),
        )


def _out_of_memory(error: BaseException) -> str:
    """The text of an out-of-memory error, empty for another."""
    return str(error) if isinstance(error, torch.OutOfMemoryError) else ""


def _badge() -> str:
    used = virtualgpu.current()
    if used is not None:
        return used.badge
    return badge(torch.cuda.get_device_name(0), virtual=False)


def _origin() -> dict[str, str]:
    origin = {"torch": torch.__version__, "python": platform.python_version()}
    if virtualgpu.current() is None:  # a virtual GPU's numbers do not depend on the day
        origin["date"] = datetime.date.today().isoformat()
    return origin
