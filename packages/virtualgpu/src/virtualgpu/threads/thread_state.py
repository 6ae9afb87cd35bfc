"""The state of one thread under the scheduler, and whether the others may run while it waits.

Nothing in Python says whether a thread waits. Linux does: the thread's state, and its processor time, which stands still as long as one
sleep lasts. A thread that only wants the interpreter lock gets it between two samples, so its next sample shows another sleep.
"""

import _thread
import math
import os
import sys
import time
from enum import Enum, auto

from virtualgpu.front_end import HERE

SAMPLE_SECONDS = 1e-3  # between two samples of the running thread
SAME_SLEEP = 5  # samples in a row within the same sleep: the thread waits for something
MOSTLY_ASLEEP = 200  # samples in one turn that find it asleep after little work: it polls, with pauses
LITTLE = 0.2  # of the time between two samples
BUSY_SECONDS = 1.0  # of processor time in one turn: it may be polling without a pause
PATIENT = 1000  # times as much of each for a thread that is known to go on by itself


class State(Enum):
    RUNNING = auto()  # it has the turn
    WAITING = auto()  # for its turn
    BLOCKED = auto()  # on something else; the thread that unblocks it reports that, or its return is noticed later
    ASLEEP = auto()  # on something else; it comes back when its sleep ends
    WAKING = auto()  # it was unblocked and has not asked for its turn yet: no thread has the turn meanwhile


class BlockedWait:
    """One time that a thread is blocked. Who ends it passes this to `Scheduler.unblock`."""

    def __init__(self, state: "ThreadState") -> None:
        self.state = state


class ThreadState:
    """One thread under the scheduler."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of starting
        self.state = State.WAKING
        self.goes_on = True  # what it waits for does not depend on the other threads
        self.wait: BlockedWait | None = None
        self.joined_by: list[BlockedWait] = []
        self.alarm: float | None = None  # when its sleep on the machine's clock is over
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.thread = 0  # its identity; 0 until it is attached
        self._status: str | int | None = None  # the file in which Linux says whether the thread sleeps, once open its number
        self._processor: int | None = None  # the clock of its processor time
        self.begin_turn()

    def attach(self) -> None:
        """To be called in the thread itself."""
        self.thread = _thread.get_ident()
        status = f"/proc/self/task/{_thread.get_native_id()}/stat"
        if hasattr(time, "pthread_getcpuclockid") and os.path.exists(status):
            self._status, self._processor = status, time.pthread_getcpuclockid(self.thread)

    def detach(self) -> None:
        if isinstance(self._status, int):
            os.close(self._status)
        self._status = None

    def begin_turn(self) -> None:
        """Forget the samples of the last turn."""
        self._idle = self._same = 0
        self._start: float | None = None
        self._spent: float | None = None

    def _sample(self) -> tuple[bool, float]:
        """Whether the thread sleeps, and its processor time in seconds: the same number as long as one sleep lasts.

        On other systems than Linux every sample shows another sleep.
        """
        if self._status is None or self._processor is None:
            return True, math.nan
        try:
            if isinstance(self._status, str):
                self._status = os.open(self._status, os.O_RDONLY | os.O_CLOEXEC)
            status = os.pread(self._status, 512, 0)
            return status[status.rindex(b")") + 2 :][:1] == b"S", time.clock_gettime(self._processor)
        except OSError:
            return True, -1.0  # the thread has ended

    def woke(self) -> bool:
        """Whether the sleep has ended in which the thread was passed over."""
        return self.state is State.ASLEEP and self._sample() != (True, self._spent)

    def stalled(self) -> State | None:
        """Sample the running thread. Returns the state in which the others pass it over, None while they wait for it."""
        asleep, spent = self._sample()
        if self._start is None or self._spent is None:
            self._start = self._spent = spent
        self._same = self._same + 1 if asleep and spent == self._spent else 0
        # A thread that computes is asleep too when it is sampled: it waits for the interpreter lock, which the sampling thread has.
        self._idle += asleep and not spent - self._spent > LITTLE * SAMPLE_SECONDS
        self._spent = spent
        if not self._out_of_patience(1, spent - self._start):
            return None
        if (self.goes_on or self._in_an_operator()) and not self._out_of_patience(PATIENT, spent - self._start):
            return None
        return State.ASLEEP if self._same >= SAME_SLEEP else State.BLOCKED

    def _out_of_patience(self, times: int, computed: float) -> bool:
        return self._same >= SAME_SLEEP * times or self._idle >= MOSTLY_ASLEEP * times or computed >= BUSY_SECONDS * times

    def _in_an_operator(self) -> bool:
        """Whether it waits for an operator's kernel, which may have threads of its own; PyTorch's own files may lie between."""
        frame = top = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
            frame = frame.f_back
        files = [x.f_code.co_filename for x in (top, frame) if x is not None]
        return any(file.startswith(HERE) and file != __file__ for file in files)
