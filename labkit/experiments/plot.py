"""The figure of a `Result`: one line for each value of a column, in the style of all figures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from math import nan
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
    drawable,
    label_ends,
    new_canvas,
    shortened,
    text_width,
    words,
)
from labkit.checks.checking import plural
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
LONGEST_LABEL = 150  # points, of the name of a line
LONGEST_TICK = 110  # points, of a name on the x axis that is written at an angle
LONGEST_NAME = 200  # points, of an axis
LINE_HEIGHT = 12  # points
GAP = 4  # points between two texts
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
    """The quantity on the y axis: its name, the unit of its values, and how to compute them.

    `value` takes a row and the first row of the line.
    """

    name: str
    unit: str
    value: Callable[[Row, Row], float]

    def text(self, value: float) -> str:
        """Write a value of the quantity with its unit."""
        if self.unit == SPEED_UP:
            return f"{units.number_text(value, 2)} times"
        return units.text_with_unit(float(value), self.unit)

    @property
    def needs(self) -> str:
        """The reason why a point has no value of this quantity, as text."""
        if self.unit == SPEED_UP:
            return "a time is not above 0"
        return "the number is missing or not finite"


@dataclass(frozen=True)
class Line:
    """The points of one line. `value` is its value in the column `by`, and `name` is its label."""

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
    """Draw the result as lines, and the recording, if there is one, as dashed lines.

    `Result.plot` describes the other arguments.
    """
    if not result.rows:
        raise ValueError(f"{result.name} has no rows to draw")
    result.column(x)
    if by is not None:
        result.column(by)
    quantity = quantity_of(result, y)
    if by is None:
        by = _only_other(result, x)
    _check_one_row_per_point(result, x, by)
    places = _places(result, recorded, x)
    measured = result.column(x)
    first = next(place for place in places if place in measured)
    lines = lines_of(result, x, by, quantity, places, first)
    if not any(line.points for line in lines):
        raise ValueError(f"No point of {y} can be drawn, because {quantity.needs}.")
    notes = _left_out(result, x, by, quantity, lines, first)
    lines = [line for line in lines if line.points]
    dashed = []
    if recorded is not None:
        drawn = [line.value for line in lines]
        dashed = lines_of(recorded, x, by, quantity, places, first)
        dashed = [line for line in dashed if line.value in drawn and line.points]
    if len(lines) > len(LINES):
        raise ValueError(
            f"{by} has {len(lines)} values, and a figure has at most {len(LINES)} lines. "
            f"Choose some: result.where({by}=[…])"
        )
    predicted = _checked_prediction(result, x, prediction)
    unit = result.columns[x]
    sentences = [_in_words(lines, x, unit, quantity)]
    sentences += [note[0].upper() + note[1:] for note in notes]
    if predicted is not None:
        where = _at(x, unit, predicted[0])
        sentences.append(f"Predicted at {where}: {quantity.text(predicted[1])}")
    if dashed and recorded is not None:
        notes.append(f"dashed: {recorded.badge}")
        sentences.append(f"{recorded.badge}: {_in_words(dashed, x, unit, quantity)}")
    with matplotlib.rc_context(STYLE):
        if title is None:
            title = _finding(lines, x, unit, quantity, places)
        canvas, axes = new_canvas(title)
        _draw(axes, result, lines, dashed, x, quantity, predicted, places, first)
        add_badge(canvas, "  ·  ".join([result.badge, *notes]))
        return Figure(canvas, words(canvas, *sentences, result.badge))


# What is drawn


def quantity_of(result: ResultData, y: str) -> Quantity:
    """Return the quantity that the name `y` stands for.

    Raises KeyError or ValueError as `Result.plot` does.
    """
    if y in result.columns:
        _check_numbers(result, y)
        return Quantity(y, result.columns[y], lambda row, first: _number(row[y]))
    for kind in (SPEED_UP, PER_GPU):
        if y == kind or y.endswith(f" {kind}"):
            column = y.removesuffix(kind).rstrip()
            return _derived(result, kind, column)
    near = get_close_matches(y, [*result.columns, SPEED_UP, PER_GPU], n=1)
    hint = ""
    if near:
        hint = f" Did you mean {near[0]!r}?"
    raise KeyError(
        f"{result.name} has no column {y!r}. It has {', '.join(result.columns)}. "
        f"{SPEED_UP!r} and {PER_GPU!r} are made of a column.{hint}"
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
        return Quantity(kind, SPEED_UP, lambda row, first: _speed_up(first[column], row[column]))
    if "gpus" not in result.columns:
        raise ValueError("“per GPU” divides by the column gpus, which this result does not have")
    _check_numbers(result, column)
    return Quantity(
        f"{column} per GPU",
        result.columns[column],
        lambda row, first: _number(row[column]) / (_number(row["gpus"]) or nan),
    )


def _check_numbers(result: ResultData, column: str) -> None:
    """Raise ValueError for a column that has texts."""
    for value in result.column(column):
        if isinstance(value, str):
            raise ValueError(
                f"The y axis needs numbers, and the column {column} has texts, such as {value!r}."
            )


def _number(value: Any) -> float:
    """Return a number that can be drawn, or nan for any other value."""
    if _is_number(value) or isinstance(value, bool):
        return value
    return nan


def _speed_up(first: Any, time: Any) -> float:
    """Return the speed-up of `time` over the time `first`, or nan if one of them is not above 0."""
    first, time = _number(first), _number(time)
    if first > 0 and time > 0:
        return first / time
    return nan


def _only_measured(result: ResultData, kind: str) -> str:
    """Return the only measured column from which a quantity of this kind can be computed."""
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
    """Raise ValueError if two rows have the same `x` on one line.

    `by` is the column that decides on which line a row is.
    """
    seen = set()
    for row in result.rows:
        point = (repr(row[x]), repr(_line_of(row, by)))
        if point in seen:
            others = [
                name
                for name in result.arguments
                if name not in (x, by) and len(set(map(repr, result.column(name)))) > 1
            ]
            if not others:
                raise ValueError(f"Several rows have the same {x}. Keep one of them.")
            name = others[0]
            values = list(dict.fromkeys(result.column(name)))
            raise ValueError(
                f"Several rows have the same {x}: {name} has the values "
                f"{', '.join(map(str, values))}. Draw a line for each with by={name!r}, "
                f"or choose one with result.where({name}={values[0]!r})."
            )
        seen.add(point)


def _places(result: ResultData, recorded: ResultData | None, x: str) -> list[Any]:
    """Return the values of `x` in the rows of the result and of the recording.

    They are in the order of the grid.
    """
    rows = list(result.rows)
    if recorded is not None:
        rows += recorded.rows
    there = list(dict.fromkeys(row[x] for row in rows))
    grid = result.parameters.get(x)
    if not isinstance(grid, list):
        return there
    ordered = [value for value in grid if value in there]
    return ordered + [value for value in there if value not in ordered]


def lines_of(
    result: ResultData,
    x: str,
    by: str | None,
    quantity: Quantity,
    places: list[Any],
    first: Any,
) -> list[Line]:
    """Return the lines of the figure, with their points in the order of `places`.

    `by` is the column that decides on which line a row is. A speed-up compares with the place
    `first`. A line that has no row there is left out. A point whose value is not a finite number is
    left out, too.
    """
    groups: dict[Any, list[Row]] = {}
    for row in sorted(result.rows, key=lambda row: places.index(row[x])):
        groups.setdefault(_line_of(row, by), []).append(row)
    lines = []
    for value in dict.fromkeys(_line_of(row, by) for row in result.rows):
        rows = groups[value]
        compared = [row for row in rows if row[x] == first]
        if quantity.unit == SPEED_UP and not compared:
            continue
        points = [(row[x], quantity.value(row, (compared or rows)[0])) for row in rows]
        points = [(place, value) for place, value in points if math.isfinite(value)]
        lines.append(Line(value, _line_name(result, by, value), points))
    return lines


def _line_of(row: Row, by: str | None) -> Any:
    """Return the value of a row in the column `by`, which decides on which line the row is.

    Return None if `by` is None, because there is only one line then.
    """
    return row[by] if by is not None else None


def _line_name(result: ResultData, by: str | None, value: Any) -> str:
    if by is None:
        return ""
    return f"{_name(by)} {units.text_with_unit(value, result.columns[by])}"


def _left_out(
    result: ResultData, x: str, by: str | None, quantity: Quantity, lines: list[Line], first: Any
) -> list[str]:
    """Return notes that say which points and lines are not drawn, and why.

    `lines` are the drawn lines. The other arguments are those of `lines_of`.
    """
    drawn = {line.value: [place for place, _ in line.points] for line in lines}
    whole_lines, points = [], []
    for row in result.rows:
        value = _line_of(row, by)
        name = _line_name(result, by, value)
        if value not in drawn:
            whole_lines.append(name)
        elif row[x] not in drawn[value]:
            points.append(f"{name} {_at(x, result.columns[x], row[x])}".strip())
    notes = []
    if whole_lines:
        missing = _at(x, result.columns[x], first)
        names = ", ".join(dict.fromkeys(whole_lines))
        notes.append(f"not drawn, because {missing} is missing: {names}")
    if points:
        notes.append(f"not drawn, because {quantity.needs}: {', '.join(points)}")
    return notes


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
    """Return whether the value is a number that an axis can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


