"""Blocks of memory that other processes map: counted, and kept until the last of those processes has let go.

The rules are PyTorch's (torch/csrc/CudaIPCTypes.cpp): each sending has a counter in memory that both processes see. It stands at 1 until
the receiver lets go. A block that its owner frees before that waits in limbo. What has been let go meanwhile is freed when the next such
block is freed, when the allocator finds no free block, and at `torch.cuda.ipc_collect()`: the receiver cannot tell its owner.
"""

import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from typing import Any

from virtualgpu.allocator import Block, CachingAllocator
from virtualgpu.processes.shared_file import WORD, SharedFile

COUNTERS = 4096  # of one file
LAST = -100  # priority among what multiprocessing does at the end of a process: after it has waited for its children
WARNING = (
    "[W CudaIPCTypes.cpp:16] Producer process has been terminated before all shared CUDA tensors released. See Note [Sharing CUDA tensors]"
)


class Counter:
    """One sending: 1 in memory that the receiver counts down."""

    def __init__(self, file: SharedFile, index: int) -> None:
        self.file, self.index = file, index
        file.words[index] = 1

    @property
    def value(self) -> int:
        return self.file.words[self.index]


class Loan:
    """A block that other processes may map. They reach its values by `handle`, for as long as `keeper` lives."""

    def __init__(self, handle: bytes, keeper: Any) -> None:
        self.handle, self.keeper = handle, keeper
        self.counters: list[Counter] = []

    def in_use(self) -> bool:
        return any(counter.value > 0 for counter in self.counters)


class Limbo:
    """A process's counters, and the blocks that it has freed and others still use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[tuple[CachingAllocator, Block, Loan]] = []
        self._files: list[SharedFile] = []
        self._spare: list[tuple[SharedFile, int]] = []
        self._sent = 0  # counters whose block is not freed yet
        self._process = 0  # whose they are
        self._at_end: multiprocessing.util.Finalize | None = None

    def watch_the_end(self) -> None:
        """From now on the end of the process warns of what others still use. A child that multiprocessing starts forgets it once."""
        self._watch()
        multiprocessing.util.register_after_fork(self, Limbo._watch)

    def _watch(self) -> None:
        self._process = os.getpid()
        self._at_end = multiprocessing.util.Finalize(None, self._warn, exitpriority=LAST)

    def count(self, loan: Loan) -> Counter:
        """One more sending of what is lent."""
        with self._lock:
            if not self._spare:
                self._files.append(SharedFile(COUNTERS * WORD))
                self._spare = [(self._files[-1], index) for index in reversed(range(COUNTERS))]
            counter = Counter(*self._spare.pop())
            loan.counters.append(counter)
            self._sent += 1
            return counter

    def add(self, allocator: CachingAllocator, block: Block, loan: Loan) -> None:
        """The owner of a lent block has freed it."""
        with self._lock:
            self._waiting.append((allocator, block, loan))
        self.collect()

    def collect(self) -> bool:
        """Free the blocks that nobody uses any more. Was there one?"""
        if not self._waiting:
            return False
        with self._lock:
            done, waiting, self._waiting = [], self._waiting, []  # a finalizer that runs here may add to it
            for entry in waiting:
                (self._waiting if entry[2].in_use() else done).append(entry)
            for _, _, loan in done:
                self._spare += [(counter.file, counter.index) for counter in loan.counters]
                self._sent -= len(loan.counters)
        for allocator, block, _ in done:
            allocator.free(block)
        return bool(done)

    def close(self) -> None:
        """The machine is taken away: who still uses its memory keeps what he has mapped."""
        if self._at_end is not None:
            self._at_end.cancel()
        self._waiting, self._files, self._spare, self._sent = [], [], [], 0

    def _warn(self) -> None:
        """The process ends. What it has sent and not freed, or others still use, ends with it."""
        if self._process != os.getpid():
            return  # a child that was forked
        self.collect()
        if self._sent and getattr(multiprocessing.current_process(), "_start_method", "spawn") == "spawn":  # the others end without a word
            print(WARNING, file=sys.stderr, flush=True)


def count_down(address: str, index: int) -> None:
    """The receiver lets go. If the sender has ended already, nobody counts any more."""
    try:
        file = SharedFile(address=address)
    except OSError:
        return
    file.words[index] -= 1
    file.close()
