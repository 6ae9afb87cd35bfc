"""Replacements of Python's threads, locks and queues while a machine is in use."""

import _thread
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.utils.data

from virtualgpu import front_end
from virtualgpu.hardware import Machine
from virtualgpu.threads.locks import Lock, SimpleQueue, Waiter
from virtualgpu.threads.scheduler import Scheduler
from virtualgpu.threads.thread_state import ThreadState


def replacements(
    machine: Machine, mode: AbstractContextManager
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each changed object of Python's library, with its new attributes by name.

    Threads take turns and run under `mode`, which would otherwise apply to one thread only.
    """
    scheduler, thread = machine.scheduler, threading.Thread
    started = outside_the_scheduler(machine, thread.start, starting(scheduler, thread.start, mode))
    yield thread, {"start": started, "join": joining(scheduler, thread.join)}
    # Pickle finds the classes under these names, as managers of spawned processes need.
    lock = {"scheduler": scheduler, "__module__": "threading", "__qualname__": "Lock"}
    yield threading, {"Lock": type("lock", (Lock,), lock)}
    simple = {"scheduler": scheduler, "__module__": "queue"}
    yield queue, {"SimpleQueue": type("SimpleQueue", (SimpleQueue,), simple)}
    # A private name. Without it, a blocked thread is noticed a little later.
    if hasattr(threading, "_allocate_lock"):
        yield threading, {"_allocate_lock": lambda: _condition_lock(scheduler)}


def starting(
    scheduler: Scheduler, start: Callable[[threading.Thread], None], mode: AbstractContextManager
) -> Callable[[threading.Thread], None]:
    """Return a replacement of `Thread.start` for threads that take turns.

    `scheduler` gives them their turns. They run under `mode`. `start` is the original method.
    """

    def run_in_turns(thread: threading.Thread, state: ThreadState, run: Callable[[], None]) -> None:
        with scheduler.attached(state), mode if scheduler.has(state) else nullcontext():
            try:
                run()
            except BaseException as error:
                # Python would report the error a moment later, with this line in the traceback.
                call = error.__traceback__ and error.__traceback__.tb_next
                report = threading.ExceptHookArgs(
                    (type(error), error.with_traceback(call), call, thread)
                )
                threading.excepthook(report)

    def start_in_turns(thread: threading.Thread) -> None:
        state = scheduler.add()
        thread.run = partial(run_in_turns, thread, state, thread.run)  # type: ignore[method-assign]
        try:
            with scheduler.keeping_turn():  # `start` waits for the new thread, which needs no turn
                start(thread)
        except BaseException:
            scheduler.remove_unstarted(state)
            raise
        thread._scheduler_state = state  # type: ignore[attr-defined]

    return start_in_turns


def joining(scheduler: Scheduler, join: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `Thread.join` that lets other threads run while it waits.

    `join` is the original method.
    """

    def join_in_turns(thread: threading.Thread, timeout: float | None = None) -> None:
        state: ThreadState | None = getattr(thread, "_scheduler_state", None)
        over = state is not None and not scheduler.has(state)
        if timeout == 0 or over:  # the call returns at once
            with scheduler.keeping_turn():
                return join(thread, timeout)
        with scheduler.blocked() as wait:
            if wait is None or state is None:
                return join(thread, timeout)
            state.joined_by.append(wait)
            try:
                return join(thread, timeout)
            finally:
                state.joined_by.remove(wait)

    return join_in_turns


def outside_the_scheduler(
    machine: Machine,
    start: Callable[[threading.Thread], None],
    in_turns: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    """Return a replacement of `Thread.start` that leaves two kinds of threads without turns.

    For these it calls `start`, the original method, and for all others `in_turns`. The progress of
    DataLoader's pinning thread depends on the real speed of other processes, and on the modelled
    computers it has a processor of its own. Threads of the kit would not exist on a real GPU, and a
    thread that watches a time limit must not wait for a turn.
    """

    def run_untimed(run: Callable[[], None]) -> None:
        machine.selected.untimed = True
        run()

    def start_thread(thread: threading.Thread) -> None:
        pins = (
            getattr(thread, "_target", None) is torch.utils.data._utils.pin_memory._pin_memory_loop
        )
        if pins or front_end.is_of_the_tools(sys._getframe(1).f_globals.get("__name__", "")):
            thread.run = partial(run_untimed, thread.run)  # type: ignore[method-assign]
            return start(thread)
        machine.clock.advance_host(machine.profile.thread_seconds)
        in_turns(thread)

    return start_thread


def _condition_lock(scheduler: Scheduler) -> Any:
    """Return the lock that `threading` creates for its own use.

    A condition creates one for each thread that waits on it.
    """
    if sys._getframe(2).f_code is threading.Condition.wait.__code__:
        return Waiter(scheduler)
    return _thread.allocate_lock()
