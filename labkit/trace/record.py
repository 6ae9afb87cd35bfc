"""`labkit.record()`: put a block of code under the instrument."""

import bisect
import datetime
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from labkit import machine
from labkit.trace.categories import categorised, held, workspace_sizes
from labkit.trace.events import Event, Events, StackTable
from labkit.trace.phases import Phase, broken_off, noted, with_forwards
from labkit.trace.replay import complete, complete_without_start
from labkit.trace.sources import CudaSource, Recorded, VirtualSource
from labkit.trace.tensors import Census, alive
from labkit.trace.trace import Trace

MAX_EVENTS = 200_000  # on a real GPU some 2 KB of host memory each


def record(max_events: int = MAX_EVENTS) -> AbstractContextManager[Trace]:
    """Record what happens to the memory of all GPUs in this process, in all its threads, until the `with` block ends.

    The trace has its figures when the block has ended, also by an exception. Recordings may lie in one another or overlap. None
    resets the peaks that `torch.cuda` keeps, and none ends a memory history that you had switched on before. In a child process that
    is forked in the block nothing is recorded.

    Args:
        max_events: the newest events of each real GPU, or of all virtual ones, that are kept; `trace.lost` counts the others.

    Raises:
        ValueError: `max_events` is not a positive whole number.
        RuntimeError: there is no GPU, real or virtual.
    """
    if isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1:
        raise ValueError(f"max_events={max_events!r}: give a whole number, 1 or more")
    return _recorded(max_events)


@contextmanager
def _recorded(max_events: int) -> Iterator[Trace]:
    recording = _Recording(max_events)
    trace = Trace.__new__(Trace)
    error, process = "", os.getpid()
    with ExitStack() as undo:
        undo.callback(recording.stop)
        recording.start()
        undo.enter_context(noted(recording.note))
        try:
            yield trace
        except BaseException as raised:
            error = _out_of_memory(raised)
            raise
        finally:
            if os.getpid() == process:
                recording.finish(trace, error)


class _Recording:
    """A recording under way."""

    def __init__(self, max_events: int) -> None:
        import torch

        used = machine.current()
        virtual = used is not None and used.virtual
        if not virtual and not torch.cuda.is_available():
            raise RuntimeError("there is no GPU to record: labkit.use(gpus=1) gives you one, real or virtual")
        self._table = StackTable()
        self._source = (VirtualSource if virtual else CudaSource)(self._table, max_events)
        self.stop = self._source.stop
        self._phases: list[list[Any]] = []  # name, start, end or None, stack
        # Now, for the block may take the machine away.
        self._badge, self._origin = _badge(), _origin()

    def start(self) -> None:
        objects = gc.get_objects()
        self._at_start = held(objects, alive(objects))
        del objects
        self._source.start()

    def note(self, name: str, frame: FrameType | None) -> Any:
        """A phase starts; returns what to call when it ends."""
        phase = [name, self._source.now(), None, self._table.of_frame(frame)]
        self._phases.append(phase)

        def end() -> None:
            phase[2] = self._source.now()

        return end

    def finish(self, trace: Trace, error: str) -> None:
        """Give the trace its figures."""
        seconds = self._source.now()
        recorded = self._source.finish()
        self.stop()
        objects = gc.get_objects()
        living = alive(objects)
        at_end, census = held(objects, living), Census(living)
        del objects, living
        told = list(self._phases)
        phases = [Phase(name, start, seconds if end is None else end, stack) for name, start, end, stack in told]
        stacks = self._table.stacks()
        events = Events.of(_attributed(recorded, phases))
        for index, (name, _, end, _) in enumerate(told):
            if name == "step" and end is None:
                phases[index] = broken_off(phases[index], phases, events, stacks)
        phases = with_forwards(phases, events, stacks)
        if recorded.lost:
            events = complete_without_start(events, recorded.settings)
        else:
            events = complete(events, recorded.segments, recorded.settings)
        workspaces = workspace_sizes(recorded.capability)
        events = categorised(events, recorded.segments, stacks, phases, self._at_start, at_end, workspaces)
        trace.__init__(
            events=events,
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
        )


def _attributed(recorded: Recorded, phases: list[Phase]) -> list[Event]:
    """The events; those without a stack get that of the phase they lie in, for a backward pass on CUDA runs in C++ threads."""
    backward = [phase for phase in phases if phase.name == "backward"]
    starts = [phase.start for phase in backward]

    def stack(event: Event) -> int:
        at = bisect.bisect_right(starts, event.time) - 1
        return backward[at].stack if at >= 0 and event.time <= backward[at].end else 0

    return [event if event.stack else replace(event, stack=stack(event)) for event in recorded.events]


def _out_of_memory(error: BaseException) -> str:
    """The text of an out-of-memory error, empty for another."""
    import torch

    return str(error) if isinstance(error, torch.OutOfMemoryError) else ""


def _badge() -> str:
    used = machine.current()
    if used is not None:
        return used.badge
    import torch

    return f"measured on {torch.cuda.get_device_name(0)}"


def _origin() -> dict[str, str]:
    import torch

    used = machine.current()
    origin = {"torch": torch.__version__, "python": platform.python_version()}
    if used is None or not used.virtual:  # what a virtual GPU tells is the same on every day
        origin["date"] = datetime.date.today().isoformat()
    return origin
