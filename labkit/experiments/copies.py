"""What a copy between host and device costs: pageable and pinned memory, both ways, by size."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB)
LARGEST = 1 << 30
PREDICTED_SIZE = 16 * MIB  # where learners predict how many times faster pinned memory is
COLUMNS = {"size": "bytes", "memory": "", "direction": "", "seconds": "seconds", "bytes_per_second": "bytes per second"}


def copy_speed(sizes: Sequence[int] = SIZES, repeats: int = 5) -> Run:
    """Copies between the host and the current GPU; `sizes` in bytes, each copy the median of `repeats` after a first that does not count.

    One row a point: `memory` is "pageable" or "pinned" (page-locked, copied with `non_blocking=True`), `direction` "h2d" (host to
    device) or "d2h". Needs host and device memory of the largest size each.

    Raises ValueError for sizes outside 1 byte to 1 GiB, RuntimeError when no GPU is in use.
    """
    sizes = checked_sizes("sizes", sizes, LARGEST)
    repeats = checked_count("repeats", repeats)
    return Run("copy_speed", {"sizes": sizes, "repeats": repeats}, COLUMNS, badge(), 4 * len(sizes), _points(sizes, repeats))


def pinned_gain(result: Result, direction: str = "h2d") -> dict[int, float]:
    """How many times faster pinned memory copies than pageable memory, by size in bytes, where both were measured."""
    speeds = {
        memory: dict(zip(*(result.column(name, memory=memory, direction=direction) for name in ("size", "bytes_per_second")), strict=True))
        for memory in ("pinned", "pageable")
    }
    return {size: speed / speeds["pageable"][size] for size, speed in speeds["pinned"].items() if size in speeds["pageable"]}


def _points(sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    for size in sizes:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        for memory in ("pageable", "pinned"):
            pinned = memory == "pinned"
            # Written, not only allocated: the operating system gives the pages of an unwritten tensor when they are first touched.
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
            for direction, target, source in (("h2d", device, host), ("d2h", host, device)):
                seconds = _copy_seconds(target, source, pinned, repeats)
                yield {"size": size, "memory": memory, "direction": direction, "seconds": seconds, "bytes_per_second": size / seconds}
            del host, target, source  # before the next is allocated: only one of the two is ever held


def _copy_seconds(target: torch.Tensor, source: torch.Tensor, non_blocking: bool, repeats: int) -> float:
    """The median, in seconds, between two CUDA events around one copy."""
    times = []
    for _ in range(1 + repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        target.copy_(source, non_blocking=non_blocking)
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[1:])
