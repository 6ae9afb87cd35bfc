"""How fast matrix products and additions are in each number format, by how much they compute with each byte they move."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import BLUE, GREEN, GREY, ORANGE, VERMILLION, Figure, binary_scale, decimal_scale, label_ends, new_canvas
from labkit import machine
from labkit.lab_parts.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.lab_parts.figures import finished, in_style, sources
from labkit.lab_parts.timing import event_seconds

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
    plain, other = (result.by("size", "seconds", operation=operation, format=name) for name in ("float32", format))
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
    return event_seconds(partial(work, a, b, out=out), repeats, uncounted=2)


# The figure


COLOURS = {"float32": VERMILLION, "tf32": ORANGE, "bfloat16": GREEN, "float16": BLUE}
MARKERS = {"float32": "s", "tf32": "D", "bfloat16": "^", "float16": "o"}
ASKED = "float16"


@in_style
def plot_format_speed(result: Result, recorded: Result | None = None) -> Figure:
    """Operations a second by operations a byte: products as lines with a point a size, additions as the lone points on the left.

    The grey roof is what the memory can feed, the bytes a second of the largest addition, up to the fastest product.
    """
    canvas, axes = new_canvas(_finding(result))
    labels = []
    for source, dashes in sources(result, recorded):
        for name, colour in COLOURS.items():
            speeds = source.column("flops_per_second", operation="product", format=name)
            if speeds:
                style = {"color": colour, "marker": MARKERS[name], "linewidth": 2 if dashes == "-" else 1.4}
                axes.plot(_intensities(source, "product", name), speeds, dashes, **style)
                label = name if source is result else f"{name}, recorded"
                labels.append((speeds[-1], label, colour))
            if source is result and source.column("size", operation="addition", format=name):
                _additions(axes, source, name, colour)
    _roof(axes, result)
    binary_scale(axes, "operations for each byte moved", lambda x: f"{x:g}" if x >= 1 else f"1/{1 / x:g}", most=9)
    decimal_scale(axes, "operations a second (1 T = 10¹²)", _short)
    right = axes.get_xlim()[1]
    label_ends(axes, [(right, *label) for label in labels])
    return finished(canvas, result, recorded, _proof)


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


def _additions(axes: Axes, result: Result, name: str, colour: str) -> None:
    speeds = result.column("flops_per_second", operation="addition", format=name)
    axes.plot(
        _intensities(result, "addition", name), speeds, linestyle=":", linewidth=0.8, color=colour, marker=MARKERS[name], markersize=4
    )


def _roof(axes: Axes, result: Result) -> None:
    """The roof: what memory can feed, from the additions on the left to the fastest product, and that from there on."""
    largest = max(result.column("size"), default=0)
    rates = result.column("bytes_per_second", size=largest, operation="addition")
    products = result.column("flops_per_second", operation="product")
    if not rates or not products:
        return
    rate, top = max(rates), max(products)
    low = 1 / 16
    right = max(axes.get_xlim()[1], top / rate)
    axes.plot([low, top / rate, right], [low * rate, top, top], color=GREY, linewidth=4, zorder=0)
    middle = (low * top / rate) ** 0.5
    text = f"memory: {units.rate_text(rate)}"
    axes.annotate(text, (middle, middle * rate), (-6, 4), textcoords="offset points", ha="right", va="bottom", color="#444444")


def _finding(result: Result) -> str:
    products, additions = (format_gain(result, operation, ASKED) for operation in FORMATS)
    if not products or not additions:
        return "Not measured yet: products and additions in float32 and float16"
    size = max(products)
    return f"In {ASKED}, products of {size}² matrices are {_times(products[size])}, sums {_times(additions.get(size, 1.0))}"


def _times(gain: float) -> str:
    return f"{gain:.2g} times faster" if gain > 1 else f"{1 / gain:.2g} times slower"


def _proof(result: Result) -> str:
    size = max(result.column("size"))
    parts = []
    for name in COLOURS:
        speeds = result.column("flops_per_second", size=size, operation="product", format=name)
        parts += [f"{flops_text(speeds[0])} in {name}"] if speeds else []
    return f"products of {size}² matrices: {', '.join(parts)}." if parts else ""
