"""Fork server inside a sandbox. It imports what lessons need, and forks a copy per submission.

The server never runs a submission's code, nor reads what a submission writes. It forks when the
grader asks for it, and watches the number of processes and their memory. At the end it kills them,
and empties the folders in which they could write. Then it compares itself with its state at the
start. If a submission has changed the server, the grader starts another one.

The grader starts it in the first folder with this command::

    python -m labcourse.sandbox_server FOLDER... FILENO
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from labkit.processes import messages

LOOK = 0.02  # seconds between two looks at the processes
PAGE = os.sysconf("SC_PAGE_SIZE")
DUMPABLE, SUBREAPER = 4, 36  # options of prctl
SHARED_OBJECTS = ["/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/keys"]
STATUS = (  # the lines of /proc/self/status that must not change
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "Threads",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapEff",
    "NoNewPrivs",
    "Seccomp",
    "TracerPid",
)


def main(*arguments: str) -> None:
    """Fork a process for each request of the grader, until the grader closes the connection."""
    *folders, fileno = arguments
    os.chdir(folders[0])
    is_first = os.getpid() == 1
    action = signal.SIG_IGN if is_first else signal.SIG_DFL
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, action)  # a submission can send these signals
    _prctl(DUMPABLE, 0)  # a submission can neither trace this process nor read its memory
    _prctl(SUBREAPER, 1)
    from labcourse import session

    prepared = session.prepare()
    gc.collect()
    gc.freeze()
    counted = []  # the folders that have their own file systems in memory
    if is_first and len(folders) > 1:
        counted = folders
    grader = _Grader(socket.socket(fileno=int(fileno)))
    processes = _Processes(is_first, counted)
    known = state(is_first)
    modes = {Path(folder): os.stat(folder).st_mode for folder in folders}
    messages.send(grader.connection, ready=os.getpid())
    with contextlib.suppress(EOFError):  # the grader has closed the connection
        while True:
            request, fds = grader.request()
            processes.start(request, fds, prepared, grader)
            while processes.status is None and processes.reason is None:
                if grader.asks_to_stop(LOOK):
                    processes.reason = "stopped"
                processes.look()
            processes.kill_all()
            clean = all([_emptied(folder, mode) for folder, mode in modes.items()])
            now = state(is_first)
            changed = sorted(name for name in known | now if known.get(name) != now.get(name))
            messages.send(
                grader.connection,
                changed=changed,
                status=processes.status,
                reason=processes.reason,
                memory=processes.peak,
                clean=clean,
            )


class _Grader:
    """Connection to the grader, which asks for processes and stops them.

    Each request comes with two open files, the process's connection and its output.
    """

    FILES = 2

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._inbox = connection, messages.Inbox()
        self._fds: list[int] = []

    def _receive(self) -> None:
        """Read what has arrived. Raise EOFError if the grader has closed the connection."""
        data, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, self.FILES)
        if not data:
            raise EOFError
        self._inbox.add(data)
        self._fds += fds

    def request(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next request, and return it with its files.

        Raise EOFError if the grader has closed the connection.
        """
        message = self._inbox.take()
        while not isinstance(message, dict):
            # None means no message. "stop" was meant for a process that had ended by itself.
            if message is None:
                self._receive()
            message = self._inbox.take()
        fds, self._fds = self._fds[: self.FILES], self._fds[self.FILES :]
        return message, fds

    def asks_to_stop(self, seconds: float) -> bool:
        """Return whether the grader asks to stop, or closes the connection, within this time."""
        if not select.select([self.connection], [], [], seconds)[0]:
            return False
        with contextlib.suppress(EOFError):
            self._receive()
            self._inbox.take()
        return True


