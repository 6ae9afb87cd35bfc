"""When each stage of a network works: its passes are recorded on its GPU and drawn as bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import nn

from gpulessons.lesson_04.schedules import BACKWARD, FORWARD
from gputrace import units
from gputrace.figures.figure import (
    BESIDE,
    BLACK,
    BLUE,
    ORANGE,
    SIZE,
    TEXT_POINTS,
    Figure,
    new_canvas,
    text_width,
    time_ticks,
)
from labkit import machine
from labkit.labs.experiment import Row
from labkit.labs.figures import badged, in_style

COLOURS = {FORWARD: BLUE, BACKWARD: ORANGE}
INK = {FORWARD: "white", BACKWARD: "black"}
BAR_HEIGHT = 0.8  # where the stages are 1 apart
MILLISECOND = 1e-3  # events count in milliseconds

# Recording


def record_work(stages: Sequence[nn.Module], step: Callable[[], object]) -> list[Row]:
    """Run `step()` twice, and return when each stage worked in the second run.

    All parameters of a stage are on one GPU, and `step` calls each stage once for each micro-batch.
    There is one row for each forward and each backward pass: the stage, the work, the micro-batch,
    the start and the seconds. Micro-batches count from 0. `peak` is the most memory that the step
    took on the stage's GPU, in bytes.

    Raises ValueError if `step` does not call every stage.
    """
    gpus = [_gpu_of(stage) for stage in stages]
    step()  # the first step also takes memory and loads kernels
    machine.synchronize()
    held = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    begun = [mark(gpu) for gpu in gpus]
    watched = [_Watched(gpu) for gpu in gpus]
    with _watching(stages, watched):
        step()
    machine.synchronize()
    rows: list[Row] = []
    for index, passes in enumerate(watched):
        if not passes.marks:
            raise ValueError(f"The step did not call stage {index}. Give the stages that it uses.")
        peak = torch.cuda.max_memory_allocated(gpus[index]) - held[index]
        for (work, micro_batch), (start, end) in passes.marks.items():
            row = {"stage": index, "work": work, "micro_batch": micro_batch, "peak": peak}
            row["start"] = begun[index].elapsed_time(start) * MILLISECOND
            row["seconds"] = start.elapsed_time(end) * MILLISECOND
            rows.append(row)
    return sorted(rows, key=lambda row: (row["start"], row["stage"]))


def mark(gpu: int) -> torch.cuda.Event:
    """Record a new event on the GPU's current stream, and return it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(gpu))
    return event


def _gpu_of(stage: nn.Module) -> int:
    for parameter in stage.parameters():
        if parameter.is_cuda:
            return parameter.get_device()
    raise ValueError("A stage needs parameters on a GPU. Move it there with .to.")


