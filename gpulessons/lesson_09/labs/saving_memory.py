"""Memory bought with time.

A training step unchanged, with checkpoints, with its activations on the host, and in micro-batches.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from torch import nn
from torch.autograd.graph import save_on_cpu

from gpulessons.networks import MLP
from gputrace import units
from gputrace.figures.figure import BESIDE, BLACK, BLUE, GREY, VERMILLION, Figure, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge
from labkit.labs.figures import finished, hollow, in_style

ROWS = 4096
NETWORK = MLP(width=2048, depth=9)  # wide enough that a GPU computes for longer than it launches
BASELINE = "baseline"
COLUMNS = {"way": "", "peak": "bytes", "seconds": "seconds"}


def _plain(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _checkpoints(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    frugal(x).sum().backward()


def _micro_batches(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    for part in x.chunk(4):
        model(part).sum().backward()


def _offload(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    with save_on_cpu(pin_memory=True):
        loss = model(x).sum()
    loss.backward()


WAYS = {
    BASELINE: _plain,
    "4 micro-batches": _micro_batches,
    "checkpoints": _checkpoints,
    "offload": _offload,
}


def memory_for_time() -> Run:
    """What forward and backward of nine linear layers add to the memory at their peak, and the seconds they take, each way of `WAYS`.

    The second of two steps counts. Needs 1 GiB of device memory. Raises RuntimeError when no GPU is in use.
    """
    parameters = {"ways": list(WAYS), "rows": ROWS, "width": NETWORK.width}
    return Run("memory_for_time", parameters, COLUMNS, badge(), len(WAYS), _points())


def prices(result: Result) -> dict[str, tuple[float, float]]:
    """Return (memory, time) of each way, as factors of the baseline's memory and time."""
    rows = {row["way"]: row for row in result.rows}
    plain = rows.get(BASELINE)
    if plain is None:
        return {}
    return {way: (row["peak"] / plain["peak"], row["seconds"] / plain["seconds"]) for way, row in rows.items()}


def _points() -> Iterator[Row]:
    for way, step in WAYS.items():
        with machine.in_use().without_values():
            peak, seconds = _cost(step)
        yield {"way": way, "peak": peak, "seconds": seconds}


def _cost(step: Callable[[nn.Module, nn.Module, torch.Tensor], None]) -> tuple[int, float]:
    model, frugal = NETWORK.build(device="cuda:0"), NETWORK.build(checkpointing=True, device="cuda:0")
    x, _ = NETWORK.batch(ROWS, "cuda:0")
    for _ in range(2):
        model.zero_grad(set_to_none=False)  # gradients are there before, and stay: what is counted are the activations
        frugal.zero_grad(set_to_none=False)
        torch.cuda.synchronize(0)
        torch.cuda.reset_peak_memory_stats(0)
        before, start = torch.cuda.memory_allocated(0), machine.host_time()
        step(model, frugal, x)
        torch.cuda.synchronize(0)
        seconds = machine.host_time() - start
        peak = torch.cuda.max_memory_allocated(0) - before
    return peak, seconds


# The figure


@in_style
def plot_memory_for_time(result: Result, recorded: Result | None = None) -> Figure:
    """Draw memory against time for each way, both as factors of the baseline on the same GPU.

    Recorded points are hollow.
    """
    canvas, axes = new_canvas(_finding(result))
    if prices(result):
        _draw(axes, result, recorded)
    shown = result.badge if recorded is None else f"{result.badge}  ·  hollow: {recorded.badge}"
    return finished(canvas, result, recorded, _proof, shown=shown)


def _finding(result: Result) -> str:
    others = {way: price for way, price in prices(result).items() if way != BASELINE}
    if not others:
        return "Not measured yet: memory for time"
    least = min(others, key=lambda way: others[way][0])
    memory, time = others[least]
    return f"Least memory: {least}, with {memory:.0%} of the memory and {time:.1f} times the time"


def _proof(result: Result) -> str:
    return "; ".join(f"{row['way']} {units.byte_text(row['peak'])}, {units.time_text(row['seconds'])}" for row in result.rows)


NEAR = 0.2  # points closer than this share one name


def _draw(axes: Axes, result: Result, recorded: Result | None) -> None:
    known = prices(recorded) if recorded else {}
    longest = 1.0
    for way, (memory, time) in prices(result).items():
        colour, marker = (VERMILLION, "s") if way == BASELINE else (BLUE, "o")
        highest = memory
        if way in known:
            memory_there, time_there = known[way]
            axes.plot([time, time_there], [memory, memory_there], ":", color=GREY, zorder=1)
            axes.plot(time_there, memory_there, marker, clip_on=False, **hollow(colour, 9))
            longest = max(longest, time_there)
            if abs(time_there - time) < NEAR:
                highest = max(memory, memory_there)
        axes.plot(time, memory, marker, color=colour, markersize=9, clip_on=False)
        above: dict[str, Any] = {"ha": "center", "va": "bottom", "xytext": (0, 8)}
        axes.annotate(way, (time, highest), **(BESIDE | above), color=BLACK)
        longest = max(longest, time)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(
        xlabel="time of forward and backward, baseline = 1",
        ylabel="memory added at the peak",
        xlim=(0.8, 1.1 * longest),
        ylim=(0, 1.12),
    )
