"""How fast matrix products and additions are in each number format: what a roofline is drawn from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

SIZES = (256, 512, 1024, 2048, 4096, 8192)
LARGEST = 1 << 14
# The formats of each operation, and the dtype that carries them: TF32 is float32 in memory, and only products know it.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {"product": tuple(DTYPES), "addition": ("float32", "bfloat16", "float16")}
COLUMNS = {
    "size": "rows",
    "operation": "",
    "format": "",
    "seconds": "seconds",
    "flops_per_second": "FLOP/s",
    "bytes_per_second": "bytes per second",
}


def format_speed(sizes: Sequence[int] = SIZES, repeats: int = 5) -> Run:
    """Products and sums of two square matrices on the current GPU, in each number format; `sizes` in rows.

    One row a point: `operation` is "product" (2 size³ operations) or "addition" (size² operations); both read two matrices and write
    one, which is what `bytes_per_second` counts. `seconds` is the median of `repeats` between CUDA events around one call, after two
    that do not count. Virtual GPUs compute no values meanwhile. A GPU without units for a format does it with those of float32.

    Raises ValueError for sizes outside 1 to 16384, RuntimeError when no GPU is in use.
    """
    sizes = checked_sizes("sizes", sizes, LARGEST)
    repeats = checked_count("repeats", repeats)
    total = len(sizes) * sum(map(len, FORMATS.values()))
    return Run("format_speed", {"sizes": sizes, "repeats": repeats}, COLUMNS, badge(), total, _points(sizes, repeats))


def format_gain(result: Result, operation: str, format: str) -> dict[int, float]:
    """How many times faster the operation is than in float32, by size, where both were measured."""
    plain, other = (
        dict(zip(*(result.column(name, operation=operation, format=f) for name in ("size", "seconds")), strict=True))
        for f in ("float32", format)
    )
    return {size: plain[size] / seconds for size, seconds in other.items() if size in plain}


def _points(sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    for size in sizes:
        for operation, formats in FORMATS.items():
            for name in formats:
                with machine.in_use().without_values(), _tf32(name == "tf32"):
                    seconds = _seconds(operation, size, DTYPES[name], repeats)
                flops = 2 * size**3 if operation == "product" else size**2
                moved = 3 * size**2 * DTYPES[name].itemsize
                rates = {"flops_per_second": flops / seconds, "bytes_per_second": moved / seconds}
                yield {"size": size, "operation": operation, "format": name, "seconds": seconds, **rates}


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether products of float32 matrices may round their factors to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(operation: str, size: int, dtype: torch.dtype, repeats: int) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    work: Callable[..., torch.Tensor] = torch.mm if operation == "product" else torch.add
    times = []
    for _ in range(2 + repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        work(a, b, out=out)
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[2:])
