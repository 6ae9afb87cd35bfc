"""Host threads of one machine take turns, in the order in which they were started: the same in every run.

The interpreter lets any thread go on that the operating system wakes first, and all of them share one clock, one allocator and one
generator a GPU: times, addresses and draws would differ from run to run. So a baton goes round. A turn is one operator, or one call of
the driver, and the Python after it, up to the thread's next one: the gate. One thread runs at a time; the others wait at the gate.

A thread that waits for another one must not keep the baton, whatever it waits in: a lock, a queue, a loop that asks again and again.
`join` and conditions (events, queues, futures) say so themselves, and who wakes whom. For the rest, a thread at the gate looks at the
one that runs (`threads.seats`): one that stays asleep in the same sleep, or sleeps most of the time, or computes for long without an
operator, is left out until it moves again. One that could run, and that a busy computer keeps waiting, is waited for: so the order does
not depend on it.
"""

import _thread
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from virtualgpu.clock.clock import Clock
from virtualgpu.threads.locks import Lock, SimpleQueue, Waiter
from virtualgpu.threads.seats import LOOK, Absence, Seat, State


class Turns:
    """The round of one machine's host threads. `several` says whether there is more than one: who is alone need not ask."""

    HEAL = 0.5  # seconds after which who waits looks for himself whether he was forgotten: an interrupt may come between any two steps

    def __init__(self) -> None:
        self.several = False
        self._mine = threading.local()
        self._seats: list[Seat] = []
        self._started = 0
        self._last = -1  # number of the seat that had the last turn
        self.running: Seat | None = None  # who has the turn, or is coming
        self._watcher: Seat | None = None  # who looks at it
        self._lock = threading.RLock()  # a signal's handler may launch operators too
        self._mine.seat = self.running = seat = self.add()
        seat.state, seat.certain = State.TURN, False
        seat.sit()

    # the round

    def add(self) -> Seat:
        """A place at the end of the round, for a thread that is about to be started."""
        with self._lock:
            seat = Seat(self._started)
            self._started += 1
            self._seats.append(seat)
            self.several = len(self._seats) > 1
            return seat

    def drop(self, seat: Seat) -> None:
        """The thread has ended, or could not be started."""
        with self._lock:
            seat.rise()
            if seat not in self._seats:
                return
            self._seats.remove(seat)
            self.several = len(self._seats) > 1
            for absence in seat.joined_by:
                self.expect(absence)
            self._go_on_without(seat)

    @contextmanager
    def seated(self, seat: Seat) -> Iterator[None]:
        """In the block the calling thread takes part; it begins and ends in a turn of its own."""
        self._mine.seat = seat
        with self._lock:
            seat.sit()
        try:
            self._arrive(seat)
            yield
        finally:
            if seat.state is not State.TURN:
                self._arrive(seat)
            self._mine.seat = None
            self.drop(seat)

    def take(self) -> None:
        """The gate: the calling thread's turn is over, and it waits for the next one."""
        seat = getattr(self._mine, "seat", None)
        if seat is None:
            return
        with self._lock:
            if seat.state is State.TURN and not any(other.state in (State.GATE, State.COMING) or other.stirs() for other in self._seats):
                return seat.begin()  # nobody else wants to go on
        self._arrive(seat)

    def close(self) -> None:
        """The machine is taken away: nobody waits any more."""
        with self._lock:
            self.several = False
            for seat in self._seats:
                seat.state = State.TURN
                seat.rise()
                _release(seat.wake)
            self._seats = []

    def after_fork(self) -> None:
        """Called in a child process, where only the thread that forked lives on."""
        self._lock = threading.RLock()
        self.several, seat = False, getattr(self._mine, "seat", None)
        self._seats = [] if seat is None else [seat]
        self.running = self._watcher = None
        if seat is not None:
            seat.rise()
            seat.sit()
            seat.state, self.running = State.TURN, seat

    # waiting

    def _arrive(self, seat: Seat) -> None:
        """Wait at the gate until the turn comes."""
        with self._lock:
            if seat not in self._seats:
                return
            if seat.state is State.TURN:
                self._last = seat.number
            seat.state, seat.certain, seat.absence = State.GATE, False, None
            self._watcher = seat
            if self.running is None or self.running is seat:
                self._pass_on()
        try:
            while seat.state is not State.TURN:
                seat.wake.acquire(timeout=LOOK if self._watcher is seat else self.HEAL)
                if seat.state is not State.TURN:
                    self._watch(seat)
        except BaseException:  # an interrupt: the thread runs on without a turn, until it comes to the gate again
            with self._lock:
                seat.state = State.AWAY
                self._go_on_without(seat)
            raise
        seat.wake.acquire(blocking=False)
        seat.begin()

    def _watch(self, seat: Seat) -> None:
        with self._lock:
            if self._watcher is None or self._watcher.state is not State.GATE:
                self._watcher = seat
            running = self.running
            if self._watcher is not seat or seat.state is State.TURN:
                return
            if running is None or running.state not in (State.TURN, State.COMING):
                self._pass_on()
            elif (state := running.left_in()) is not None:
                running.state, running.certain = state, False
                self._pass_on()

    def _go_on_without(self, seat: Seat) -> None:
        if self.running is seat:
            self._pass_on()
        self._appoint()

    def _pass_on(self) -> None:
        """Let those who were woken come to the gate, one after the other; then the next one there has its turn."""
        self.running = None
        for seat in self._seats:
            if seat.state is State.COMING or seat.stirs():
                seat.state = State.COMING
                self.running = seat
                break
        else:
            waiting = [seat for seat in self._seats if seat.state is State.GATE]
            if waiting:
                chosen = next((seat for seat in waiting if seat.number > self._last), waiting[0])
                chosen.state, self._last, self.running = State.TURN, chosen.number, chosen
                _release(chosen.wake)
        self._appoint()

    def _appoint(self) -> None:
        """Somebody at the gate has to watch."""
        if self._watcher is None or self._watcher.state is not State.GATE:
            self._watcher = next((seat for seat in self._seats if seat.state is State.GATE), None)
            if self._watcher is not None:
                _release(self._watcher.wake)

    # sleeping on the machine's clock

    def sleep(self, seconds: float, clock: Clock) -> None:
        """So many seconds of the machine's clock go by for the calling thread. The others go on meanwhile; if all sleep, time jumps."""
        seat = getattr(self._mine, "seat", None)
        if seat is None or not self.several:
            return clock.advance_host(seconds)
        seat.alarm = clock.host + seconds
        try:
            while clock.host < seat.alarm:
                self.take()
                with self._lock:
                    others = [other for other in self._seats if other.state is State.GATE]
                    if all(other.alarm is not None for other in others):
                        clock.advance_host(max(0.0, min(other.alarm for other in (seat, *others)) - clock.host))
        finally:
            seat.alarm = None

    # being away

    @contextmanager
    def away(self) -> Iterator[Absence | None]:
        """In the block the calling thread waits for something. Who ends that calls `expect` with the absence."""
        seat = getattr(self._mine, "seat", None)
        if seat is None or seat.certain or seat not in self._seats:
            yield None
            return
        with self._lock:
            absence = seat.absence = Absence(seat)
            seat.state = State.AWAY
            self._go_on_without(seat)
        try:
            yield absence
        except BaseException:  # an interrupt does not wait at the gate
            seat.absence = None
            raise
        self._arrive(seat)

    def expect(self, absence: Absence) -> None:
        """What the thread was away for is there: from now on the others wait until it has come to the gate."""
        seat = absence.seat
        with self._lock:
            if seat.absence is absence and seat.state is State.AWAY:
                seat.state, seat.certain = State.COMING, True
                if self.running is None:
                    self._pass_on()

    @contextmanager
    def certain(self) -> Iterator[None]:
        """In the block the calling thread waits for what comes without the others: it keeps its turn."""
        seat = getattr(self._mine, "seat", None)
        if seat is None or seat.certain:
            yield
            return
        seat.certain = True
        try:
            yield
        finally:
            seat.certain = False

    # what stands in for Python's own

    def starting(self, start: Callable[..., None], mode: AbstractContextManager) -> Callable[[threading.Thread], None]:
        """`Thread.start` for a thread that takes part, and runs under `mode`."""

        def run_in_turns(seat: Seat, run: Callable[[], None]) -> None:
            with self.seated(seat), mode if seat in self._seats else nullcontext():
                run()

        def start_in_turns(thread: threading.Thread) -> None:
            seat = self.add()
            thread.run = partial(run_in_turns, seat, thread.run)  # type: ignore[method-assign]
            try:
                with self.certain():  # it waits until the thread is there, which needs no turn
                    start(thread)
            except BaseException:
                with self._lock:
                    if not seat.thread:  # an interrupt may come when the thread has begun
                        self.drop(seat)
                raise
            thread._seat = seat  # type: ignore[attr-defined]

        return start_in_turns

    def joining(self, join: Callable[..., None]) -> Callable[..., None]:
        """`Thread.join` that lets the others go on."""

        def join_in_turns(thread: threading.Thread, timeout: float | None = None) -> None:
            seat = getattr(thread, "_seat", None)
            if timeout == 0 or (seat is not None and seat not in self._seats):  # it ends at once
                with self.certain():
                    return join(thread, timeout)
            with self.away() as absence:
                if absence is None or seat is None:
                    return join(thread, timeout)
                seat.joined_by.append(absence)
                try:
                    return join(thread, timeout)
                finally:
                    seat.joined_by.remove(absence)

        return join_in_turns

    def waiting_lock(self) -> Any:
        """The lock that `threading` makes for its own use. A condition makes one for each thread that waits on it."""
        return Waiter(self) if sys._getframe(1).f_code is threading.Condition.wait.__code__ else _thread.allocate_lock()

    def lock_class(self) -> type[Lock]:
        """`threading.Lock` of this machine's threads."""
        return type("lock", (Lock,), {"turns": self})

    def queue_class(self) -> type[SimpleQueue]:
        """`queue.SimpleQueue` of this machine's threads, through which a pool's get their work."""
        return type("SimpleQueue", (SimpleQueue,), {"turns": self})


def _release(lock: Any) -> None:
    if lock.locked():
        lock.release()