# How it is drawn


def _draw(
    axes: Axes,
    result: ResultData,
    lines: list[Line],
    dashed: list[Line],
    x: str,
    quantity: Quantity,
    predicted: Point | None,
    grid: list[Any],
    first: Any,
) -> None:
    drawn_places = {place for line in [*lines, *dashed] for place, _ in line.points}
    if predicted is not None:
        drawn_places.add(predicted[0])
    places = [place for place in grid if place in drawn_places]
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
    _scale_x(axes, result, x, places, numeric)
    _scale_y(axes, lines + dashed, quantity, predicted, _at(x, result.columns[x], first))
    if predicted is not None:
        _draw_prediction(axes, position(predicted[0]), predicted[1], quantity)
    _make_room(axes, [text for _, _, text, _ in labels])
    _write_ticks(axes, [units.text(place, result.columns[x]) for place in places], numeric)
    label_ends(axes, [(x, y, _short(text), colour) for x, y, text, colour in labels])


def _style(is_recorded: bool, numeric: bool) -> dict[str, Any]:
    """Return matplotlib's style of a line. If x has words, there are only points.

    `is_recorded` says whether the line is a recording, and `numeric` whether x has numbers.
    """
    style: dict[str, Any] = {"linestyle": "-", "linewidth": 2}
    if is_recorded:
        style = {"linestyle": "--", "linewidth": 1.4, "markerfacecolor": "white"}
    if not numeric:
        style["linestyle"] = ""
    return style


