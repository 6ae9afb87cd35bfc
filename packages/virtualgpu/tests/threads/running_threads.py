"""A machine for each test of threads, threads that run to their end, and work for them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import virtualgpu
from virtualgpu import VirtualGPUs


@contextmanager
def fresh(gpus: int = 1) -> Iterator[VirtualGPUs]:
    """Use a new virtual machine in the block. A machine that was in use is taken away."""
    virtualgpu.use(None)
    with virtualgpu.use(gpus=gpus, like="H200") as machine:
        yield machine


def run_threads(*works: Callable[[], Any], names: str | None = None) -> list[Any]:
    """Run each function in a thread, and return their results.

    `names` has one letter for each thread.
    """
    results: list[Any] = [None] * len(works)

    def keep(index: int, work: Callable[[], Any]) -> None:
        results[index] = work()

    threads = [
        threading.Thread(target=keep, args=(index, work), name=names and names[index], daemon=True)
        for index, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def launch(times: int = 3) -> float:
    return sum(torch.ones(2, device="cuda").sum().item() for _ in range(times))
