"""Compute in several number formats, rounding each number and each result, and show the bits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import isinf, isnan
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from gpulessons.lesson_07.computation import Computation, evaluated, parse
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    SKY_BLUE,
    TEXT_POINTS,
    TITLE_POINTS,
    Figure,
    add_title,
    darker,
    shortened,
)
from labkit.labs.experiment import Result, Row, Run
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import ExperimentPanel
from labkit.labs.predictions import stays_open, typed_number

COLUMNS = {"format": "", "value": "", "exact": "", "sign": "", "exponent": "", "fraction": ""}
BADGE = "computed bit by bit, each step rounded to the nearest"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, with a sign bit, bits of the exponent and of the fraction.

    The rules are those of IEEE 754. Results are rounded to the nearest number, ties to even. There
    are subnormal numbers, infinities and nan.
    """

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        return (2 - 2.0**-self.fraction_bits) * 2.0**self.bias

    @property
    def smallest(self) -> float:
        """The smallest number above 0, which is subnormal."""
        return 2.0 ** (1 - self.bias - self.fraction_bits)

    def rounded(self, x: float) -> float:
        """Return the number of this format that is nearest to `x`."""
        if x == 0 or not math.isfinite(x):
            return x
        step = self._step(x)
        value = round(x / step) * step  # Python rounds halves to even
        if abs(value) <= self.largest:
            return math.copysign(value, x)
        return math.copysign(math.inf, x)

    def _step(self, x: float) -> float:
        """Return the distance from `x` to the next larger number of this format.

        Subnormal numbers have the same distance as the smallest normal numbers.
        """
        exponent = max(math.frexp(x)[1] - 1, 1 - self.bias)
        return 2.0 ** (exponent - self.fraction_bits)

    def pattern(self, x: float) -> tuple[str, str, str]:
        """Return sign, exponent and fraction of `x` as bits. `x` is a number of this format."""
        ones = 2**self.exponent_bits - 1
        if math.isnan(x):
            exponent, fraction = ones, 2 ** (self.fraction_bits - 1)
        elif math.isinf(x):
            exponent, fraction = ones, 0
        else:
            units = 0  # with the leading one, which is not stored
            if x:
                units = round(abs(x) / self._step(x))
            normal = units >= 2**self.fraction_bits
            if normal:
                exponent = math.frexp(x)[1] - 1 + self.bias
                fraction = units - 2**self.fraction_bits
            else:
                exponent, fraction = 0, units
        sign = "1" if math.copysign(1, x) < 0 and not math.isnan(x) else "0"
        return sign, f"{exponent:0{self.exponent_bits}b}", f"{fraction:0{self.fraction_bits}b}"


FORMATS = (
    Format("float32", 8, 23),
    Format("tf32", 8, 10),  # only for the factors of matrix products; no tensor has it
    Format("bfloat16", 8, 7),
    Format("float16", 5, 10),
)
# the format of Python's floats, with which the others are compared
FLOAT64 = Format("float64", 11, 52)
ASKED = "float16"  # the format whose result learners predict


def number_formats(computation: str) -> Run:
    """Compute "0.1 + 0.2", "300**2", "sum(0.01, 1000)" or the like in each format.

    Each number and each result of an operation is rounded to the format. A format has one row:
    `value` is the result, `exact` is the result in float64, and `sign`, `exponent` and `fraction`
    are the bits of `value`. No GPU is needed.

    Raises ValueError for text that is no computation. The message says what is allowed.
    """
    parsed = parse(computation)
    evaluated(parsed, FLOAT64.rounded)  # a mistake shows before the first point
    return Run(
        "number_formats",
        {"computation": parsed.text},
        COLUMNS,
        BADGE,
        len(FORMATS),
        _points(parsed),
    )


def _points(computation: Computation) -> Iterator[Row]:
    exact = evaluated(computation, FLOAT64.rounded)
    for form in FORMATS:
        value = evaluated(computation, form.rounded)
        sign, exponent, fraction = form.pattern(value)
        yield {
            "format": form.name,
            "value": value,
            "exact": exact,
            "sign": sign,
            "exponent": exponent,
            "fraction": fraction,
        }


# The figure


# In points, 72 an inch, from the left edge and the upper one
WIDTH, TOP, ROW, BOTTOM = 504, 56, 33, 26
NAMES, BITS, BIT, GAP, BOX = 10, 78, 8.7, 5, 14
# fill, digits: of three lightnesses
PARTS = {
    "sign": ("white", BLACK),
    "exponent": (BLUE, "white"),
    "fraction": (SKY_BLUE, BLACK),
}
FORM = {form.name: form for form in FORMATS}
LEAST = 1e-5  # relative errors below this are not told apart


@in_style
def plot_number_formats(result: Result, prediction: float | None = None) -> Figure:
    """Draw the value and the bits of a computation in each format.

    `prediction` is the predicted value in float16.
    """
    height = TOP + ROW * max(1, len(result.rows)) + BOTTOM
    canvas = Canvas(figsize=(WIDTH / 72, height / 72), facecolor="white")
    axes = canvas.add_axes(
        (0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0), frame_on=False, xticks=[], yticks=[]
    )
    axes.grid(False)
    add_title(canvas, shortened(_finding(result), WIDTH - 20, TITLE_POINTS, bold=True))
    for index, row in enumerate(result.rows):
        _draw(axes, row, TOP + index * ROW, names=index == 0)
        if prediction is not None and row["format"] == ASKED:
            right = BITS + FORM[ASKED].bits * BIT + 3 * GAP
            axes.text(
                right,
                TOP + index * ROW + BOX / 2,
                f"○ you predicted {prediction:.6g}",
                va="center",
                color=darker(BLUE),
            )
    told = ""
    if prediction is not None:
        told = f"Predicted for {ASKED}: {prediction:.6g}."
    return badged(canvas, result.badge, *(f"{_spoken(row)}." for row in result.rows), told)


