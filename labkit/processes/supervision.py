"""What all processes that the kit starts have in common: how they are started, found, listened to and ended.

A job's processes have the job's folder in their environment. So all of them are found and killed, also those that have left their session.
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

JOB_VARIABLE = "LABKIT_ISOLATED"  # the environment variable that holds the folders of the jobs to which a process belongs
KIT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)  # the folder from which this kit is imported
KILLING = 10.0  # seconds until the system has ended what was killed
LOOK = 0.05  # seconds between looks at a process that has closed everything
KEPT = 512 << 10  # bytes of output kept of its beginning, and of its end
CHUNK = 64 << 10  # bytes: what a pipe holds


# Starting


def start_connected(
    command: Sequence[str], kind: int = socket.SOCK_STREAM, **options: Any
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process in a session of its own, without input, and return it with a connection to it.

    The number of the process's end of the connection is the last argument of its command. `options` are those of `subprocess.Popen`.
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
    """Return the environment of a process of the job in `folder`. All of them share a fork server.

    A job within another one belongs to both.
    """
    jobs = filter(None, [os.environ.get(JOB_VARIABLE), folder])
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        JOB_VARIABLE: " ".join(jobs),
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0",  # or CUDA would write the GPU's memory to a file
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
    """The first and the last `KEPT` bytes of a stream."""

    def __init__(self) -> None:
        self.first, self.last, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        missing = KEPT - len(self.first)
        self.first += data[:missing]
        self.last += data[missing:]
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


# Ending


def processes_of(folder: str) -> list[psutil.Process]:
    """The living processes of the job in `folder`, and what they started, wherever that went. A zombie has no environment any more."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if (
                folder in process.environ().get(JOB_VARIABLE, "")
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def is_running(pid: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_job(folder: str) -> None:
    """Kill the processes of the job in `folder`, but for the one that calls this; return when all are gone."""
    deadline = time.monotonic() + KILLING
    while (
        alive := [process for process in processes_of(folder) if process.pid != os.getpid()]
    ) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.001)


def end_with_caller(connection: socket.socket, folder: str) -> None:
    """Start a thread that ends this process, and clears up its job, when the caller's end of the connection closes.

    From now on the caller sends nothing. The connection closes before that only when the caller has died, so nobody else clears up. Of
    several processes of one job only the first to rename the folder does: they would kill each other first.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)
        with contextlib.suppress(OSError):
            ended = f"{folder}-ended"
            os.rename(folder, ended)
            kill_job(folder)  # what still writes would keep the folder from going
            shutil.rmtree(ended, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end with the caller", daemon=True).start()


def stay_until_cleared(connection: socket.socket) -> None:
    """Call this before a process ends. Where its caller has died, the thread of `end_with_caller` still clears up, and then ends it."""
    with contextlib.suppress(OSError):
        if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            time.sleep(2 * KILLING)


def leave(status: int) -> NoReturn:
    """End this process as Python does, but leave the interpreter to the system.

    Taking down an interpreter with torch in it takes a third of a second. A thread of C++ that then still releases a Python object is
    stopped in the middle, and aborts the process. And other ranks would see their connections close before this process has ended, fail,
    and have torchrun stop this process with them.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has written
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the system, too, closes the connections first
    os._exit(status)
