"""The process in which an isolated function runs: started, listened to until it ends, and ended together with all that it started.

Nothing here can block. Output comes through a pipe that is always emptied, everything else lies in files. On a connection the worker
reports that the function begins and ends; when it closes, the worker knows that nobody waits for it any more.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from labkit.isolation.exit_status import is_whole_stack
from labkit.processes.supervision import CHUNK, KILLING, KIT, LOOK, KeptOutput, job_environment, kill_job, start_connected

STOPPING = 5.0  # seconds over its time for a process to write where it is, on a busy machine


class Stage(IntEnum):
    """How far a worker is; it sends this byte whenever it goes on."""

    STARTING = 0  # torch is imported, the GPUs are initialised, the function is built
    RUNNING = 1  # the function runs
    RETURNING = 2  # the result and the trace are written
    ENDING = 3  # threads and exit functions


# Seconds that a stage may take; a function may run for the time that its caller gives.
LIMITS = {Stage.STARTING: 120.0, Stage.RETURNING: 120.0, Stage.ENDING: 5.0}

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from labkit.isolation import worker; worker.main(*sys.argv[2:])"


@dataclass(frozen=True)
class EndedProcess:
    """How the process ended: `status` as subprocess gives it, the stage that it was in, whether it took too long there, and whether
    part of its output is left out."""

    status: int
    output: str
    stage: Stage
    late: bool
    cut: bool


class IsolatedProcess:
    """A worker for the request that lies in `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._output = KeptOutput()
        # Modules are looked for where this process looks, and at last where this kit lies.
        path = json.dumps([*(entry for entry in sys.path if isinstance(entry, str)), KIT])
        # -P: the working directory is searched as this process does it, no sooner. -u: a crash loses no output.
        command = [sys.executable, "-P", "-u", "-c", _START, path, folder]
        env = os.environ | job_environment(folder)
        self._process, self._connection = start_connected(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        assert self._process.stdout is not None  # it is a pipe
        self._pipe = self._process.stdout
        self._stage, self._deadline = Stage.STARTING, time.monotonic() + LIMITS[Stage.STARTING]

    def run(self, timeout: float | None) -> EndedProcess:
        """Listen until the process ends, or until the function has run for `timeout` seconds. No process is left in any case."""
        try:
            late = not self._listen(math.inf if timeout is None else timeout)
        finally:
            with self._connection, self._pipe:
                self._kill_all()
                self._read_rest()
        output = self._output.text()
        return EndedProcess(self._process.returncode, output, self._stage, late, self._output.left_out > 0)

    def _listen(self, timeout: float) -> bool:
        """False if the process still runs when its time is over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            while self._process.poll() is None:
                remaining = self._deadline - time.monotonic()
                if remaining <= 0 and (remaining <= -STOPPING or self._has_said_where()):
                    return False
                for key, _ in selector.select(min(LOOK, max(0.01, remaining))):
                    data = os.read(key.fd, CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            self._process.wait(LOOK)  # most often it is ending
                    elif key.fileobj is self._connection:
                        self._enter_stage(Stage(data[-1]), timeout)
                    else:
                        self._output.add(data)
        return True

    def _enter_stage(self, stage: Stage, timeout: float) -> None:
        self._stage = stage
        self._deadline = time.monotonic() + (timeout if stage == Stage.RUNNING else LIMITS[stage])

    def _has_said_where(self) -> bool:
        """Whether the function's process has written where it is; in the other stages none does."""
        return self._stage != Stage.RUNNING or is_whole_stack(Path(self._folder, "crash").read_text(errors="replace"))

    def _kill_all(self) -> None:
        """Kill what is left of the worker, of its process group, and of what has left the group; return when all are gone."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    child.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids what is a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILLING)
        kill_job(self._folder)

    def _read_rest(self) -> None:
        """What lies in the pipe and in the connection; nobody is left to add to it."""
        self._connection.setblocking(False)
        with contextlib.suppress(OSError):
            while data := self._connection.recv(CHUNK):
                self._stage = Stage(data[-1])
        output = self._pipe.fileno()
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, CHUNK):
                self._output.add(data)