def value_text(value: float) -> str:
    """Return a value as text, such as 0.333333343, 65504, infinity or not a number."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinity" if value > 0 else "−infinity"
    return f"{value:.9g}"


def error_text(row: Row) -> str:
    """Return a text that says how far a value is from the result in float64."""
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
    if off >= LEAST:
        return f"off by {100 * off:.2g} %"
    return "off by < 0.001 %"


def _finding(result: Result) -> str:
    computation, rows = result.parameters["computation"], result.rows
    if not rows:
        return f"Not computed yet: {computation}"
    wrong = [row for row in rows if error_text(row) not in ("", "as float64")]
    large = [row["format"] for row in wrong if _too_large(row)]
    small = [row["format"] for row in wrong if error_text(row) == "too small"]
    lost = [row["format"] for row in wrong if error_text(row) == "lost on the way"]
    if not wrong:
        return f"{computation}: every format says what float64 says"
    if large:
        return f"{computation} is too large for {_listed(large)}"
    if lost:
        return f"{computation} is lost on the way in {_listed(lost)}"
    if small:
        return f"{computation} is too small for {_listed(small)}"
    worst = max(wrong, key=_off)
    asked = [row for row in wrong if row["format"] == ASKED and row is not worst]
    first = ""
    if asked:
        first = f"{ASKED} is {error_text(asked[0])}, "
    return f"{computation}: {first}{worst['format']} {'' if first else 'is '}{error_text(worst)}"


def _too_large(row: Row) -> bool:
    value, exact = row["value"], row["exact"]
    return math.isfinite(exact) and math.isinf(value)


def _off(row: Row) -> float:
    """Return the relative error of a row's value, compared with float64."""
    exact = row["exact"]
    if exact == 0 or not math.isfinite(exact):
        return math.inf
    return abs(row["value"] - exact) / abs(exact)


def _listed(names: list[str]) -> str:
    if len(names) == len(FORMATS):
        return "every format"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _spoken(row: Row) -> str:
    error = error_text(row)
    bits = " ".join(row[part] for part in PARTS)
    return f"{row['format']}: {value_text(row['value'])}{', ' * bool(error)}{error}, bits {bits}"


def _draw(axes: Axes, row: Row, top: float, names: bool) -> None:
    axes.text(
        NAMES, top + BOX / 2, row["format"], va="center", fontweight="bold", fontsize=TEXT_POINTS
    )
    left = float(BITS)
    for part, (fill, ink) in PARTS.items():
        if names:
            if part == "sign":  # The name is wider than the one bit, so it extends to the left.
                axes.text(left + BIT, top - 6, part, ha="right", va="bottom")
            else:
                axes.text(left, top - 6, part, ha="left", va="bottom")
        for digit in row[part]:
            axes.add_patch(
                Rectangle((left, top), BIT, BOX, facecolor=fill, edgecolor=BLACK, linewidth=0.6)
            )
            axes.text(
                left + BIT / 2,
                top + BOX / 2 + 0.5,
                digit,
                ha="center",
                va="center",
                color=ink,
                fontsize=TEXT_POINTS,
            )
            left += BIT
        left += GAP
    right = BITS + max(form.bits for form in FORMATS) * BIT + 3 * GAP
    axes.text(right, top + BOX / 2, value_text(row["value"]), va="center", fontsize=TEXT_POINTS)
    axes.text(
        right, top + BOX + 9, error_text(row), va="center", fontsize=TEXT_POINTS, color="#444444"
    )


# The widget


GOOD = 1e-3  # A prediction within this relative error is called good.


class FormatLab(ExperimentPanel):
    """Lab in which learners type a computation and predict its result in float16.

    A computation is a number, 0.1 + 0.2, 300**2, 1/3, sum(0.01, 1000) or the like. The figure shows
    the result in every format. `computation` is the text in the field at first. The lab computes
    bit by bit and needs no GPU.
    """

    question = f"What does {ASKED} make of this computation?"
    unit = f"in {ASKED}"

    def __init__(self, computation: str = "0.1 + 0.2") -> None:
        self.computation = widgets.Text(
            value=computation,
            description="Computation:",
            placeholder="such as sum(0.01, 1000)",
            style={"description_width": "initial"},
            layout=widgets.Layout(width="26em"),
        )
        super().__init__([self.computation])
        self.answer.placeholder = "a number, inf or nan"

    def experiment(self) -> Run:
        return number_formats(self.computation.value)

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['format']}: {value_text(row['value'])}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_number_formats(result, prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        value = next(iter(result.column("value", format=ASKED)), None)
        if value is None:
            return stays_open(f"{ASKED} was not reached", prediction)
        computation = result.parameters["computation"]
        was = f"In {ASKED}, {computation} is {value_text(value)}; you predicted {prediction:g}."
        if _near(prediction, value):
            return f"{was} A good prediction!"
        return was

    def predicted(self, text: str) -> float:
        """Return the typed number, which may be negative, infinite or nan.

        Raises ValueError for other text.
        """
        number, typed = typed_number(text), text.strip()
        if isnan(number) and typed.lower().lstrip("+-") != "nan":
            found = "There is no prediction yet"
            if typed:
                found = f"“{typed}” is not a prediction"
            raise ValueError(
                f"{found}: type a number such as 0.3, or inf, or nan, and press Predict."
            )
        return number


def _near(prediction: float, value: float) -> bool:
    if isnan(value) or isinf(value):
        return prediction == value or (isnan(prediction) and isnan(value))
    return abs(prediction - value) <= GOOD * abs(value)
