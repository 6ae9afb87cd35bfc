"""The figures of nn.DataParallel's training step: a small and a large network by the number of GPUs, and what each GPU does in it."""

from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLUE,
    STYLE,
    VERMILLION,
    Figure,
    add_badge,
    binary_scale,
    darker,
    decimal_scale,
    label_ends,
    new_canvas,
    words,
)
from labkit.experiments.data_parallel import computing_shares, parallel_gain
from labkit.experiments.result import Result
from labkit.plots.experiments import SAME, badges, line, sources, told

COLOURS = (BLUE, VERMILLION)


def data_parallel_step(result: Result, recorded: Result | None = None, prediction: float | None = None) -> Figure:
    """Seconds of one training step by the number of GPUs, a line for each model (two at most).

    `prediction` says how many times faster than on one GPU the last model's step is on the most GPUs.
    """
    models = list(result.parameters["models"])
    with matplotlib.rc_context(STYLE):
        canvas, axes = new_canvas(_finding(result, models))
        labels = []
        for source, dashes in sources(result, recorded):
            for model, colour in zip(models, COLOURS, strict=False):
                gpus, seconds = source.column("gpus", model=model), source.column("seconds", model=model)
                labels += line(axes, gpus, seconds, colour, dashes, model if source is result else f"{model}, recorded")
        sentence = _predicted(axes, result, models[-1], prediction)
        binary_scale(axes, "GPUs that share a batch", lambda gpus: f"{gpus:g}", most=5)
        decimal_scale(axes, "time of one training step", units.time_text)
        label_ends(axes, labels)
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _proof(result), sentence, _proof(recorded), result.badge))


def data_parallel_work(result: Result, recorded: Result | None = None) -> Figure:
    """The share of a training step for which each GPU computes, a bar for each, in a panel for each model; a diamond where recorded."""
    models = list(result.parameters["models"])
    with matplotlib.rc_context(STYLE):
        canvas, *panels = new_canvas(_work_finding(result, models), rows=len(models))
        for axes, model, colour in zip(panels, models, COLOURS, strict=False):
            shares = computing_shares(result, model)
            axes.barh(list(shares), list(shares.values()), color=colour, height=0.6)
            if recorded is not None:
                there = computing_shares(recorded, model)
                axes.plot(list(there.values()), list(there), "D", markerfacecolor="white", markeredgecolor="black", label="recorded")
            axes.set(xlim=(0, 1), yticks=range(result.parameters["gpus"]))
            axes.set_yticklabels([f"GPU {gpu}" for gpu in range(result.parameters["gpus"])])
            axes.invert_yaxis()
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.text(1.02, 0.5, f"{model} model", transform=axes.transAxes, va="center", color=darker(colour))
        panels[-1].set_xlabel("share of the step for which it computes")
        if recorded is not None:
            panels[0].legend(frameon=False, loc="center right")
        add_badge(canvas, badges(result, recorded))
        return Figure(canvas, words(canvas, _work_proof(result, models), _work_proof(recorded, models), result.badge))


def _work_finding(result: Result, models: list[str]) -> str:
    parts = []
    for model in models:
        if shares := computing_shares(result, model):
            parts.append(f"{mean(shares.values()):.0%} of the {model} model's step")
    return f"GPUs compute for {', '.join(parts)}" if parts else "Not measured yet: for how much of a step each GPU computes"


def _work_proof(result: Result | None, models: list[str]) -> str:
    if result is None or not result.rows:
        return ""
    parts = []
    for model in models:
        shares = computing_shares(result, model)
        if shares:
            parts.append(f"{model} model, {', '.join(f'GPU {gpu} {share:.0%}' for gpu, share in shares.items())}")
    return told(result, f"{'; '.join(parts)}.")


def _finding(result: Result, models: list[str]) -> str:
    gains = {model: gain for model in models if (gain := parallel_gain(result, model))}
    if not gains:
        return "Not measured yet: a model on one GPU and on several"
    most = max(max(gain) for gain in gains.values())
    parts = [f"the {model} model {_compared(gain[most])}" for model, gain in gains.items() if most in gain]
    return f"{most} GPUs: {', '.join(parts)}"


def _compared(gain: float) -> str:
    if 1 / SAME < gain < SAME:
        return "as fast as on one"
    return f"{gain:.1f} times faster" if gain > 1 else f"{1 / gain:.1f} times slower"


def _predicted(axes: Axes, result: Result, model: str, prediction: float | None) -> str:
    """Draw the predicted time of the model on the most GPUs as a hollow marker, and say it."""
    most = max(result.parameters["gpus"])
    alone = result.column("seconds", model=model, gpus=1)
    if prediction is None or not alone:
        return ""
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": VERMILLION, "markeredgewidth": 2}
    seconds = alone[0] / prediction
    axes.plot([most], [seconds], linestyle="", marker="s", markersize=11, **hollow)
    axes.annotate(f"predicted: {prediction:g} times", (most, seconds), (-11, 0), **BESIDE, ha="right", color=darker(VERMILLION))
    return f"Predicted for the {model} model on {most} GPUs: {prediction:g} times faster."


def _proof(result: Result | None) -> str:
    if result is None or not result.rows:
        return ""
    parts = []
    for model in dict.fromkeys(result.column("model")):
        gpus, seconds = result.column("gpus", model=model), result.column("seconds", model=model)
        times = ", ".join(f"{units.time_text(value)} on {count}" for count, value in zip(gpus, seconds, strict=True))
        parts.append(f"a step of the {model} model takes {times}")
    return told(result, f"{'; '.join(parts)}.")
