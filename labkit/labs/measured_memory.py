"""The memory of a training step by formula, and as measured."""

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, TEXT_POINTS, VERMILLION, Figure, darker, new_canvas, shortened
from labkit import machine
from labkit.lab_parts.budget import Budget, Setting, budget, gpu_of
from labkit.lab_parts.experiment import Result, Row, Run, badge
from labkit.lab_parts.figures import finished, in_style
from labkit.lab_parts.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, ResNet

SMALL_GPT = GPT(width=512, layers=6, heads=8, tokens=512, vocabulary=8192)
TEN_SETTINGS = (
    Setting(MLP(), 8192),
    Setting(MLP(), 8192, "autocast float16", "SGD momentum"),
    Setting(MLP(4096, 6), 512, optimizer="Adam fused"),
    Setting(MLP(), 8192, checkpointing=True, micro_batches=2),
    Setting(SMALL_GPT, 16),
    Setting(SMALL_GPT, 16, "autocast float16", "AdamW"),
    Setting(SMALL_GPT, 16, checkpointing=True),
    Setting(ResNet(), 64, optimizer="SGD momentum"),
    Setting(ResNet(), 64, "autocast float16", checkpointing=True),
    Setting(SMALL_GPT, 16, gpus=2, spread="DataParallel"),
)
COLUMNS = {"setting": "", "formula": "bytes", "measured": "bytes"}
NOT_MEASURED, RAN_OUT = 0, -1  # in place of bytes
STEPS = 3  # the first makes the optimizer's state, and with more than one GPU two fill caches


def training_memory(settings: Sequence[Setting] = TEN_SETTINGS) -> Run:
    """The peak of a training step on the first GPU for each of the `settings`: by formula, and as measured in the third of three steps.

    Virtual GPUs compute no values meanwhile. Raises ValueError for no setting, for more GPUs than are in use and for DDP, whose ranks
    are processes of their own; RuntimeError when no GPU is in use.
    """
    name = badge()
    if not settings:
        raise ValueError("settings=(): give at least one")
    for setting in settings:
        _check_measurable(setting)
    parameters = {"settings": [describe(setting) for setting in settings]}
    return Run("training_memory", parameters, COLUMNS, name, len(settings), _points(settings))


def describe(setting: Setting) -> str:
    """A setting in one line, with every size: "MLP(width=2048, …), batch 8192, float32, Adam"."""
    parts = [f"{setting.network}, batch {setting.batch}", setting.precision, setting.optimizer]
    if setting.micro_batches > 1:
        parts.append(f"{setting.micro_batches} micro-batches")
    if setting.checkpointing:
        parts.append("checkpointing")
    if setting.gpus > 1:
        parts.append(f"{setting.gpus} GPUs, {setting.spread}")
    return ", ".join(parts)


def formula_errors(result: Result) -> dict[str, float]:
    """How far the formula is from what was measured, as a share of that, by setting."""
    columns = (result.column(name) for name in COLUMNS)
    return {setting: formula / measured - 1 for setting, formula, measured in zip(*columns, strict=True) if measured > 0}


def _points(settings: Sequence[Setting]) -> Iterator[Row]:
    chip = gpu_of().chip
    for setting in settings:
        predicted = budget(setting, chip)
        yield {"setting": describe(setting), "formula": predicted.peak, "measured": measured_peak(setting, predicted)}


def obstacle(setting: Setting) -> str | None:
    """Why a setting cannot be measured on the machine in use; None if it can."""
    count = machine.in_use().count
    if setting.gpus > count:
        return f"it needs {setting.gpus} GPUs, and {count} are in use"
    if setting.gpus > 1 and setting.spread == "DDP":
        return "the ranks of DDP are processes of their own: choose DataParallel"
    return None


def _check_measurable(setting: Setting) -> None:
    reason = obstacle(setting)
    if reason is not None:
        raise ValueError(f"{describe(setting)}: {reason}")


def measured_peak(setting: Setting, predicted: Budget) -> int:
    """The most bytes allocated on the first GPU in a step of this training, after two others; -1 where memory ran out.

    What other tensors hold does not count. The workspaces of cuBLAS stay in the process, whoever took them first, so they count as in
    `predicted`.
    """
    with machine.in_use().without_values():
        try:
            highest = _train(setting)
        except torch.OutOfMemoryError:
            highest = None
        gc.collect()  # the traceback of what ran out holds tensors
        torch.cuda.empty_cache()
    return RAN_OUT if highest is None else highest - torch.cuda.memory_allocated(0) + predicted.terms["workspace"]


def _train(setting: Setting) -> int:
    network, dtype, rows = setting.network, PRECISIONS[setting.precision], setting.micro_rows
    model = network.build(setting.checkpointing, "cuda:0")
    run = nn.DataParallel(model, list(range(setting.gpus))) if setting.gpus > 1 else model
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    inputs, targets = network.batch(setting.batch, "cuda:0")
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats(0)
        optimizer.zero_grad()
        for x, y in zip(inputs.split(rows), targets.split(rows * len(targets) // setting.batch), strict=True):
            with torch.autocast("cuda", dtype=dtype) if dtype else nullcontext():
                loss = F.cross_entropy(run(x), y) / setting.micro_batches
            loss.backward()
        optimizer.step()
    torch.cuda.synchronize(0)
    return torch.cuda.max_memory_allocated(0)


# The figure


GIB = 1 << 30


@in_style
def plot_training_memory(result: Result, recorded: Result | None = None) -> Figure:
    """Formula and measurement for each setting."""
    canvas, axes = new_canvas(_finding(result))
    axes.set_position((0.46, 0.24, 0.5, 0.65))
    for place, row in enumerate(result.rows):
        measured, formula = row["measured"] / GIB, row["formula"] / GIB
        if row["measured"] > 0:
            axes.plot(measured, place, "o", color=BLUE, label=None if place else "measured")
        axes.plot(formula, place, "o", markersize=11, markerfacecolor="none", markeredgecolor=BLACK, label=None if place else "formula")
    for place, row in enumerate(recorded.rows if recorded is not None else []):
        axes.plot(row["measured"] / GIB, place, "|", color=darker(VERMILLION), markersize=13, label=None if place else "recorded")
    axes.set_yticks(range(len(result.rows)), [shortened(_short(row["setting"]), 218) for row in result.rows], fontsize=TEXT_POINTS)
    axes.set(xlim=(0, None), ylim=(len(result.rows) - 0.4, -0.6), xlabel="GiB at the fullest moment")
    if result.rows:
        canvas.legend(loc="lower left", bbox_to_anchor=(0.01, 0.06), ncols=3, frameon=False, fontsize=TEXT_POINTS)
    shown = result.badge if recorded is None else f"{result.badge}  ·  | {recorded.badge}"
    return finished(canvas, result, recorded, _proof, shown=shown)


def _finding(result: Result) -> str:
    found = formula_errors(result)
    if not found:
        return "Not measured yet: what training steps take"
    return f"The formula is within {100 * max(map(abs, found.values())):.2g} % of {len(found)} measured training steps"


def _short(setting: str) -> str:
    """The setting without the sizes of its network."""
    return re.sub(r"\(.*?\)", "", setting)


def _proof(result: Result) -> str:
    told = (
        f"{row['setting']}: formula {units.byte_text(row['formula'])}, measured {units.byte_text(row['measured'])}"
        for row in result.rows
        if row["measured"] > 0
    )
    return ("; " if result.origin else ". ").join(told)
