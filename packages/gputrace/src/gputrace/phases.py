"""Phases of training: forward, backward and step. The program need not mark them.

Backward passes and optimizer steps are noted as they happen. A forward pass is found afterwards. It
begins with the first allocation inside a module's call, and ends with the following backward pass.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from sys import _getframe as frame_at
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gputrace.events import Events, Stack
from virtualgpu.source_lines import is_users

_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl")  # the functions behind Module.__call__


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of training.

    Attributes:
        name: "forward", "backward" or "step".
        start, end: seconds from the start of the recording.
        stack: the number of the stack that called it.
    """

    name: str
    start: float
    end: float
    stack: int


@dataclass(slots=True)
class NotedPhase:
    """A phase that may not have ended yet. `end` is None until it has."""

    name: str
    start: float
    stack: int
    end: float | None = None


@dataclass(slots=True)
class NotedMark:
    """A part of the program that its author has named. `end` is None until it has ended."""

    name: str
    start: float
    end: float | None = None


# Function that is called when a phase starts. It returns the function to call when the phase ends.
Note = Callable[[str, FrameType | None], Callable[[], None]]

_notes: list[Note] = []  # those of the recordings that are going on
_mark_notes: list[Note] = []  # the same, for the parts that the user has named
_lock = threading.Lock()
_undo: Callable[[], None] | None = None


@contextmanager
def noted(note: Note, note_mark: Note | None = None) -> Iterator[None]:
    """Call `note` at every backward pass and optimizer step in any thread, within the block.

    Call `note_mark` when a line of the user's code enters `torch.profiler.record_function`.
    """
    global _undo
    with _lock:
        _notes.append(note)
        if note_mark is not None:
            _mark_notes.append(note_mark)
        if _undo is None:
            _undo = _watch()
    try:
        yield
    finally:
        with _lock:
            _notes.remove(note)
            if note_mark is not None:
                _mark_notes.remove(note_mark)
            if not _notes:
                _undo()
                _undo = None


def _watch() -> Callable[[], None]:
    """Watch backward passes, optimizer steps and marks. Return a function that stops watching.

    PyTorch has hooks for steps, but none for backward passes and marks.
    """
    # For each thread and optimizer, the functions to call at the end of its steps, innermost last.
    # There may be several, because a class's `step` may call that of its base class.
    steps: dict[tuple[int, int], list[list[Callable[[], None]]]] = {}

    def before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        steps.setdefault((threading.get_ident(), id(optimizer)), []).append(
            _begin("step", frame_at(1))
        )

    def after_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        under_way = steps.get((threading.get_ident(), id(optimizer)))
        if under_way:
            for end in under_way.pop():
                end()

    wrapped_in: dict[Any, tuple[Any, Any]] = {}
    for module in (torch.autograd, torch.autograd.graph):
        wrapped_in[module] = _wrap(module)
    hooks = [
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ]

    undo_marks = _watch_marks()

    def undo() -> None:
        undo_marks()
        for module, (original, wrapped) in wrapped_in.items():
            if module._engine_run_backward is wrapped:  # otherwise somebody has wrapped it again
                module._engine_run_backward = original
        for hook in hooks:
            hook.remove()

    return undo


def _wrap(module: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Wrap the function of a module that starts a backward pass.

    Return the original function and the wrapper.
    """
    original = module._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        ends = _begin("backward", frame_at(1))
        try:
            return original(*args, **kwargs)
        finally:
            for end in ends:
                end()

    module._engine_run_backward = run_backward
    return original, run_backward


def _watch_marks() -> Callable[[], None]:
    """Watch `record_function`. Return a function that stops watching.

    The marks of PyTorch itself, in optimizers and DDP, are left out.
    """
    enter, leave = record_function.__enter__, record_function.__exit__
    under_way: dict[int, list[Callable[[], None]]] = {}  # by the id of the mark

    @functools.wraps(enter)
    def marked_enter(mark: record_function) -> record_function:
        frame = frame_at(1)
        while frame.f_back is not None and frame.f_code.co_filename == contextlib.__file__:
            frame = frame.f_back  # `record_function` is used as a decorator
        if is_users(frame.f_code.co_filename):
            under_way[id(mark)] = [note(mark.name, frame) for note in list(_mark_notes)]
        return enter(mark)

    @functools.wraps(leave)
    def marked_leave(mark: record_function, *error: Any) -> None:
        leave(mark, *error)
        for end in under_way.pop(id(mark), ()):
            end()

    record_function.__enter__ = marked_enter  # type: ignore[method-assign]
    record_function.__exit__ = marked_leave  # type: ignore[method-assign]

    def undo() -> None:
        record_function.__enter__ = enter  # type: ignore[method-assign]
        record_function.__exit__ = leave  # type: ignore[method-assign]

    return undo


def _begin(name: str, frame: FrameType | None) -> list[Callable[[], None]]:
    """Tell all recordings that a phase starts. Return the functions to call when it ends.

    `frame` is the frame that called it.
    """
    return [note(name, frame) for note in list(_notes)]


def broken_off(step: Phase, phases: list[Phase], events: Events, stacks: list[Stack]) -> Phase:
    """Return the phase of an optimizer step that an exception ended, with its end.

    PyTorch's hooks do not report that end. We take the step's last event before the next phase.
    """
    caller = stacks[step.stack][1:]  # without the innermost line, which is PyTorch's
    inside = np.array([stack[len(stack) - len(caller) :] == caller for stack in stacks], dtype=bool)
    until = min((phase.start for phase in phases if phase.start > step.start), default=np.inf)
    during = (events.time >= step.start) & (events.time < until) & inside[events.stack]
    return replace(step, end=float(events.time[during].max(initial=step.start)))


def with_forwards(phases: list[Phase], events: Events, stacks: list[Stack]) -> list[Phase]:
    """Return the phases with the forward passes between them, in order of time.

    A phase inside another phase is left out.
    """
    outer: list[Phase] = []
    for one in sorted(phases, key=lambda phase: (phase.start, -phase.end)):
        if not outer or one.start >= outer[-1].end:
            outer.append(one)
    in_module = np.array(
        [any(line.function in _MODULE_CALLS for line in stack) for stack in stacks], dtype=bool
    )
    called = np.zeros(0, dtype=bool)
    if len(events):
        called = in_module[events.stack]
    found: list[Phase] = []
    gap = -np.inf
    for phase in [*outer, None]:
        until = np.inf if phase is None else phase.start
        inside = np.flatnonzero(called & (events.time >= gap) & (events.time <= until))
        if len(inside):
            first, last = inside[0], inside[-1]
            end = float(events.time[last])
            if phase is not None and phase.name == "backward":
                end = phase.start
            found.append(Phase("forward", float(events.time[first]), end, int(events.stack[first])))
        if phase is not None:
            found.append(phase)
            gap = phase.end
    return found


def phase_of(phases: list[Phase], times: np.ndarray) -> np.ndarray:
    """Return the index of the phase at each time, or -1. Both ends of a phase belong to it."""
    starts = np.array([phase.start for phase in phases])
    ends = np.array([phase.end for phase in phases])
    if not len(starts):
        return np.full(len(times), -1)
    index = np.searchsorted(starts, times, side="right") - 1
    return np.where((index >= 0) & (times <= ends[index]), index, -1)
