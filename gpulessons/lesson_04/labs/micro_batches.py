"""A batch that goes through two GPUs in micro-batches: seconds of a step by their number, and by the order in which two halves launch."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from matplotlib.axes import Axes
from torch import nn

from gpulessons.networks import linear_layers
from gputrace import units
from gputrace.figures.figure import BLUE, VERMILLION, Figure, binary_scale, label_ends, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_count, checked_sizes
from labkit.labs.figures import SAME, add_line, finished, in_style, sources
from labkit.labs.timing import host_seconds

SPLITS = (1, 2, 4, 8, 16, 32, 64)
COMPUTE_FIRST, COPY_FIRST = "compute first", "copy first"
COLUMNS = {"splits": "", "program": "", "seconds": "seconds"}
LARGEST = 1 << 16


def pipeline_splits(splits: Sequence[int] = SPLITS, repeats: int = 3, layers: int = 16, width: int = 4096, batch: int = 8192) -> Run:
    """Seconds of forward and backward of a network whose halves lie on two GPUs, by the number of micro-batches.

    The network has `layers` linear layers, each with ReLU, `width` neurons wide. Two programs do the same with plain `.to`, and differ
    in one thing: "compute first" launches the second half on a micro-batch before the first half and the copy of the next, "copy first"
    after them. The median of `repeats`, after one that does not count. Virtual GPUs compute no values meanwhile.

    Raises ValueError for what is out of bounds, RuntimeError when fewer than two GPUs are in use.
    """
    name = badge()
    if machine.in_use().count < 2:
        raise RuntimeError("a network cut in two needs labkit.use(gpus=2)")
    for parameter, value in (("repeats", repeats), ("layers", layers), ("width", width), ("batch", batch)):
        if checked_count(parameter, value) > LARGEST:
            raise ValueError(f"{parameter}={value}: give at most {LARGEST}")
    if layers % 2:
        raise ValueError(f"layers={layers}: give an even number, for two equal halves")
    splits = checked_sizes("splits", splits, batch)
    parameters = {"splits": splits, "repeats": repeats, "layers": layers, "width": width, "batch": batch}
    return Run("pipeline_splits", parameters, COLUMNS, name, 2 * len(splits), _points(splits, repeats, layers // 2, width, batch))


def split_gain(result: Result, program: str = COMPUTE_FIRST) -> dict[int, float]:
    """How many times faster a program's step is than with the batch in one piece, by the number of splits, where that was measured."""
    seconds = result.by("splits", "seconds", program=program)
    return {splits: seconds[1] / value for splits, value in seconds.items() if 1 in seconds}


def _points(splits: list[int], repeats: int, layers: int, width: int, batch: int) -> Iterator[Row]:
    for count in splits:
        for program, work in ((COPY_FIRST, copy_first), (COMPUTE_FIRST, compute_first)):
            with machine.in_use().without_values():
                seconds = _step_seconds(work, count, repeats, layers, width, batch)
            yield {"splits": count, "program": program, "seconds": seconds}


def copy_first(first: nn.Module, second: nn.Module, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the micro-batches. The first half of one, and its copy, are launched before the second half of the one before."""
    outputs, before = [], None
    for part in parts:
        arrived = first(part).to("cuda:1")
        if before is not None:
            outputs.append(second(before))
        before = arrived
    return [*outputs, second(before)]


def compute_first(first: nn.Module, second: nn.Module, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the micro-batches, each of which is launched as a whole before the next."""
    return [second(first(part).to("cuda:1")) for part in parts]


def _step_seconds(work: Callable, splits: int, repeats: int, layers: int, width: int, batch: int) -> float:
    first, second = (linear_layers(layers, width, f"cuda:{index}") for index in range(2))
    parts = torch.ones(batch, width, device="cuda:0").chunk(splits)

    def step() -> None:
        torch.cat(work(first, second, parts)).square().mean().backward()

    times = [host_seconds(step, gpus=2) for _ in range(1 + repeats)]
    return median(times[1:])


# The figure


FORMULA_COLOUR = "#767676"


@in_style
def plot_pipeline_splits(result: Result, recorded: Result | None = None) -> Figure:
    """How many times as fast as the whole batch a step is, by the number of micro-batches, for each order of launching and the formula."""
    canvas, axes = new_canvas(_finding(result))
    labels = []
    for source, dashes in sources(result, recorded):
        for program, colour in ((COPY_FIRST, VERMILLION), (COMPUTE_FIRST, BLUE)):
            gain = split_gain(source, program)
            labels += add_line(
                axes, list(gain), list(gain.values()), colour, dashes, program if source is result else f"{program}, recorded"
            )
    labels += _draw_formula(axes, result)
    binary_scale(axes, "micro-batches", lambda splits: f"{splits:g}", most=8)
    axes.set_ylabel("times as fast as the whole batch")
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof)


def _finding(result: Result) -> str:
    gain = split_gain(result)
    if len(gain) < 2:
        return "Not measured yet: a batch whole and cut"
    best = max(gain, key=lambda splits: (gain[splits], -splits))
    if best == 1:
        return "The batch in one piece is fastest"
    most = max(gain)
    rest = f"; {most} are slower again" if gain[best] > SAME * gain[most] else ""
    return f"{best} micro-batches are {gain[best]:.1f} times as fast as one{rest}"


def _proof(result: Result) -> str:
    parts = []
    for program in dict.fromkeys(result.column("program")):
        seconds = result.by("splits", "seconds", program=program)
        times = ", ".join(f"{units.time_text(value)} with {count}" for count, value in seconds.items())
        parts.append(f"{program} takes {times}")
    return f"{'; '.join(parts)}."


def _draw_formula(axes: Axes, result: Result) -> list[tuple]:
    """2m / (m + 1), by which m micro-batches are faster on two stages, says the formula."""
    splits = list(split_gain(result))
    if len(splits) < 2:
        return []
    gain = [2 * count / (count + 1) for count in splits]
    axes.plot(splits, gain, ":", color=FORMULA_COLOUR, linewidth=1.4)
    return [(splits[-1], gain[-1], "formula", FORMULA_COLOUR)]
