"""The figure of a computation in every number format: the bits of each result, sign, exponent and fraction told apart."""

import math

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from gputrace.figures.figure import (
    BLACK,
    BLUE,
    SKY_BLUE,
    STYLE,
    TEXT_POINTS,
    TITLE_POINTS,
    Figure,
    add_badge,
    add_title,
    darker,
    shortened,
    words,
)
from labkit.experiments.formats import ASKED, FORMATS
from labkit.experiments.result import Result, Row

# In points, 72 an inch, from the left edge and the upper one
WIDTH, TOP, ROW, BOTTOM = 504, 56, 33, 26
NAMES, BITS, BIT, GAP, BOX = 10, 78, 8.7, 5, 14
PARTS = {"sign": ("white", BLACK), "exponent": (BLUE, "white"), "fraction": (SKY_BLUE, BLACK)}  # fill, digits: of three lightnesses
FORM = {form.name: form for form in FORMATS}
LEAST = 1e-5  # relative errors below this are not told apart


def number_formats(result: Result, prediction: float | None = None) -> Figure:
    """The value and the bits of a computation in each format; `prediction` is what was predicted of float16."""
    height = TOP + ROW * max(1, len(result.rows)) + BOTTOM
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), facecolor="white")
        axes = canvas.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0), frame_on=False, xticks=[], yticks=[])
        axes.grid(False)
        add_title(canvas, shortened(_finding(result), WIDTH - 20, TITLE_POINTS, bold=True))
        for index, row in enumerate(result.rows):
            _draw(axes, row, TOP + index * ROW, names=index == 0)
            if prediction is not None and row["format"] == ASKED:
                right = BITS + FORM[ASKED].bits * BIT + 3 * GAP
                axes.text(right, TOP + index * ROW + BOX / 2, f"○ you predicted {prediction:.6g}", va="center", color=darker(BLUE))
        add_badge(canvas, result.badge)
        told = "" if prediction is None else f"Predicted for {ASKED}: {prediction:.6g}."
        return Figure(canvas, words(canvas, *(f"{_spoken(row)}." for row in result.rows), told, result.badge))


def value_text(value: float) -> str:
    """0.333333343, 65504, infinity, not a number."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinity" if value > 0 else "−infinity"
    return f"{value:.9g}"


def error_text(row: Row) -> str:
    """How far a value is from what float64 makes of the same computation."""
    value, exact = row["value"], row["exact"]
    if math.isnan(exact):
        return "" if math.isnan(value) else "a number"
    if value == exact:
        return "" if math.isinf(exact) else "as float64"
    if _too_large(row):
        return "too large"
    if math.isinf(exact):
        return "no number" if math.isnan(value) else "not infinite"
    if math.isnan(value):
        return "lost on the way"
    if value == 0 and abs(exact) < FORM[row["format"]].smallest:
        return "too small"
    off = _off(row)
    return f"off by {100 * off:.2g} %" if off >= LEAST else "off by < 0.001 %"


def _finding(result: Result) -> str:
    computation, rows = result.parameters["computation"], result.rows
    if not rows:
        return f"Not computed yet: {computation}"
    wrong = [row for row in rows if error_text(row) not in ("", "as float64")]
    large = [row["format"] for row in wrong if _too_large(row)]
    small = [row["format"] for row in wrong if error_text(row) == "too small"]
    if not wrong:
        return f"{computation}: every format says what float64 says"
    if large:
        return f"{computation} is too large for {_listed(large)}"
    if lost := [row["format"] for row in wrong if error_text(row) == "lost on the way"]:
        return f"{computation} is lost on the way in {_listed(lost)}"
    if small:
        return f"{computation} is too small for {_listed(small)}"
    worst = max(wrong, key=_off)
    asked = [row for row in wrong if row["format"] == ASKED and row is not worst]
    first = f"{ASKED} is {error_text(asked[0])}, " if asked else ""
    return f"{computation}: {first}{worst['format']} {'' if first else 'is '}{error_text(worst)}"


def _too_large(row: Row) -> bool:
    value, exact = row["value"], row["exact"]
    if not math.isfinite(exact):
        return False
    return math.isinf(value) or (abs(exact) > FORM[row["format"]].largest == abs(value))


def _off(row: Row) -> float:
    """The relative error."""
    return abs(row["value"] - row["exact"]) / abs(row["exact"]) if row["exact"] and math.isfinite(row["exact"]) else math.inf


def _listed(names: list[str]) -> str:
    if len(names) == len(FORMATS):
        return "every format"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _spoken(row: Row) -> str:
    error = error_text(row)
    bits = " ".join(row[part] for part in PARTS)
    return f"{row['format']}: {value_text(row['value'])}{', ' * bool(error)}{error}, bits {bits}"


def _draw(axes: Axes, row: Row, top: float, names: bool) -> None:
    axes.text(NAMES, top + BOX / 2, row["format"], va="center", fontweight="bold", fontsize=TEXT_POINTS)
    left = float(BITS)
    for part, (fill, ink) in PARTS.items():
        if names:
            at_end = part == "sign"  # one bit wide: its name stands to the left
            axes.text(left + BIT * at_end, top - 6, part, ha="right" if at_end else "left", va="bottom")
        for digit in row[part]:
            axes.add_patch(Rectangle((left, top), BIT, BOX, facecolor=fill, edgecolor=BLACK, linewidth=0.6))
            axes.text(left + BIT / 2, top + BOX / 2 + 0.5, digit, ha="center", va="center", color=ink, fontsize=TEXT_POINTS)
            left += BIT
        left += GAP
    right = BITS + max(form.bits for form in FORMATS) * BIT + 3 * GAP
    axes.text(right, top + BOX / 2, value_text(row["value"]), va="center", fontsize=TEXT_POINTS)
    axes.text(right, top + BOX + 9, error_text(row), va="center", fontsize=TEXT_POINTS, color="#444444")
