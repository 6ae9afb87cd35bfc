"""The memory of a training step by formula and as measured, and the plan that makes a training fit."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from labkit import machine
from labkit.experiments import fit
from labkit.experiments.budget import Budget, Setting, budget
from labkit.experiments.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, ResNet
from labkit.experiments.result import Result, Row, Run, badge

SMALL_GPT = GPT(width=512, layers=6, heads=8, tokens=512, vocabulary=8192)
TEN = (
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
TERMS = ("parameters", "optimizer state", "gradients", "activations", "in flight", "buckets", "batch", "workspace")
PLAN_COLUMNS = {"change": "", "moment": "", **dict.fromkeys(TERMS, "bytes"), "peak": "bytes", "room": "bytes", "measured": "bytes"}
NOT_MEASURED, RAN_OUT = 0, -1  # in place of bytes
STEPS = 3  # the first makes the optimizer's state, and with more than one GPU two fill caches


def training_memory(settings: Sequence[Setting] = TEN) -> Run:
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


def memory_plan(setting: Setting, on: str = fit.IN_USE) -> Run:
    """Whether a training fits a GPU, and what to change first: the setting as it is, then change after change until it fits.

    `on` is one of `fit.models()`. Each row has the terms of the formula, the name of the fullest `moment`, the `room` that PyTorch has on
    that GPU, and the peak as `measured`, where `on` is the GPU in use and the setting one that can be measured there; 0 elsewhere, and -1
    where memory ran out.

    Raises ValueError for an unknown GPU and for what has no formula, RuntimeError when no GPU is in use.
    """
    name, chosen = badge(), fit.gpu(on)
    if on != fit.IN_USE:
        name = f"by formula, for {chosen.name}"
    steps = list(fit.plan(setting, chosen))
    changes = [step.change for step in steps]
    parameters = {"setting": describe(setting), "gpu": chosen.name, "answer": fit.answer(steps, chosen), "changes": changes}
    return Run("memory_plan", parameters, PLAN_COLUMNS, name, len(steps), _plan_points(steps, chosen, on == fit.IN_USE))


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


def errors(result: Result) -> dict[str, float]:
    """How far the formula is from what was measured, as a share of that, by setting."""
    columns = (result.column(name) for name in COLUMNS)
    return {setting: formula / measured - 1 for setting, formula, measured in zip(*columns, strict=True) if measured > 0}


def _points(settings: Sequence[Setting]) -> Iterator[Row]:
    chip = fit.gpu().chip
    for setting in settings:
        predicted = budget(setting, chip)
        yield {"setting": describe(setting), "formula": predicted.peak, "measured": measured_peak(setting, predicted)}


def _plan_points(steps: list[fit.Step], on: fit.Gpu, here: bool) -> Iterator[Row]:
    for step in steps:
        measured = measured_peak(step.setting, step.budget) if here and _obstacle(step.setting) is None else NOT_MEASURED
        known = {"change": step.change, "moment": step.budget.moment, "peak": step.budget.peak, "room": on.memory}
        yield {**known, **step.budget.terms, "measured": measured}


def _obstacle(setting: Setting) -> str | None:
    """Why a setting cannot be measured on the machine in use; None if it can."""
    count = machine.in_use().count
    if setting.gpus > count:
        return f"it needs {setting.gpus} GPUs, and {count} are in use"
    if setting.gpus > 1 and setting.spread == "DDP":
        return "the ranks of DDP are processes of their own: choose DataParallel"
    return None


def _check_measurable(setting: Setting) -> None:
    reason = _obstacle(setting)
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
