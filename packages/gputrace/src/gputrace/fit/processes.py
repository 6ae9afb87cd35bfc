"""Attempts in their own processes, as many at once as this computer has processors and memory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import psutil

from gputrace.fit.outcome import PROGRESS, Outcome, Wish

TELLS_AFTER = 10.0  # seconds without an outcome until an attempt's progress is reported
LOOK = 0.02  # seconds between two looks at the running attempts
PROGRAM = str(Path(__file__).with_name("__main__.py"))


class Process(Protocol):
    """Interface of a running process, a subset of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


# Function that starts a Python with these arguments, in its own session. It writes to that file.
Start = Callable[[Sequence[str], int], Process]


def afresh(command: Sequence[str], output: int) -> Process:
    """Start a new Python process, in which no module is imported yet.

    `output` is the file descriptor for the process's output.
    """
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class _Attempt:
    """An attempt that runs in a process of its own.

    The output of the script is shown only if the process ends without an outcome.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.told = 0.0  # when its progress was reported last, on the computer's clock
        self.process: Process | None = None
        self.outcome: Outcome | None = None

    def start(self, start: Start) -> None:
        """Start the process."""
        self._folder = TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True)
        with Path(self._folder.name, "output").open("wb") as output:
            self.told = self._started = time.monotonic()
            command = [PROGRAM, json.dumps(asdict(self.wish)), self._file("outcome")]
            self.process = start(command, output.fileno())

    def is_running(self) -> bool:
        """Return whether the process runs. When it has ended, read its outcome."""
        if self.process is None or self.outcome is not None:
            return False
        if self.process.poll() is None:
            return True
        if os.path.exists(self._file("outcome")):
            text = Path(self._file("outcome")).read_text(encoding="utf-8")
            self.outcome = Outcome(**json.loads(text))
        else:
            text = Path(self._file("output")).read_text(encoding="utf-8", errors="replace")
            last = "".join(text.strip().splitlines()[-1:])
            status = self.process.returncode
            self.outcome = Outcome(failed=f"its process ended with status {status}: {last}")
        self._folder.cleanup()
        return False

    def progress(self) -> str:
        """Return a text that says how long the process has been running, and what it has done."""
        self.told = time.monotonic()
        change = f", {self.wish.change}" if self.wish.change else ""
        try:
            so_far = Path(self._file(PROGRESS)).read_text(encoding="utf-8")
        except OSError:
            so_far = "nothing on the GPU yet"
        seconds = round(self.told - self._started)
        return f"{self.wish.like}{change}: running for {seconds} s, {so_far}"

    def stop(self) -> None:
        """Kill the process, if it runs, and all processes that it started."""
        if self.is_running() and self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._folder.cleanup()

    def _file(self, name: str) -> str:
        """Return the path of the file with this name in the folder of the attempt."""
        return os.path.join(self._folder.name, name)


class Runner:
    """Runner of attempts, several at a time.

    Args:
        start: starts their processes.
        tell: gets a line of text about each slow attempt.
    """

    def __init__(
        self, start: Start = afresh, tell: Callable[[str], object] = lambda line: None
    ) -> None:
        self._start, self._tell = start, tell
        self._starts_processes = False  # whether the script does. They may need the same port.
        self._largest = 1  # the most bytes of this computer's memory that an attempt used

    def run_all(self, wishes: list[Wish]) -> Iterator[tuple[Wish, Outcome]]:
        """Make all attempts, and yield each wish with its outcome.

        An attempt that fails beside others is repeated alone, after the others. Two attempts may
        need the same file or the same port.
        """
        again = []
        most = self.at_once()
        for wish, outcome in self._outcomes(wishes, most):
            if outcome.failed and min(most, len(wishes)) > 1:
                again.append(wish)
            else:
                yield wish, outcome
        yield from self._outcomes(again, 1)

    def at_once(self) -> int:
        """Return the number of attempts to run at the same time.

        Each needs a processor, and as much memory as the largest attempt so far. A script that
        starts processes runs alone, because they use a port.
        """
        if self._starts_processes:
            return 1
        return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // self._largest))

    def _outcomes(self, wishes: list[Wish], most: int) -> Iterator[tuple[Wish, Outcome]]:
        """Yield outcomes in the order of the wishes, with at most `most` attempts at the same time.

        If the caller stops early, kill the attempts that still run.
        """
        attempts = [_Attempt(wish) for wish in wishes]
        try:
            for attempt in attempts:
                while attempt.outcome is None:
                    free = most - sum([one.is_running() for one in attempts])
                    for fresh in [one for one in attempts if one.process is None][:free]:
                        fresh.start(self._start)
                    for one in attempts:
                        if one.is_running() and time.monotonic() > one.told + TELLS_AFTER:
                            self._tell(one.progress())
                    time.sleep(LOOK)
                self._starts_processes |= attempt.outcome.processes > 0
                self._largest = max(self._largest, attempt.outcome.resident)
                yield attempt.wish, attempt.outcome
        finally:
            for attempt in attempts:
                attempt.stop()


def run(wish: Wish) -> Outcome:
    """Make one attempt in a process of its own, and return its outcome."""
    [(_, outcome)] = Runner().run_all([wish])
    return outcome
