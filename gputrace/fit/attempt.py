"""One attempt: some steps of an unmodified script on one virtual GPU without values."""

import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import virtualgpu
from gputrace.events import StackTable
from gputrace.fit.changes import ALL, CHANGES
from gputrace.fit.growth import StepMemory, growth_of, where_it_grows
from gputrace.holders.tensors import all_objects, of_kind
from gputrace.leaks import Leak
from gputrace.phases import noted
from gputrace.recording import record
from gputrace.sources.clock import ClockSource
from gputrace.spans import COPIES, KERNEL, Spans, chosen, seconds_of
from gputrace.trace import Trace
from virtualgpu import instruments
from virtualgpu.commands import set_up_for_times
from virtualgpu.script import run_script
from virtualgpu.source_lines import is_users

NO_GPU = "it put nothing on the GPU: perhaps an option of its own asks for that, such as --device cuda"
MAX_EVENTS = 2_000_000  # some steps of a large model
MORE = 4  # steps that follow if the peak still changes, to tell growth from variation
MOST_MADE_UP = 10_000  # values, after which a script is taken to wait for another than 0 in vain
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, in which the system counts a process's memory
SEEN = 2  # steps, in which all that a script does has come by, its other optimizers too: what a change has not met by then is not there


@dataclass(frozen=True)
class Wish:
    """What is tried: a script's steps on a GPU model, with one change or none. `memory` in bytes, None for the model's own."""

    script: str
    arguments: list[str]
    module: bool
    like: str
    steps: int
    host: float = 1.0
    memory: int | None = None
    change: str | None = None


@dataclass
class Outcome:
    """What came of it; bytes and seconds.

    `failed` is the text of an exception other than for memory, with its line. `used` counts what the device holds at most, CUDA's
    context included; `allocated` and `reserved` are the allocator's, and `parts` what the peak of the allocated consists of. `step` is
    the median time of the steps after the first, and `idle` the share of it in which the GPU had nothing to do; where there was one
    step alone, `first` is the most that it took. `changed` says whether the change met something that it could change; where none was
    made, `changes` are those of CHANGES that would have. `asked` is the line that wanted a value which nothing computed, after the first
    whole step: the script ended there. `made_up` is the first line that got 0 for such an integer and went on. `by_hand` says that no
    optimizer was made, so that each backward was taken for a step, and `tries_algorithms` that cuDNN would try them at each new shape.
    `resident` is the most of this computer's memory that the attempt, or a process of its, took. `peaks`
    are the bytes allocated at the peak of each step, and `left` those that each step left behind, both
    in the order of the steps. `grows` says where memory grows.
    """

    total: int = 0
    fits: bool = True
    failed: str = ""
    line: str = ""
    steps: int = 0
    used: int = 0
    allocated: int = 0
    reserved: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    step: float | None = None
    idle: float | None = None
    changed: bool = False
    first: float | None = None
    asked: str = ""
    by_hand: bool = False
    made_up: str = ""
    changes: list[str] = field(default_factory=list)
    resident: int = 0
    tries_algorithms: bool = False
    peaks: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    grows: str = ""


class _Enough(BaseException):
    """The steps asked for are done. No script catches it by accident."""


def attempt(wish: Wish) -> Outcome:
    """Run the script in this process, which should end afterwards: the GPUs, the hook and what the change patched stay in place."""
    gpus = virtualgpu.use(1, like=wish.like, memory=wish.memory, values=False, host=wish.host)
    outcome = Outcome(total=gpus.request.memory or gpus.profile.total_memory)
    set_up_for_times(gpus, virtual_time=False)  # a loss that is printed is NaN, no error
    met = [] if wish.change is None else ALL[wish.change].make(True)
    would_meet = {name: change.make(False) for name, change in CHANGES.items() if wish.change is None}
    made_up = _MadeUp()
    if wish.change is not None:  # what its first step asks for, it did without as it stands
        gpus.machine.makes_up = made_up

    def enough(done: int) -> bool:
        gpus.machine.makes_up = made_up  # not before: what the first step needs, no made-up value may stand for
        if wish.change is not None:
            return done >= wish.steps or (done >= SEEN and not met)
        if done < wish.steps:
            return False
        return done >= wish.steps + MORE or steps.memory.is_settled()

    steps = _Steps(enough, StepMemory(gpus.machine.gpus[0].allocator))
    origin = gpus.machine.clock.host
    try:
        # The memory of the whole run, and what ran when from the first backward on: an evaluation before it may be long.
        with noted(steps.before_backward), record(MAX_EVENTS, timeline=False) as trace:
            register_optimizer_step_pre_hook(steps.before_step)
            register_optimizer_step_post_hook(steps.after_step)
            try:
                run_script(wish.script, wish.arguments, wish.module)
            finally:
                _end_children()
    except _Enough:
        pass
    except SystemExit as ended:
        where = _in_front(_where(traceback.extract_tb(ended.__traceback__)))
        outcome.failed = "" if ended.code in (None, 0) else f"{where}it ended by sys.exit({ended.code!r}); every loss is NaN here"
    except BaseException as error:  # whatever the script raises is told, not raised
        outcome.fits = not trace.error
        if outcome.fits and steps.done and (made_up.times or instruments.asks_for_values(error)):
            outcome.asked = made_up.line or _where(traceback.extract_tb(error.__traceback__))
        elif outcome.fits:
            outcome.failed = _told(error)
    if made_up.times > MOST_MADE_UP:
        outcome.asked = made_up.line
    outcome.made_up = "" if outcome.asked else made_up.line
    outcome.steps, outcome.by_hand, outcome.changed = steps.done, steps.by_hand, bool(met)
    outcome.peaks, outcome.left = steps.memory.peaks, steps.left
    if growth_of(outcome.peaks, outcome.left) is not None:
        ends = [time - origin for time in steps.times]
        outcome.grows = where_it_grows(steps.leaks, trace, ends)
    outcome.tries_algorithms = torch.backends.cudnn.benchmark
    outcome.changes = [name for name, found in would_meet.items() if found]
    if outcome.fits and not outcome.failed and not (trace.timeline(0).allocated > 0).any():
        outcome.failed = NO_GPU
    _measure(trace, steps.ran.finish(origin).spans, [time - origin for time in steps.times], outcome)
    used = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    outcome.resident = max(used) * RSS_UNIT
    return outcome


