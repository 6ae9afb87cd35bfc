"""How long work takes on the GPU, how many cycles keep it busy so long, on which stream it comes next, and races that show in values."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from virtualgpu import RaceWarning

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


def turn_streams() -> None:
    """The streams that an answer makes next are those that it made before: it finds memory that is free for them, and takes none anew.

    PyTorch hands out the same 32 in turn, and the current stream must be one of them. On a real GPU, memory that is taken anew costs the
    host more time than a copy is to hide.
    """
    while torch.cuda.Stream() != torch.cuda.current_stream():
        pass


@contextmanager
def told_by_values(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """A race shows in what the check observes, so nothing is printed of it; and what is under way ends with the block."""
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.simplefilter("ignore", RaceWarning)
        try:
            yield
        finally:
            torch.cuda.synchronize()
