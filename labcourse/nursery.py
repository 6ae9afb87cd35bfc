"""The first process behind a wall: it imports what lessons need, once, and makes a copy of itself for each submission.

It never runs a submission's code nor reads what a submission writes. It starts a copy when the grader says so, watches how many processes
and how much memory there are, ends all of them, and empties the folder they worked in, and the others that nobody else has.

    python -m labcourse.nursery FILENO ROOM [FOLDER...]        (the grader starts it)
"""

import contextlib
import ctypes
import gc
import os
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


def main(fileno: str, room: str, *others: str) -> None:
    os.chdir(room)
    line = socket.socket(fileno=int(fileno))
    alone = os.getpid() == 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if alone else signal.SIG_DFL)  # a submission can send them
    _prctl(DUMPABLE, 0)  # nor can it trace this process, or read its memory
    _prctl(SUBREAPER, 1)
    from labcourse import session

    prepared = session.prepare()
    gc.collect()
    gc.freeze()
    line.sendall(messages.packed({"ready": os.getpid()}))
    grader, watch = Grader(line), Watch(alone)
    while True:
        try:
            job, fds = grader.job()
        except EOFError:
            return
        _raise_one(grader, fds, job, watch, prepared)
        watch.end_all()
        clean = all([_emptied(Path(folder)) for folder in (room, *others)])
        line.sendall(messages.packed({"status": watch.status, "why": watch.why, "memory": watch.peak, "clean": clean}))


class Grader:
    """What the grader says: jobs, and that one is to be stopped. With a job come two descriptors for the copy: its line, its output."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self._inbox, self._fds = line, messages.Inbox(), []

    def _hear(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.line, 1 << 16, 2)
        if not data:
            raise EOFError
        self._inbox.add(data)
        self._fds += fds

    def job(self) -> tuple[dict[str, Any], list[int]]:
        """The next one. Raises EOFError when the grader has gone."""
        while not isinstance(message := self._inbox.take(), dict):  # a word to stop what had ended by itself
            if message is None:
                self._hear()
        fds, self._fds = self._fds[:2], self._fds[2:]
        return message, fds

    def says_stop(self, seconds: float) -> bool:
        """Within that time, by a word or by going away."""
        if not select.select([self.line], [], [], seconds)[0]:
            return False
        with contextlib.suppress(EOFError):
            self._hear()
            self._inbox.take()
        return True


def _raise_one(grader: Grader, fds: list[int], job: dict[str, Any], watch: "Watch", prepared: Any) -> None:
    """Start a copy, and wait until it has ended or must."""
    from labcourse import session

    child = os.fork()
    if child == 0:
        grader.line.close()
        session.serve(*fds, job, prepared)  # never returns
    for fd in fds:
        os.close(fd)
    watch.start(child, job["memory"], job["processes"])
    while watch.status is None and watch.why is None:
        if grader.says_stop(LOOK):
            watch.why = "stopped"
        watch.look()


class Watch:
    """The processes of one submission: how many, and how much more memory each has than this one."""

    def __init__(self, alone: bool) -> None:
        self._alone, self._own = alone, os.getpid()
        self._first = _resident(self._own)

    def start(self, child: int, memory: int, processes: int) -> None:
        self._child, self._memory, self._processes = child, memory, processes
        self.status: int | None = None
        self.why: str | None = None
        self.peak = 0

    def look(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:  # whatever was orphaned is this process's child too
                if found[0] == self._child:
                    self.status = os.waitstatus_to_exitcode(found[1])
        there = self._others()
        held = sum(max(0, now - first) for pid in there for now, first in zip(_resident(pid), self._first, strict=True))
        self.peak = max(self.peak, held)
        if held > self._memory:
            self.why = "memory"
        elif len(there) > self._processes:
            self.why = "processes"

    def _others(self) -> list[int]:
        """Process numbers of all but this one; of its descendants, where it shares the machine with others."""
        if self._alone:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != self._own]
        import psutil

        with contextlib.suppress(psutil.Error):
            return [process.pid for process in psutil.Process().children(recursive=True)]
        return []

    def end_all(self) -> None:
        """Kill everything but this process and wait for it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._alone:
                    os.kill(-1, signal.SIGKILL)  # all at once: what forks meanwhile is killed too
            for pid in [] if self._alone else self._others():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    if found[0] == self._child:
                        self.status = os.waitstatus_to_exitcode(found[1])
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


def _emptied(folder: Path) -> bool:
    """Remove all that lies in a folder. False if something stays, so that this sandbox is not used again."""
    try:
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
