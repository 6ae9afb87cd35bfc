"""Convolutions ask for the workspaces that were measured, and for estimates elsewhere."""

import pytest
import torch
from recorded import cases, check

from labkit.vgpu.footprint.convolution import workspaces


@pytest.mark.parametrize("name", [n for n in cases() if n.split("/")[1].startswith("conv")][::3])
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_an_unknown_batch_is_in_proportion_to_a_measured_one():
    layer = "float32 first F 64 64 3,3 1,1 1,1 1,1 1"
    known, more = (workspaces(layer, (n, 56, 56), 1, 1, 1, 4, False) for n in (64, 72))
    assert more == tuple(round(n * 72 / 64) for n in known)


def test_an_unknown_layer_copies_input_output_and_weight():
    assert workspaces("float32 first F 5 9 2,2 1,1 0,0 1,1 1", (3, 7, 7), 100, 200, 300, 4, False) == (600, 600, 600)


def test_memory_returns(machine):
    layer = torch.nn.Conv2d(5, 9, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    layer(torch.randn(3, 5, 7, 7, device="cuda")).sum().item()
    assert torch.cuda.memory_allocated() == before
