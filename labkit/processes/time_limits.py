"""Time limits that are fair on a busy machine: waiting for a core does not count.

A right answer takes longer where other programs use the cores. Linux reports for each thread how
long it was ready to run but had no core. That time does not count here. But the limit grows only up
to a factor of MOST_STRETCHED, so an answer that never ends is still stopped.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MOST_STRETCHED = 4.0  # the largest factor by which a limit grows
PROC = Path("/proc")

Waits = dict[int, float]  # the seconds that each thread has waited for a core


def core_waits(processes: Iterable[int]) -> Waits:
    """Return how long each thread of processes and their descendants has waited for a core.

    Processes that have ended have no threads. Systems other than Linux do not report waits, so the
    result is empty there.
    """
    found: Waits = {}
    remaining = list(processes)
    while remaining:
        for thread in _entries(PROC / str(remaining.pop()) / "task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                nanoseconds = (thread / "schedstat").read_text().split()[1]
                found[int(thread.name)] = int(nanoseconds) / 1e9
            with contextlib.suppress(OSError, ValueError):
                remaining += map(int, (thread / "children").read_text().split())
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has ended
        return []


class TimeLimit:
    """A limit of seconds for some processes, from the moment when it is made.

    Args:
        seconds: the limit on a machine where no process has to wait for a core.
        processes: the numbers of the processes. The default is this process. Their descendants
            count too.
        clock: returns the seconds that have passed since some moment.
        waits: returns the waits of processes, as `core_waits` does.
    """

    def __init__(
        self,
        seconds: float,
        processes: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[Iterable[int]], Waits] = core_waits,
    ) -> None:
        self._seconds, self._clock, self._waits = seconds, clock, waits
        self._processes = [os.getpid()] if processes is None else list(processes)
        self._start, self._before = clock(), waits(self._processes)

    def remaining(self) -> float:
        """Return the seconds that are left, which is 0 or less when the limit is over.

        Ask again when they have passed: by then the processes may have waited for a core.
        """
        passed = self._clock() - self._start
        if passed < self._seconds:
            return self._seconds - passed  # whatever they waited
        now = self._waits(self._processes)
        # Threads wait side by side, so their waits do not add up.
        waited = max((now[thread] - self._before.get(thread, 0.0) for thread in now), default=0.0)
        waited = max(waited, 0.0)
        return min(self._seconds + waited, MOST_STRETCHED * self._seconds) - passed
