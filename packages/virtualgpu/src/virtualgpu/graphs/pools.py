"""Private pools of memory: `torch.cuda.MemPool`, and replacements of C++ functions for pools."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.cuda.memory

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine

PoolId = tuple[int, int]
_numbers = itertools.count(1)


def new_number() -> int:
    """Return a number that no other pool or graph has.

    The id of a pool that the program created is (0, number), and that of a graph is (number, 0).
    """
    return next(_numbers)


class MemPool:
    """A private memory pool of the current GPU.

    A thread's requests use the pool in the block of `torch.cuda.use_mem_pool`.
    """

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None:
            raise unsupported("torch.cuda.MemPool with an allocator")
        self._allocator = hardware.machine().current.allocator
        self._id = (0, new_number())
        self._allocator.make_pool(self._id, use_on_oom, not no_split)

    @property
    def id(self) -> PoolId:
        """The id of the pool, a pair of numbers."""
        return self._id

    @property
    def device(self) -> int:
        """The index of the GPU to which the pool belongs."""
        return self._allocator.index

    def use_count(self) -> int:
        """Return the number of users of the pool, including this object."""
        return self._allocator.pool_users(self._id)

    def snapshot(self, include_traces: bool = True) -> list[dict]:
        """Return the pool's segments, as `torch.cuda.memory_snapshot` does.

        `include_traces` has no effect.
        """
        return self._allocator.segments(self._id)

    def __del__(self) -> None:
        if "_id" in self.__dict__:
            self._allocator.release_pool(self._id)
            self._allocator.empty_pool(self._id)


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Use `pool` for the memory requests of the calling thread on a GPU in the block.

    `device` names the GPU. The default is the current one.
    """
    gpu = hardware.machine().gpu(device)
    assert gpu is not None
    gpu.allocator.begin_pool(pool.id, _of_thread())
    try:
        yield
    finally:
        gpu.allocator.end_pool(pool.id)
        gpu.allocator.release_pool(pool.id)


def _of_thread() -> Callable[[int], bool]:
    """Return a function that says whether a memory request comes from the thread that calls now.

    The function takes a stream and ignores it.
    """
    caller = threading.get_ident()
    return lambda stream: threading.get_ident() == caller


def answers(machine: Machine) -> dict[str, Any]:
    """Return the replacements of C++ functions for pools, by name."""

    def begin_for_thread(index: int, pool_id: PoolId) -> None:
        machine.gpus[index].allocator.begin_pool(pool_id, _of_thread())

    def begin_for_stream(index: int, pool_id: PoolId) -> None:
        gpu = machine.gpus[index]
        gpu.allocator.begin_pool(pool_id, gpu.stream.stream_id.__eq__)

    def end(index: int, pool_id: PoolId) -> None:
        machine.gpus[index].allocator.end_pool(pool_id)

    def has_alone(index: int, pool_id: PoolId, addresses: set[int]) -> bool:
        """Return whether `addresses` are those of all blocks in use in a pool of a GPU."""
        used = set()
        for segment in machine.gpus[index].allocator.segments(pool_id):
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    used.add(block["address"])
        return used == addresses

    def release(index: int, pool_id: PoolId) -> None:
        machine.gpus[index].allocator.release_pool(pool_id)

    return {
        "_cuda_beginAllocateToPool": begin_for_stream,
        "_cuda_beginAllocateCurrentStreamToPool": begin_for_stream,
        "_cuda_beginAllocateCurrentThreadToPool": begin_for_thread,
        "_cuda_endAllocateToPool": end,
        "_cuda_endAllocateCurrentStreamToPool": end,
        "_cuda_releasePool": release,
        "_cuda_checkPoolLiveAllocations": has_alone,
    }


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch._C, answers(machine)
    for module in (torch.cuda, torch.cuda.memory):
        yield module, {"MemPool": MemPool, "use_mem_pool": use_mem_pool}
