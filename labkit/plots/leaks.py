"""The figure of a leaky training: the memory that its leaks keep, step by step."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gputrace import units
from gputrace.figures.figure import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    SKY_BLUE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    byte_ticks,
    darker,
    label_ends,
    new_canvas,
    words,
)
from labkit.experiments.leaks import growth
from labkit.experiments.result import Result

MIB = 1 << 20
LOOKS = ((VERMILLION, "o"), (BLUE, "s"), (ORANGE, "^"), (GREEN, "D"), (SKY_BLUE, "v"), (BLACK, "x"))


def leaky_training(result: Result, recorded: Result | None = None, prediction: float | None = None) -> Figure:
    """What each training has kept after each step. `prediction` says in MiB what is kept a step; it is drawn at the last one."""
    kept = growth(result)
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result, kept))
        labels = [_line(axes, result, leak, "-", index) for index, leak in enumerate(kept)]
        for index, leak in enumerate(kept):
            if recorded is not None and leak in growth(recorded):
                _line(axes, recorded, leak, "--", index)
        guess = _predicted(axes, result, prediction)
        highest = [*result.column("grown"), *(recorded.column("grown") if recorded else []), guess or 0, MIB]
        byte_ticks(axes, 1.08 * max(highest), 6)
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # a line at 0 is seen
        axes.set(xlabel="training step", ylabel="kept since the start")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        label_ends(axes, [*labels, (result.rows[-1]["step"], guess, f"predicted: {prediction:g}", BLUE)] if guess is not None else labels)
        add_badge(canvas, result.badge if recorded is None else f"{result.badge}  ·  dashed: {recorded.badge}")
        said = "" if prediction is None else f"Predicted: {prediction:g} MiB a step."
        return Figure(canvas, words(canvas, _proof(result), _held(result), said, _proof(recorded), result.badge))


def _finding(result: Result, kept: dict[str, float]) -> str:
    if not kept:
        return "Not measured yet: not even one step"
    if len(kept) == 1:
        nbytes = next(iter(kept.values()))
        return f"Memory grows by {units.byte_text(nbytes)} a step" if nbytes else "Memory does not grow"
    most, least = max(kept, key=lambda leak: kept[leak]), min(kept, key=lambda leak: kept[leak])
    nothing = units.byte_text(kept[least]) if kept[least] else "nothing"
    return f"“{most}” keeps {units.byte_text(kept[most])} a step, “{least}” {nothing}"


def _proof(result: Result | None) -> str:
    """The bytes a step of each training, in a sentence; a recording says that it is one."""
    if result is None or not result.rows:
        return ""
    told = ", ".join(f"{leak} {units.byte_text(nbytes)}" for leak, nbytes in growth(result).items())
    return f"{f'{result.badge}: ' if result.origin else ''}kept a step: {told}."


def _held(result: Result) -> str:
    return "".join(f"Held by {holder}." for holder in result.column("holder") if holder)


def _line(axes: Axes, result: Result, leak: str, dashes: str, index: int) -> tuple[float, float, str, str]:
    """Draw what one training kept; returns the name for the line's end."""
    steps, grown = result.column("step", leak=leak), result.column("grown", leak=leak)
    colour, marker = LOOKS[index % len(LOOKS)]
    if dashes == "-":
        axes.plot(steps, grown, dashes, color=colour, marker=marker, clip_on=False)
    else:
        axes.plot(steps, grown, dashes, color=darker(colour), linewidth=1.4)
    return steps[-1], grown[-1], f"{leak.count('+') + 1} leaks" if "+" in leak else leak, colour


def _predicted(axes: Axes, result: Result, prediction: float | None) -> float | None:
    """Draw the predicted bytes at the last step as a hollow marker, and return them."""
    if prediction is None or not result.rows:
        return None
    step = result.rows[-1]["step"]
    guess = prediction * MIB * step
    axes.plot([step], [guess], "o", markersize=11, markerfacecolor="none", markeredgecolor=BLUE, markeredgewidth=2, clip_on=False)
    return guess
