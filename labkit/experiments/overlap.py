"""Copies to the GPU beside kernels: what pinned memory hides, and what a stream of its own hides."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count

MIB = 1 << 20
ALONE = ("copies alone", "kernels alone")
TOGETHER = ("pageable memory", "pinned memory", "pinned, on a stream of its own")
WAYS = ALONE + TOGETHER
LARGEST_SIZE, LARGEST_WIDTH = 1 << 28, 1 << 14
COLUMNS = {"way": "", "seconds": "seconds"}


def copy_overlap(ways: Sequence[str] = WAYS, batches: int = 8, size: int = 32 * MIB, width: int = 2048, repeats: int = 3) -> Run:
    """Seconds for so many batches to be copied to the current GPU, each of them worked on there; a row for each of the `ways`.

    A batch has `size` bytes; the work on one is a product of two float32 matrices, `width` wide. "copies alone" are pinned ones; in the
    last way batch k + 1 is copied on a stream of its own while the GPU works on batch k. The median of `repeats`, after one that does
    not count. Virtual GPUs compute no values meanwhile.

    Raises ValueError for what is not one of the ways, sizes outside 1 byte to 256 MiB and widths outside 1 to 16384, RuntimeError when
    no GPU is in use.
    """
    if not ways or not set(ways) <= set(WAYS):
        raise ValueError(f"ways={ways!r}: choose from {', '.join(map(repr, WAYS))}")
    for name, value, largest in (("size", size, LARGEST_SIZE), ("width", width, LARGEST_WIDTH)):
        if checked_count(name, value) > largest:
            raise ValueError(f"{name}={value}: give a whole number up to {largest}")
    chosen = [way for way in WAYS if way in ways]
    batches, repeats = checked_count("batches", batches), checked_count("repeats", repeats)
    parameters = {"ways": chosen, "batches": batches, "size": size, "width": width, "repeats": repeats}
    return Run("copy_overlap", parameters, COLUMNS, badge(), len(chosen), _points(chosen, batches, size, width, repeats))


def hidden_share(result: Result, way: str = TOGETHER[-1]) -> float | None:
    """The share of the shorter of copies and kernels that went on while the other did: 0 to 1; None where something was not measured."""
    seconds = dict(zip(result.column("way"), result.column("seconds"), strict=True))
    if not {*ALONE, way} <= set(seconds):
        return None
    copies, kernels = (seconds[alone] for alone in ALONE)
    return min(1.0, max(0.0, (copies + kernels - seconds[way]) / min(copies, kernels)))


def _points(ways: Sequence[str], batches: int, size: int, width: int, repeats: int) -> Iterator[Row]:
    for way in ways:
        with machine.in_use().without_values():
            pinned = way != TOGETHER[0]
            source = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
            matrix = torch.ones(width, width, device="cuda")
            work = partial(_PROGRAMS[way], source, batches, partial(torch.mm, matrix, matrix))
            times = [_seconds(work) for _ in range(1 + repeats)]
            del source, matrix, work
        yield {"way": way, "seconds": median(times[1:])}


def _copies(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        source.to("cuda", non_blocking=True)


def _kernels(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        kernel()


def _in_turn(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    for _ in range(batches):
        source.to("cuda", non_blocking=True)
        kernel()


def _beside(source: torch.Tensor, batches: int, kernel: Callable[[], object]) -> None:
    """Each batch's copy on a stream of its own, one ahead of the kernels, which wait for their own batch's."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def copied() -> torch.Tensor:
        with torch.cuda.stream(side):
            return source.to("cuda", non_blocking=True)

    following = copied()
    for index in range(batches):
        here.wait_stream(side)
        batch = following
        batch.record_stream(here)
        if index + 1 < batches:
            following = copied()
        kernel()


_PROGRAMS = dict(zip(WAYS, (_copies, _kernels, _in_turn, _in_turn, _beside), strict=True))


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = machine.host_time()
    work()
    torch.cuda.synchronize()
    return machine.host_time() - start
