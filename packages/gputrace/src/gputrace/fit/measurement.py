"""Measurement of one process of a script: its steps, its memory, and the time of a step."""

import os
import resource
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gputrace.events import SourceLine, StackTable
from gputrace.fit.changes import ALL, CHANGES, Met
from gputrace.fit.growth import StepMemory, growth_of, where_it_grows
from gputrace.fit.made_up import IN_VAIN, MadeUp, advice_for, one_line, told, where
from gputrace.fit.outcome import PROGRESS, Outcome, Wish
from gputrace.holders.tensors import all_objects, of_kind
from gputrace.leaks import Leak
from gputrace.phases import noted
from gputrace.recording import record
from gputrace.sources.clock import ClockSource
from gputrace.sources.this_computer import Batch, loading_of, time_loaders
from gputrace.spans import COPIES, KERNEL, Spans, chosen, seconds_of
from gputrace.trace import Trace
from gputrace.units import byte_text
from virtualgpu import instruments
from virtualgpu.commands import set_up_for_times
from virtualgpu.machines import VirtualGPUs

MAX_EVENTS = 2_000_000  # some steps of a large model
MORE = 4  # further steps if the peak still changes, to tell growth from variation
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of the system's unit of memory
SEEN = 2  # steps after which everything in a script has happened once


