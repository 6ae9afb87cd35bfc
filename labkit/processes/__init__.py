"""Child processes for experiments and checks. They start quickly and end with their block.

A server process imports torch and what virtual GPUs need. Each child is a copy of the server and
has not used a GPU yet. Python's multiprocessing runs the server, which ends with this process.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 60.0  # seconds for a child to end when it has nothing left to do
PRELOADED = ["labkit.processes.preload", "virtualgpu.preload"]  # what the server imports


def context() -> BaseContext:
    """Return the context that makes children, queues and pipes."""
    import torch.multiprocessing  # not every process that imports this module needs torch

    chosen = torch.multiprocessing.get_context("forkserver")
    # This has no effect if a server is already running.
    chosen.set_forkserver_preload(PRELOADED)
    return chosen


@contextmanager
def children(
    function: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[BaseProcess]]:
    """Start a child for each tuple of arguments, and wait for the children at the end of the block.

    They are killed if the block raises an exception, or if they run for more than PATIENCE seconds
    after it.

    Args:
        function: the function that each child calls. A child imports it by its name.
        arguments: the arguments of each call.
    """
    started: list[BaseProcess] = []
    try:
        for each in arguments:
            # Every kind of context has `Process`, but their base class does not declare it.
            process = context().Process(  # type: ignore[attr-defined]
                target=function, args=each, daemon=True
            )
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
    """Start the server, and wait until it has imported torch, so that no later child has to wait.

    This takes long on a slow machine.
    """
    with children(_nothing, [()]):
        pass


def _nothing() -> None:
    """Do nothing. This is the function of the first child, which only starts the server."""