def _end_children() -> None:
    """A data loader's workers would prepare more batches, and be waited for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes a worker's end for a failure
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


class _NoStacks(StackTable):
    """Takes no stack for what is measured alone."""

    def of_frame(self, frame: FrameType | None) -> int:
        return 0


class _Steps:
    """Counts a script's steps, and ends it where so many are `enough`.

    Of several optimizers the first one's steps count. Where a script makes none, and changes its parameters by hand, a step is done when
    the backward after it begins.
    """

    def __init__(self, enough: Callable[[int], bool], memory: StepMemory) -> None:
        self.memory = memory
        self.left: list[int] = []  # bytes that each step left behind
        self.leaks: list[Leak] = []  # if memory grows
        self.times: list[float] = []  # of the machine's clock, at which each was counted
        self.by_hand = False
        self.ran = ClockSource(_NoStacks(), MAX_EVENTS)
        self._enough = enough
        self._first: Any = None
        self._optimizers = False  # was any made?

    @property
    def done(self) -> int:
        return len(self.times)

    def before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if torch.cuda.max_memory_allocated() == 0:
            raise _Enough  # a script that has put nothing on the GPU by now need not go on computing on the CPU
        self.ran.start()

    def after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._count()

    def before_backward(self, name: str, frame: FrameType | None) -> Callable[[], None]:
        self.ran.start()
        if name == "backward" and not self._optimizers:
            if self.by_hand:
                self._count()
            self._optimizers = bool(of_kind(all_objects(), torch.optim.Optimizer))
            self.by_hand = not self._optimizers
        return lambda: None

    def _count(self) -> None:
        self.times.append(instruments.machine().clock.host)
        self.memory.end_step()
        if self._enough(self.done):
            self._look_for_growth()
            raise _Enough

    def _look_for_growth(self) -> None:
        """Find who holds what steps left behind, while the script's variables exist."""
        self.left = self.memory.left_behind()
        if growth_of(self.memory.peaks, self.left) is not None:
            self.leaks = self.memory.leaks()


class _MadeUp:
    """Called whenever the host asks for an integer that nothing computed, and gets 0: counts how often, and keeps the first line."""

    def __init__(self) -> None:
        self.times, self.line = 0, ""

    def __call__(self) -> None:
        self.line = self.line or _where(traceback.extract_stack())
        self.times += 1
        if self.times > MOST_MADE_UP:
            raise _Enough


def _told(error: BaseException) -> str:
    """An exception in a line, with the innermost line of the user's own. Of a long message the first line and the last."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return _in_front(_where(traceback.extract_tb(error.__traceback__))) + " … ".join(dict.fromkeys((lines[0], lines[-1])))


def _in_front(line: str) -> str:
    return line and f"{line}: "


def _where(calls: traceback.StackSummary) -> str:
    """The innermost line of the user's own."""
    users = [call for call in calls if is_users(call.filename)]
    return f"{Path(users[-1].filename).name}:{users[-1].lineno} {users[-1].line}" if users else ""


def _measure(trace: Trace, spans: Spans, counted: list[float], outcome: Outcome) -> None:
    """Memory at the peak, and the time of a step."""
    timeline = trace.timeline(0)
    outcome.used, outcome.allocated, outcome.reserved = (
        int(column.max()) for column in (timeline.used, timeline.allocated, timeline.reserved)
    )
    at = int(timeline.allocated.argmax())
    outcome.parts = {name: int(layer[at]) for name, layer in trace.layers(0).items() if layer[at] > 0}
    outcome.parts["reserved, not in use"] = outcome.reserved - outcome.allocated
    event = trace.peak_event(0)
    line = None if event < 0 else trace.line(int(trace.events.stack[event]))
    outcome.line = "" if line is None else f"{line.location} {line.text}"
    ends = _ends(spans, counted)
    if len(ends) == 1:  # it makes the optimizer's state too, and takes its memory from the driver
        outcome.first = ends[0] - min(phase.start for phase in trace.phases)
    elif steps := sorted((end - begin, begin, end) for begin, end in pairwise(ends) if end > begin):
        outcome.step, begin, end = steps[(len(steps) - 1) // 2]  # an evaluation may lie between two of them
        outcome.idle = max(0.0, 1 - _busy_between(spans, begin, end) / outcome.step)


def _ends(spans: Spans, counted: list[float]) -> list[float]:
    """When the GPU was done with all that had been launched when each step was counted: the host may be far ahead."""
    mine = np.flatnonzero(chosen(spans, 0, (KERNEL, *COPIES)) & (spans.launch >= 0))
    launched, ended = spans.start[spans.launch[mine]], spans.end[mine]
    return [float(ended[launched <= time].max(initial=0.0)) for time in counted]


def _busy_between(spans: Spans, begin: float, end: float) -> float:
    """Seconds in which the GPU worked."""
    start = np.clip(spans.start, begin, end)
    return seconds_of(replace(spans, start=start, duration=np.clip(spans.end, begin, end) - start), chosen(spans, 0, (KERNEL, *COPIES)))
