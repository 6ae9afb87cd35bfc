"""One thread among those that take turns: what it is doing, and whether the others may go on without it.

Nothing in Python says whether a thread waits. Linux does: the thread's state, and the time that it has had of a processor, which stands
still as long as one sleep lasts. A thread that only wants the interpreter lock gets it between two looks, so its sleep is another one.
"""

import _thread
import math
import os
import sys
import time
from enum import Enum, auto

from virtualgpu.front_end import HERE

LOOK = 1e-3  # seconds between two looks at the thread that runs
STILL = 5  # looks in a row at the same sleep: the thread waits for something
RESTLESS = 200  # looks since its last turn that find it asleep after little work: it asks again and again
LITTLE = 0.2  # of the time between two looks
BUSY = 1.0  # seconds of the processor since its last turn: it may be asking without a pause
PATIENT = 1000  # times as much of each for a thread of which it is known that it will go on


class State(Enum):
    TURN = auto()  # it has the turn
    GATE = auto()  # it waits for its turn
    AWAY = auto()  # it waits for something else, and whoever wakes it says so; or nobody knows when it comes back
    ASLEEP = auto()  # it waits for something else, and comes back when its sleep ends
    COMING = auto()  # it was woken, and is on its way to the gate: nobody has the turn meanwhile


class Absence:
    """One time that a thread is away."""

    def __init__(self, seat: "Seat") -> None:
        self.seat = seat


class Seat:
    """A thread's place in the round."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of starting
        self.state = State.COMING
        self.certain = True  # it will go on by itself: what it waits for does not depend on the others
        self.absence: Absence | None = None
        self.joined_by: list[Absence] = []
        self.alarm: float | None = None  # when its sleep on the machine's clock is over
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.thread = 0  # its identity; 0 until it sits here
        self._status: str | int | None = None  # the file, once open its number, in which Linux says whether the thread sleeps
        self._processor: int | None = None  # the clock of its time on the processor
        self.begin()

    def sit(self) -> None:
        """Called in the thread itself."""
        self.thread = _thread.get_ident()
        status = f"/proc/self/task/{_thread.get_native_id()}/stat"
        if hasattr(time, "pthread_getcpuclockid") and os.path.exists(status):
            self._status, self._processor = status, time.pthread_getcpuclockid(self.thread)

    def rise(self) -> None:
        if isinstance(self._status, int):
            os.close(self._status)
        self._status = None

    def begin(self) -> None:
        """A turn begins: what was seen of the thread before is forgotten."""
        self._idle = self._same = 0
        self._start: float | None = None
        self._spent: float | None = None

    def _look(self) -> tuple[bool, float]:
        """Does the thread sleep, and the seconds that it has had of a processor: the same number as long as one sleep lasts.

        Where the system does not tell, every look finds another sleep.
        """
        if self._status is None:
            return True, math.nan
        try:
            if isinstance(self._status, str):
                self._status = os.open(self._status, os.O_RDONLY | os.O_CLOEXEC)
            status = os.pread(self._status, 512, 0)
            return status[status.rindex(b")") + 2 :][:1] == b"S", time.clock_gettime(self._processor)
        except OSError:
            return True, -1.0  # it has ended without a word

    def stirs(self) -> bool:
        """Has the sleep ended in which the thread was left?"""
        return self.state is State.ASLEEP and self._look() != (True, self._spent)

    def left_in(self) -> State | None:
        """Called every LOOK seconds while the thread runs: the state in which the others go on without it; None to wait for it."""
        asleep, spent = self._look()
        if self._start is None:
            self._start = self._spent = spent
        self._same = self._same + 1 if asleep and spent == self._spent else 0
        # One that computes is asleep too when it is looked at: it waits for the interpreter lock, which the one who looks has.
        self._idle += asleep and not spent - self._spent > LITTLE * LOOK
        self._spent = spent
        if not self._out_of_patience(1):
            return None
        if (self.certain or self._in_an_operator()) and not self._out_of_patience(PATIENT):
            return None
        return State.ASLEEP if self._same >= STILL else State.AWAY

    def _out_of_patience(self, times: int) -> bool:
        return self._same >= STILL * times or self._idle >= RESTLESS * times or self._spent - self._start >= BUSY * times

    def _in_an_operator(self) -> bool:
        """There it waits for its kernel alone, which may have threads of its own; PyTorch's own files may lie between."""
        frame = top = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
            frame = frame.f_back
        files = [x.f_code.co_filename for x in (top, frame) if x is not None]
        return any(file.startswith(HERE) and file != __file__ for file in files)
