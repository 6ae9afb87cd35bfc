"""Memory blocks that other processes map, with reference counts.

A block is not freed until the last of those processes has released it. The rules are PyTorch's
(torch/csrc/CudaIPCTypes.cpp). Each sending has a counter in memory that both processes map. The
counter is 1 until the receiver releases the block. A block that its owner frees earlier is a
pending free (PyTorch's `CudaIPCSentDataLimbo`).

A receiver cannot notify the owner. Pending frees whose receivers have finished are therefore freed
when the next exported block is freed, when the allocator finds no free block, and in
`torch.cuda.ipc_collect()`.
"""

import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from typing import Any

from virtualgpu.allocator import Block, CachingAllocator
from virtualgpu.processes.shared_file import WORD, SharedFile

COUNTERS = 4096  # per file
LAST = -100  # exit priority of a finalizer that runs after multiprocessing has waited for children
WARNING = (
    "[W CudaIPCTypes.cpp:16] Producer process has been terminated before all shared CUDA tensors "
    "released. See Note [Sharing CUDA tensors]"
)


class Counter:
    """The reference count for one receiver of a block, in memory that the receiver decrements."""

    def __init__(self, file: SharedFile, index: int) -> None:
        self.file, self.index = file, index
        file.words[index] = 1

    @property
    def value(self) -> int:
        """The number of processes that use the block through this counter: 1 or 0."""
        return self.file.words[self.index]


class ExportedBlock:
    """A memory block that other processes can map.

    `handle` leads to its values as long as the object `keeper` lives.
    """

    def __init__(self, handle: bytes, keeper: Any) -> None:
        self.handle, self.keeper = handle, keeper
        self.counters: list[Counter] = []

    def in_use(self) -> bool:
        """Return whether another process uses the block."""
        return any(counter.value > 0 for counter in self.counters)


class PendingFrees:
    """The counters of a process, and the blocks that it has freed while others use them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: list[tuple[CachingAllocator, Block, ExportedBlock]] = []
        self._files: list[SharedFile] = []
        self._spare: list[tuple[SharedFile, int]] = []
        self._sent = 0  # the number of counters whose block is not freed yet
        self._process = 0  # the id of the process that owns them
        self._at_exit: multiprocessing.util.Finalize | None = None

    def warn_at_exit(self) -> None:
        """Warn when the process ends about exported memory that other processes still use.

        A forked child forgets the finalizer and gets its own.
        """
        self._register_exit()
        multiprocessing.util.register_after_fork(self, PendingFrees._register_exit)

    def _register_exit(self) -> None:
        """Register the warning that this process gives when it ends."""
        self._process = os.getpid()
        self._at_exit = multiprocessing.util.Finalize(None, self._warn, exitpriority=LAST)

    def count(self, exported: ExportedBlock) -> Counter:
        """Return a counter for one more process to which the exported block is sent."""
        with self._lock:
            if not self._spare:
                self._files.append(SharedFile(COUNTERS * WORD))
                self._spare = [(self._files[-1], index) for index in reversed(range(COUNTERS))]
            counter = Counter(*self._spare.pop())
            exported.counters.append(counter)
            self._sent += 1
            return counter

    def add(self, allocator: CachingAllocator, block: Block, exported: ExportedBlock) -> None:
        """Note that this process, the owner, has freed an exported block.

        `allocator` gets the block back when no other process uses it any more.
        """
        with self._lock:
            self._pending.append((allocator, block, exported))
        self.collect()

    def collect(self) -> bool:
        """Free the exported blocks that no process uses any more.

        Returns whether there were any.
        """
        if not self._pending:
            return False
        with self._lock:
            pending, self._pending = self._pending, []  # a finalizer may add to it in the meantime
            done: list[tuple[CachingAllocator, Block, ExportedBlock]] = []
            for entry in pending:
                if entry[2].in_use():
                    self._pending.append(entry)
                else:
                    done.append(entry)
            for _, _, exported in done:
                self._spare += [(counter.file, counter.index) for counter in exported.counters]
                self._sent -= len(exported.counters)
        for allocator, block, _ in done:
            allocator.free(block)
        return bool(done)

    def close(self) -> None:
        """Forget all exported blocks, because the machine is taken away.

        Other processes keep the memory that they have mapped.
        """
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._pending, self._files, self._spare, self._sent = [], [], [], 0

    def _warn(self) -> None:
        """Warn if other processes use exported memory that ends with this process."""
        if self._process != os.getpid():
            return  # in a forked child
        self.collect()
        # Only the main process and spawned ones print the warning, as on CUDA.
        start_method = getattr(multiprocessing.current_process(), "_start_method", "spawn")
        if self._sent and start_method == "spawn":
            print(WARNING, file=sys.stderr, flush=True)


def decrement(address: str, index: int) -> None:
    """Tell the sender of a block that this process does not use it any more.

    The counter of the block is at `index` of the file at `address`. If the sender has ended, there
    is no counter any more, and nothing is done.
    """
    try:
        file = SharedFile(address=address)
    except OSError:
        return
    file.words[index] -= 1
    file.close()
