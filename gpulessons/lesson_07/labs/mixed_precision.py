"""The same small network trained in four ways: in float32, in float16 alone, and with autocast in float16 and in bfloat16."""

import math
from collections.abc import Iterator
from copy import deepcopy
from statistics import median

import torch
from matplotlib.ticker import MaxNLocator
from torch import nn

from gputrace.figures.figure import BLACK, BLUE, GREY, ORANGE, VERMILLION, Figure, darker, decimal_scale, label_ends, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count
from labkit.labs.figures import finished, in_style, sources

# The network's own dtype, and that of autocast, if any. Gradients are scaled where autocast takes float16.
WAYS = {
    "float32": (torch.float32, None),
    "float16 alone": (torch.float16, None),
    "autocast float16": (torch.float32, torch.float16),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
}
STEPS = 42
FEATURES, WIDTH, BATCH = 16, 64, 64
LEARNING_RATE = 0.01
LAST = 5  # steps whose losses are averaged: the last ones of a training
COLUMNS = {"way": "", "step": "", "loss": "", "seconds": "seconds"}


def four_ways(steps: int = STEPS) -> Run:
    """Trains a network of three linear layers with Adam from the same weights on the same batch, in each of the four `WAYS`.

    It learns the sine of twice each of 16 inputs, on 64 rows, in so many `steps`. One row a step: the mean squared error before it, and
    its seconds.

    Raises ValueError for less than one step, RuntimeError when no GPU is in use.
    """
    steps = checked_count("steps", steps)
    parameters = {"ways": list(WAYS), "steps": steps}
    return Run("four_ways", parameters, COLUMNS, badge(), len(WAYS) * steps, _points(steps))


def last_loss(result: Result) -> dict[str, float]:
    """The mean loss of each training's last five steps, as far as it was measured."""
    return {way: sum(losses[-LAST:]) / len(losses[-LAST:]) for way in WAYS if (losses := result.column("loss", way=way))}


def step_seconds(result: Result) -> dict[str, float]:
    """The median time of a step of each training, in seconds."""
    return {way: median(seconds) for way in WAYS if (seconds := result.column("seconds", way=way))}


def _points(steps: int) -> Iterator[Row]:
    network, inputs, targets = _start()
    for way in WAYS:
        for step, (loss, seconds) in enumerate(_training(way, steps, network, inputs, targets), start=1):
            yield {"way": way, "step": step, "loss": loss, "seconds": seconds}


def _start() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Network and batch, drawn on the CPU: the same ones on every machine, and each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = torch.randn(BATCH, FEATURES)
        layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES)]
        return nn.Sequential(*layers), inputs, torch.sin(2 * inputs)


def _training(way: str, steps: int, network: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[float, float]]:
    """The loss of each step and its seconds."""
    dtype, lower = WAYS[way]
    model = deepcopy(network).to("cuda", dtype)
    x, y = inputs.to("cuda", dtype), targets.to("cuda", dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cuda", enabled=lower is torch.float16)
    for _ in range(steps):
        start = machine.host_time()
        with torch.autocast("cuda", dtype=lower or torch.float16, enabled=lower is not None):
            loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        value = loss.item()  # waits for the GPU
        yield value, machine.host_time() - start


# The figure


# Colour, marker and width of each line: the widest lies under the others.
LINES = {
    "float32": (GREY, "", 7.0),
    "autocast float16": (BLUE, "o", 2.0),
    "autocast bfloat16": (ORANGE, "^", 1.4),
    "float16 alone": (VERMILLION, "X", 2.0),
}


@in_style
def plot_four_ways(result: Result, recorded: Result | None = None) -> Figure:
    """Loss by step of each training. A training that has come to "not a number" is drawn as far as it had a number."""
    canvas, axes = new_canvas(_finding(result))
    labels = []
    for source, dashes in reversed(sources(result, recorded)):  # the dashes on top
        for way, (colour, marker, width) in LINES.items():
            points = _finite(source, way)
            if not points:
                continue
            steps, losses = zip(*points, strict=True)
            thin = {"linewidth": 1.2, "color": BLACK if colour == GREY else darker(colour)}
            bold = {"linewidth": width, "color": colour, "marker": marker, "markevery": 6}
            axes.plot(steps, losses, dashes, **(bold if source is result else thin))
            if source is result:
                labels.append((steps[-1], losses[-1], _named(result, way), BLACK if colour == GREY else colour))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    decimal_scale(axes, "mean squared error", lambda loss: f"{loss:g}")
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof)


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


def _proof(result: Result) -> str:
    last = last_loss(result)
    told_losses = ", ".join(f"{way} {'no number' if math.isnan(loss) else _rough(loss)}" for way, loss in last.items())
    return f"the loss of the last steps: {told_losses}."
