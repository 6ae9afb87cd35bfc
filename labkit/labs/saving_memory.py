"""Memory bought with time: a training step as it is, with checkpoints, with its activations on the host, and in micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn
from torch.autograd.graph import save_on_cpu

from gputrace import units
from gputrace.figures.figure import BESIDE, BLACK, BLUE, VERMILLION, Figure, byte_ticks, darker, new_canvas
from labkit import machine
from labkit.lab_parts.experiment import Result, Row, Run, badge, checked_count
from labkit.lab_parts.figures import finished, hollow, in_style, sources
from labkit.lab_parts.networks import MLP

ROWS = 4096
NETWORK = MLP(width=2048, depth=9)  # wide enough that a GPU computes for longer than it launches
AS_IT_IS = "as it is"
COLUMNS = {"way": "", "peak": "bytes", "seconds": "seconds"}


def _plain(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _checkpoints(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    frugal(x).sum().backward()


def _micro_batches(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
    for part in x.chunk(4):
        model(part).sum().backward()


def _offloading(pinned: bool) -> Callable[[nn.Module, nn.Module, torch.Tensor], None]:
    def step(model: nn.Module, frugal: nn.Module, x: torch.Tensor) -> None:
        with save_on_cpu(pin_memory=pinned):
            loss = model(x).sum()
        loss.backward()

    return step


WAYS = {
    AS_IT_IS: _plain,
    "4 micro-batches": _micro_batches,
    "checkpoints": _checkpoints,
    "offload": _offloading(pinned=True),
    "offload, not pinned": _offloading(pinned=False),
}


def memory_for_time(ways: Sequence[str] = tuple(WAYS)[:-1], repeats: int = 1) -> Run:
    """What forward and backward of nine linear layers add to the memory at their peak, and the seconds they take, each way of `WAYS`.

    The median of `repeats`, after one that does not count. Needs 1 GiB of device memory.
    Raises ValueError for other ways, RuntimeError when no GPU is in use.
    """
    name, chosen = badge(), list(dict.fromkeys(ways))
    if not chosen or not set(chosen) <= set(WAYS):
        raise ValueError(f"ways={ways!r}: choose from {', '.join(map(repr, WAYS))}")
    parameters = {"ways": chosen, "rows": ROWS, "width": NETWORK.width, "repeats": checked_count("repeats", repeats)}
    return Run("memory_for_time", parameters, COLUMNS, name, len(chosen), _points(chosen, repeats))


def prices(result: Result) -> dict[str, tuple[float, float]]:
    """Of each way the share of memory and the share of time that it takes, compared with the step as it is."""
    rows = {row["way"]: row for row in result.rows}
    plain = rows.get(AS_IT_IS)
    if plain is None:
        return {}
    return {way: (row["peak"] / plain["peak"], row["seconds"] / plain["seconds"]) for way, row in rows.items()}


def _points(ways: list[str], repeats: int) -> Iterator[Row]:
    for way in ways:
        with machine.in_use().without_values():
            peak, seconds = _cost(WAYS[way], repeats)
        yield {"way": way, "peak": peak, "seconds": seconds}


def _cost(step: Callable[[nn.Module, nn.Module, torch.Tensor], None], repeats: int) -> tuple[int, float]:
    model, frugal = NETWORK.build(device="cuda:0"), NETWORK.build(checkpointing=True, device="cuda:0")
    x, _ = NETWORK.batch(ROWS, "cuda:0")
    peaks, times = [], []
    for _ in range(1 + repeats):
        model.zero_grad(set_to_none=False)  # gradients are there before, and stay: what is counted are the activations
        frugal.zero_grad(set_to_none=False)
        torch.cuda.synchronize(0)
        torch.cuda.reset_peak_memory_stats(0)
        before, start = torch.cuda.memory_allocated(0), machine.host_time()
        step(model, frugal, x)
        torch.cuda.synchronize(0)
        times.append(machine.host_time() - start)
        peaks.append(torch.cuda.max_memory_allocated(0) - before)
    return max(peaks[1:]), median(times[1:])


# The figure


@in_style
def plot_memory_for_time(result: Result, recorded: Result | None = None) -> Figure:
    """Peak and seconds of each way, and hollow what was recorded; the step as it is stands out."""
    canvas, axes = new_canvas(_finding(result))
    if result.rows:
        _draw(axes, result, recorded)
    shown = result.badge if recorded is None else f"{result.badge}  ·  hollow: {recorded.badge}"
    return finished(canvas, result, recorded, _proof, shown=shown)


def _finding(result: Result) -> str:
    others = {way: price for way, price in prices(result).items() if way != AS_IT_IS}
    if not others:
        return "Not measured yet: memory for time"
    told: list[str] = [way for way in ("checkpoints", "offload") if way in others] or [min(others, key=lambda way: others[way][0])]
    return "Slower than the step as it is: " + ", ".join(f"{way} {others[way][1]:.1f} times" for way in told)


def _proof(result: Result) -> str:
    return "; ".join(f"{row['way']} {units.byte_text(row['peak'])}, {units.time_text(row['seconds'])}" for row in result.rows)


def _draw(axes: Axes, result: Result, recorded: Result | None) -> None:
    longest = max(row["seconds"] for source, _ in sources(result, recorded) for row in source.rows)
    period, short = units.time_unit(longest)
    for row in recorded.rows if recorded else ():
        plain = row["way"] == AS_IT_IS
        look = hollow(VERMILLION if plain else BLUE, 9)
        x, y = row["seconds"] / period, row["peak"]
        axes.plot(x, y, "s" if plain else "o", clip_on=False, **look)
        axes.annotate(row["way"], (x, y), **(BESIDE | {"xytext": (9, 0)}), color=BLACK)
    for row in result.rows:
        x, y = row["seconds"] / period, row["peak"]
        plain = row["way"] == AS_IT_IS
        axes.plot(x, y, "s" if plain else "o", color=VERMILLION if plain else BLUE, markersize=9, clip_on=False)
        above: dict[str, Any] = {"ha": "center", "va": "bottom", "xytext": (0, 9)}
        axes.annotate(row["way"], (x, y), **(BESIDE | above), color=darker(VERMILLION) if plain else BLACK)
    byte_ticks(axes, 1.2 * max(result.column("peak")), 6)
    axes.set(xlabel=f"{short} for forward and backward", ylabel="added at the peak", xlim=(0, 1.15 * longest / period))
