"""The same small network trained in four ways: in float32, in float16 alone, and with autocast in float16 and in bfloat16."""

from collections.abc import Iterator
from copy import deepcopy
from statistics import median

import torch
from torch import nn

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count

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
