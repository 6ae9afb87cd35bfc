"""Recurrent cells run as fused kernels with their buffers, and have second derivatives."""

import pytest
import torch
from torch import nn

from ..recorded import check


@pytest.mark.parametrize(
    "name", ["shared/rnn_cell", "shared/lstm_cell", "more/lstm_cell", "more/gru_cell"]
)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_have_second_derivatives(kind, machine):
    plain, moved = kind(3, 4), kind(3, 4)
    moved.load_state_dict(plain.state_dict())
    moved.cuda()
    found = []
    for layer, device in ((plain, "cpu"), (moved, "cuda")):
        x = torch.linspace(-1, 1, 6, device=device).view(2, 3).requires_grad_()
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first.detach().cpu(), second.cpu()))
    torch.testing.assert_close(*found)
