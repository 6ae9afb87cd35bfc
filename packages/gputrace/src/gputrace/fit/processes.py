"""Attempts in processes of their own, as many at once as this computer has processors and memory for."""

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

TELLS_AFTER = 10.0  # seconds without an outcome, after which an attempt's progress is told
LOOK = 0.02  # seconds between looks at what is under way
PROGRAM = str(Path(__file__).with_name("__main__.py"))


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Start = Callable[[Sequence[str], int], Process]  # Python with these arguments, in a session of its own, which writes to that file


def afresh(command: Sequence[str], output: int) -> Process:
    """Start a Python that has imported nothing yet."""
    return subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


class _Attempt:
    """One process, from its start until its outcome is known. What the script prints is shown only where it ends without one."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.told = 0.0  # the real time when its progress was told
        self.process: Process | None = None
        self.outcome: Outcome | None = None

    def start(self, start: Start) -> None:
        self._folder = TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True)
        with Path(self._folder.name, "output").open("wb") as output:
            self.told = self._started = time.monotonic()
            self.process = start([PROGRAM, json.dumps(asdict(self.wish)), self._file("outcome")], output.fileno())

    def is_running(self) -> bool:
        """Whether it is; when it has ended, `outcome` tells what came of it."""
        if self.process is None or self.outcome is not None:
            return False
        if self.process.poll() is None:
            return True
        if os.path.exists(self._file("outcome")):
            self.outcome = Outcome(**json.loads(Path(self._file("outcome")).read_text(encoding="utf-8")))
        else:
            tail = Path(self._file("output")).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            self.outcome = Outcome(failed=f"its process ended with status {self.process.returncode}: {''.join(tail)}")
        self._folder.cleanup()
        return False

    def progress(self) -> str:
        """Say for how long it has been running, and how far it is."""
        self.told = time.monotonic()
        change = f", {self.wish.change}" if self.wish.change else ""
        try:
            so_far = Path(self._file(PROGRESS)).read_text(encoding="utf-8")
        except OSError:
            so_far = "nothing on the GPU yet"
        seconds = round(self.told - self._started)
        return f"{self.wish.like}{change}: running for {seconds} s, {so_far}"

    def stop(self) -> None:
        """Kill it with all that it started, if it is running."""
        if self.is_running() and self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._folder.cleanup()

    def _file(self, name: str) -> str:
        return os.path.join(self._folder.name, name)


class Runner:
    """Runs attempts, by processes that `start` starts. `tell` gets lines about slow ones."""

    def __init__(self, start: Start = afresh, tell: Callable[[str], object] = lambda line: None) -> None:
        self._start, self._tell = start, tell
        self._starts_processes = False  # does the script? Its processes may want the same port
        self._largest = 1  # bytes of this computer's memory that an attempt took

    def run_all(self, wishes: list[Wish]) -> Iterator[tuple[Wish, Outcome]]:
        """Try all. What fails beside others is tried once more alone, and comes last: two may want the same file, or the same port."""
        again = []
        most = self.at_once()
        for wish, outcome in self._outcomes(wishes, most):
            if outcome.failed and min(most, len(wishes)) > 1:
                again.append(wish)
            else:
                yield wish, outcome
        yield from self._outcomes(again, 1)

    def at_once(self) -> int:
        """Return how many attempts run at once.

        There are as many as processors, and as have room if each takes what the largest took so
        far. A script that starts processes runs alone: they meet at a port.
        """
        if self._starts_processes:
            return 1
        return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // self._largest))

    def _outcomes(self, wishes: list[Wish], most: int) -> Iterator[tuple[Wish, Outcome]]:
        """What came of each, in their order. None goes on when the caller wants no more, or is interrupted."""
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
    """Try it."""
    [(_, outcome)] = Runner().run_all([wish])
    return outcome
