"""The experiment `training_memory`: the peak of a training step of ten networks, as measured.

Lesson 9 plans a training on virtual GPUs. A recording of this experiment on real GPUs says how
accurate such plans are.
"""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from gpulessons.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, Network, ResNet
from labkit import machine
from labkit.labs import Run
from labkit.labs.experiment import Row, badge


@dataclass(frozen=True)
class Setting:
    """The settings with which a network is trained.

    `batch` counts the rows of one optimizer step, over all GPUs and micro-batches. More than one
    GPU means DataParallel.
    """

    network: Network
    batch: int
    precision: str = "float32"
    optimizer: str = "Adam"
    checkpointing: bool = False
    gpus: int = 1
    micro_batches: int = 1

    @property
    def micro_rows(self) -> int:
        """The number of rows in the largest micro-batch, over all GPUs."""
        return -(-self.batch // self.micro_batches)

    def __str__(self) -> str:
        """Describe the setting in one line: "MLP(width=2048, …), batch 8192, float32, Adam"."""
        parts = [f"{self.network}, batch {self.batch}", self.precision, self.optimizer]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.checkpointing:
            parts.append("checkpointing")
        if self.gpus > 1:
            parts.append(f"{self.gpus} GPUs, DataParallel")
        return ", ".join(parts)


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
    Setting(SMALL_GPT, 16, gpus=2),
)
COLUMNS = {"setting": "", "measured": "bytes"}


def training_memory() -> Run:
    """Measure the peak of the third training step on the first GPU, for each of ten settings.

    Virtual GPUs compute no values meanwhile.
    """
    parameters = {"settings": [str(setting) for setting in TEN_SETTINGS]}
    return Run("training_memory", parameters, COLUMNS, badge(), len(TEN_SETTINGS), _points())


def _points() -> Iterator[Row]:
    for setting in TEN_SETTINGS:
        with machine.in_use().without_values():
            peak = peak_of(setting)
        yield {"setting": str(setting), "measured": peak}


def peak_of(setting: Setting) -> int:
    """Return the peak of the last step on the first GPU, in bytes, without other tensors."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the steps take them again, whoever took them first
    before = torch.cuda.memory_allocated(0)
    network, dtype, rows = setting.network, PRECISIONS[setting.precision], setting.micro_rows
    model = network.build(setting.checkpointing, "cuda:0")
    run = model
    if setting.gpus > 1:
        run = nn.DataParallel(model, list(range(setting.gpus)))
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    inputs, targets = network.batch(setting.batch, "cuda:0")
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats(0)
        optimizer.zero_grad()
        for x, y in zip(
            inputs.split(rows), targets.split(rows * len(targets) // setting.batch), strict=True
        ):
            with torch.autocast("cuda", dtype=dtype) if dtype else nullcontext():
                loss = F.cross_entropy(run(x), y) / setting.micro_batches
            loss.backward()
        optimizer.step()
    torch.cuda.synchronize(0)
    return torch.cuda.max_memory_allocated(0) - before