def _draw_prediction(axes: Axes, place: float, value: float, quantity: Quantity) -> None:
    """Draw a predicted point as a hollow marker, with a text on the side that has more space.

    `place` is the x coordinate of the point.
    """
    axes.plot([place], [value], marker="o", markeredgecolor=BLACK, **HOLLOW)
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    look = {**BESIDE, "ha": "right", "color": BLACK, "bbox": white}
    offset = -11
    axes.get_xlim()  # it brings the limits up to date, which the transformation reads
    if axes.transAxes.inverted().transform(axes.transData.transform((place, value)))[0] < 0.5:
        look["ha"], offset = "left", 11
    told = drawable(f"predicted: {quantity.text(value)}")
    axes.annotate(told, (place, value), (offset, 0), **look)


def _scale_x(axes: Axes, result: ResultData, x: str, places: list[Any], numeric: bool) -> None:
    if not numeric:
        axes.set_xticks(range(len(places)))
        axes.set_xlim(-0.5, len(places) - 0.5)
    else:
        doubling = len(places) > 2 and all(b == 2 * a for a, b in pairwise(places))
        if places[0] > 0 and (doubling or places[-1] >= WIDE_X * places[0]):
            axes.set_xscale("log")
        axes.set_xticks(places)
        axes.set_xticks([], minor=True)
    name = _name(x) + units.beside_name(result.columns[x])
    axes.set_xlabel(shortened(name, LONGEST_NAME, LABEL_POINTS))


