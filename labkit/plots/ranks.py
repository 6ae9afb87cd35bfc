"""Figures of ranks: what each holds before and after a collective, and of a model in training."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from gputrace import units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    GREEN,
    GREY,
    ORANGE,
    SIZE,
    SKY_BLUE,
    STYLE,
    TEXT_POINTS,
    VERMILLION,
    YELLOW,
    Figure,
    add_badge,
    add_title,
    byte_ticks,
    new_canvas,
    words,
)
from labkit.experiments.result import Result
from labkit.experiments.shards import KINDS

RANKS = (BLUE, ORANGE, GREEN, VERMILLION, SKY_BLUE, YELLOW, "#CC79A7", "#999999")  # the colour of what a rank brings
LIGHT = 0.4  # how much of its colour a box keeps, so that its number can be read
ARROW = 1.4  # boxes: the room between before and after
WIDEST, BAR = 0.8, 0.92  # of a way's bars together, and of each of them its own place


def collectives(result: Result) -> Figure:
    """The vectors of all ranks before and after each collective: a box for each number, in the colour of the rank that brought it."""
    names = list(dict.fromkeys(result.column("collective")))
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, facecolor="white")
        panels = canvas.subplots(2, 2, gridspec_kw={"left": 0.07, "right": 0.98, "bottom": 0.1, "top": 0.82, "hspace": 0.5, "wspace": 0.3})
        add_title(canvas, _collectives_finding(result))
        for axes in panels.flat:
            axes.set_axis_off()
        for axes, name in zip(panels.flat, names, strict=False):
            _draw_collective(axes, name, result.column("before", collective=name), result.column("after", collective=name))
        add_badge(canvas, f"grey: sums over all ranks  ·  {result.badge}")
        return Figure(canvas, words(canvas, *(_collective_told(result, name) for name in names), result.badge))


def _draw_collective(axes: Axes, name: str, before: Sequence[list[int]], after: Sequence[list[int]]) -> None:
    owner = {number: rank for rank, numbers in enumerate(before) for number in numbers}
    ranks = len(before)
    axes.set(xlim=(0, 2 * ranks + ARROW), ylim=(ranks, 0), title=name)
    for rank, (brought, left) in enumerate(zip(before, after, strict=True)):
        axes.text(-0.15, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=TEXT_POINTS)
        for start, numbers in ((0.0, brought), (ranks + ARROW, left)):
            for column, number in enumerate(numbers):
                _box(axes, start + column, rank, str(number), RANKS[owner[number]] if number in owner else GREY)
    look = {"arrowstyle": "->", "color": BLACK, "linewidth": 1.2}
    axes.annotate("", (ranks + ARROW - 0.2, ranks / 2), (max(map(len, before)) + 0.2, ranks / 2), arrowprops=look)


def _box(axes: Axes, x: float, rank: int, text: str, colour: str) -> None:
    filled = tuple(1 - LIGHT * (1 - part) for part in to_rgb(colour))
    axes.add_patch(Rectangle((x + 0.04, rank + 0.1), 0.92, 0.8, facecolor=filled, edgecolor=colour))
    axes.text(x + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=TEXT_POINTS)


def _collectives_finding(result: Result) -> str:
    ranks = result.parameters["ranks"]
    reduced, gathered = (result.column("after", collective=name) for name in ("all_reduce", "all_gather"))
    if reduced and reduced == gathered:
        return "An all_reduce does what reduce_scatter and all_gather do together"
    return f"What {ranks} ranks hold before and after collectives"


def _collective_told(result: Result, name: str) -> str:
    """The vectors in words; ranks that end with the same are named together."""
    before, after = result.column("before", collective=name), result.column("after", collective=name)
    brought = "; ".join(_listed(numbers) for numbers in before)
    left = f"each {_listed(after[0])}" if after.count(after[0]) == len(after) else "; ".join(_listed(numbers) for numbers in after)
    return f"{name}: before, ranks 0 to {len(before) - 1} hold {brought}; after, {left}."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def held_by_ranks(result: Result) -> Figure:
    """The bytes that each rank holds under each way, one bar a rank, in the colours of their kinds; a hollow marker for the formula's."""
    ways, ranks = list(dict.fromkeys(result.column("way"))), result.parameters["ranks"]
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_held_finding(result))
        top = max((_held(result, way, rank, "formula") for way in ways for rank in range(ranks)), default=1)
        for place, way in enumerate(ways):
            for rank in range(ranks):
                _draw_held(axes, result, way, rank, place - WIDEST / 2 + WIDEST * (rank + 0.5) / ranks, WIDEST / ranks)
        byte_ticks(axes, 1.12 * top, most=5)
        axes.set(xticks=range(len(ways)), ylabel="held by a rank")
        axes.set_xticklabels([f"{way}\n{'  '.join(f'rank {rank}' for rank in range(ranks))}" for way in ways])
        axes.grid(axis="x", visible=False)
        patches = [
            Patch(facecolor=CATEGORY_COLOURS[kind], hatch=CATEGORY_HATCHES.get(kind), edgecolor="white", label=kind) for kind in KINDS
        ]
        axes.legend(handles=patches[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.6), fontsize=TEXT_POINTS)
        axes.annotate("hollow:\nby the formula", (1.03, 0.3), xycoords="axes fraction", va="center", fontsize=TEXT_POINTS)
        add_badge(canvas, result.badge)
        return Figure(canvas, words(canvas, *(_held_told(result, way) for way in ways), result.badge))


def _draw_held(axes: Axes, result: Result, way: str, rank: int, x: float, width: float) -> None:
    bottom = 0
    for kind in KINDS:
        for nbytes in result.column("bytes", way=way, rank=rank, kind=kind):
            look: dict[str, Any] = {"color": CATEGORY_COLOURS[kind], "hatch": CATEGORY_HATCHES.get(kind), "edgecolor": "white"}
            axes.bar(x, nbytes, BAR * width, bottom, **look)
            bottom += nbytes
    if bottom:
        axes.plot([x], [_held(result, way, rank, "formula")], "D", markerfacecolor="white", markeredgecolor=BLACK, markersize=6)


def _held(result: Result, way: str, rank: int, column: str) -> int:
    return sum(result.column(column, way=way, rank=rank))


def _held_finding(result: Result) -> str:
    whole, cut = _held(result, "DDP", 0, "bytes"), _held(result, "FSDP", 0, "bytes")
    if not whole or not cut:
        return "Not measured yet: what a rank holds"
    return f"A rank holds {units.byte_text(_round_down(whole))} under DDP, {units.byte_text(_round_down(cut))} under FSDP"


def _round_down(nbytes: int) -> int:
    """Without Adam's step numbers, some bytes a tensor, which would make 4 MiB to 4.00002 MiB."""
    return nbytes >> 10 << 10


def _held_told(result: Result, way: str) -> str:
    parts = []
    for rank in range(result.parameters["ranks"]):
        kinds = ", ".join(
            f"{units.byte_text(_round_down(nbytes))} of {kind}"
            for kind in KINDS
            for nbytes in result.column("bytes", way=way, rank=rank, kind=kind)
        )
        parts.append(f"rank {rank} {kinds}")
    alike = len({part.split(" ", 2)[2] for part in parts}) == 1
    return f"{way}: {'each rank ' + parts[0].split(' ', 2)[2] if alike else '; '.join(parts)}."
