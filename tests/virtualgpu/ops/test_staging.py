"""Copies between host and GPU take the temporaries that CUDA's take."""

import pytest
import torch
from recorded import check

NAMES = ("h2d", "h2d_half", "d2h_half", "h2d_t", "d2h_t", "d2h_slice", "copy_h2d_strided", "copy_", "copy_dtype", "tolist", "ctc")


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(f"more/{name}")


def test_values_survive_types_and_layouts(machine):
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(x.t().to("cuda", torch.float16).cpu(), x.t().half())
    assert torch.equal(x.cuda()[:, ::2].to("cpu", torch.int32), x[:, ::2].int())
