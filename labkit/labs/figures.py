"""What the labs' figures share.

Solid lines are this machine's (measured or virtual), dashed ones are recordings, hollow markers are predictions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gputrace.figures.figure import BLUE, STYLE, VERMILLION, Figure, add_badge, words
from labkit.labs.experiment import Result

MARKERS = {BLUE: "o", VERMILLION: "s"}
SAME = 1.05  # factors closer to 1 than this are called equal

in_style = matplotlib.rc_context(STYLE)  # a decorator: the function draws in the style of all figures


def sources(result: Result, recorded: Result | None) -> list[tuple[Result, str]]:
    """The results to draw and their line styles."""
    return [(result, "-")] if recorded is None else [(recorded, "--"), (result, "-")]


def add_line(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, dashes: str, label: str) -> list[tuple]:
    """Draw a line; returns its end with the label, as `label_ends` takes it, or nothing where there are no points."""
    if not x:
        return []
    axes.plot(x, y, dashes, color=colour, marker=MARKERS[colour], linewidth=2 if dashes == "-" else 1.4)
    return [(x[-1], y[-1], label, colour)]


def hollow(colour: str, size: float = 11) -> dict[str, Any]:
    """The look of a predicted point."""
    return {"linestyle": "", "markersize": size, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 2}


def finished(
    canvas: Canvas, result: Result, recorded: Result | None, proof: Callable[[Result], str], *sentences: str, shown: str | None = None
) -> Figure:
    """The figure with its badges. In words, `proof` tells the numbers of a result with rows; `sentences` follow those of `result`."""
    told = [proof(result) if result.rows else "", *sentences]
    if recorded is not None and recorded.rows and (numbers := proof(recorded)):
        told.append(f"{recorded.badge}: {numbers}")
    both = result.badge if recorded is None else f"{result.badge}  ·  dashed: {recorded.badge}"
    return badged(canvas, result.badge, *told, shown=both if shown is None else shown)


def badged(canvas: Canvas, badge: str, *sentences: str, shown: str | None = None) -> Figure:
    """The figure with its badge, or what is `shown` in its place. `sentences` follow the title in the words for who cannot see it."""
    add_badge(canvas, badge if shown is None else shown)
    return Figure(canvas, words(canvas, *sentences, badge))
