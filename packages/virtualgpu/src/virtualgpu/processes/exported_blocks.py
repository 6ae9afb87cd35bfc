"""Blocks of memory that other processes map: reference-counted, and not freed until the last of those processes has released them.

The rules are PyTorch's (torch/csrc/CudaIPCTypes.cpp): each sending has a counter in memory that both processes map. It is 1 until the
receiver releases the block. A block that its owner frees before that is a pending free (PyTorch's `CudaIPCSentDataLimbo`). Pending frees
whose receivers have finished are freed when the next exported block is freed, when the allocator finds no free block, and at
`torch.cuda.ipc_collect()`: a receiver cannot notify the owner.
"""

import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from typing import Any

from virtualgpu.allocator import Block, CachingAllocator
from virtualgpu.processes.shared_file import WORD, SharedFile

COUNTERS = 4096  # in one file
LAST = -100  # exit priority of a multiprocessing finalizer: after it has waited for its children
WARNING = (
    "[W CudaIPCTypes.cpp:16] Producer process has been terminated before all shared CUDA tensors released. See Note [Sharing CUDA tensors]"
)


class Counter:
    """The reference count of one sending, in memory that the receiver decrements."""

    def __init__(self, file: SharedFile, index: int) -> None:
        self.file, self.index = file, index
        file.words[index] = 1

    @property
    def value(self) -> int:
        return self.file.words[self.index]


class ExportedBlock:
    """A block that other processes may map. They reach its values by `handle`, for as long as `keeper` lives."""

    def __init__(self, handle: bytes, keeper: Any) -> None:
        self.handle, self.keeper = handle, keeper
        self.counters: list[Counter] = []

    def in_use(self) -> bool:
        return any(counter.value > 0 for counter in self.counters)


class PendingFrees:
    """A process's counters, and the blocks that it has freed while other processes use them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: list[tuple[CachingAllocator, Block, ExportedBlock]] = []
        self._files: list[SharedFile] = []
        self._spare: list[tuple[SharedFile, int]] = []
        self._sent = 0  # counters whose block is not freed yet
        self._process = 0  # id of their process
        self._at_exit: multiprocessing.util.Finalize | None = None

    def warn_at_exit(self) -> None:
        """From now on the end of the process warns of what others still use. A forked child forgets that finalizer and gets its own."""
        self._register_exit()
        multiprocessing.util.register_after_fork(self, PendingFrees._register_exit)

    def _register_exit(self) -> None:
        self._process = os.getpid()
        self._at_exit = multiprocessing.util.Finalize(None, self._warn, exitpriority=LAST)

    def count(self, exported: ExportedBlock) -> Counter:
        """A counter for one more sending of the block."""
        with self._lock:
            if not self._spare:
                self._files.append(SharedFile(COUNTERS * WORD))
                self._spare = [(self._files[-1], index) for index in reversed(range(COUNTERS))]
            counter = Counter(*self._spare.pop())
            exported.counters.append(counter)
            self._sent += 1
            return counter

    def add(self, allocator: CachingAllocator, block: Block, exported: ExportedBlock) -> None:
        """The owner has freed an exported block."""
        with self._lock:
            self._pending.append((allocator, block, exported))
        self.collect()

    def collect(self) -> bool:
        """Free the blocks that no process uses any more. Returns whether there was one."""
        if not self._pending:
            return False
        with self._lock:
            pending, self._pending = self._pending, []  # a finalizer that runs here may add to it
            done: list[tuple[CachingAllocator, Block, ExportedBlock]] = []
            for entry in pending:
                (self._pending if entry[2].in_use() else done).append(entry)
            for _, _, exported in done:
                self._spare += [(counter.file, counter.index) for counter in exported.counters]
                self._sent -= len(exported.counters)
        for allocator, block, _ in done:
            allocator.free(block)
        return bool(done)

    def close(self) -> None:
        """The machine is taken away: processes that still use its memory keep what they have mapped."""
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._pending, self._files, self._spare, self._sent = [], [], [], 0

    def _warn(self) -> None:
        """Warn that memory which this process has sent ends with it."""
        if self._process != os.getpid():
            return  # a child that was forked
        self.collect()
        if self._sent and getattr(multiprocessing.current_process(), "_start_method", "spawn") == "spawn":  # others end without a word
            print(WARNING, file=sys.stderr, flush=True)


def decrement(address: str, index: int) -> None:
    """The receiver releases the block. If the sender has ended already, there is no counter."""
    try:
        file = SharedFile(address=address)
    except OSError:
        return
    file.words[index] -= 1
    file.close()
