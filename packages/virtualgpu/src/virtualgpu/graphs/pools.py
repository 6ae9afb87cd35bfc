"""Private pools of memory: `torch.cuda.MemPool`, and what torch.cuda asks of C++ to send requests to one."""

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
    """Of a pool or a graph. A pool that the program asked for has it in the second place, a graph's own in the first."""
    return next(_numbers)


class MemPool:
    """A pool of the current GPU, into which `torch.cuda.use_mem_pool` sends what a thread asks for."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if allocator is not None:
            raise unsupported("torch.cuda.MemPool with an allocator")
        self._allocator = hardware.machine().current.allocator
        self._id = (0, new_number())
        self._allocator.make_pool(self._id, use_on_oom, not no_split)

    @property
    def id(self) -> PoolId:
        return self._id

    @property
    def device(self) -> int:
        return self._allocator.index

    def use_count(self) -> int:
        """How many use the pool now, this object among them."""
        return self._allocator.pool_users(self._id)

    def snapshot(self, include_traces: bool = True) -> list[dict]:
        return self._allocator.segments(self._id)

    def __del__(self) -> None:
        if "_id" in self.__dict__:
            self._allocator.release_pool(self._id)
            self._allocator.empty_pool(self._id)


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """In the block what the calling thread asks for on the device comes from the pool."""
    gpu = hardware.machine().gpu(device)
    assert gpu is not None
    gpu.allocator.begin_pool(pool.id, _of_thread())
    try:
        yield
    finally:
        gpu.allocator.end_pool(pool.id)
        gpu.allocator.release_pool(pool.id)


def _of_thread() -> Callable[[int], bool]:
    caller = threading.get_ident()
    return lambda stream: threading.get_ident() == caller


def answers(machine: Machine) -> dict[str, Any]:
    """What torch.cuda asks of C++."""

    def begin_for_thread(index: int, pool_id: PoolId) -> None:
        machine.gpus[index].allocator.begin_pool(pool_id, _of_thread())

    def begin_for_stream(index: int, pool_id: PoolId) -> None:
        gpu = machine.gpus[index]
        gpu.allocator.begin_pool(pool_id, gpu.stream.stream_id.__eq__)

    def end(index: int, pool_id: PoolId) -> None:
        machine.gpus[index].allocator.end_pool(pool_id)

    def has_alone(index: int, pool_id: PoolId, addresses: set[int]) -> bool:
        """Are these the addresses of all blocks in use in the pool?"""
        blocks = [block for segment in machine.gpus[index].allocator.segments(pool_id) for block in segment["blocks"]]
        return {block["address"] for block in blocks if block["state"] == "active_allocated"} == addresses

    return {
        "_cuda_beginAllocateToPool": begin_for_stream,
        "_cuda_beginAllocateCurrentStreamToPool": begin_for_stream,
        "_cuda_beginAllocateCurrentThreadToPool": begin_for_thread,
        "_cuda_endAllocateToPool": end,
        "_cuda_endAllocateCurrentStreamToPool": end,
        "_cuda_releasePool": lambda index, pool_id: machine.gpus[index].allocator.release_pool(pool_id),
        "_cuda_checkPoolLiveAllocations": has_alone,
    }


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch._C, answers(machine)
    for module in (torch.cuda, torch.cuda.memory):
        yield module, {"MemPool": MemPool, "use_mem_pool": use_mem_pool}
