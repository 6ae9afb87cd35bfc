"""Parts that the figures of labs share.

Solid lines are numbers of this machine, measured or virtual. Dashed lines are recordings. Hollow
markers are predictions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gputrace.figures.figure import BLUE, STYLE, VERMILLION, Figure, add_badge, words
from labkit.labs.experiment import Result

MARKERS = {BLUE: "o", VERMILLION: "s"}
SAME = 1.05  # two numbers count as equal if their ratio is closer to 1 than this

# Decorator for a function that draws in the style of all figures.
in_style = matplotlib.rc_context(STYLE)


def sources(result: Result, recorded: Result | None) -> list[tuple[Result, str]]:
    """Return the results to draw, each with its line style. A recording is drawn first."""
    if recorded is None:
        return [(result, "-")]
    return [(recorded, "--"), (result, "-")]


def add_line(
    axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, dashes: str, label: str
) -> list[tuple]:
    """Draw a line, and return its last point with the label and the colour for `label_ends`.

    The list is empty if there are no points. `dashes` is the line style: "-" for a solid line.
    """
    if not x:
        return []
    width = 2 if dashes == "-" else 1.4
    axes.plot(x, y, dashes, color=colour, marker=MARKERS[colour], linewidth=width)
    return [(x[-1], y[-1], label, colour)]


def hollow(colour: str, size: float = 11) -> dict[str, Any]:
    """Return matplotlib's arguments for the hollow marker of a predicted point."""
    return {
        "linestyle": "",
        "markersize": size,
        "markerfacecolor": "none",
        "markeredgecolor": colour,
        "markeredgewidth": 2,
    }


def finished(
    canvas: Canvas,
    result: Result,
    recorded: Result | None,
    proof: Callable[[Result], str],
    *sentences: str,
) -> Figure:
    """Return the figure with its badges and a description in words.

    Args:
        canvas: the figure of matplotlib.
        result: the result that is drawn solid.
        recorded: the recording that is drawn dashed, if there is one.
        proof: a function that describes the numbers of a result in words.
        sentences: more sentences, which follow the numbers of `result`.
    """
    told = [proof(result) if result.rows else "", *sentences]
    if recorded is not None and recorded.rows:
        numbers = proof(recorded)
        if numbers:
            told.append(f"{recorded.badge}: {numbers}")
    shown = result.badge
    if recorded is not None:
        shown += f"  ·  dashed: {recorded.badge}"
    return badged(canvas, result.badge, *told, shown=shown)


def badged(canvas: Canvas, badge: str, *sentences: str, shown: str | None = None) -> Figure:
    """Return the figure with its badge, or with the text `shown` in its place.

    The `sentences` follow the title in the description for readers who cannot see the figure.
    """
    if shown is None:
        shown = badge
    add_badge(canvas, shown)
    return Figure(canvas, words(canvas, *sentences, badge))
