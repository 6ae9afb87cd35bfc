"""The losses of a network that was trained in four ways, over one another."""

import math

import matplotlib
from matplotlib.ticker import MaxNLocator

from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    decimal_scale,
    label_ends,
    new_canvas,
    words,
)
from labkit.experiments.four_ways import WAYS, last_loss
from labkit.experiments.result import Result
from labkit.plots.experiments import badges, sources, told

# Colour, marker and width of each line: the widest lies under the others.
LINES = {
    "float32": (GREY, "", 7.0),
    "autocast float16": (BLUE, "o", 2.0),
    "autocast bfloat16": (ORANGE, "^", 1.4),
    "float16 alone": (VERMILLION, "X", 2.0),
}


def four_ways(result: Result, recorded: Result | None = None) -> Figure:
    """Loss by step of each training. A training that has come to "not a number" is drawn as far as it had a number."""
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result))
        labels = []
        for source, dashes in sources(result, recorded):
            for way, (colour, marker, width) in LINES.items():
                points = _finite(source, way)
                if not points:
                    continue
                steps, losses = zip(*points, strict=True)
                thin = {"linewidth": 1, "color": BLACK if colour == GREY else colour}
                bold = {"linewidth": width, "color": colour, "marker": marker, "markevery": 6}
                axes.plot(steps, losses, dashes, **(bold if source is result else thin))
                if source is result:
                    labels.append((steps[-1], losses[-1], _named(result, way), BLACK if colour == GREY else colour))
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        decimal_scale(axes, "mean squared error", lambda loss: f"{loss:g}")
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _proof(result), _proof(recorded), result.badge))


def _finite(result: Result, way: str) -> list[tuple[int, float]]:
    pairs = zip(result.column("step", way=way), result.column("loss", way=way), strict=True)
    return [(step, loss) for step, loss in pairs if math.isfinite(loss)]


def _lost(result: Result) -> dict[str, int]:
    """The step at which a training's loss first was no number."""
    found: dict[str, int] = {}
    for row in result.rows:
        if not math.isfinite(row["loss"]):
            found.setdefault(row["way"], row["step"])
    return found


def _named(result: Result, way: str) -> str:
    lost = _lost(result).get(way)
    return way if lost is None else f"{way}: no number from step {lost} on"


def _finding(result: Result) -> str:
    lost, last = _lost(result), last_loss(result)
    whole = [way for way in last if way not in lost]
    if len(last) < len(WAYS):
        return "Not measured yet: a training in four ways"
    if not lost:
        return f"All four ways end at a loss of about {_rough(last['float32'])}"
    end = min((last[way] for way in whole), default=math.nan)
    return f"{' and '.join(lost)} fails at step {min(lost.values())}; the others end at about {_rough(end)}"


def _rough(loss: float) -> str:
    """One digit: the next one differs between machines, whose sums are made in different orders."""
    return f"{loss:.1g}"


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    last = last_loss(result)
    told_losses = ", ".join(f"{way} {'no number' if math.isnan(loss) else _rough(loss)}" for way, loss in last.items())
    return told(result, f"the loss of the last steps: {told_losses}.")
