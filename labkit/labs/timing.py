"""Measure the time of GPU work, with the host's clock or with two CUDA events."""

from collections.abc import Callable
from statistics import median

import torch

from labkit import machine


def synchronize(gpus: int) -> None:
    """Wait for all work on the first `gpus` GPUs."""
    for index in range(gpus):
        torch.cuda.synchronize(index)


def host_seconds(work: Callable[[], object], gpus: int | None = None) -> float:
    """Return the seconds from the call of `work` until the GPUs have finished, by the host's clock.

    It waits for the first `gpus` GPUs, or for the current GPU if `gpus` is None.
    """

    def wait() -> None:
        if gpus is None:
            torch.cuda.synchronize()
        else:
            synchronize(gpus)

    wait()
    start = machine.host_time()
    work()
    wait()
    return machine.host_time() - start


def event_seconds(work: Callable[[], object], repeats: int, uncounted: int = 1) -> float:
    """Return the median of the seconds between two CUDA events around `work`.

    Args:
        work: a function that launches GPU work on the current stream.
        repeats: how often to measure.
        uncounted: how often to run `work` before that, without counting the time.
    """
    times = []
    for _ in range(uncounted + repeats):
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[uncounted:])
