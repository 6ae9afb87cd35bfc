"""The memory of a process and of all that it starts, looked at while a block runs. Linux."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

INTERVAL = 0.05  # seconds between two looks


def bytes_of_tree(pid: int) -> int:
    """Return the bytes in memory of a process and all its descendants.

    A page that several processes share is counted once, because the kernel reports each one's share
    of it (PSS).
    """
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):  # it has ended
                total += _bytes(each.pid)
    return total


def _bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0  # it has ended and waits for its parent


@dataclass
class Watched:
    """The highest number of bytes that was seen."""

    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def _look(self, pid: int) -> None:
        while not self._ended.wait(INTERVAL):
            self.peak = max(self.peak, bytes_of_tree(pid))


@contextmanager
def watched(pid: int) -> Iterator[Watched]:
    """Sample the memory of a process and its children every 50 ms, until the block ends."""
    looking = Watched(bytes_of_tree(pid))
    thread = threading.Thread(target=looking._look, args=(pid,), name="process memory")
    thread.start()
    try:
        yield looking
    finally:
        looking._ended.set()
        thread.join()
