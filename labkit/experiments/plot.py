"""The figure of a `Result`: one line for each value of a column, in the style of all figures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    SIZE,
    SKY_BLUE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    Figure,
    add_badge,
    byte_ticks,
    decimal_scale,
    label_ends,
    new_canvas,
    shortened,
    text_width,
    words,
)
from labkit.experiments.result_data import ResultData, Row

SPEED_UP = "speed-up"
PER_GPU = "per GPU"
PURPLE = "#CC79A7"
LINES = (
    (BLUE, "o"),
    (VERMILLION, "s"),
    (GREEN, "^"),
    (ORANGE, "D"),
    (PURPLE, "v"),
    (SKY_BLUE, "P"),
    (BLACK, "X"),
)
SAME = 1.05  # factors closer to 1 than this are called equal
WIDE = 50  # a y axis is logarithmic if its largest value is so many times the smallest
WIDE_X = 8
LABEL_POINTS = 9.5
MOST_TICKS = 8
LONGEST_LABEL = 150  # points
TITLE_WIDTH = 0.93 * 72 * SIZE[0]  # points
HOLLOW: dict[str, Any] = {
    "linestyle": "",
    "markersize": 11,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
}

Point = tuple[Any, float]


@dataclass(frozen=True)
class Quantity:
    """What the y axis shows: its name, the unit of its values, and how a row's value is made.

    `value` takes a row and the first row of the line.
    """

    name: str
    unit: str
    value: Callable[[Row, Row], float]

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit == SPEED_UP:
            return f"{value:.2g} times"
        return units.text(float(value), self.unit)


@dataclass(frozen=True)
class Line:
    """The points of one line. `value` is that of the column `by`, and `name` says it."""

    value: Any
    name: str
    points: list[Point]


def plotted(
    result: ResultData,
    recorded: ResultData | None,
    x: str,
    y: str,
    by: str | None,
    *,
    title: str | None = None,
    prediction: tuple[Any, float] | None = None,
) -> Figure:
    """Draw the result, and the recording as dashed lines. `Result.plot` describes the arguments."""
    if not result.rows:
        raise ValueError(f"{result.name} has no rows to draw")
    for column in (x, *([] if by is None else [by])):
        result.column(column)
    quantity = quantity_of(result, y)
    if by is None:
        by = _only_other(result, x)
    _check_one_row_per_point(result, x, by)
    lines = lines_of(result, x, by, quantity)
    dashed = [] if recorded is None else lines_of(recorded, x, by, quantity)
    if len(lines) > len(LINES):
        raise ValueError(
            f"{by} has {len(lines)} values, and a figure has at most {len(LINES)} lines. "
            f"Choose some: result.where({by}=[…])"
        )
    predicted = _checked_prediction(result, x, prediction)
    unit = result.columns[x]
    with matplotlib.rc_context(STYLE):
        finding = title if title is not None else _finding(lines, x, unit, quantity)
        canvas, axes = new_canvas(finding)
        _draw(axes, result, lines, dashed, x, quantity, predicted)
        badge = result.badge
        if recorded is not None:
            badge = f"{result.badge}  ·  dashed: {recorded.badge}"
        add_badge(canvas, badge)
        sentences = [_in_words(lines, x, unit, quantity)]
        if predicted is not None:
            sentences.append(
                f"Predicted at {_at(x, unit, predicted[0])}: {quantity.text(predicted[1])}"
            )
        if recorded is not None:
            sentences.append(f"{recorded.badge}: {_in_words(dashed, x, unit, quantity)}")
        return Figure(canvas, words(canvas, *sentences, result.badge))


# What is drawn


def quantity_of(result: ResultData, y: str) -> Quantity:
    """Return what `y` means. Raises KeyError or ValueError as `Result.plot`."""
    if y in result.columns:
        return Quantity(y, result.columns[y], lambda row, first: row[y])
    for kind in (SPEED_UP, PER_GPU):
        if y == kind or y.endswith(f" {kind}"):
            column = y.removesuffix(kind).rstrip()
            return _derived(result, kind, column)
    raise KeyError(
        f"{result.name} has no column {y!r}; it has {', '.join(result.columns)}. "
        f"{SPEED_UP!r} and {PER_GPU!r} are made of a column."
    )


def _derived(result: ResultData, kind: str, column: str) -> Quantity:
    if column:
        result.column(column)
    else:
        column = _only_measured(result, kind)
    if kind == SPEED_UP:
        if result.columns[column] != "seconds":
            unit = {column: "seconds"}
            raise ValueError(
                f"A speed-up compares seconds, and the column {column} has another unit. "
                f"If it has seconds, pass units={unit} to labkit.measure."
            )
        return Quantity(kind, SPEED_UP, lambda row, first: first[column] / row[column])
    if "gpus" not in result.columns:
        raise ValueError("“per GPU” divides by the column gpus, which this result does not have")
    return Quantity(
        f"{column} per GPU", result.columns[column], lambda row, first: row[column] / row["gpus"]
    )


def _only_measured(result: ResultData, kind: str) -> str:
    """Return the column that a quantity is made of if only one is possible."""
    columns = result.measured
    if kind == SPEED_UP:
        columns = [name for name in columns if result.columns[name] == "seconds"] or columns
    if len(columns) != 1:
        raise ValueError(
            f"Which column? Write one of {', '.join(repr(f'{name} {kind}') for name in columns)}."
        )
    return columns[0]


def _only_other(result: ResultData, x: str) -> str | None:
    """Return the only argument besides `x` that has several values, if there is one."""
    varied = [
        name
        for name in result.arguments
        if name != x and len(set(map(repr, result.column(name)))) > 1
    ]
    if len(varied) == 1:
        return varied[0]
    return None


def _check_one_row_per_point(result: ResultData, x: str, by: str | None) -> None:
    """Raise ValueError if two rows have the same `x` on one line."""
    seen = set()
    for row in result.rows:
        point = (repr(row[x]), repr(row[by]) if by is not None else "")
        if point in seen:
            others = [
                name
                for name in result.arguments
                if name not in (x, by) and len(set(map(repr, result.column(name)))) > 1
            ]
            name = others[0] if others else x
            values = list(dict.fromkeys(result.column(name)))
            raise ValueError(
                f"Several rows have the same {x}: {name} has the values "
                f"{', '.join(map(str, values))}. Draw a line for each with by={name!r}, "
                f"or choose one with result.where({name}={values[0]!r})."
            )
        seen.add(point)


def lines_of(result: ResultData, x: str, by: str | None, quantity: Quantity) -> list[Line]:
    """Return the lines, with their points in the order of the rows."""
    groups: dict[Any, list[Row]] = {}
    for row in result.rows:
        groups.setdefault(None if by is None else row[by], []).append(row)
    lines = []
    for value, rows in groups.items():
        points = [(row[x], quantity.value(row, rows[0])) for row in rows]
        name = "" if by is None else f"{_name(by)} {units.text(value, result.columns[by])}"
        lines.append(Line(value, name, points))
    return lines


def _checked_prediction(
    result: ResultData, x: str, prediction: tuple[Any, float] | None
) -> tuple[Any, float] | None:
    if prediction is None:
        return None
    if (
        not isinstance(prediction, tuple | list)
        or len(prediction) != 2
        or not _is_number(prediction[1])
    ):
        raise ValueError(f"prediction={prediction!r}: give a point (x, y), such as (4, 2.5)")
    if prediction[0] not in result.column(x):
        there = ", ".join(map(str, dict.fromkeys(result.column(x))))
        raise ValueError(f"prediction={prediction!r}: {x} is one of {there}")
    return tuple(prediction)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# How it is drawn


def _draw(
    axes: Axes,
    result: ResultData,
    lines: list[Line],
    dashed: list[Line],
    x: str,
    quantity: Quantity,
    predicted: Point | None,
) -> None:
    places = list(dict.fromkeys(place for line in [*lines, *dashed] for place, _ in line.points))
    numeric = all(map(_is_number, places))
    if numeric:
        places.sort()

    def position(place: Any) -> float:
        return place if numeric else places.index(place)

    labels: list[tuple[float, float, str, str]] = []
    looks = {line.value: look for line, look in zip(lines, LINES, strict=False)}
    for drawn, is_recorded in ((dashed, True), (lines, False)):
        for line in drawn:
            if line.value not in looks:
                continue
            colour, marker = looks[line.value]
            points = sorted((position(place), value) for place, value in line.points)
            xs, ys = zip(*points, strict=True)
            style = _style(is_recorded, numeric)
            axes.plot(xs, ys, color=colour, marker=marker, **style)
            text = line.name or _name(quantity.name)
            if is_recorded:
                text = f"{text}, recorded"
            labels.append((xs[-1], ys[-1], text, colour))
    if predicted is not None:
        _draw_prediction(axes, position(predicted[0]), predicted[1], quantity)
    _scale_x(axes, result, x, places, numeric)
    _scale_y(
        axes, lines + dashed, quantity, predicted, _at(x, result.columns[x], lines[0].points[0][0])
    )
    _label(axes, labels)


def _style(is_recorded: bool, numeric: bool) -> dict[str, Any]:
    """Return how a line looks. Words on the x axis are not joined by a line."""
    style: dict[str, Any] = {"linestyle": "-", "linewidth": 2}
    if is_recorded:
        style = {"linestyle": "--", "linewidth": 1.4, "markerfacecolor": "white"}
    if not numeric:
        style["linestyle"] = ""
    return style


def _draw_prediction(axes: Axes, place: float, value: float, quantity: Quantity) -> None:
    axes.plot([place], [value], marker="o", markeredgecolor=BLACK, **HOLLOW)
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    look = {**BESIDE, "ha": "right", "color": BLACK, "bbox": white}
    axes.annotate(f"predicted: {quantity.text(value)}", (place, value), (-11, 0), **look)


def _scale_x(axes: Axes, result: ResultData, x: str, places: list[Any], numeric: bool) -> None:
    texts = [units.text(place, result.columns[x]) for place in places]
    if not numeric:
        axes.set_xticks(range(len(places)), texts)
        axes.set_xlim(-0.5, len(places) - 0.5)
    else:
        doubling = len(places) > 2 and all(b == 2 * a for a, b in pairwise(places))
        if places[0] > 0 and (doubling or places[-1] >= WIDE_X * places[0]):
            axes.set_xscale("log")
        every = math.ceil(len(places) / MOST_TICKS)
        axes.set_xticks(places[::every], texts[::every])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(_name(x))


def _scale_y(
    axes: Axes,
    lines: list[Line],
    quantity: Quantity,
    predicted: Point | None,
    first: str,
) -> None:
    values = [value for line in lines for _, value in line.points]
    if predicted is not None:
        values.append(predicted[1])
    name = _name(quantity.name)
    if quantity.unit == SPEED_UP:
        name = f"times as fast as with {first}"
        axes.axhline(1, color=BLACK, linewidth=1)
    if min(values) > 0 and max(values) > WIDE * min(values):
        if quantity.unit == "bytes":
            _binary_scale_y(axes, name)
        else:
            decimal_scale(axes, name, quantity.text)
        return
    axes.set_ylabel(name)
    if min(values) < 0:
        axes.yaxis.set_major_formatter(lambda value, _: quantity.text(value))
        return
    top = 1.08 * max(values) or 1.0
    axes.set_ylim(0, top)
    if quantity.unit == "bytes":
        byte_ticks(axes, top, 6)
    elif quantity.unit == "seconds":
        size, unit = units.time_unit(top)
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value / size:g} {unit}" if value else "0"
        )
    elif quantity.unit == "bytes per second":
        axes.yaxis.set_major_formatter(lambda value, _: units.rate_text(value) if value else "0")
    elif quantity.unit and quantity.unit != SPEED_UP:
        axes.set_ylabel(f"{name}, {quantity.unit}")


def _binary_scale_y(axes: Axes, name: str) -> None:
    """Make the y axis logarithmic, with ticks at powers of two."""
    axes.set_yscale("log", base=2)
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    every = max(1, math.ceil((high - low) / MOST_TICKS))
    powers = [2.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]
    axes.set_yticks(powers, [units.byte_text(power) for power in powers])
    axes.set_ylabel(name)


def _label(axes: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write the names beside the ends of the lines, and make room for the longest name."""
    fitting = [
        (x, y, shortened(text, LONGEST_LABEL, LABEL_POINTS), colour)
        for x, y, text, colour in labels
    ]
    widest = max(text_width(text, LABEL_POINTS) for _, _, text, _ in fitting)
    width = 72 * SIZE[0]
    box = axes.get_position()
    right = min(0.9, 1 - (widest + 18) / width)
    axes.set_position((box.x0, box.y0, right - box.x0, box.height))
    label_ends(axes, fitting)


