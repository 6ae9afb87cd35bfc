"""The figures of memory budgets: a plan that makes a training fit, and formulas beside what was measured."""

import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    GREY,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    YELLOW,
    Figure,
    add_badge,
    darker,
    new_canvas,
    shortened,
    words,
)
from labkit.experiments.result import Result, Row
from labkit.experiments.training_memory import RAN_OUT, TERMS, errors

GIB = 1 << 30
COLOURS = CATEGORY_COLOURS | {"in flight": YELLOW, "buckets": "white", "batch": GREY}
HATCHES = CATEGORY_HATCHES | {"buckets": "////", "in flight": "\\\\\\\\"}


def memory_plan(result: Result, prediction: float | None = None) -> Figure:
    """The terms of each step's peak beside the room that there is. `prediction` says in GiB what the first takes."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_answer(result))
        axes.set_position((0.27, 0.36, 0.69, 0.48))
        if result.rows:
            _draw_plan(axes, result, prediction)
        add_badge(canvas, result.badge)
        said = "" if prediction is None else f"Predicted: {prediction:g} GiB."
        told = [f"{row['change']}: {_told(row)}" for row in result.rows]
        return Figure(canvas, words(canvas, result.parameters["setting"], *told, said, result.badge))


def _answer(result: Result) -> str:
    if not result.rows:
        return f"Not worked out yet: {result.parameters['gpu']}"
    first, gpu = result.rows[0], result.parameters["gpu"]
    sizes = f"{units.byte_text(first['peak'])} of {units.byte_text(first['room'])} on {gpu}"
    changes = result.parameters["changes"]
    return f"{sizes}: {f'first change {changes[1]}' if len(changes) > 1 else result.parameters['answer'].split(',')[0].rstrip('.').lower()}"


def _told(row: Row) -> str:
    terms = ", ".join(f"{name} {units.byte_text(row[name])}" for name in TERMS if row[name])
    told = f"{units.byte_text(row['peak'])} at {row['moment']}: {terms}"
    if row["measured"] == RAN_OUT:
        return f"{told}; memory ran out"
    return f"{told}; measured {units.byte_text(row['measured'])}" if row["measured"] else told


def _draw_plan(axes: Axes, result: Result, prediction: float | None) -> None:
    rows = result.rows
    left = [0.0] * len(rows)
    for name in TERMS:
        sizes = [row[name] / GIB for row in rows]
        if any(sizes):
            look: dict[str, Any] = {"color": COLOURS[name], "hatch": HATCHES.get(name), "edgecolor": BLACK, "linewidth": 0.6}
            axes.barh(range(len(rows)), sizes, 0.55, left, label=name, **look)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    measured = {place: row["measured"] / GIB for place, row in enumerate(rows) if row["measured"] > 0}
    if measured:
        axes.plot(list(measured.values()), list(measured), "D", color=BLACK, markersize=6, label="measured")
    for place, row in enumerate(rows):
        if row["measured"] == RAN_OUT:
            axes.annotate("ran out", (left[place], place), (6, 0), textcoords="offset points", va="center", color=darker(VERMILLION))
    if prediction is not None:
        hollow: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": BLUE, "markeredgewidth": 2}
        axes.plot(prediction, 0, "o", **hollow, label="your prediction")
    room = rows[0]["room"] / GIB
    axes.axvline(room, color=BLACK, linestyle=":", linewidth=1.6)
    most = max(room, prediction or 0, *left)
    side: dict[str, Any] = {"ha": "right", "xytext": (4, 2)} if room > most / 2 else {"ha": "left", "xytext": (-4, 2)}
    axes.annotate(f"room: {room:.3g} GiB", (room, -0.6), textcoords="offset points", va="bottom", annotation_clip=False, **side)
    axes.set(xlim=(0, 1.12 * most), ylim=(max(len(rows), 2) - 0.4, -0.6), xlabel="GiB at the fullest moment")
    axes.set_yticks(range(len(rows)), [shortened(row["change"], 122) for row in rows], fontsize=TEXT_POINTS)
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="lower left", bbox_to_anchor=(0.01, 0.06), ncols=5, frameon=False, fontsize=TEXT_POINTS, columnspacing=1.2)


def training_memory(result: Result, recorded: Result | None = None) -> Figure:
    """Formula and measurement for each setting."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result))
        axes.set_position((0.46, 0.24, 0.5, 0.65))
        for place, row in enumerate(result.rows):
            measured, formula = row["measured"] / GIB, row["formula"] / GIB
            if row["measured"] > 0:
                axes.plot(measured, place, "o", color=BLUE, label=None if place else "measured")
            axes.plot(formula, place, "o", markersize=11, markerfacecolor="none", markeredgecolor=BLACK, label=None if place else "formula")
        for place, row in enumerate(recorded.rows if recorded is not None else []):
            axes.plot(row["measured"] / GIB, place, "|", color=darker(VERMILLION), markersize=13, label=None if place else "recorded")
        axes.set_yticks(range(len(result.rows)), [shortened(_short(row["setting"]), 218) for row in result.rows], fontsize=TEXT_POINTS)
        axes.set(xlim=(0, None), ylim=(len(result.rows) - 0.4, -0.6), xlabel="GiB at the fullest moment")
        if result.rows:
            canvas.legend(loc="lower left", bbox_to_anchor=(0.01, 0.06), ncols=3, frameon=False, fontsize=TEXT_POINTS)
        add_badge(canvas, result.badge if recorded is None else f"{result.badge}  ·  | {recorded.badge}")
        return Figure(canvas, words(canvas, *_proof(result), *_proof(recorded), result.badge))


def _finding(result: Result) -> str:
    found = errors(result)
    if not found:
        return "Not measured yet: what training steps take"
    return f"The formula is within {100 * max(map(abs, found.values())):.2g} % of {len(found)} measured training steps"


def _short(setting: str) -> str:
    """The setting without the sizes of its network."""
    return re.sub(r"\(.*?\)", "", setting)


def _proof(result: Result | None) -> list[str]:
    if result is None:
        return []
    told = [
        f"{row['setting']}: formula {units.byte_text(row['formula'])}, measured {units.byte_text(row['measured'])}"
        for row in result.rows
        if row["measured"] > 0
    ]
    return [f"{result.badge}: {'; '.join(told)}"] if result.origin else told
