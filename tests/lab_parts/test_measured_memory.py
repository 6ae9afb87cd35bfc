"""The memory of a training step, as measured: what test_budget.py does not say of it."""

import torch

import labkit
from labkit.lab_parts.budget import budget, gpu_of
from labkit.lab_parts.measured_memory import measured_peak, obstacle
from labkit.labs import MLP, Setting

SMALL = Setting(MLP(256, 2), 512)


def test_what_others_hold_does_not_count_and_nothing_is_left():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        predicted = budget(SMALL, gpu_of().chip)
        first = measured_peak(SMALL, predicted)
        mine = torch.zeros(1 << 22, device="cuda")
        before = torch.cuda.memory_allocated()
        assert measured_peak(SMALL, predicted) == first
        assert torch.cuda.memory_allocated() == before
        assert mine.sum() == 0  # values are computed again


def test_what_cannot_be_measured_is_told():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        assert obstacle(SMALL) is None
        assert obstacle(Setting(MLP(), 8, gpus=2)) == "the ranks of DDP are processes of their own: choose DataParallel"
        assert obstacle(Setting(MLP(), 8, gpus=4, spread="DataParallel")) == "it needs 4 GPUs, and 2 are in use"
