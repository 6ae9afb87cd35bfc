"""How long work takes on the GPU, and how many cycles keep it busy so long."""

from collections.abc import Callable
from typing import Any

import torch

PROBE = 10_000_000  # cycles, to learn how many there are in a second


def cycles_in(seconds: float) -> int:
    """How many cycles `torch.cuda._sleep` needs for so many seconds on this GPU."""
    return round(seconds * PROBE / gpu_seconds(lambda: torch.cuda._sleep(PROBE)))


def gpu_seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
