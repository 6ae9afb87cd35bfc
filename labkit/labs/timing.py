"""How labs take times: by the host's clock, until the GPUs are done, and by two events around work on a stream."""

from collections.abc import Callable
from statistics import median

import torch

from labkit import machine


def synchronize(gpus: int) -> None:
    """Wait for all work on the first so many GPUs."""
    for index in range(gpus):
        torch.cuda.synchronize(index)


def host_seconds(work: Callable[[], object], gpus: int | None = None) -> float:
    """Seconds from the launch of `work` until the first so many GPUs, or the current one, have done it."""
    wait = torch.cuda.synchronize if gpus is None else lambda: synchronize(gpus)
    wait()
    start = machine.host_time()
    work()
    wait()
    return machine.host_time() - start


def event_seconds(work: Callable[[], object], repeats: int, uncounted: int = 1) -> float:
    """The median, in seconds, between two CUDA events around `work`, which runs before that so many times that do not count."""
    times = []
    for _ in range(uncounted + repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[uncounted:])
