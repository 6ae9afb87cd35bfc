"""The memory of a training step, as measured."""

import gc
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from labkit import machine
from labkit.lab_parts.budget import Budget, Setting
from labkit.lab_parts.networks import OPTIMIZERS, PRECISIONS

NOT_MEASURED, RAN_OUT = 0, -1  # in place of bytes
STEPS = 3  # the first makes the optimizer's state, and with more than one GPU two fill caches


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


def obstacle(setting: Setting) -> str | None:
    """Why a setting cannot be measured on the machine in use; None if it can."""
    count = machine.in_use().count
    if setting.gpus > count:
        return f"it needs {setting.gpus} GPUs, and {count} are in use"
    if setting.gpus > 1 and setting.spread == "DDP":
        return "the ranks of DDP are processes of their own: choose DataParallel"
    return None


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
