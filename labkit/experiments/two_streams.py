"""Two chains of kernels on one stream and on two: when a second stream helps, and when not."""

from collections.abc import Iterator, Sequence
from statistics import median

import torch

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
LARGEST = 1 << 14
CHAINS = 2
COLUMNS = {"width": "", "streams": "", "seconds": "seconds"}


def two_streams(widths: Sequence[int] = WIDTHS, kernels: int = 20, repeats: int = 3) -> Run:
    """Seconds of two chains of `kernels` matrix products each, on one stream and on two; `widths` of the square float32 matrices.

    The host launches in turn, one product of each chain. Each time is the median of `repeats`, after one that does not count. Virtual
    GPUs compute no values meanwhile.

    Raises ValueError for widths outside 1 to 16384, RuntimeError when no GPU is in use.
    """
    widths = checked_sizes("widths", widths, LARGEST)
    kernels, repeats = checked_count("kernels", kernels), checked_count("repeats", repeats)
    parameters = {"widths": widths, "kernels": kernels, "repeats": repeats}
    return Run("two_streams", parameters, COLUMNS, badge(), CHAINS * len(widths), _points(widths, kernels, repeats))


def stream_gain(result: Result) -> dict[int, float]:
    """How many times faster the chains are on two streams than on one, by width, where both were measured."""
    one, two = (dict(zip(*(result.column(name, streams=count) for name in ("width", "seconds")), strict=True)) for count in (1, 2))
    return {width: one[width] / seconds for width, seconds in two.items() if width in one}


def _points(widths: Sequence[int], kernels: int, repeats: int) -> Iterator[Row]:
    streams = [torch.cuda.Stream() for _ in range(CHAINS)]
    for width in widths:
        for count in (1, 2):
            with machine.in_use().without_values():
                matrices = [torch.ones(width, width, device="cuda") for _ in range(CHAINS)]
                torch.cuda.synchronize()
                used = [streams[chain % count] for chain in range(CHAINS)]
                times = [_seconds(matrices, used, kernels) for _ in range(1 + repeats)]
                del matrices
            yield {"width": width, "streams": count, "seconds": median(times[1:])}


def _seconds(matrices: list[torch.Tensor], streams: list[torch.cuda.Stream], kernels: int) -> float:
    products = [torch.empty_like(matrix) for matrix in matrices]
    torch.cuda.synchronize()
    start = machine.host_time()
    for _ in range(kernels):
        for matrix, product, stream in zip(matrices, products, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
    return machine.host_time() - start
