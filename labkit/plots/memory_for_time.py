"""The figure of memory bought with time: each way of a training step by both."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    byte_ticks,
    darker,
    new_canvas,
    time_unit,
    words,
)
from labkit.experiments.memory_for_time import AS_IT_IS, prices
from labkit.experiments.result import Result


def memory_for_time(result: Result, recorded: Result | None = None) -> Figure:
    """Peak and seconds of each way; the step as it is stands out."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result))
        if result.rows:
            _draw(axes, result)
        add_badge(canvas, result.badge)
        return Figure(canvas, words(canvas, _proof(result), _proof(recorded), result.badge))


def _finding(result: Result) -> str:
    others = {way: price for way, price in prices(result).items() if way != AS_IT_IS}
    if not others:
        return "Not measured yet: memory for time"
    way = min(others, key=lambda way: others[way][0])
    memory, time = others[way]
    return f"“{way}” takes {memory:.0%} of the memory and {time:.1f} times the time"


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    told = "; ".join(f"{row['way']} {units.byte_text(row['peak'])}, {units.time_text(row['seconds'])}" for row in result.rows)
    return f"{f'{result.badge}: ' if result.origin else ''}{told}."


def _draw(axes: Axes, result: Result) -> None:
    period, short = time_unit(max(result.column("seconds")))
    middle = max(result.column("seconds")) / period / 2
    for row in result.rows:
        x, y = row["seconds"] / period, row["peak"]
        plain = row["way"] == AS_IT_IS
        axes.plot(x, y, "s" if plain else "o", color=VERMILLION if plain else BLUE, markersize=9, clip_on=False)
        side: dict[str, Any] = {"ha": "right", "xytext": (-9, 0)} if x > middle else {"ha": "left", "xytext": (9, 0)}
        axes.annotate(row["way"], (x, y), **(BESIDE | side), color=darker(VERMILLION) if plain else BLACK)
    byte_ticks(axes, 1.1 * max(result.column("peak")), 6)
    axes.set(xlabel=f"{short} for forward and backward", ylabel="added at the peak", xlim=(0, 2.1 * middle))
