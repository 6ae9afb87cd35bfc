"""How fast this computer is beside the one that the virtual GPUs' times take for their host."""

import time
from collections.abc import Callable
from statistics import median

import torch

from virtualgpu import profiles

LOOP, ROUNDS = 1000, 7
RECORDED = profiles.load("H200")


def measure_host(clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times as long it takes for a small operator as the recorded H200s' host: for its launch, where there is a CUDA GPU."""
    if torch.cuda.is_available():  # as benchmarks/timing/micro.py measured launch_us_host
        return _seconds(lambda x: x.add_(1), torch.zeros(1, device="cuda"), torch.cuda.synchronize, clock) / RECORDED.launch_seconds
    return _seconds(lambda x: x + x, torch.zeros(16, 16), lambda: None, clock) / RECORDED.cpu_launch_seconds  # as fidelity/host_costs.py


def _seconds(work: Callable[[torch.Tensor], object], x: torch.Tensor, wait: Callable[[], None], clock: Callable[[], float]) -> float:
    """Host time of one piece of work, a median: the first round warms up."""
    found = []
    for _ in range(ROUNDS + 1):
        wait()
        start = clock()
        for _ in range(LOOP):
            work(x)
        found.append((clock() - start) / LOOP)
    wait()
    return median(found[1:])