class _Watched:
    """Watcher of one stage, with hooks that record events before and after its passes.

    `marks` has the first and the last event of each pass, by the work and the micro-batch.
    """

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.calls = 0
        self.backward = 0  # the micro-batch whose backward pass runs
        self.marks: dict[tuple[str, int], list[torch.cuda.Event]] = {}

    def begin_forward(self, stage: nn.Module, inputs: tuple[Any, ...]) -> None:
        event = mark(self.gpu)
        self.marks[FORWARD, self.calls] = [event, event]

    def end_forward(self, stage: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        number = self.calls
        self.calls += 1
        self.marks[FORWARD, number][1] = mark(self.gpu)
        for node in _nodes(output, inputs):
            node.register_hook(lambda *gradients: self.extend_backward(number))
        return _Begin.apply(output, partial(self.begin_backward, number))

    def begin_backward(self, number: int) -> None:
        event = mark(self.gpu)
        self.backward = number
        self.marks[BACKWARD, number] = [event, event]

    def extend_backward(self, number: int) -> None:
        """Move the end of a backward pass after the work that was launched last.

        `number` is the number of the micro-batch.
        """
        self.marks[BACKWARD, number][1] = mark(self.gpu)

    def end_accumulation(self, parameter: torch.Tensor) -> None:
        self.extend_backward(self.backward)


def _nodes(output: torch.Tensor, inputs: tuple[Any, ...]) -> set[Any]:
    """Return the nodes of autograd's graph between the inputs of a stage and its output."""
    before = {x.grad_fn for x in inputs if isinstance(x, torch.Tensor)}
    found: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        # The nodes that add gradients to parameters are shared by all micro-batches.
        if node is None or node in before or node in found or hasattr(node, "variable"):
            continue
        found.add(node)
        waiting += [following for following, _ in node.next_functions]
    return found


class _Begin(torch.autograd.Function):
    """Autograd function that returns its input, and calls `note()` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note()
        return gradient, None


@contextmanager
def _watching(stages: Sequence[nn.Module], watched: Sequence[_Watched]) -> Iterator[None]:
    """Let each stage call its hooks in the block."""
    hooks = []
    try:
        for stage, passes in zip(stages, watched, strict=True):
            hooks.append(stage.register_forward_pre_hook(passes.begin_forward))
            hooks.append(stage.register_forward_hook(passes.end_forward))
            for parameter in stage.parameters():
                hook = parameter.register_post_accumulate_grad_hook(passes.end_accumulation)
                hooks.append(hook)
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Drawing


@in_style
def plot_work(
    stages: Sequence[nn.Module], steps: Mapping[str, Callable[[], object]], memory: bool = False
) -> Figure:
    """Run each step, and draw when the GPU of each stage works, with a panel for each step.

    The title says for which share of the step the GPUs wait, on average. All panels have the same
    axis. `memory=True` adds the most memory that the step took on each GPU. `record_work` says what
    a step must do, and what it raises.
    """
    recorded = {name: record_work(stages, step) for name, step in steps.items()}
    shares = {name: waiting(rows, len(stages)) for name, rows in recorded.items()}
    canvas, *panels = new_canvas(waiting_finding(shares), rows=len(recorded))
    end = 1.03 * max(row["start"] + row["seconds"] for rows in recorded.values() for row in rows)
    place_panels(canvas, panels, end, memory)
    for axes, (name, rows) in zip(panels, recorded.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=TEXT_POINTS)
        if len(recorded) > 1:
            heading = f"{name}: GPUs wait {percent(shares[name])}"
            axes.set_title(heading, loc="left", fontsize=TEXT_POINTS)
        draw_bars(axes, rows, len(stages))
        if memory:
            draw_memory(axes, peaks(rows))
    split = any(row["micro_batch"] for rows in recorded.values() for row in rows)
    add_legend(canvas, split)
    sentences = [_in_words(name, rows) for name, rows in recorded.items()]
    if memory:
        sentences.append(memory_in_words({name: peaks(rows) for name, rows in recorded.items()}))
    return badged(canvas, machine.in_use().badge, *sentences)


def waiting(rows: Sequence[Row], stages: int) -> float:
    """Return the share of the step in which a GPU waits, averaged over the stages."""
    end = max(row["start"] + row["seconds"] for row in rows)
    step = end - min(row["start"] for row in rows)
    return 1 - sum(row["seconds"] for row in rows) / (step * stages)


def peaks(rows: Sequence[Row]) -> dict[int, int]:
    """Return the most memory that the step took on each stage's GPU, in bytes."""
    return {row["stage"]: row["peak"] for row in rows}


def percent(share: float) -> str:
    """Return a share as text in percent."""
    return f"{100 * share:.0f}%"


def waits_in_words(shares: Mapping[str, float]) -> str:
    """Return the waiting share of each schedule as text."""
    return ", ".join(f"{percent(share)} with {name}" for name, share in shares.items())


def waiting_finding(shares: Mapping[str, float]) -> str:
    """Return a figure's title, which says for which share of the step the GPUs wait."""
    if not shares:
        return "Not measured yet: a whole step"
    if len(shares) == 1:
        return f"The GPUs wait {percent(*shares.values())} of the step"
    return f"The GPUs wait: {waits_in_words(shares)}"


def memory_in_words(most: Mapping[str, Mapping[int, int]]) -> str:
    """Return the most memory of each GPU under each schedule, as a sentence."""
    parts = []
    for name, stages in most.items():
        if stages:
            taken = [f"{units.byte_text(n)} on cuda:{stage}" for stage, n in sorted(stages.items())]
            parts.append(f"{name} takes {', '.join(taken)}")
    if parts:
        return f"Memory of the step: {'; '.join(parts)}."
    return ""


def _in_words(name: str, rows: Sequence[Row]) -> str:
    """Return a sentence with the order of each GPU's work in the step `name`."""
    parts = []
    for stage in sorted({row["stage"] for row in rows}):
        done = [
            f"{row['work'][0].upper()}{row['micro_batch'] + 1}"
            for row in rows
            if row["stage"] == stage
        ]
        parts.append(f"cuda:{stage} {' '.join(done)}")
    return f"Order with {name} (F is forward, B is backward): {'; '.join(parts)}."


def place_panels(canvas: Canvas, panels: Sequence[Any], end: float, memory: bool) -> None:
    """Put the panels below each other, on one axis of time that ends at `end`."""
    right = 0.85 if memory else 0.97
    panels[0].get_gridspec().update(hspace=0.5, top=0.81, right=right, left=0.09)
    for axes in panels:
        axes.set_position(axes.get_subplotspec().get_position(canvas))
        time_ticks(axes, end)
        axes.label_outer()
        axes.tick_params(axis="x", bottom=axes is panels[-1])
    if memory:
        panels[0].set_title(" most memory", loc="right", fontsize=TEXT_POINTS, ha="left")


def draw_bars(axes: Axes, rows: Sequence[Row], stages: int) -> None:
    """Draw a bar for each forward and backward pass, with the micro-batch's number if it fits."""
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"cuda:{stage}" for stage in range(stages)])
    axes.grid(axis="y", visible=False)
    points_per_second = axes.get_position().width * SIZE[0] * 72 / axes.get_xlim()[1]
    split = any(row["micro_batch"] for row in rows)
    for row in rows:
        look: dict[str, Any] = {"color": COLOURS[row["work"]], "edgecolor": "white"}
        axes.barh(row["stage"], row["seconds"], BAR_HEIGHT, row["start"], linewidth=0.5, **look)
        number = str(row["micro_batch"] + 1)
        if split and text_width(number) + 2 <= points_per_second * row["seconds"]:
            middle = row["start"] + row["seconds"] / 2
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            ink = INK[row["work"]]
            axes.text(middle, row["stage"], number, fontsize=TEXT_POINTS, color=ink, **place)


def draw_memory(axes: Axes, most: Mapping[int, int]) -> None:
    """Write the bytes that each GPU used at most beside the GPU's bars."""
    for stage, nbytes in most.items():
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), **BESIDE}
        axes.annotate(units.byte_text(nbytes), (1, stage), (9, 0), fontsize=TEXT_POINTS, **place)


def add_legend(canvas: Canvas, split: bool) -> None:
    """Add a legend for the colours of the bars.

    If the batch is `split`, explain the numbers, too.
    """
    entries: list[Artist] = [Patch(color=COLOURS[work], label=work) for work in (FORWARD, BACKWARD)]
    if split:
        label = "number of the micro-batch"
        entries.append(Line2D([], [], linestyle="", marker="$1$", color=BLACK, label=label))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0.945), "ncols": 3}
    canvas.legend(handles=entries, frameon=False, fontsize=TEXT_POINTS, **place)
