"""The scheduler of one machine's host threads. They run one at a time, in the order of their start.

All threads share one clock, and one allocator and generator per GPU. Python lets any thread
continue that the operating system wakes up, so times, addresses and random numbers would differ
from run to run. Threads therefore take turns. A turn is one operator or one driver call, with the
Python code after it. The thread's next operator or driver call waits for its next turn.

A thread that waits for another thread must not keep its turn, whatever it waits in: a lock, a queue
or a loop that polls. `join` and conditions (events, queues, futures) report that they block, and
who unblocks whom (`threads.locks`, `host.threading_module`). Otherwise one of the waiting threads
samples the running thread (`threads.thread_state`). The others skip a thread that stays in the same
sleep, sleeps most of the time, or computes for long without an operator, until it moves again. They
wait for a thread that could run but is delayed by a busy computer, so the order does not depend on
the computer's load.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from virtualgpu.clock.machine_clock import Clock
from virtualgpu.threads.thread_state import SAMPLE_SECONDS, BlockedWait, State, ThreadState


class Scheduler:
    """The scheduler of one machine's threads.

    `several` says whether there is more than one thread. A single thread need not take turns.
    """

    # Seconds after which a waiting thread checks whether it was forgotten. This is necessary
    # because an interrupt can happen between any two steps.
    RECHECK_SECONDS = 0.5

    def __init__(self) -> None:
        self.several = False
        self._mine = threading.local()
        self._threads: list[ThreadState] = []
        self._started = 0
        self._last = -1  # the number of the thread that had the last turn
        self.running: ThreadState | None = None  # the thread that has the turn, or is waking up
        self._sampler: ThreadState | None = None  # the waiting thread that samples the running one
        self._lock = threading.RLock()  # a signal handler may launch operators, too
        self._mine.state = self.running = state = self.add()
        state.state = State.RUNNING
        state.goes_on = False
        state.attach()

    def current(self) -> ThreadState | None:
        """Return the state of the calling thread, or None if it takes no turns."""
        return getattr(self._mine, "state", None)

    # Threads that start and end

    def add(self) -> ThreadState:
        """Return a new state, for a thread that is about to be started."""
        with self._lock:
            state = ThreadState(self._started)
            self._started += 1
            self._threads.append(state)
            self.several = len(self._threads) > 1
            return state

    def remove(self, state: ThreadState) -> None:
        """Forget the state of a thread that has ended or could not be started."""
        with self._lock:
            state.detach()
            if state not in self._threads:
                return
            self._threads.remove(state)
            self.several = len(self._threads) > 1
            for wait in state.joined_by:
                self.unblock(wait)
            self._go_on_without(state)

    def remove_unstarted(self, state: ThreadState) -> None:
        """Forget a thread whose start has failed, unless it runs in spite of an interrupt."""
        with self._lock:
            if not state.thread:
                self.remove(state)

    def has(self, state: ThreadState) -> bool:
        """Return whether the thread with this state takes turns."""
        return state in self._threads

    @contextmanager
    def attached(self, state: ThreadState) -> Iterator[None]:
        """Let the calling thread take turns in the block. The block begins and ends in a turn."""
        self._mine.state = state
        with self._lock:
            state.attach()
        try:
            self._wait_for_turn(state)
            yield
        finally:
            if state.state is not State.RUNNING:
                self._wait_for_turn(state)
            self._mine.state = None
            self.remove(state)

    def close(self) -> None:
        """Let all threads run without turns, because the machine is taken away."""
        with self._lock:
            self.several = False
            for state in self._threads:
                state.state = State.RUNNING
                state.detach()
                _release(state.wake)
            self._threads = []

    def after_fork(self) -> None:
        """Keep only the calling thread, in a forked child process."""
        self._lock = threading.RLock()
        self.several, state = False, self.current()
        self._threads = [] if state is None else [state]
        self.running = self._sampler = None
        if state is not None:
            state.detach()
            state.attach()
            state.state = State.RUNNING
            self.running = state

    # Turns

    def take_turn(self) -> None:
        """End the calling thread's turn and wait for its next one."""
        state = self.current()
        if state is None:
            return
        with self._lock:
            if state.state is State.RUNNING and not self._others_want_to_run():
                return state.begin_turn()
        self._wait_for_turn(state)

    def _others_want_to_run(self) -> bool:
        """Return whether another thread waits for its turn or is waking up."""
        for other in self._threads:
            if other.state in (State.WAITING, State.WAKING) or other.woke():
                return True
        return False

    def _wait_for_turn(self, state: ThreadState) -> None:
        """Wait until the calling thread has its turn. `state` is the state of this thread."""
        with self._lock:
            if state not in self._threads:
                return
            if state.state is State.RUNNING:
                self._last = state.number
            state.state, state.goes_on, state.wait = State.WAITING, False, None
            self._sampler = state
            if self.running is None or self.running is state:
                self._pass_on()
        try:
            while state.state is not State.RUNNING:
                timeout = self.RECHECK_SECONDS
                if self._sampler is state:
                    timeout = SAMPLE_SECONDS
                state.wake.acquire(timeout=timeout)
                if state.state is not State.RUNNING:
                    self._sample_running(state)
        except BaseException:
            # After an interrupt the thread runs without a turn, until it asks for one again.
            with self._lock:
                state.state = State.BLOCKED
                self._go_on_without(state)
            raise
        state.wake.acquire(blocking=False)
        state.begin_turn()

    def _sample_running(self, state: ThreadState) -> None:
        """Sample the running thread, to see whether it waits and must be skipped.

        `state` is the calling thread's state. Only one waiting thread, the sampler, does this.
        """
        with self._lock:
            if self._sampler is None or self._sampler.state is not State.WAITING:
                self._sampler = state
            running = self.running
            if self._sampler is not state or state.state is State.RUNNING:
                return
            if running is None or running.state not in (State.RUNNING, State.WAKING):
                self._pass_on()
                return
            stalled = running.stalled()
            if stalled is not None:
                running.state = stalled
                running.goes_on = False
                self._pass_on()

    def _go_on_without(self, state: ThreadState) -> None:
        """Take the turn from the thread with this state, if it has the turn.

        Another thread then gets it.
        """
        if self.running is state:
            self._pass_on()
        self._choose_sampler()

    def _pass_on(self) -> None:
        """Give the turn to the next thread.

        Unblocked threads first ask for their turns, one after the other. Then the next waiting
        thread gets its turn.
        """
        self.running = None
        for state in self._threads:
            if state.state is State.WAKING or state.woke():
                state.state = State.WAKING
                self.running = state
                break
        else:
            waiting = [state for state in self._threads if state.state is State.WAITING]
            if waiting:
                later = [state for state in waiting if state.number > self._last]
                chosen = later[0] if later else waiting[0]
                chosen.state = State.RUNNING
                self._last = chosen.number
                self.running = chosen
                _release(chosen.wake)
        self._choose_sampler()

    def _choose_sampler(self) -> None:
        """Choose a waiting thread that samples the running one, unless there is one."""
        if self._sampler is None or self._sampler.state is not State.WAITING:
            waiting = [state for state in self._threads if state.state is State.WAITING]
            self._sampler = waiting[0] if waiting else None
            if self._sampler is not None:
                _release(self._sampler.wake)

    # Sleeping on the machine's clock

    def sleep(self, seconds: float, clock: Clock) -> None:
        """Let the calling thread sleep for `seconds` on the machine's clock.

        The other threads run in the meantime. If all threads sleep, the clock jumps.
        """
        state = self.current()
        if state is None or not self.several:
            return clock.advance_host(seconds)
        state.alarm = alarm = clock.host + seconds
        try:
            while clock.host < alarm:
                self.take_turn()
                with self._lock:
                    waiting = [other for other in self._threads if other.state is State.WAITING]
                    alarms = [other.alarm for other in waiting]
                    if None not in alarms:
                        first = min([alarm, *(x for x in alarms if x is not None)])
                        clock.advance_host(max(0.0, first - clock.host))
        finally:
            state.alarm = None

    # Blocking

    @contextmanager
    def blocked(self) -> Iterator[BlockedWait | None]:
        """Let the other threads run while the calling thread waits for something in the block.

        The thread that ends the wait calls `unblock` with the yielded object.
        """
        state = self.current()
        if state is None or state.goes_on or state not in self._threads:
            yield None
            return
        with self._lock:
            wait = state.wait = BlockedWait(state)
            state.state = State.BLOCKED
            self._go_on_without(state)
        try:
            yield wait
        except BaseException:  # an interrupt does not wait for its turn
            state.wait = None
            raise
        self._wait_for_turn(state)

    def unblock(self, wait: BlockedWait) -> None:
        """Let the other threads wait until the thread of `wait` has asked for its turn.

        It is unblocked now.
        """
        state = wait.state
        with self._lock:
            if state.wait is wait and state.state is State.BLOCKED:
                state.state = State.WAKING
                state.goes_on = True
                if self.running is None:
                    self._pass_on()

    @contextmanager
    def keeping_turn(self) -> Iterator[None]:
        """Keep the calling thread's turn in a block that does not wait for other threads."""
        state = self.current()
        if state is None or state.goes_on:
            yield
            return
        state.goes_on = True
        try:
            yield
        finally:
            state.goes_on = False


def _release(lock: Any) -> None:
    """Release a lock if it is locked."""
    if lock.locked():
        lock.release()
