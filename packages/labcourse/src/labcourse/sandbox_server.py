"""The fork server inside a sandbox: it imports what lessons need, once, and forks a copy of itself for each submission.

It never runs a submission's code nor reads what a submission writes. It forks when the grader asks for it, watches how many processes
there are and how much memory they use, kills all of them, and empties the folder they worked in, and the others that nobody else has.
Then it compares itself with what it was at first: a submission that changed it is reported, and the grader starts another server.

    python -m labcourse.sandbox_server FOLDER... FILENO        (the grader starts it; it works in the first folder)
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

LOOK = 0.02  # seconds between looks at the processes
PAGE = os.sysconf("SC_PAGE_SIZE")
DUMPABLE, SUBREAPER = 4, 36  # options of prctl


def main(*arguments: str) -> None:
    *folders, fileno = arguments
    os.chdir(folders[0])
    is_first = os.getpid() == 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if is_first else signal.SIG_DFL)  # a submission can send them
    _prctl(DUMPABLE, 0)  # nor can it trace this process, or read its memory
    _prctl(SUBREAPER, 1)
    from labcourse import session

    prepared = session.prepare()
    gc.collect()
    gc.freeze()
    grader, processes = _Grader(socket.socket(fileno=int(fileno))), _Processes(is_first, folders if is_first and len(folders) > 1 else [])
    known, modes = state(is_first), {Path(folder): os.stat(folder).st_mode for folder in folders}
    messages.send(grader.connection, ready=os.getpid())
    with contextlib.suppress(EOFError):  # the grader has gone
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
            ended = {"status": processes.status, "reason": processes.reason, "memory": processes.peak, "clean": clean}
            messages.send(grader.connection, changed=changed, **ended)


class _Grader:
    """The connection to the grader, which asks for a copy, and to stop it.

    With a request come two files, the copy's connection and its output.
    """

    FILES = 2

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._inbox = connection, messages.Inbox()
        self._fds: list[int] = []

    def _receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, self.FILES)
        if not data:
            raise EOFError
        self._inbox.add(data)
        self._fds += fds

    def request(self) -> tuple[dict[str, Any], list[int]]:
        """The next one. Raises EOFError when the grader has gone."""
        while not isinstance(message := self._inbox.take(), dict):  # "stop", for a copy that had ended by itself
            if message is None:
                self._receive()
        fds, self._fds = self._fds[: self.FILES], self._fds[self.FILES :]
        return message, fds

    def asks_to_stop(self, seconds: float) -> bool:
        """Whether it asks within that time, or goes away."""
        if not select.select([self.connection], [], [], seconds)[0]:
            return False
        with contextlib.suppress(EOFError):
            self._receive()
            self._inbox.take()
        return True


class _Processes:
    """The processes of one submission: how many, and how much more memory each has than this one.

    Attributes:
        status: the exit status of the first one, when it has ended.
        reason: why they have to end: "memory", "processes", "stopped".
        peak: bytes of memory at most.
    """

    def __init__(self, is_first: bool, folders: list[str]) -> None:
        self._is_first, self._own, self._folders = is_first, os.getpid(), folders
        self._own_memory = _resident(self._own)

    def start(self, request: dict[str, Any], fds: list[int], prepared: Any, grader: _Grader) -> None:
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
        self._reap()
        if len(others := self._others()) > self._limits["processes"]:  # before their memory, of which many have too much
            self.reason = "processes"
            return
        used = sum(max(0, now - first) for pid in others for now, first in zip(_resident(pid), self._own_memory, strict=True))
        used += sum(map(_held_by, self._folders))  # in memory, too
        if self._is_first:  # elsewhere the sockets of other programs count
            used += _held_by_sockets(self._limits["socket"])
        self.peak = max(self.peak, used)
        if used > self._limits["memory"]:
            self.reason = "memory"

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:  # whatever was orphaned is this process's child too
                if found[0] == self._child:
                    self.status = os.waitstatus_to_exitcode(found[1])

    def _others(self) -> list[int]:
        """Process numbers of all but this one; of its descendants, where it shares the machine with others."""
        if self._is_first:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != self._own]
        import psutil

        with contextlib.suppress(psutil.Error):
            return [process.pid for process in psutil.Process().children(recursive=True)]
        return []

    def kill_all(self) -> None:
        """Kill everything but this process and wait for it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in [-1] if self._is_first else self._others():  # -1 is all at once: what forks meanwhile is killed too
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not self._others():
                return
            time.sleep(0.001)
        sys.exit("what a submission started cannot be ended")


def _resident(pid: int) -> tuple[int, int]:
    """Bytes of memory that a process has in use: its own, and mapped from files or shared. Both 0 when it has gone."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    except (OSError, ValueError):
        return 0, 0
    return (resident - shared) * PAGE, shared * PAGE


def _held_by(folder: str) -> int:
    """Bytes of the files in a folder that is a disk of its own, in memory."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _held_by_sockets(each: int) -> int:
    """Bytes that the sockets of this sandbox's own network may hold. No process's memory has them.

    Linux tells how much waits in an internet socket. A socket between processes may hold `each`.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        found += each * (len(Path("/proc/net/unix").read_text().splitlines()) - 1)
        for name in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                found += sum(int(queue, 16) for queue in line.split()[4].split(":"))
    return found


def state(is_first: bool) -> dict[str, Any]:
    """What somebody else could have changed of this process, and what outlives whoever made it, by name."""
    numbers = {name: number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
    found: dict[str, Any] = {name: resource.getrlimit(number) for name, number in numbers.items()}
    found["priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    found["folder"] = os.getcwd()
    if hasattr(os, "sched_getaffinity"):
        found["scheduling"] = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
        found["processors"] = sorted(os.sched_getaffinity(0))
    names = ["oom_score_adj", "timerslack_ns", "coredump_filter", "mountinfo"]
    shared = ["/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/keys"] if is_first else []
    for path in [*(f"/proc/self/{name}" for name in names), *shared]:
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_text()
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        kept = ("Umask", "Uid", "Gid", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs", "Seccomp", "TracerPid")
        found |= dict(line.split(":", 1) for line in lines if line.startswith(kept))
    return found


def _emptied(folder: Path, mode: int) -> bool:
    """Remove all that lies in a folder and let everybody use it who could before.

    Return False if something stays. Then this sandbox is not used again.
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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
