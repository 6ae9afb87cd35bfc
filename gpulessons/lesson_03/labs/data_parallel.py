"""Measure and draw how much faster nn.DataParallel makes a training step on several GPUs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

import labkit
from gpulessons.networks import linear_layers
from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    VERMILLION,
    Figure,
    binary_scale,
    darker,
    label_ends,
    new_canvas,
)
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import SAME, add_line, finished, hollow, in_style, sources
from labkit.labs.panel import ExperimentPanel
from labkit.labs.predictions import compared_as_factor, stays_open

MODELS = {"small": (1024, 512), "large": (4096, 8192)}  # (width in neurons, rows of a batch)
ASKED = "large"  # the model for which learners predict
GPUS = (1, 2, 4)
LAYERS = 8
LARGEST = 1 << 16
COLUMNS = {"gpus": "GPUs", "model": "", "width": "neurons", "batch": "rows", "seconds": "seconds"}


def data_parallel_step(
    gpus: Sequence[int] = GPUS, models: Mapping[str, Sequence[int]] = MODELS, repeats: int = 3
) -> Run:
    """Measure the seconds of a training step under `nn.DataParallel`, by model and number of GPUs.

    A model is given as (width, batch): eight linear layers of that width, each with ReLU, and the
    rows of the batch, which is on the first GPU. A step is forward pass, backward pass and SGD. Its
    seconds are the median of `repeats` steps after two warm-up steps. On one GPU, DataParallel
    calls the model itself. Virtual GPUs do not compute values here, only memory, order and time.

    Raises ValueError for more GPUs than are in use and for sizes outside 1 to 65536, and
    RuntimeError when no GPU is in use.
    """
    name = badge()
    gpus = checked_sizes("gpus", gpus, machine.in_use().count)
    repeats = checked_count("repeats", repeats)
    if not models:
        raise ValueError("expected at least one model as name: (width, batch), got models={}")
    sizes = {model: _checked_model(model, size) for model, size in models.items()}
    parameters = {"gpus": gpus, "models": sizes, "repeats": repeats}
    points = len(gpus) * len(sizes)
    rows = _points(gpus, sizes, repeats)
    return Run("data_parallel_step", parameters, COLUMNS, name, points, rows)


def parallel_gain(result: Result, model: str) -> dict[int, float]:
    """Return the speed-up of the model's step over one GPU, by the number of GPUs.

    A speed-up below 1 means that the step is slower than on one GPU.
    """
    seconds = result.by("gpus", "seconds", model=model)
    if 1 not in seconds:
        return {}
    return {gpus: seconds[1] / value for gpus, value in seconds.items() if gpus > 1}


def _checked_model(model: str, size: Sequence[int]) -> list[int]:
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(n) is int and 1 <= n <= LARGEST for n in size):
        raise ValueError(
            f"expected (width, batch) with whole numbers from 1 to {LARGEST} for model {model!r}, "
            f"got {size!r}"
        )
    return list(size)


def _points(
    gpus: Sequence[int], models: Mapping[str, Sequence[int]], repeats: int
) -> Iterator[Row]:
    for model, (width, batch) in models.items():
        for count in gpus:
            with machine.in_use().without_values():
                seconds = _step_seconds(width, batch, count, repeats)
            sizes = {"width": width, "batch": batch}
            yield {"gpus": count, "model": model, **sizes, "seconds": seconds}


def _step_seconds(width: int, batch: int, gpus: int, repeats: int) -> float:
    step = _prepared(width, batch, gpus)
    return labkit.seconds(step, repeats, warm_up=0)


def _prepared(width: int, batch: int, gpus: int) -> Callable[[], None]:
    """Return a function that runs a training step under DataParallel.

    The step has already run twice, because the first steps load libraries and allocate memory.
    """
    parallel = nn.DataParallel(linear_layers(LAYERS, width, "cuda:0"), device_ids=list(range(gpus)))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    inputs = torch.ones(batch, width, device="cuda:0")

    def step() -> None:
        loss = parallel(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    step()
    return step


# The figure


COLOURS = (BLUE, VERMILLION)


@in_style
def plot_data_parallel_step(
    result: Result, recorded: Result | None = None, prediction: float | None = None
) -> Figure:
    """Draw the speed-up of a training step over one GPU, by the number of GPUs.

    There is a line for each model, two at most. `prediction` is the speed-up that the learner
    predicts for the last model on the most GPUs.
    """
    models = list(result.parameters["models"])
    canvas, axes = new_canvas(_finding(result, models))
    most = max(result.parameters["gpus"])
    axes.hlines(1, 1, most, color=BLACK, linewidth=1)
    labels: list[tuple] = [(most, 1, "one GPU", BLACK)]
    for source, dashes in sources(result, recorded):
        for model, colour in zip(models, COLOURS, strict=False):
            gain = parallel_gain(source, model)
            if gain:
                label = model
                if source is not result:
                    label = f"{model}, recorded"
                labels += add_line(axes, [1, *gain], [1, *gain.values()], colour, dashes, label)
    sentence = _predicted(axes, result, models[-1], prediction)
    binary_scale(axes, "GPUs that share a batch", lambda gpus: f"{gpus:g}", most=5)
    axes.set_ylim(0, None)
    axes.set_ylabel("times as fast as on one GPU")
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof, sentence)


def _finding(result: Result, models: list[str]) -> str:
    gains = {model: parallel_gain(result, model) for model in models}
    counts = [gpus for gain in gains.values() for gpus in gain]
    if not counts:
        return "Not measured yet: a model on one GPU and on several"
    most = max(counts)
    parts = [
        f"the {model} model {_compared(gain[most])}"
        for model, gain in gains.items()
        if most in gain
    ]
    return f"{most} GPUs: {', '.join(parts)}"


def _compared(gain: float) -> str:
    if 1 / SAME < gain < SAME:
        return "as fast as on one"
    if gain > 1:
        return f"{gain:.1f} times faster"
    return f"{1 / gain:.1f} times slower"


def _predicted(axes: Axes, result: Result, model: str, prediction: float | None) -> str:
    """Draw the predicted speed-up as a hollow marker, and return a sentence about it."""
    most = max(result.parameters["gpus"])
    if prediction is None or not result.column("seconds", model=model, gpus=1):
        return ""
    axes.plot([most], [prediction], marker="s", **hollow(VERMILLION))
    style: Any = {**BESIDE, "ha": "right", "color": darker(VERMILLION)}
    axes.annotate(f"predicted: {prediction:g} times", (most, prediction), (-11, 0), **style)
    return f"Predicted for the {model} model on {most} GPUs: {prediction:g} times faster."


def _proof(result: Result) -> str:
    parts = []
    for model in dict.fromkeys(result.column("model")):
        seconds = result.by("gpus", "seconds", model=model)
        times = ", ".join(
            f"{units.time_text(value)} on {count}" for count, value in seconds.items()
        )
        parts.append(f"a step of the {model} model takes {times}")
    return f"{'; '.join(parts)}."


# The widget


GOOD = 1.25  # A prediction within this factor is called good.


class DataParallelLab(ExperimentPanel):
    """Lab in which learners predict and measure the speed-up of `nn.DataParallel` on four GPUs.

    It uses the training step of the large model.
    """

    unit = "times"

    question = (
        "{} linear layers, {} neurons wide, a batch of {} rows: how many times faster is a "
        "training step on {} GPUs than on one? (0.5 means twice as slow.)"
    ).format(LAYERS, *MODELS[ASKED], GPUS[-1])

    def experiment(self) -> Run:
        return data_parallel_step()

    def point(self, row: dict[str, Any]) -> str:
        gpus = "1 GPU"
        if row["gpus"] != 1:
            gpus = f"{row['gpus']} GPUs"
        return f"{row['model']} model on {gpus}: {units.time_text(row['seconds'])}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        return plot_data_parallel_step(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        gain = parallel_gain(result, ASKED).get(GPUS[-1])
        if gain is None:
            return stays_open(f"The {ASKED} model was not measured on {GPUS[-1]} GPUs", prediction)
        was = (
            f"The step was {gain:.2g} times as fast on {GPUS[-1]} GPUs; "
            f"you predicted {prediction:g}"
        )
        return compared_as_factor(was, prediction, gain, GOOD)
