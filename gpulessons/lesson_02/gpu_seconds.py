"""Measure seconds on the GPU, keep it busy, choose the next streams, and silence race warnings."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from virtualgpu import RaceWarning

PROBE = 10_000_000  # clock cycles that are timed


def cycles_in(seconds: float) -> int:
    """Return the cycles for which `torch.cuda._sleep` keeps this GPU busy for `seconds`."""
    return round(seconds * PROBE / gpu_seconds(lambda: torch.cuda._sleep(PROBE)))


def gpu_seconds(work: Callable[[], Any]) -> float:
    """Run the work between two events, and return the GPU's seconds between them."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def turn_streams() -> None:
    """Make PyTorch return the streams that an answer used before, so it takes no new memory.

    PyTorch returns the same 32 streams in turn, and the current stream must be one of them. On a
    real GPU, allocating new memory takes the host longer than a copy.
    """
    while torch.cuda.Stream() != torch.cuda.current_stream():
        pass


@contextmanager
def without_race_warnings(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Use a stream in the block, print no warnings of races, and wait for all work at the end.

    A check sees a race in the values that it observes.
    """
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.simplefilter("ignore", RaceWarning)
        try:
            yield
        finally:
            torch.cuda.synchronize()
