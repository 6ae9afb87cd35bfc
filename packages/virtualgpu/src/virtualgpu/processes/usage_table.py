"""A table of the bytes that each process of one machine holds on each GPU.

The table is in memory that all processes map. It needs no process of its own, and it is gone when
the last process has ended (`virtualgpu.processes.shared_file`).
"""

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from virtualgpu.processes.shared_file import WORD, SharedFile

ADDRESS = "LABKIT_MACHINE"  # the variable that leads this process's children to the table
NOT_FOUND = "[Not Found]"  # as NVIDIA's tools print it
ROWS = 512  # the most processes that can share a machine
_HEAD, _USED = 4, 3  # words before the first row, and the index of the number of used rows
_PID, _STARTED, _BYTES = 0, 1, 2  # in a row: process id, start time, and bytes on each GPU


class UsageTable:
    """The table of a machine with `count` GPUs of a model, each with `total` bytes.

    Without an `address` the table is new. Only one process writes to a row. A process is identified
    by its id and its start time, because ids are reused. The row of a process that has ended, in
    whatever way, counts as empty and is given to the next process.

    Raises OSError for an address that cannot be opened, and ValueError if its machine differs.
    """

    def __init__(self, model: str, count: int, total: int, address: str | None = None) -> None:
        self._width = _BYTES + count
        self._open = True
        self._row: int | None = None  # the index of this process's first word
        machine = zlib.crc32(model.encode()), count, total
        self._file = SharedFile((_HEAD + ROWS * self._width) * WORD, address)
        words = self._file.words
        if address is None:
            words[0], words[1], words[2] = machine
        elif len(words) < _HEAD or tuple(words[:_USED]) != machine:
            self._file.close()
            raise ValueError(
                f"expected a machine of {count} x {model} with {total} bytes at {address}, got "
                "another machine"
            )

    @property
    def address(self) -> str:
        """The address with which another process opens the table."""
        return self._file.address

    def hold(self, gpu: int, nbytes: int) -> None:
        """Record in this process's row that it holds `nbytes` bytes on GPU number `gpu`."""
        if not self._open:
            return
        if self._row is None:
            with self.claiming():
                self._row = self._free_row()
                self._file.words[self._row + _STARTED] = started(os.getpid())
                self._file.words[self._row + _PID] = os.getpid()
        self._file.words[self._row + _BYTES + gpu] = nbytes

    def holders(self, gpu: int) -> list[tuple[int, int]]:
        """Return (process id, bytes) of every living process with memory on GPU number `gpu`.

        They are sorted by process id.
        """
        if not self._open:
            return []
        words = self._file.words
        rows = range(_HEAD, _HEAD + words[_USED] * self._width, self._width)
        found = []
        for row in rows:
            nbytes = words[row + _BYTES + gpu]
            if nbytes and self._alive(row):
                found.append((words[row + _PID], nbytes))
        return sorted(found)

    def others(self, gpu: int) -> int:
        """Return the bytes that other living processes hold on GPU number `gpu`."""
        mine = os.getpid()
        return sum(nbytes for pid, nbytes in self.holders(gpu) if pid != mine)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Claim memory in the block, while other processes wait to claim theirs."""
        lock = self._file.locked() if self._open else nullcontext()
        with lock:
            yield

    def after_fork(self) -> None:
        """Forget the table's row in a forked child, because the row belongs to its parent."""
        self._row = None
        self._file.after_fork()

    def close(self) -> None:
        """Clear this process's row and close the table."""
        if self._row is not None:
            for word in range(self._row, self._row + self._width):
                self._file.words[word] = 0
        self._row, self._open = None, False
        self._file.close()

    def _alive(self, row: int) -> bool:
        """Return whether the process to which a row of the table belongs is alive.

        `row` is the position of the row's first word in the table.
        """
        if row == self._row:
            return True
        pid, start = self._file.words[row + _PID], self._file.words[row + _STARTED]
        return pid != 0 and started(pid) == start

    def _free_row(self) -> int:
        """Clear a row of the table that no living process uses, and return its position.

        Raises RuntimeError if there is none.
        """
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
    """Open the usage table at an address, for a machine with these properties.

    `total` is the bytes of each of the `count` GPUs. Returns None if the table is gone or belongs
    to another machine.
    """
    if address is None:
        return None
    try:
        return UsageTable(model, count, total, address)
    except (OSError, ValueError):
        return None


def started(pid: int) -> int:
    """Return the start time of a process in the system's units, or 0 if it is dead or a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return 0
    except OSError:
        return _started_elsewhere(pid)
    # The fields begin with the state. Number 19 is the start in ticks since the computer's start
    # (man 5 proc_pid_stat).
    fields = status[status.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return 0
    return int(fields[19])


def _started_elsewhere(pid: int) -> int:
    """Return the start time of a process on a system without /proc, as psutil reports it.

    Without psutil every living process has the start time 1, so a reused id is not noticed.
    """
    try:
        import psutil
    except ImportError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return 0
        except OSError:  # the process belongs to another user
            pass
        return 1
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return 0
        return int(process.create_time() * 1e6)
    except psutil.Error:
        return 0


def program(pid: int) -> str:
    """Return the program that a process runs, or NOT_FOUND if it cannot be read."""
    if pid == os.getpid():
        return sys.executable
    try:
        if os.path.exists("/proc/self/cmdline"):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            return os.fsdecode(command.partition(b"\0")[0]) or NOT_FOUND
        import psutil

        return psutil.Process(pid).cmdline()[0]
    except Exception:  # it has ended or is another user's, or there is neither /proc nor psutil
        return NOT_FOUND
