"""The process of its own: started, listened to until it ends, and ended together with all that it started.

Nothing here can block. Output comes through a pipe that is always emptied, everything else lies in files. A socket joins the two
processes: the worker says there that the function begins and ends, and sees there, when it closes, that nobody waits for it any more.
"""

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from labkit.isolation.forkserver import MARK

STOPPING = 0.25  # seconds over its time for a process to write where it is
KILLING = 10.0  # seconds until the system has ended what was killed
LOOK = 0.05  # seconds between looks at a process that has closed everything
KEPT = 512 << 10  # bytes of output kept of its beginning, and of its end
CHUNK = 64 << 10  # bytes: what a pipe holds


class Stage(IntEnum):
    """How far a worker is; it says so whenever it goes on."""

    STARTING = 0  # torch is imported, the GPUs are initialised, the function is built
    RUNNING = 1  # the function runs
    RETURNING = 2  # the result and the trace are written
    ENDING = 3  # threads and exit functions


# Seconds that a stage may take; a function may run for the time that its caller gives.
LIMITS = {Stage.STARTING: 120.0, Stage.RETURNING: 120.0, Stage.ENDING: 5.0}

_START = os.path.join(os.path.dirname(__file__), "start.py")


@dataclass(frozen=True)
class Ended:
    """How the process ended: `status` as subprocess gives it, the stage that it was in, whether it took too long there, and whether
    part of its output is left out."""

    status: int
    output: str
    stage: Stage
    late: bool
    cut: bool


class Ends:
    """The first and the last `KEPT` bytes of a stream."""

    def __init__(self) -> None:
        self.first, self.last, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = KEPT - len(self.first)
        self.first += data[:room]
        self.last += data[room:]
        if len(self.last) > 2 * KEPT:  # not at every write: cutting moves the rest
            self._cut()

    def _cut(self) -> None:
        surplus = max(0, len(self.last) - KEPT)
        del self.last[:surplus]
        self.left_out += surplus

    def text(self) -> str:
        self._cut()
        if not self.left_out:
            return (self.first + self.last).decode(errors="replace")
        # The cuts may lie within a character.
        note = f"\n[... {self.left_out / (1 << 20):.1f} MiB of output left out ...]\n"
        return self.first.decode(errors="ignore") + note + self.last.decode(errors="ignore")


class Process:
    """A worker for the request that lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self._output = Ends()
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P: the working directory is searched as this process does it, no sooner. -u: a crash loses no output.
                    [sys.executable, "-P", "-u", _START, _search_path(), folder, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=os.environ | mark(self._folder),
                )
        except BaseException:
            self._control.close()
            raise
        assert self._process.stdout is not None  # it is a pipe
        self._told = self._process.stdout
        self._stage, self._deadline = Stage.STARTING, time.monotonic() + LIMITS[Stage.STARTING]

    def run(self, timeout: float | None) -> Ended:
        """Listen until the process ends, or until the function has run for `timeout` seconds. No process is left in any case."""
        try:
            late = not self._listen(math.inf if timeout is None else timeout)
        finally:
            with self._control, self._told:
                self._end_all()
                self._read_rest()
        output = self._output.text()
        return Ended(self._process.returncode, output, self._stage, late, self._output.left_out > 0)

    def _listen(self, timeout: float) -> bool:
        """False if the process still runs when its time is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._told, selectors.EVENT_READ)
            selector.register(self._control, selectors.EVENT_READ)
            while self._process.poll() is None:
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    return False
                for key, _ in selector.select(min(LOOK, remaining)):
                    data = os.read(key.fd, CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            self._process.wait(LOOK)  # most often it is ending
                    elif key.fileobj is self._control:
                        self._hear(data, timeout)
                    else:
                        self._output.add(data)
        return True

    def _hear(self, stages: bytes, timeout: float) -> None:
        self._stage = Stage(stages[-1])
        limit = timeout + STOPPING if self._stage == Stage.RUNNING else LIMITS[self._stage]
        self._deadline = time.monotonic() + limit

    def _end_all(self) -> None:
        """Kill what is left of the worker, of its process group, and of what has left the group; return when all are gone."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    child.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids what is a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILLING)
        end_started_in(self._folder)

    def _read_rest(self) -> None:
        """What lies in the pipe; nobody is left to add to it."""
        output = self._told.fileno()
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, CHUNK):
                self._output.add(data)


def mark(folder: str) -> dict[str, str]:
    """The environment variables of what belongs to `folder`: a run within another one belongs to both."""
    marks = [*filter(None, [os.environ.get(MARK)]), folder]
    # CUDA would write what lies on the GPU to a file.
    return {MARK: " ".join(marks), "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}


def started_in(folder: str) -> list[psutil.Process]:
    """A worker and what it started, wherever that went: they have the worker's folder in their environment. A zombie has none any more."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if folder in process.environ().get(MARK, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_started_in(folder: str) -> None:
    """Kill what was started in `folder`, but for the process that asks; return when all is gone."""
    deadline = time.monotonic() + KILLING
    while (left := [process for process in started_in(folder) if process.pid != os.getpid()]) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.001)


def end_with(line: socket.socket, folder: str) -> None:
    """For a thread of a worker. Nothing ever comes on this line: it closes when the process at its other end is gone. Then nobody else
    clears up. Of several workers in one folder one does it, the first to rename it: they would kill each other first."""
    with contextlib.suppress(OSError):
        line.recv(1)
    with contextlib.suppress(OSError):
        ended = f"{folder}-ended"
        os.rename(folder, ended)
        end_started_in(folder)  # what still writes would keep the folder from going
        shutil.rmtree(ended, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def stay_until_cleared(line: socket.socket) -> None:
    """For the end of a worker's main thread. Where nobody is at the line's other end any more, `end_with` is clearing up in its thread,
    and ends this process when it has."""
    with contextlib.suppress(OSError):
        if not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            time.sleep(2 * KILLING)


def _search_path() -> str:
    """This process's, as JSON; at its end the place that this kit came from, should it be found nowhere else."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return json.dumps([*path, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))])
