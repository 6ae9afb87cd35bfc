"""What ranks send one another in collectives."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from gpulessons import rank_programs
from gputrace.figures.figure import BLACK, BLUE, GREEN, GREY, ORANGE, SIZE, SKY_BLUE, TEXT_POINTS, VERMILLION, YELLOW, Figure, add_title
from labkit.labs.experiment import Result, Row, Run, checked_count
from labkit.labs.figures import badged, in_style

COLLECTIVES = ("broadcast", "all_reduce", "reduce_scatter", "all_gather")
COLUMNS = {"collective": "", "rank": "", "before": "", "after": ""}
MOST = 8  # ranks


def collectives(ranks: int = 3) -> Run:
    """The vector that each of so many ranks holds before and after each of the `COLLECTIVES`, as lists of whole numbers.

    Rank r brings 10 (r + 1), 10 (r + 1) + 1, …, a number for each rank; all_gather begins with what reduce_scatter left. The ranks are
    processes that torchrun starts, once. Raises ValueError for less than 2 ranks and for more than 8, and as
    `labkit.torchrun` does.
    """
    if not 2 <= checked_count("ranks", ranks) <= MOST:
        raise ValueError(f"ranks={ranks}: choose 2 to {MOST}")
    return Run("collectives", {"ranks": ranks}, COLUMNS, rank_programs.badge(ranks), len(COLLECTIVES) * ranks, _points(ranks))


def _points(ranks: int) -> Iterator[Row]:
    told = rank_programs.results("collectives", ranks)
    for collective in COLLECTIVES:
        for rows in told:
            yield next(row for row in rows if row["collective"] == collective)


# The figure


RANKS = (BLUE, ORANGE, GREEN, VERMILLION, SKY_BLUE, YELLOW, "#CC79A7", "#999999")  # the colour of what a rank brings
LIGHT = 0.4  # how much of its colour a box keeps, so that its number can be read
ARROW = 1.4  # boxes: the room between before and after


@in_style
def plot_collectives(result: Result) -> Figure:
    """The vectors of all ranks before and after each collective: a box for each number, in the colour of the rank that brought it."""
    names = list(dict.fromkeys(result.column("collective")))
    canvas = Canvas(figsize=SIZE, facecolor="white")
    panels = canvas.subplots(2, 2, gridspec_kw={"left": 0.07, "right": 0.98, "bottom": 0.1, "top": 0.82, "hspace": 0.5, "wspace": 0.3})
    add_title(canvas, _finding(result))
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, name in zip(panels.flat, names, strict=False):
        _draw(axes, name, result.column("before", collective=name), result.column("after", collective=name))
    told = (_told(result, name) for name in names)
    return badged(canvas, result.badge, *told, shown=f"grey: sums over all ranks  ·  {result.badge}")


def _draw(axes: Axes, name: str, before: Sequence[list[int]], after: Sequence[list[int]]) -> None:
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


def _finding(result: Result) -> str:
    ranks = result.parameters["ranks"]
    reduced, gathered = (result.column("after", collective=name) for name in ("all_reduce", "all_gather"))
    if reduced and reduced == gathered:
        return "An all_reduce does what reduce_scatter and all_gather do together"
    return f"What {ranks} ranks hold before and after collectives"


def _told(result: Result, name: str) -> str:
    """The vectors in words; ranks that end with the same are named together."""
    before, after = result.column("before", collective=name), result.column("after", collective=name)
    brought = "; ".join(_listed(numbers) for numbers in before)
    left = f"each {_listed(after[0])}" if after.count(after[0]) == len(after) else "; ".join(_listed(numbers) for numbers in after)
    return f"{name}: before, ranks 0 to {len(before) - 1} hold {brought}; after, {left}."


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
