"""The scheduler of one machine's host threads: they run one at a time, in the order in which they were started.

All threads share one clock, one allocator and one generator a GPU, and the interpreter lets any thread go on that the operating system
wakes first: times, addresses and draws would differ from run to run. So threads take turns. A turn is one operator, or one call of the
driver, and the Python after it, up to the thread's next one, where it waits for its next turn.

A thread that waits for another one must not keep its turn, whatever it waits in: a lock, a queue, a loop that polls. `join` and
conditions (events, queues, futures) report that they block, and who unblocks whom (`threads.locks`, `host.threading_module`). For the rest,
one of the waiting threads samples the running one (`threads.thread_state`): if it stays in the same sleep, or sleeps most of the time, or
computes for long without an operator, the others pass it over until it moves again. A thread that could run, and that a busy computer
keeps waiting, is waited for: so the order does not depend on the computer's load.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from virtualgpu.clock.machine_clock import Clock
from virtualgpu.threads.thread_state import SAMPLE_SECONDS, BlockedWait, State, ThreadState


class Scheduler:
    """The scheduler of one machine. `several` is True while there is more than one thread: a single one need not ask."""

    # Seconds after which a waiting thread checks whether it was forgotten: an interrupt may come between any two steps.
    RECHECK_SECONDS = 0.5

    def __init__(self) -> None:
        self.several = False
        self._mine = threading.local()
        self._threads: list[ThreadState] = []
        self._started = 0
        self._last = -1  # number of the thread that had the last turn
        self.running: ThreadState | None = None  # has the turn, or is waking
        self._sampler: ThreadState | None = None  # the waiting thread that samples the running one
        self._lock = threading.RLock()  # a signal's handler may launch operators too
        self._mine.state = self.running = state = self.add()
        state.state, state.goes_on = State.RUNNING, False
        state.attach()

    def current(self) -> ThreadState | None:
        """The calling thread's; None for one that takes no turns."""
        return getattr(self._mine, "state", None)

    # Taking part

    def add(self) -> ThreadState:
        """For a thread that is about to be started."""
        with self._lock:
            state = ThreadState(self._started)
            self._started += 1
            self._threads.append(state)
            self.several = len(self._threads) > 1
            return state

    def remove(self, state: ThreadState) -> None:
        """The thread has ended, or could not be started."""
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
        """Starting the thread has failed. After an interrupt it may have begun all the same; then it stays."""
        with self._lock:
            if not state.thread:
                self.remove(state)

    def has(self, state: ThreadState) -> bool:
        return state in self._threads

    @contextmanager
    def attached(self, state: ThreadState) -> Iterator[None]:
        """In the block the calling thread takes part; it begins and ends in a turn of its own."""
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
        """The machine is taken away: nobody waits any more."""
        with self._lock:
            self.several = False
            for state in self._threads:
                state.state = State.RUNNING
                state.detach()
                _release(state.wake)
            self._threads = []

    def after_fork(self) -> None:
        """To be called in a child process, where only the thread that forked lives on."""
        self._lock = threading.RLock()
        self.several, state = False, self.current()
        self._threads = [] if state is None else [state]
        self.running = self._sampler = None
        if state is not None:
            state.detach()
            state.attach()
            state.state, self.running = State.RUNNING, state

    # Turns

    def take_turn(self) -> None:
        """End the calling thread's turn and wait for its next one."""
        state = self.current()
        if state is None:
            return
        with self._lock:
            others = (other.state in (State.WAITING, State.WAKING) or other.woke() for other in self._threads)
            if state.state is State.RUNNING and not any(others):
                return state.begin_turn()  # nobody else wants to run
        self._wait_for_turn(state)

    def _wait_for_turn(self, state: ThreadState) -> None:
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
                state.wake.acquire(timeout=SAMPLE_SECONDS if self._sampler is state else self.RECHECK_SECONDS)
                if state.state is not State.RUNNING:
                    self._sample_running(state)
        except BaseException:  # an interrupt: the thread runs on without a turn, until it asks for one again
            with self._lock:
                state.state = State.BLOCKED
                self._go_on_without(state)
            raise
        state.wake.acquire(blocking=False)
        state.begin_turn()

    def _sample_running(self, state: ThreadState) -> None:
        with self._lock:
            if self._sampler is None or self._sampler.state is not State.WAITING:
                self._sampler = state
            running = self.running
            if self._sampler is not state or state.state is State.RUNNING:
                return
            if running is None or running.state not in (State.RUNNING, State.WAKING):
                self._pass_on()
            elif (stalled := running.stalled()) is not None:
                running.state, running.goes_on = stalled, False
                self._pass_on()

    def _go_on_without(self, state: ThreadState) -> None:
        if self.running is state:
            self._pass_on()
        self._choose_sampler()

    def _pass_on(self) -> None:
        """Let threads that were unblocked ask for their turns, one after the other; then the next waiting one has its turn."""
        self.running = None
        for state in self._threads:
            if state.state is State.WAKING or state.woke():
                state.state = State.WAKING
                self.running = state
                break
        else:
            waiting = [state for state in self._threads if state.state is State.WAITING]
            if waiting:
                chosen = next((state for state in waiting if state.number > self._last), waiting[0])
                chosen.state, self._last, self.running = State.RUNNING, chosen.number, chosen
                _release(chosen.wake)
        self._choose_sampler()

    def _choose_sampler(self) -> None:
        if self._sampler is None or self._sampler.state is not State.WAITING:
            self._sampler = next((state for state in self._threads if state.state is State.WAITING), None)
            if self._sampler is not None:
                _release(self._sampler.wake)

    # Sleeping on the machine's clock

    def sleep(self, seconds: float, clock: Clock) -> None:
        """Let `seconds` of the machine's clock go by for the calling thread. The others run meanwhile; if all sleep, time jumps."""
        state = self.current()
        if state is None or not self.several:
            return clock.advance_host(seconds)
        state.alarm = alarm = clock.host + seconds
        try:
            while clock.host < alarm:
                self.take_turn()
                with self._lock:
                    alarms = [other.alarm for other in self._threads if other.state is State.WAITING]
                    if None not in alarms:
                        clock.advance_host(max(0.0, min([alarm, *(x for x in alarms if x is not None)]) - clock.host))
        finally:
            state.alarm = None

    # Blocking

    @contextmanager
    def blocked(self) -> Iterator[BlockedWait | None]:
        """In the block the calling thread waits for something, and the others run. Who ends it calls `unblock`."""
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
        """What the thread waited for is there: from now on the others wait until it has asked for its turn."""
        state = wait.state
        with self._lock:
            if state.wait is wait and state.state is State.BLOCKED:
                state.state, state.goes_on = State.WAKING, True
                if self.running is None:
                    self._pass_on()

    @contextmanager
    def keeping_turn(self) -> Iterator[None]:
        """In the block the calling thread waits for something that comes without the other threads: it keeps its turn."""
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
    if lock.locked():
        lock.release()
