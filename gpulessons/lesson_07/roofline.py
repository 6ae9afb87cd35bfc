"""A roofline: how fast one GPU computes, and the memory and arithmetic that limit it."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BLUE,
    GREY,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    binary_scale,
    darker,
    decimal_scale,
    new_canvas,
)
from labkit.labs.experiment import Result
from labkit.labs.figures import badged, in_style

SUM, PRODUCT = "sum", "product"
COLOURS = {"float32": VERMILLION, "float16": BLUE}
MARKERS = {"float32": "s", "float16": "o"}
WIDTHS = {"float32": 3.0, "float16": 1.6}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": TEXT_POINTS}
NOTE = "#444444"


@in_style
def plot_roofline(speeds: Result) -> Figure:
    """Draw operations per second over operations per byte, with the roofs of the GPU.

    The rows of `speeds` have the columns `operation` ("sum" or "product"), `size`, `format`
    ("float32" or "float16"), `operations_per_byte` and `operations_per_second`. The sloped roof is
    the bandwidth of the fastest sum. The flat roofs are the fastest product of each format.

    Raises ValueError if the rows lack sums or products in one of the two formats.
    """
    for operation in (SUM, PRODUCT):
        for form in COLOURS:
            if not speeds.column("size", operation=operation, format=form):
                raise ValueError(
                    f"There is no {operation} in {form}. A roofline needs sums and products in "
                    "float32 and float16."
                )
    canvas, axes = new_canvas(_finding(speeds))
    for form, colour in COLOURS.items():
        for operation in (SUM, PRODUCT):
            look: dict[str, Any] = {"color": colour, "marker": MARKERS[form]}
            x, y = _points(speeds, operation, form)
            axes.plot(x, y, linewidth=WIDTHS[form], markersize=5 + WIDTHS[form], **look)
    _draw_roofs(axes, speeds)
    _name_sizes(axes, speeds)
    axes.margins(y=0.1)
    binary_scale(axes, "operations per byte that moves", _intensity_text, most=9)
    decimal_scale(axes, "operations per second (1 T = 10¹²)", short_number)
    return badged(canvas, speeds.badge, *_in_words(speeds))


def gain(speeds: Result, operation: str, size: int) -> float:
    """Return how many times faster the operation is in float16 than in float32."""
    rates = speeds.by("format", "operations_per_second", operation=operation, size=size)
    return rates["float16"] / rates["float32"]


def bandwidth(speeds: Result) -> float:
    """Return the bytes per second of the fastest sum."""
    rates = []
    for row in speeds:
        if row["operation"] == SUM:
            rates.append(row["operations_per_second"] / row["operations_per_byte"])
    return max(rates)


def short_number(number: float) -> str:
    """Return a number with a prefix, such as 1 P, 4.9 T or 750 G."""
    for size, letter in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def _fastest(speeds: Result, form: str) -> float:
    """Return the operations per second of the fastest product in a format."""
    return max(speeds.column("operations_per_second", operation=PRODUCT, format=form))


def _points(speeds: Result, operation: str, form: str) -> tuple[Sequence[float], Sequence[float]]:
    columns = ("operations_per_byte", "operations_per_second")
    x, y = (speeds.column(name, operation=operation, format=form) for name in columns)
    return x, y


def _draw_roofs(axes: Axes, speeds: Result) -> None:
    """Draw the roof of the memory and the roof of each format, with their names."""
    rate = bandwidth(speeds)
    left = min(speeds.column("operations_per_byte"))
    right = 2 * max(speeds.column("operations_per_byte"))
    highest = max(_fastest(speeds, form) for form in COLOURS)
    roof: dict[str, Any] = {"linewidth": 5, "alpha": 0.35, "zorder": 0, "solid_capstyle": "butt"}
    axes.plot([left, highest / rate], [left * rate, highest], color=GREY, **roof)
    middle = (left * highest / rate) ** 0.5
    text = f"memory: {units.rate_text(rate)}"
    place: dict[str, Any] = {"ha": "right", "va": "bottom"}
    axes.annotate(text, (middle, middle * rate), (-4, 4), color=NOTE, **BESIDE, **place)
    for form, colour in COLOURS.items():
        fastest = _fastest(speeds, form)
        axes.plot([fastest / rate, right], [fastest, fastest], color=colour, **roof)
        label = f"{form}:\n{short_number(fastest)}"
        axes.annotate(label, (right, fastest), (4, 0), va="center", color=darker(colour), **BESIDE)


def _name_sizes(axes: Axes, speeds: Result) -> None:
    """Write the sizes beside the points of float16: all products, and the first and last sum."""
    beside: dict[str, Any] = {"color": NOTE, **BESIDE}
    *products, largest = _sizes(speeds, PRODUCT)
    for size, x, y in products:
        axes.annotate(f"{size}²", (x, y), (6, -3), va="top", **beside)
    size, x, y = largest  # beside it are the names of the roofs
    axes.annotate(f"{size}²", (x, y), (0, -7), va="top", ha="center", **beside)
    sums = _sizes(speeds, SUM)
    for size, x, y in (sums[0], sums[-1]):
        axes.annotate(f"sum of {size}²", (x, y), (9, 0), va="center", **beside)


def _sizes(speeds: Result, operation: str) -> list[tuple[int, float, float]]:
    """Return (size, operations per byte, operations per second) of each point in float16.

    `operation` is "sum" or "product".
    """
    x, y = _points(speeds, operation, "float16")
    sizes = speeds.column("size", operation=operation, format="float16")
    return list(zip(sizes, x, y, strict=True))


def _intensity_text(operations: float) -> str:
    if operations >= 1:
        return f"{operations:g}"
    return f"1/{1 / operations:g}"


def _finding(speeds: Result) -> str:
    parts = []
    for operation in (PRODUCT, SUM):
        size = max(speeds.column("size", operation=operation))
        faster = gain(speeds, operation, size)
        parts.append(f"a {operation} of {size}² is {faster:.2g} times as fast")
    return f"In float16, {parts[0]}, {parts[1]}"


def _in_words(speeds: Result) -> list[str]:
    """Return the roofs and the gain of each size as sentences."""
    roofs = []
    for form in COLOURS:
        fastest = short_number(_fastest(speeds, form))
        roofs.append(f"{fastest} operations per second in {form}")
    sentences = [f"Roofs: memory {units.rate_text(bandwidth(speeds))}, {', '.join(roofs)}."]
    for operation in (SUM, PRODUCT):
        sizes = sorted(set(speeds.column("size", operation=operation)))
        gains = [f"{gain(speeds, operation, size):.2g} at {size}²" for size in sizes]
        sentences.append(
            f"A {operation} in float16 is faster by these factors: {', '.join(gains)}."
        )
    return sentences