class _Processes:
    """All processes of one submission, and the memory that they use beyond this process's memory.

    Args:
        is_first: whether this process is the first in its namespace, so that all others are the
            submission's.
        folders: the folders whose files are in memory.

    Attributes:
        status: the exit status of the first process, once it has ended.
        reason: why the processes have to end: "memory", "processes", "stopped" or None.
        peak: the peak memory in bytes.
    """

    def __init__(self, is_first: bool, folders: list[str]) -> None:
        self._is_first, self._own, self._folders = is_first, os.getpid(), folders
        self._own_memory = _resident(self._own)

    def start(
        self, request: dict[str, Any], fds: list[int], prepared: Any, grader: _Grader
    ) -> None:
        """Fork the first process of a submission."""
        from labcourse import session

        self.status: int | None = None
        self.reason: str | None = None
        self.peak = 0
        self._limits = request
        self._child = os.fork()
        if self._child == 0:
            grader.connection.close()
            session.serve(fds, request, prepared)  # never returns
        for fd in fds:
            os.close(fd)

    def look(self) -> None:
        """Measure the processes, and set `reason` if they exceed a limit."""
        self._reap()
        others = self._others()
        if len(others) > self._limits["processes"]:  # first, because many also use much memory
            self.reason = "processes"
            return
        used = 0
        for pid in others:
            for now, first in zip(_resident(pid), self._own_memory, strict=True):
                used += max(0, now - first)
        used += sum(map(_held_by, self._folders))
        if self._is_first:  # otherwise the sockets of other programs would count
            used += _held_by_sockets(self._limits["socket"])
        self.peak = max(self.peak, used)
        if used > self._limits["memory"]:
            self.reason = "memory"

    def _reap(self) -> None:
        """Collect the exit statuses of all processes that have ended, also of orphans."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                if pid == self._child:
                    self.status = os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)

    def _others(self) -> list[int]:
        """Return the ids of the submission's processes.

        They are all others in this namespace, or without a namespace this process's descendants.
        """
        if self._is_first:
            numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            return [number for number in numbers if number != self._own]
        import psutil

        with contextlib.suppress(psutil.Error):
            return [process.pid for process in psutil.Process().children(recursive=True)]
        return []

    def kill_all(self) -> None:
        """Kill all processes of the submission, and wait until they have ended."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            # -1 kills all processes at once, so that none can fork in the meantime.
            for pid in [-1] if self._is_first else self._others():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not self._others():
                return
            time.sleep(0.001)
        sys.exit("the processes of a submission cannot be ended")


def _resident(pid: int) -> tuple[int, int]:
    """Return the bytes of memory of a process: its own, and those that files or others share.

    Both are 0 if the process has ended.
    """
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except (OSError, ValueError):
        return 0, 0
    return (resident - shared) * PAGE, shared * PAGE


def _held_by(folder: str) -> int:
    """Return the bytes used in a file system whose root is this folder."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _held_by_sockets(each: int) -> int:
    """Return the bytes that the sockets of this sandbox's network may hold.

    This memory belongs to no process. Linux reports what waits in each internet socket. A socket
    between processes may hold `each` bytes.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        found += each * (len(Path("/proc/net/unix").read_text().splitlines()) - 1)
        for name in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                found += sum(int(queue, 16) for queue in line.split()[4].split(":"))
    return found


def state(is_first: bool) -> dict[str, Any]:
    """Return the state of this process that another process could have changed, by name.

    With `is_first`, also return the shared objects that outlive the process that made them.
    """
    found: dict[str, Any] = {}
    for name, number in vars(resource).items():
        if name.startswith("RLIMIT_"):
            found[name] = resource.getrlimit(number)
    found["priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    found["folder"] = os.getcwd()
    if hasattr(os, "sched_getaffinity"):
        found["scheduling"] = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
        found["processors"] = sorted(os.sched_getaffinity(0))
    names = ["oom_score_adj", "timerslack_ns", "coredump_filter", "mountinfo"]
    paths = [f"/proc/self/{name}" for name in names]
    if is_first:
        paths += SHARED_OBJECTS
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_text()
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found |= dict(line.split(":", 1) for line in lines if line.startswith(STATUS))
    return found


def _emptied(folder: Path, mode: int) -> bool:
    """Empty a folder, and set its permissions to `mode`.

    Return False if that fails. Then this sandbox is not used again.
    """
    try:
        os.chmod(folder, mode)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True


def _prctl(option: int, value: int) -> None:
    """Set an option of this process, if the system is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
