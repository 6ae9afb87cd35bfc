"""Norms of lists of tensors. Sequences recorded on an H200."""

from itertools import pairwise

import pytest
import torch
from asked import asked
from torch import nn


def with_gradients(*sizes: int) -> list[torch.Tensor]:
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).cuda()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return list(module.parameters())


@pytest.mark.parametrize(
    ("sizes", "order", "expected"),
    [
        ((300, 300, 300), 2.0, "+32 +4 +4 +4 +4 -32 +16 +4 -16 -4 -4 -4 -4 +4 +4 +4 -4 -4 +4 -4 -4"),
        ((200, 100), float("inf"), "+8 +4 +4 -8 +8 +4 -8 -4 -4 +4 +4 +4 -4 -4 +4 -4 -4"),
    ],
)
def test_clipping(sizes, order, expected):
    def clip(parameters: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, 1.0, order)

    assert " ".join(asked(clip, setup=lambda: with_gradients(*sizes))) == expected
