"""From which size on a GPU is worth its launches: a training step of a small network on the CPU and on the GPU."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gputrace import units
from gputrace.figures.figure import BLUE, VERMILLION, Figure, binary_scale, decimal_scale, label_ends, new_canvas
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import add_line, finished, in_style, sources
from labkit.labs.timing import host_seconds

WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
WIDEST = 16384
COLUMNS = {"width": "neurons", "device": "", "seconds": "seconds"}


def host_and_device(widths: Sequence[int] = WIDTHS, batch: int = 64, repeats: int = 5) -> Run:
    """Seconds of one training step of a network of two linear layers, by their `widths`, on the "cpu" and on "cuda".

    A step is forward, backward and SGD on `batch` rows; the mean of `repeats` steps in a row, after two that do not count. On the
    virtual machine the host's clock counts the CPU's operators, as its profile has them.

    Raises ValueError for widths outside 1 to 16384, RuntimeError when no GPU is in use.
    """
    widths = checked_sizes("widths", widths, WIDEST)
    parameters = {"widths": widths, "batch": checked_count("batch", batch), "repeats": checked_count("repeats", repeats)}
    return Run("host_and_device", parameters, COLUMNS, badge(), 2 * len(widths), _points(widths, batch, repeats))


def gpu_gain(result: Result) -> dict[int, float]:
    """How many times faster the GPU does the step than the CPU, by width, where both were measured."""
    cpu, gpu = (result.by("width", "seconds", device=device) for device in ("cpu", "cuda"))
    return {width: cpu[width] / seconds for width, seconds in gpu.items() if width in cpu}


def _points(widths: Sequence[int], batch: int, repeats: int) -> Iterator[Row]:
    for width in widths:
        for device in ("cpu", "cuda"):
            yield {"width": width, "device": device, "seconds": _step_seconds(width, batch, device, repeats)}


def _step_seconds(width: int, batch: int, device: str, repeats: int) -> float:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.zeros(batch, width, device=device), torch.ones(batch, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    def steps() -> None:
        for _ in range(repeats):
            step()

    step()
    step()
    return host_seconds(steps) / repeats


# The figure


@in_style
def plot_host_and_device(result: Result, recorded: Result | None = None) -> Figure:
    """Seconds of one training step on CPU and GPU, by the width of the network."""
    canvas, axes = new_canvas(_finding(gpu_gain(result)))
    labels = []
    for source, dashes in sources(result, recorded):
        for device, name, colour in (("cpu", "CPU", VERMILLION), ("cuda", "GPU", BLUE)):
            label = name if source is result else f"{name}, recorded"
            widths, seconds = source.column("width", device=device), source.column("seconds", device=device)
            labels += add_line(axes, widths, seconds, colour, dashes, label)
    binary_scale(axes, "width of the network, in neurons", lambda width: f"{width:g}", most=10)
    decimal_scale(axes, "time of one training step", units.time_text)
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof)


def _finding(gain: dict[int, float]) -> str:
    """The widths at which the CPU wins."""
    if not gain:
        return "Not measured yet: CPU and GPU at one width"
    widths = sorted(gain)
    lost = [width for width in widths if gain[width] < 1]
    if not lost:
        return f"The GPU wins at every width; at {widths[-1]} it is {gain[widths[-1]]:.3g} times faster"
    if len(lost) == len(widths):
        return f"The CPU wins at every width up to {widths[-1]}"
    return f"The CPU wins up to a width of {max(lost)}; at {widths[-1]} the GPU is {gain[widths[-1]]:.3g} times faster"


def _proof(result: Result) -> str:
    if not (gain := gpu_gain(result)):
        return ""
    ends = []
    for width in (min(gain), max(gain)):
        cpu, gpu = (result.column("seconds", width=width, device=device)[0] for device in ("cpu", "cuda"))
        ends.append(f"at a width of {width} a step takes {units.time_text(cpu)} on the CPU, {units.time_text(gpu)} on the GPU")
    return f"{'; '.join(ends)}."
