"""The bytes that each process of one machine holds on each GPU: a small table in memory that all of them map.

No process runs for it, and it is gone when the last one has ended (`virtualgpu.processes.shared_file`).
"""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from virtualgpu.processes.shared_file import WORD, SharedFile

ADDRESS = "LABKIT_MACHINE"  # the environment variable that names the table to this process's children
NOT_FOUND = "[Not Found]"  # as NVIDIA's tools say
ROWS = 512  # processes that may share a machine
_HEAD, _USED = 4, 3  # words before the first row: the machine's, and how many rows have been used
_PID, _STARTED, _BYTES = 0, 1, 2  # a row: which process, and its bytes on each GPU


class UsageTable:
    """The table of a machine of `count` GPUs, each a `model` with `total` bytes: a new one, or with an `address` another process's.

    A row is written by one process only. A process is identified by its id and its start time, because ids are reused; the row of one
    that has ended, in whatever way, counts for nothing and goes to the next process that needs a row.

    Raises OSError for an address that cannot be opened, and ValueError where that machine is another one.
    """

    def __init__(self, model: str, count: int, total: int, address: str | None = None) -> None:
        self._width = _BYTES + count
        self._open = True
        self._row: int | None = None  # where this process's begins
        machine = zlib.crc32(model.encode()), count, total
        self._file = SharedFile((_HEAD + ROWS * self._width) * WORD, address)
        words = self._file.words
        if address is None:
            words[0], words[1], words[2] = machine
        elif len(words) < _HEAD or tuple(words[:_USED]) != machine:
            self._file.close()
            raise ValueError(f"the machine at {address} is not one of {count} x {model} with {total} bytes")

    @property
    def address(self) -> str:
        return self._file.address

    def hold(self, gpu: int, nbytes: int) -> None:
        """Record that this process holds `nbytes` bytes on GPU number `gpu`."""
        if not self._open:
            return
        if self._row is None:
            with self.claiming():
                self._row = self._free_row()
                self._file.words[self._row + _STARTED] = started(os.getpid())
                self._file.words[self._row + _PID] = os.getpid()
        self._file.words[self._row + _BYTES + gpu] = nbytes

    def holders(self, gpu: int) -> list[tuple[int, int]]:
        """(process id, bytes) of every living process that holds something on the GPU, by id."""
        if not self._open:
            return []
        words = self._file.words
        rows = range(_HEAD, _HEAD + words[_USED] * self._width, self._width)
        return sorted((words[row + _PID], words[row + _BYTES + gpu]) for row in rows if words[row + _BYTES + gpu] and self._alive(row))

    def others(self, gpu: int) -> int:
        """Bytes that the other living processes hold on the GPU."""
        mine = os.getpid()
        return sum(nbytes for pid, nbytes in self.holders(gpu) if pid != mine)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """In the block no other process claims memory: what was free at its start still is."""
        with self._file.locked() if self._open else nullcontext():
            yield

    def after_fork(self) -> None:
        """Called in a child that was forked: the row is its parent's."""
        self._row = None
        self._file.after_fork()

    def close(self) -> None:
        """This process holds nothing any more."""
        if self._row is not None:
            for word in range(self._row, self._row + self._width):
                self._file.words[word] = 0
        self._row, self._open = None, False
        self._file.close()

    def _alive(self, row: int) -> bool:
        words = self._file.words
        return row == self._row or (words[row + _PID] != 0 and started(words[row + _PID]) == words[row + _STARTED])

    def _free_row(self) -> int:
        words = self._file.words
        for number in range(ROWS):
            row = _HEAD + number * self._width
            if number == words[_USED] or not self._alive(row):
                for word in range(row, row + self._width):
                    words[word] = 0
                words[_USED] = max(words[_USED], number + 1)
                return row
        raise RuntimeError(f"more than {ROWS} processes hold memory of one virtual machine")


def join(model: str, count: int, total: int, address: str | None) -> UsageTable | None:
    """The table at an address; None where there is none any more, or its machine is another one."""
    if address is None:
        return None
    try:
        return UsageTable(model, count, total, address)
    except (OSError, ValueError):
        return None


def started(pid: int) -> int:
    """The start time of a process, on a scale of the system's own; 0 if there is none, or it is a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return 0
    except OSError:
        return _started_elsewhere(pid)
    fields = status[status.rindex(b")") + 2 :].split()  # the state, ..., the start in ticks since the computer's (man 5 proc_pid_stat)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _started_elsewhere(pid: int) -> int:
    """The same without /proc, from psutil; without that, a reused id is taken for the same process."""
    try:
        import psutil
    except ImportError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 0
        except OSError:  # it belongs to another user
            pass
        return 1
    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1e6)
    except psutil.Error:
        return 0


def program(pid: int) -> str:
    """The program that a process runs, as it was called; NOT_FOUND where it may not be read."""
    if pid == os.getpid():
        return sys.executable
    try:
        if os.path.exists("/proc/self/cmdline"):
            return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]) or NOT_FOUND
        import psutil

        return psutil.Process(pid).cmdline()[0]
    except Exception:  # it has ended, or is another user's; or there is neither /proc nor psutil
        return NOT_FOUND