# What it finds


def _finding(lines: list[Line], x: str, unit: str, quantity: Quantity) -> str:
    """Return the change of each line from the first x to the last, in short if there are many."""
    first, last = (
        units.text(place, unit) for place, _ in (lines[0].points[0], lines[0].points[-1])
    )
    changes = "; ".join(f"{line.name} {_change(line, quantity)}".strip() for line in lines)
    if len(lines[0].points) == 1:
        finding = f"{_name(quantity.name)} at {_name(x)} {first}: {changes}"
    elif quantity.unit == SPEED_UP:
        finding = f"{_name(x)} {first} → {last}: {changes}"
    else:
        finding = f"{_name(quantity.name)}, {_name(x)} {first} → {last}: {changes}"
    if text_width(finding, TEXT_POINTS, bold=True) > TITLE_WIDTH:
        finding = _range(lines, x, last, quantity)
    return finding[0].upper() + finding[1:]


def _change(line: Line, quantity: Quantity) -> str:
    start, end = line.points[0][1], line.points[-1][1]
    if quantity.unit == SPEED_UP:
        return _faster(end)
    if len(line.points) == 1:
        return quantity.text(end)
    return f"{quantity.text(start)} → {quantity.text(end)}"


def _range(lines: list[Line], x: str, last: str, quantity: Quantity) -> str:
    """Return the smallest and the largest value at the last x."""
    ends = [line.points[-1] for line in lines]
    least, most = min(value for _, value in ends), max(value for _, value in ends)
    values = f"{quantity.text(least)} to {quantity.text(most)}"
    return f"{_name(quantity.name)} at {_name(x)} {last}: {values}"


def _faster(gain: float) -> str:
    if 1 / SAME < gain < SAME:
        return "as fast"
    if gain > 1:
        return f"{gain:.2g} times as fast"
    return f"{1 / gain:.2g} times slower"


def _name(column: str) -> str:
    """Return a column's name for readers."""
    return column.replace("_", " ").replace("gpus", "GPUs")


def _at(x: str, unit: str, place: Any) -> str:
    """Return a value of the x axis with its name, such as "4 GPUs" or "width 1024"."""
    if x == "gpus":
        return "1 GPU" if place == 1 else f"{place} GPUs"
    return f"{_name(x)} {units.text(place, unit)}"


def _in_words(lines: list[Line], x: str, unit: str, quantity: Quantity) -> str:
    """Return all numbers as a sentence."""
    parts = []
    for line in lines:
        points = ", ".join(
            f"{quantity.text(value)} at {_at(x, unit, place)}" for place, value in line.points
        )
        parts.append(f"{line.name}: {points}" if line.name else points)
    return "; ".join(parts)
