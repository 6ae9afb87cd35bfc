"""Start, listen to, find and end the processes that the kit starts.

Every process of a job has the job's folder in its environment. So all processes of a job are found
and killed, even if they have left their session.
"""

import atexit
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

# The environment variable with the folders of the jobs to which a process belongs.
JOB_VARIABLE = "LABKIT_ISOLATED"
# The folder from which this kit is imported.
KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
KILLING = 10.0  # seconds for the system to end a process that was killed
LOOK = 0.05  # seconds between looks at a process that has closed its connections
KEPT = 512 << 10  # bytes kept of the beginning of an output, and of its end
CHUNK = 64 << 10  # bytes in a pipe


# Starting


def start_connected(
    command: Sequence[str], kind: int = socket.SOCK_STREAM, **options: Any
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process in its own session, without input, and return it with a connection to it.

    Args:
        command: the command. The process finds the number of its connection as the last argument.
        kind: the type of the socket.
        options: arguments of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    try:
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **options,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def rank_environment(folder: str) -> dict[str, str]:
    """Return the environment of a process of the job in `folder`.

    It is the same for all processes of a job, so they share a fork server. A job that runs within
    another job belongs to both.
    """
    jobs = filter(None, [os.environ.get(JOB_VARIABLE), folder])
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        JOB_VARIABLE: " ".join(jobs),
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0",  # CUDA would write a GPU's memory to a file
    }


def end_before_others() -> None:
    """Let Linux end this process before the notebook when memory runs out.

    If the process crashes, it writes no file of gigabytes.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


# Listening


class KeptOutput:
    """The first and the last KEPT bytes of a stream."""

    def __init__(self) -> None:
        self.first, self.last, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        missing = KEPT - len(self.first)
        self.first += data[:missing]
        self.last += data[missing:]
        if len(self.last) > 2 * KEPT:  # not for each call, because a cut moves the rest
            self._cut()

    def _cut(self) -> None:
        surplus = max(0, len(self.last) - KEPT)
        del self.last[:surplus]
        self.left_out += surplus

    def text(self) -> str:
        """Return the stream as text. A note says how much is left out of its middle."""
        self._cut()
        if not self.left_out:
            return (self.first + self.last).decode(errors="replace")
        note = f"\n[... {self.left_out / (1 << 20):.1f} MiB of output left out ...]\n"
        # A cut may be within a character.
        return self.first.decode(errors="ignore") + note + self.last.decode(errors="ignore")


# Ending


def processes_of(folder: str) -> list[psutil.Process]:
    """Return the running processes of the job in `folder`, and all that they started."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            belongs = folder in process.environ().get(JOB_VARIABLE, "")
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process with this number exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_job(folder: str) -> None:
    """Kill the processes of the job in `folder` and wait for their end.

    The process that calls this function is not killed.
    """
    deadline = time.monotonic() + KILLING
    while time.monotonic() < deadline:
        alive = [process for process in processes_of(folder) if process.pid != os.getpid()]
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.001)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_caller(connection: socket.socket, folder: str) -> None:
    """Start a thread that waits for the death of the caller, and then ends the job.

    The caller sends nothing from now on, so the connection closes only if the caller has died.
    Then nobody else removes the folder. Among several processes of a job, only the first to rename
    the folder clears up, because otherwise they would kill each other first.

    Args:
        connection: the connection to the caller.
        folder: the folder of the job to which this process belongs.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)
        with contextlib.suppress(OSError):
            ended = f"{folder}-ended"
            os.rename(folder, ended)
            kill_job(folder)  # before the removal, because processes may still write files
            shutil.rmtree(ended, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with the caller", daemon=True).start()


def stay_until_cleared(connection: socket.socket) -> None:
    """Wait if the caller has died, so that the thread of `end_with_caller` can clear up.

    The thread then ends this process. Call this function before a process ends.
    """
    with contextlib.suppress(OSError):
        if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            time.sleep(2 * KILLING)


def leave(status: int) -> NoReturn:
    """End this process as Python does, but do not take down the interpreter.

    With torch, taking it down takes a third of a second. A thread of C++ that still releases a
    Python object would abort the process. Other ranks would see their connections close before this
    process has ended. They would fail, and torchrun would stop this process too.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has written
    # The system closes the connections first, so torchrun could still stop this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit(status)
