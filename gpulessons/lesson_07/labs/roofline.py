"""How fast matrix products and additions are in each number format, by how much they compute with each byte they move."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, GREY, ORANGE, VERMILLION, Figure, binary_scale, decimal_scale, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import finished, in_style
from labkit.labs.timing import event_seconds

SIZES = (256, 512, 1024, 2048, 4096, 8192)
LARGEST = 1 << 14
# The formats of each operation, and the dtype that carries them: TF32 is float32 in memory, and only products know it.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Formats = dict[str, tuple[str, ...]]
FORMATS: Formats = {"product": tuple(DTYPES), "addition": ("float32", "bfloat16", "float16")}
AMPERE = (8, 0)  # the first compute capability with TF32
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
    that do not count. Virtual GPUs compute no values meanwhile. GPUs before Ampere have no TF32,
    so they get no rows for it.

    Raises ValueError for sizes outside 1 to 16384, RuntimeError when no GPU is in use.
    """
    sizes = checked_sizes("sizes", sizes, LARGEST)
    repeats = checked_count("repeats", repeats)
    name = badge()
    formats = formats_here()
    total = len(sizes) * sum(map(len, formats.values()))
    parameters = {"sizes": sizes, "repeats": repeats}
    points = _points(sizes, formats, repeats)
    return Run("format_speed", parameters, COLUMNS, name, total, points)


def formats_here() -> Formats:
    """The formats of each operation on the current GPU."""
    if torch.cuda.get_device_capability() >= AMPERE:
        return FORMATS
    without_tf32 = {operation: list(names) for operation, names in FORMATS.items()}
    without_tf32["product"].remove("tf32")
    return {operation: tuple(names) for operation, names in without_tf32.items()}


def format_gain(result: Result, operation: str, format: str) -> dict[int, float]:
    """How many times faster the operation is than in float32, by size, where both were measured."""
    plain, other = (result.by("size", "seconds", operation=operation, format=name) for name in ("float32", format))
    return {size: plain[size] / seconds for size, seconds in other.items() if size in plain}


def _points(sizes: Sequence[int], formats: Formats, repeats: int) -> Iterator[Row]:
    for size in sizes:
        for operation, names in formats.items():
            for name in names:
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
    return event_seconds(partial(work, a, b, out=out), repeats, uncounted=2)


# The figure


# Colour, marker and width of each format's line: the widest lies under the others, for formats that are equally fast.
LINES = {"float32": (VERMILLION, "s", 5.0), "tf32": (ORANGE, "D", 3.5), "bfloat16": (GREEN, "^", 2.8), "float16": (BLUE, "o", 1.4)}
ASKED = "float16"
ALIKE = 0.05  # roofs closer than this are drawn once


@in_style
def plot_format_speed(result: Result) -> Figure:
    """Operations a second by operations a byte on one GPU: the sizes of the products on the right, those of the sums on the left.

    The roofs are what the memory can feed, the bytes a second of the largest sum, and for each format its fastest product.
    """
    canvas, axes = new_canvas(_finding(result))
    for operation in FORMATS:
        for name, (colour, marker, width) in LINES.items():
            speeds = result.column("flops_per_second", operation=operation, format=name)
            if speeds:
                style = {"color": colour, "marker": marker, "linewidth": width, "markersize": 4 + width}
                label = f"{name}: {_short(max(speeds))}" if operation == "product" else None
                axes.plot(_intensities(result, operation, name), speeds, label=label, **style)
    if result.rows:
        _roofs(axes, result)
        axes.legend(title="fastest product", handlelength=1.2, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, alignment="left")
    binary_scale(axes, "operations for each byte moved", lambda x: f"{x:g}" if x >= 1 else f"1/{1 / x:g}", most=9)
    decimal_scale(axes, "operations a second (1 T = 10¹²)", _short)
    return finished(canvas, result, None, _proof)


def flops_text(flops: float) -> str:
    """4.9 TFLOP/s, 750 GFLOP/s: 10¹² and 10⁹ operations a second."""
    return f"{_short(flops)}FLOP/s"


def _short(number: float) -> str:
    """1 P, 4.9 T, 750 G."""
    size, letter = next(((size, letter) for size, letter in _PREFIXES if number >= size), (1.0, ""))
    return f"{number / size:.3g} {letter}"


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def _intensities(result: Result, operation: str, name: str) -> list[float]:
    """Operations for each byte, by size."""
    flops, moved = (result.column(column, operation=operation, format=name) for column in ("flops_per_second", "bytes_per_second"))
    return [a / b for a, b in zip(flops, moved, strict=True)]


def _roofs(axes: Axes, result: Result) -> None:
    """What memory can feed, up to the fastest product; each format's fastest product, from where memory can feed it."""
    rates = result.column("bytes_per_second", size=max(result.column("size")), operation="addition")
    products = result.column("flops_per_second", operation="product")
    if not rates or not products:
        return
    rate, top, low = max(rates), max(products), 1 / 16
    right = max(axes.get_xlim()[1], top / rate)
    axes.plot([low, top / rate], [low * rate, top], color=GREY, linewidth=4, zorder=0)
    drawn: list[float] = []
    for name, (colour, _, _) in LINES.items():
        speeds = result.column("flops_per_second", operation="product", format=name)
        if not speeds or any(abs(max(speeds) / other - 1) < ALIKE for other in drawn):
            continue
        drawn.append(max(speeds))
        fastest = max(speeds)
        look: dict[str, Any] = {"color": colour, "alpha": 0.35, "linewidth": 4, "zorder": 0}
        axes.plot([fastest / rate, right], [fastest, fastest], **look)
    beside: dict[str, Any] = {"textcoords": "offset points", "color": "#444444"}
    axes.annotate(f"memory: {units.rate_text(rate)}", (0.5, 0.5 * rate), (8, -3), va="top", **beside)
    axes.annotate("sums", (1 / 6, min(result.column("flops_per_second", operation="addition"))), (10, 0), va="center", **beside)
    left = min(x for name in LINES for x in _intensities(result, "product", name))
    axes.annotate("products", (left, min(products)), (0, -10), ha="center", va="top", **beside)
    _name_sizes(axes, result, beside)


def _name_sizes(axes: Axes, result: Result, look: dict[str, Any]) -> None:
    """Write the size beside the smallest and the largest product in float16."""
    speeds = result.by("size", "flops_per_second", operation="product", format=ASKED)
    if not speeds:
        return
    intensities = dict(zip(speeds, _intensities(result, "product", ASKED), strict=True))
    for size, aligned, shift in ((min(speeds), "left", 6), (max(speeds), "right", -2)):
        place = intensities[size], speeds[size]
        axes.annotate(f"{size}²", place, (shift, -6), va="top", ha=aligned, **look)


def _finding(result: Result) -> str:
    products, additions = (format_gain(result, operation, ASKED) for operation in FORMATS)
    if not products or not additions:
        return "Not measured yet: products and additions in float32 and float16"
    size = max(products)
    return f"In {ASKED}, {size}² products are {_times(products[size])}, sums {_times(additions.get(size, 1.0))}"


def _times(gain: float) -> str:
    return f"{gain:.2g} times faster" if gain > 1 else f"{1 / gain:.2g} times slower"


def _proof(result: Result) -> str:
    size = max(result.column("size"))
    parts = []
    for name in LINES:
        speeds = result.column("flops_per_second", size=size, operation="product", format=name)
        parts += [f"{flops_text(speeds[0])} in {name}"] if speeds else []
    return f"products of {size}² matrices: {', '.join(parts)}." if parts else ""