class Enough(BaseException):
    """Exception that ends a script when it has made enough steps.

    No script catches it by accident, because it does not derive from Exception.
    """


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let `torch.save` write no file, so that no made-up numbers replace a checkpoint."""
    save = torch.save

    def save_no_file(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)

    with patch.object(torch, "save", save_no_file):
        yield


class Measurement:
    """Measurement of this process while it runs a script, or its own part of a script.

    The hooks and the patches of the change are not removed, so the process should end afterwards.

    Args:
        one_of_several: whether the process makes a fixed number of steps, so that ranks which wait
            for each other make the same number.

    Attributes:
        has_enough: whether the process was ended because it had made enough steps.
        raised: the exception of the script, or None.
    """

    def __init__(
        self, wish: Wish, gpus: VirtualGPUs, folder: str, one_of_several: bool = False
    ) -> None:
        self.has_enough = False
        self.raised: BaseException | None = None
        self._wish, self._gpus, self._machine = wish, gpus, gpus.machine
        self._one_of_several = one_of_several
        self._running = False
        self._progress = Path(folder, PROGRESS)
        self._due = time.monotonic()  # when to write the progress again
        self._made_up = MadeUp(self._end_in_vain)
        self._trains = True  # whether there is an optimizer
        self._met, self._would_meet = _changes_made(wish.change)

    def of(self, work: Callable[[], object]) -> Outcome:
        """Run the work until it ends or has made enough steps, and return the outcome."""
        gpus, machine = self._gpus, self._machine
        outcome = Outcome(total=gpus.request.memory or gpus.profile.total_memory)
        set_up_for_times(gpus, virtual_time=False)  # so that printing a loss is no error
        machine.makes_up = self._made_up
        memories = [StepMemory(gpu.allocator, gpu.index) for gpu in machine.gpus]
        self._steps = steps = _Steps(self._after_step, self._end, memories)
        for gpu in machine.gpus:
            gpu.allocator.listen(self._write_progress)
        origin = machine.clock.host
        batches: dict[SourceLine, list[Batch]] = defaultdict(list)
        # Loading a batch takes time of this computer, and none of the model.
        time_loaders(batches, lambda: machine.clock.host, machine.selected.without_time)
        trace: Any = None
        try:
            # Memory is recorded from the start, and kernels from the first backward pass, because
            # an evaluation before it may take long.
            with noted(steps.before_backward), record(MAX_EVENTS, timeline=False) as trace:
                register_optimizer_step_pre_hook(steps.before_step)
                register_optimizer_step_post_hook(steps.after_step)
                self._running = True
                try:
                    with without_checkpoints():
                        work()
                finally:
                    self._running = False
        except Enough:
            self.has_enough = not self._made_up.is_in_vain
        except SystemExit as ended:
            self.raised = ended
            if ended.code not in (None, 0):
                line = where(traceback.extract_tb(ended.__traceback__))
                outcome.failed = f"it ended by sys.exit({ended.code!r})"
                if line:
                    outcome.failed = f"{line}: {outcome.failed}"
        except BaseException as error:  # any error of the script is reported and not raised
            self.raised = error
            outcome.fits = not trace.error
            if outcome.fits:
                outcome.failed = told(error)
        self._explain(outcome)
        self._fill(outcome, trace, origin)
        slowest = max(loading_of(batches), key=lambda loading: sum(loading.seconds), default=None)
        if slowest is not None:
            outcome.loading, outcome.workers = slowest.seconds, slowest.workers
        return outcome

    def is_over(self) -> None:
        """Note that the script has ended, so that `stop` does nothing from now on."""
        self._running = False

    def stop(self, *_: object) -> None:
        """End the script now. A signal handler calls this method."""
        if self._running:
            self._end()

    def _end_in_vain(self) -> None:
        """End a script that waits for a value that nothing computes."""
        self._trains = bool(of_kind(all_objects(), torch.optim.Optimizer))
        self._end()

    def _end(self) -> None:
        """End the script by raising `Enough` in it."""
        self._running = False
        raise Enough

    def _write_progress(self, *event: object) -> None:
        """Write how far the script is to the progress file, at most once per second.

        The allocators call this method at each of their events, which are not used.
        """
        now = time.monotonic()
        if now < self._due or not self._running:
            return
        self._due = now + 1
        reserved = max(gpu.allocator.peak_reserved for gpu in self._machine.gpus)
        steps = f"{self._steps.done} steps of an optimizer so far"
        so_far = f"{steps}, and {byte_text(reserved)} reserved by PyTorch's allocator"
        self._progress.write_text(so_far, encoding="utf-8")

    def _after_step(self, done: int) -> bool:
        """Return whether `done` steps are enough for the measurement."""
        self._made_up.begin_step()
        wish = self._wish
        if wish.change is not None:
            return done >= wish.steps or (done >= SEEN and not self._met)
        if self._one_of_several:
            return done >= wish.steps + MORE
        if done < wish.steps:
            return False
        settled = all(memory.is_settled() for memory in self._steps.memories)
        return done >= wish.steps + MORE or settled

    def _explain(self, outcome: Outcome) -> None:
        """Note in the outcome the made-up values that the script read.

        If the script failed or waited because of one, note that, too.
        """
        made_up = self._made_up
        asks = self.raised is not None and instruments.asks_for_values(self.raised)
        outcome.made_up = made_up.lines
        if made_up.is_in_vain:
            outcome.failed = ""
            line, why = made_up.last, "waits for a value that nothing computes"
        elif outcome.failed and (asks or made_up.lines):
            raised_at = None if self.raised is None else self.raised.__traceback__
            line = where(traceback.extract_tb(raised_at)) or made_up.last
            why = f"fails, probably because {made_up.last} read a made-up value"
            if asks or line == made_up.last:
                why = "needs a value that nothing computes"
        else:
            return
        if self._steps.done or not self._trains:
            outcome.asked, outcome.failed = line, ""
            outcome.made_up = [other for other in made_up.lines if other != line]
            return
        if made_up.is_in_vain:
            advice = IN_VAIN
        else:
            advice = advice_for(self.raised, line, made_up.last)
        outcome.failed = f"{line} {why}. {advice}"
        if self.raised is not None and not asks:
            outcome.failed += f" The script ended with {one_line(self.raised)}"

    def _fill(self, outcome: Outcome, trace: Trace, origin: float) -> None:
        """Write the measured memory and times into the outcome.

        `origin` is the time on the machine's clock when the trace began.
        """
        steps = self._steps
        outcome.steps, outcome.by_hand, outcome.changed = steps.done, steps.by_hand, bool(self._met)
        devices = [gpu.index for gpu in self._machine.gpus]
        outcome.by_device = [_most(trace.timeline(device).used) for device in devices]
        outcome.device = max(devices, key=lambda device: _most(trace.timeline(device).reserved))
        memory = steps.memories[outcome.device]
        outcome.peaks = memory.peaks
        outcome.left = steps.left[outcome.device] if steps.left else []
        ends = [time - origin for time in steps.times]
        if growth_of(outcome.peaks, outcome.left) is not None:
            leaks = steps.leaks[outcome.device] if steps.leaks else []
            outcome.grows = where_it_grows(leaks, trace, ends, outcome.device)
        outcome.tries_algorithms = torch.backends.cudnn.benchmark
        outcome.changes = [name for name, found in self._would_meet.items() if found]
        _measure(trace, steps.ran.finish(origin).spans, ends, outcome)
        users = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        outcome.resident = max(resource.getrusage(who).ru_maxrss for who in users) * RSS_UNIT


@cache
def _make_changes(change: str | None) -> tuple[Met, dict[str, Met]]:
    """Patch PyTorch for a change, and return what the changes meet.

    The result is a list for `change`, and lists for all other changes if `change` is None. PyTorch
    is patched only once, because a forked process inherits the patches.
    """
    if change is not None:
        return ALL[change].make(True), {}
    return [], {name: other.make(False) for name, other in CHANGES.items()}


def _changes_made(change: str | None) -> tuple[Met, dict[str, Met]]:
    """Make a change, and return what it meets, together with what other changes would meet.

    The lists are empty at first. Without a change, the result is about all changes.
    """
    met, would_meet = _make_changes(change)
    for names in (met, *would_meet.values()):
        names.clear()
    return met, would_meet


class _NoStacks(StackTable):
    """Table that takes no stacks, because only times are measured."""

    def of_frame(self, frame: FrameType | None) -> int:
        """Return the number of the empty stack."""
        return 0


class _Steps:
    """Counter of a script's steps, which ends the script after enough of them.

    If there are several optimizers, the steps of the first one count. If a script makes no
    optimizer and changes its parameters itself, a step ends when the next backward pass begins.

    Attributes:
        memories: the memory by step of each GPU.
        left: the bytes that each step left behind, by GPU.
        leaks: the leaks if memory grows, by GPU.
        times: when each step was counted, on the machine's clock.
        by_hand: whether there is no optimizer.
    """

    def __init__(
        self,
        is_enough: Callable[[int], bool],
        end: Callable[[], None],
        memories: list[StepMemory],
    ) -> None:
        self.memories = memories
        self.left: list[list[int]] = []
        self.leaks: list[list[Leak]] = []
        self.times: list[float] = []
        self.by_hand = False
        self.ran = ClockSource(_NoStacks(), MAX_EVENTS)
        self._is_enough, self._end = is_enough, end
        self._first: Any = None
        self._optimizers = False  # whether an optimizer was made
        self._process = os.getpid()  # a forked process inherits the hooks, but has its own steps

    @property
    def done(self) -> int:
        """The number of steps."""
        return len(self.times)

    def before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """Start to record kernels. End a script that uses no GPU.

        The arguments are those of PyTorch's hook before an optimizer's step.
        """
        if self._process != os.getpid():
            return
        if not any(gpu.allocator.peak_allocated for gpu in instruments.machine().gpus):
            self._end()  # the script would go on computing on the CPU
        self.ran.start()

    def after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        """Count a step of the first optimizer, and ignore the steps of the others.

        The arguments are those of PyTorch's hook after an optimizer's step.
        """
        self._first = self._first or optimizer
        if optimizer is self._first and self._process == os.getpid():
            self._count()

    def before_backward(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        """Start to record kernels. Count a step if there is no optimizer.

        `name` is the phase that begins. Return a function for the end of the phase, which does
        nothing.
        """
        if self._process != os.getpid():
            return lambda: None
        self.ran.start()
        if name == "backward" and not self._optimizers:
            if self.by_hand:
                self._count()
            self._optimizers = bool(of_kind(all_objects(), torch.optim.Optimizer))
            self.by_hand = not self._optimizers
        return lambda: None

    def _count(self) -> None:
        """Count a step, and end the script if it was the last."""
        self.times.append(instruments.machine().clock.host)
        for memory in self.memories:
            memory.end_step()
        if self._is_enough(self.done):
            self._look_for_growth()
            self._end()

    def _look_for_growth(self) -> None:
        """Find what holds the tensors that steps left behind, while the script still runs."""
        for memory in self.memories:
            self.left.append(memory.left_behind())
            grows = growth_of(memory.peaks, self.left[-1]) is not None
            self.leaks.append(memory.leaks() if grows else [])


def _most(column: np.ndarray) -> int:
    """Return the highest number of a column, or 0."""
    return int(column.max(initial=0))


def _measure(trace: Trace, spans: Spans, counted: list[float], outcome: Outcome) -> None:
    """Write into the outcome the fullest GPU's memory at its peak, and the time of a step.

    `counted` are the times at which the host counted the steps.
    """
    device = outcome.device
    timeline = trace.timeline(device)
    outcome.used = _most(timeline.used)
    outcome.allocated, outcome.reserved = _most(timeline.allocated), _most(timeline.reserved)
    at = int(timeline.allocated.argmax())
    layers = trace.layers(device).items()
    outcome.parts = {name: int(layer[at]) for name, layer in layers if layer[at] > 0}
    outcome.parts["reserved, not in use"] = outcome.reserved - outcome.allocated
    event = trace.peak_event(device)
    outcome.line = ""
    if event >= 0:
        line = trace.line(int(trace.events.stack[event]))
        if line is not None:
            outcome.line = f"{line.location} {line.text}"
    ends = _ends(spans, counted)
    if len(ends) == 1:
        # In this step, the optimizer makes its state and takes its memory from the driver.
        outcome.first = ends[0] - min(phase.start for phase in trace.phases)
        return
    steps = sorted((end - begin, begin, end) for begin, end in pairwise(ends) if end > begin)
    if steps:
        # There may be an evaluation between two steps, so this is the median.
        outcome.step, begin, end = steps[(len(steps) - 1) // 2]
        busy = _busy_between(spans, device, begin, end)
        outcome.idle = max(0.0, 1 - busy / outcome.step)


def _ends(spans: Spans, counted: list[float]) -> list[float]:
    """Return when the GPUs finished the work of each step.

    `counted` are the times at which the host counted the steps. The host may be far ahead of the
    GPUs.
    """
    ran = np.isin(spans.kind, (KERNEL, *COPIES)) & (spans.launch >= 0)
    mine = np.flatnonzero(ran)
    launched, ended = spans.start[spans.launch[mine]], spans.end[mine]
    return [float(ended[launched <= time].max(initial=0.0)) for time in counted]


def _busy_between(spans: Spans, device: int, begin: float, end: float) -> float:
    """Return the seconds during which a GPU worked between two times in seconds."""
    start = np.clip(spans.start, begin, end)
    clipped = replace(spans, start=start, duration=np.clip(spans.end, begin, end) - start)
    return seconds_of(clipped, chosen(spans, device, (KERNEL, *COPIES)))
