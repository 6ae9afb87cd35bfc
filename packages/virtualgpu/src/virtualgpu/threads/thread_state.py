"""The state of one thread under the scheduler, and whether others may run while it waits.

Python does not tell whether a thread waits, but Linux does. It reports the thread's state and its
processor time, which does not change during a sleep. A thread that only waits for the interpreter's
lock gets the lock between two samples, so its next sample shows another sleep.
"""

import _thread
import math
import os
import sys
import time
from enum import Enum, auto

from virtualgpu.front_end import HERE

SAMPLE_SECONDS = 1e-3  # time between two samples of the running thread
SAME_SLEEP = 5  # after this many samples in the same sleep, the thread waits for something
MOSTLY_ASLEEP = 200  # after this many samples of sleep with little work, the thread polls
LITTLE = 0.2  # the largest work between two samples that counts as little, as a share of the time
BUSY_SECONDS = 1.0  # after this processor time in one turn, the thread may poll without pauses
PATIENT = 1000  # the limits are this many times larger for a thread known to continue by itself


class State(Enum):
    """The states of a thread under the scheduler."""

    RUNNING = auto()  # it has the turn
    WAITING = auto()  # it waits for its turn
    BLOCKED = auto()  # it waits for another thread, which reports the end, or its return is noticed
    ASLEEP = auto()  # it waits for something else, and returns when its sleep ends
    WAKING = auto()  # it was unblocked but has not asked for its turn. No thread has the turn then


class BlockedWait:
    """One wait of a blocked thread. The thread that ends the wait passes it to `unblock`."""

    def __init__(self, state: "ThreadState") -> None:
        self.state = state


class ThreadState:
    """One thread under the scheduler.

    number: the position in the order of starting
    goes_on: whether the end of its wait does not depend on the other threads
    alarm: when its sleep on the machine's clock ends, or None
    thread: its identity, or 0 until it is attached
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = State.WAKING
        self.goes_on = True
        self.wait: BlockedWait | None = None
        self.joined_by: list[BlockedWait] = []
        self.alarm: float | None = None
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.thread = 0
        # The file in which Linux tells whether the thread sleeps: its path, or its open descriptor.
        self._status: str | int | None = None
        self._processor: int | None = None  # the clock of its processor time
        self.begin_turn()

    def attach(self) -> None:
        """Store the identity and the processor clock of the calling thread in this state."""
        self.thread = _thread.get_ident()
        status = f"/proc/self/task/{_thread.get_native_id()}/stat"
        if hasattr(time, "pthread_getcpuclockid") and os.path.exists(status):
            self._status = status
            self._processor = time.pthread_getcpuclockid(self.thread)

    def detach(self) -> None:
        """Close the file with which the thread was sampled."""
        if isinstance(self._status, int):
            os.close(self._status)
        self._status = None

    def begin_turn(self) -> None:
        """Forget the samples that were taken during the thread's last turn."""
        self._idle = self._same = 0
        self._start: float | None = None
        self._spent: float | None = None

    def _sample(self) -> tuple[bool, float]:
        """Return (whether the thread sleeps, its processor time in seconds).

        The processor time stays the same during one sleep. On systems other than Linux every sample
        shows another sleep.
        """
        if self._status is None or self._processor is None:
            return True, math.nan
        try:
            if isinstance(self._status, str):
                self._status = os.open(self._status, os.O_RDONLY | os.O_CLOEXEC)
            status = os.pread(self._status, 512, 0)
            is_asleep = status[status.rindex(b")") + 2 :][:1] == b"S"
            return is_asleep, time.clock_gettime(self._processor)
        except OSError:
            return True, -1.0  # the thread has ended

    def woke(self) -> bool:
        """Return whether a thread that was skipped during a sleep has woken up from it."""
        return self.state is State.ASLEEP and self._sample() != (True, self._spent)

    def stalled(self) -> State | None:
        """Sample the running thread, and return the state in which others may skip it.

        Returns None while the others should wait for it.
        """
        asleep, spent = self._sample()
        if self._start is None or self._spent is None:
            self._start = self._spent = spent
        if asleep and spent == self._spent:
            self._same += 1
        else:
            self._same = 0
        # A computing thread is also asleep when it is sampled, because it waits for the
        # interpreter's lock, which the sampling thread holds.
        self._idle += asleep and not spent - self._spent > LITTLE * SAMPLE_SECONDS
        self._spent = spent
        computed = spent - self._start
        if not self._out_of_patience(1, computed):
            return None
        patient = self.goes_on or self._in_an_operator()
        if patient and not self._out_of_patience(PATIENT, computed):
            return None
        if self._same >= SAME_SLEEP:
            return State.ASLEEP
        return State.BLOCKED

    def _out_of_patience(self, times: int, computed: float) -> bool:
        """Return whether the thread has slept or computed for `times` times a limit.

        `computed` is the seconds of its computing without an operator.
        """
        if self._same >= SAME_SLEEP * times or self._idle >= MOSTLY_ASLEEP * times:
            return True
        return computed >= BUSY_SECONDS * times

    def _in_an_operator(self) -> bool:
        """Return whether the thread waits for an operator's kernel, which may use threads.

        There may be calls of PyTorch's own files between the kernel and the kit.
        """
        frame = top = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
            frame = frame.f_back
        files = [x.f_code.co_filename for x in (top, frame) if x is not None]
        return any(file.startswith(HERE) and file != __file__ for file in files)
