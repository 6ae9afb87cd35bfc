"""Child processes for experiments and checks: soon ready, and gone with the block that started them, however it ends.

A server process imports torch once, and what virtual GPUs need; each child is a copy of it that has not touched a GPU. The server, which
Python's multiprocessing runs, ends with this process.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 60.0  # seconds in which a child ends that has nothing left to do


def context() -> BaseContext:
    """What children, queues and pipes are made with: `forkserver`, or `spawn` on a system that cannot fork."""
    import torch.multiprocessing  # here, for not every process that uses this package needs torch

    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return torch.multiprocessing.get_context("spawn")
    chosen = torch.multiprocessing.get_context("forkserver")
    preload = ["labkit.processes.preload", "virtualgpu.preload"]
    chosen.set_forkserver_preload(preload)  # heeded by a server that is not yet running
    return chosen


@contextmanager
def children(
    function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[BaseProcess]]:
    """One child for each tuple of `arguments`, in which `function`, importable by its name, runs with them.

    The block ends when all have ended; they are killed where it ends in an exception, or `PATIENCE` runs out.
    """
    started: list[BaseProcess] = []
    try:
        for each in arguments:
            process = context().Process(target=function, args=each, daemon=True)  # type: ignore[attr-defined]  # of each kind of context
            process.start()
            started.append(process)
        yield started
        for process in started:
            process.join(PATIENCE)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()


@cache
def start_server() -> None:
    """Start the server, and wait until it has imported torch, so that no later child has to; on a slow machine that takes long."""
    with children(_nothing, [()]):
        pass


def _nothing() -> None:
    """What the first child does."""
