"""The roofline: how fast products and additions are in each number format, by how much they compute with each byte they move."""

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    binary_scale,
    decimal_scale,
    label_ends,
    new_canvas,
    words,
)
from labkit.experiments.format_speed import FORMATS, format_gain
from labkit.experiments.result import Result
from labkit.plots.experiments import badges, sources, told

COLOURS = {"float32": VERMILLION, "tf32": ORANGE, "bfloat16": GREEN, "float16": BLUE}
MARKERS = {"float32": "s", "tf32": "D", "bfloat16": "^", "float16": "o"}
ASKED = "float16"


def format_speed(result: Result, recorded: Result | None = None) -> Figure:
    """Operations a second by operations a byte: products as lines with a point a size, additions as the lone points on the left.

    The grey roof is what the memory can feed, the bytes a second of the largest addition, up to the fastest product.
    """
    with matplotlib.rc_context(STYLE):
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
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _proof(result), _proof(recorded), result.badge))


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


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    size = max(result.column("size"))
    parts = []
    for name in COLOURS:
        speeds = result.column("flops_per_second", size=size, operation="product", format=name)
        parts += [f"{flops_text(speeds[0])} in {name}"] if speeds else []
    return told(result, f"products of {size}² matrices: {', '.join(parts)}.") if parts else ""