def _write_ticks(axes: Axes, texts: list[str], numeric: bool) -> None:
    """Label the ticks of the x axis, without the labels that would overlap.

    `numeric` says whether the x axis has numbers.
    """
    point = axes.figure.dpi / 72
    axes.get_xlim()  # it brings the limits up to date, which the transformation reads
    ticks = list(axes.get_xticks())
    places = [axes.transData.transform((tick, 0))[0] / point for tick in ticks]
    widths = [text_width(text, LABEL_POINTS) for text in texts]
    look: dict[str, Any] = {}
    if not numeric and len(ticks) > 1 and max(widths) + GAP > places[1] - places[0]:
        widths = [LINE_HEIGHT] * len(ticks)
        look = {"rotation": 90}
    every = 1
    if numeric:
        every = math.ceil(len(ticks) / MOST_TICKS)
    chosen: list[int] = []
    for index in range(0, len(ticks), every):
        before = chosen[-1] if chosen else index
        needed = (widths[before] + widths[index]) / 2 + GAP * (not look)
        if index == before or places[index] - places[before] >= needed:
            chosen.append(index)
    if look:
        texts = [shortened(text, LONGEST_TICK, LABEL_POINTS) for text in texts]
        _move_up(axes, max(text_width(texts[index], LABEL_POINTS) for index in chosen))
    axes.set_xticks([ticks[i] for i in chosen], [drawable(texts[i]) for i in chosen], **look)


def _move_up(axes: Axes, height: float) -> None:
    """Move the axes up, to leave space for tick labels of this height (in points) below them."""
    box = axes.get_position()
    bottom = max(box.y0, (height + 45) / (72 * SIZE[1]))
    axes.set_position((box.x0, bottom, box.width, box.y1 - bottom))


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
    name = _name(quantity.name) + units.beside_name(quantity.unit)
    if quantity.unit == SPEED_UP:
        name = f"times as fast as with {first}"
        axes.axhline(1, color=BLACK, linewidth=1)
    name = shortened(name, LONGEST_NAME, LABEL_POINTS)
    if min(values) > 0 and max(values) > WIDE * min(values):
        if quantity.unit == "bytes":
            _binary_scale_y(axes, name)
        else:
            decimal_scale(axes, name, lambda value: units.text(value, quantity.unit))
        return
    axes.set_ylabel(name)
    if min(values) < 0:
        axes.yaxis.set_major_formatter(lambda value, _: units.text(value, quantity.unit))
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


def _binary_scale_y(axes: Axes, name: str) -> None:
    """Make the y axis logarithmic, with ticks at powers of two."""
    axes.set_yscale("log", base=2)
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    every = max(1, math.ceil((high - low) / MOST_TICKS))
    powers = [2.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]
    axes.set_yticks(powers, [units.byte_text(power) for power in powers])
    axes.set_ylabel(name)


