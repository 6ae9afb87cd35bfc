"""The experiment `training_memory`: the peak of a training step, as measured.

The memory that the lab of lesson 9 measures on virtual GPUs is compared with its recording.
"""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from gpulessons.lesson_09.training import Setting
from gpulessons.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, ResNet
from labkit import machine
from labkit.labs import Run
from labkit.labs.experiment import Row, badge

STEPS = 3  # the first makes the optimizer's state, and with more than one GPU two fill caches
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
COLUMNS = {"setting": "", "measured": "bytes"}


def training_memory() -> Run:
    """The peak of the third training step on the first GPU, for each of the ten settings.

    Virtual GPUs compute no values meanwhile.
    """
    parameters = {"settings": [str(setting) for setting in TEN_SETTINGS]}
    return Run("training_memory", parameters, COLUMNS, badge(), len(TEN_SETTINGS), _points())


def _points() -> Iterator[Row]:
    for setting in TEN_SETTINGS:
        with machine.in_use().without_values():
            peak = _peak(setting)
        yield {"setting": str(setting), "measured": peak}


def _peak(setting: Setting) -> int:
    """The most bytes that the last step has allocated on the first GPU, without other tensors."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the steps take them again, whoever took them first
    before = torch.cuda.memory_allocated(0)
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
    return torch.cuda.max_memory_allocated(0) - before