def _make_room(axes: Axes, names: list[str]) -> None:
    """Make space for the longest of the names on the right, and for the y labels on the left."""
    width = 72 * SIZE[0]
    longest = max(text_width(_short(name), LABEL_POINTS) for name in names)
    numbers = [text_width(tick.get_text(), LABEL_POINTS) for tick in axes.get_yticklabels()]
    box = axes.get_position()
    left = max(box.x0, (max(numbers, default=0) + 28) / width)
    right = min(0.9, 1 - (longest + 18) / width)
    axes.set_position((left, box.y0, right - left, box.height))


def _short(name: str) -> str:
    return shortened(name, LONGEST_LABEL, LABEL_POINTS)


# What it finds


def _finding(lines: list[Line], x: str, unit: str, quantity: Quantity, places: list[Any]) -> str:
    """Return a title with the change of each line from the first x to the last.

    If there are many lines, the title is short. A line that begins later or ends earlier says from
    where to where its change goes.
    """
    drawn = {place for line in lines for place, _ in line.points}
    ends = [place for place in places if place in drawn]
    first, last = units.text(ends[0], unit), units.text(ends[-1], unit)
    changes = []
    for line in lines:
        change = f"{line.name} {_change(line, quantity)}".strip()
        start, end = (units.text(place, unit) for place, _ in (line.points[0], line.points[-1]))
        if (start, end) != (first, last):
            if start == end:
                change += f" (only {start})"
            else:
                change += f" ({start} → {end})"
        changes.append(change)
    told = "; ".join(changes)
    if len(ends) == 1:
        finding = f"{_name(quantity.name)} at {_name(x)} {first}: {told}"
    elif quantity.unit == SPEED_UP:
        finding = f"{_name(x)} {first} → {last}: {told}"
    else:
        finding = f"{_name(quantity.name)}, {_name(x)} {first} → {last}: {told}"
    if text_width(finding, TEXT_POINTS, bold=True) > TITLE_WIDTH:
        at_last = [value for line in lines for place, value in line.points if place == ends[-1]]
        finding = _range(at_last, x, last, quantity)
    return finding[0].upper() + finding[1:]


def _change(line: Line, quantity: Quantity) -> str:
    start, end = line.points[0][1], line.points[-1][1]
    if quantity.unit == SPEED_UP:
        return _faster(end)
    if len(line.points) == 1:
        return quantity.text(end)
    return f"{quantity.text(start)} → {quantity.text(end)}"


def _range(values: list[float], x: str, last: str, quantity: Quantity) -> str:
    """Return a text with the smallest and the largest value of a quantity at the last x.

    `x` is the name of the axis, and `last` is its last value as text.
    """
    both = f"{quantity.text(min(values))} to {quantity.text(max(values))}"
    return f"{_name(quantity.name)} at {_name(x)} {last}: {both}"


def _faster(gain: float) -> str:
    if 1 / SAME < gain < SAME:
        return "as fast"
    if gain > 1:
        return f"{units.number_text(gain, 2)} times as fast"
    return f"{units.number_text(1 / gain, 2)} times slower"


def _name(column: str) -> str:
    """Return a column's name as words, such as "GPU memory" for "gpu_memory"."""
    words = ["GPU" + word[3:] if word in ("gpu", "gpus") else word for word in column.split("_")]
    return " ".join(words)


def _at(x: str, unit: str, place: Any) -> str:
    """Return a value of the x axis with its name, such as "4 GPUs" or "width 1024".

    `place` is the value, and `unit` is its unit.
    """
    if x == "gpus":
        return plural(place, "GPU")
    return f"{_name(x)} {units.text_with_unit(place, unit)}"


def _in_words(lines: list[Line], x: str, unit: str, quantity: Quantity) -> str:
    """Return a sentence with all numbers of the lines.

    `x` and `unit` are the name of the x axis and the unit of its values.
    """
    parts = []
    for line in lines:
        points = ", ".join(
            f"{quantity.text(value)} at {_at(x, unit, place)}" for place, value in line.points
        )
        if line.name:
            points = f"{line.name}: {points}"
        parts.append(points)
    return "; ".join(parts)
