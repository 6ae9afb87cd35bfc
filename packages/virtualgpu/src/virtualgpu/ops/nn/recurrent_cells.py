"""LSTM and GRU cells: one fused kernel of pointwise formulas behind two matrix products.

Source: PyTorch's native/cuda/RNN.cu.
"""

from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.ops.call import composes
from virtualgpu.ops.half import HALF
from virtualgpu.ops.without_values import all_known
from virtualgpu.tensor import tensors

aten = torch.ops.aten
Tensor = torch.Tensor


def plain_values(x: Tensor | None) -> Tensor | None:
    """The CPU tensor of a device tensor's values, in a type that the CPU computes fast."""
    if x is None:
        return None
    x = aten.alias.default(x)
    return x.float() if x.dtype in HALF else x


class LstmCell(torch.autograd.Function):
    """`_thnn_fused_lstm_cell`: gates of the input and of the hidden state, and the cell, to the next hidden state and cell."""

    @staticmethod
    def forward(
        ctx: Any,
        of_input: Tensor,
        of_hidden: Tensor,
        cx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)  # CUDA's kernel takes a missing gradient for zeros
        work, hy, cy = torch.empty_like(of_input), torch.empty_like(cx), torch.empty_like(cx)
        plain_of(of_input, lstm_step, (of_input, of_hidden, cx, b_ih, b_hh), (hy, cy))
        ctx.save_for_backward(of_hidden, b_hh, of_input, b_ih, cx, cy, work)
        ctx.set_materialize_grads(False)
        return hy, cy

    @staticmethod
    def backward(ctx: Any, grad_hy: Tensor, grad_cy: Tensor) -> Any:
        of_hidden, b_hh, of_input, b_ih, cx, _, _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(lstm_step, (of_input, of_hidden, cx, b_ih, b_hh), (grad_hy, grad_cy))
        gates, of_cell = torch.empty_like(of_input), torch.empty_like(cx)
        plain_gradients(
            lstm_step,
            (of_input, of_hidden, cx, b_ih, b_hh),
            (grad_hy, grad_cy),
            (gates, None, of_cell, None, None),
        )
        bias = gates.sum(0) if b_ih is not None else None
        return gates, gates, of_cell if ctx.needs_input_grad[2] else None, bias, bias


class GruCell(torch.autograd.Function):
    """`_thnn_fused_gru_cell`: its workspace holds five numbers a hidden unit."""

    @staticmethod
    def forward(
        ctx: Any,
        of_input: Tensor,
        of_hidden: Tensor,
        hx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Tensor:
        work, hy = hx.new_empty((hx.shape[0], 5 * hx.shape[1])), torch.empty_like(hx)
        plain_of(of_input, gru_step, (of_input, of_hidden, hx, b_ih, b_hh), (hy,))
        ctx.save_for_backward(of_hidden, b_hh, of_input, b_ih, hx, work)
        return hy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_hidden, b_hh, of_input, b_ih, hx, _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(gru_step, (of_input, of_hidden, hx, b_ih, b_hh), (grad,))
        targets = torch.empty_like(of_input), torch.empty_like(of_hidden), torch.empty_like(hx)
        plain_gradients(
            gru_step, (of_input, of_hidden, hx, b_ih, b_hh), (grad,), (*targets, None, None)
        )
        biases = [t.sum(0) for t in targets[:2]] if b_ih is not None else [None, None]
        return *targets[:2], targets[2] if ctx.needs_input_grad[2] else None, *biases


def lstm_step(
    of_input: Tensor, of_hidden: Tensor, cx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, ...]:
    gates = (
        of_input + of_hidden if b_ih is None or b_hh is None else of_input + b_ih + of_hidden + b_hh
    )
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy


def gru_step(
    of_input: Tensor, of_hidden: Tensor, hx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, ...]:
    (r, z, n), (hr, hz, hn) = (
        (x if b is None else x + b).chunk(3, 1) for x, b in ((of_input, b_ih), (of_hidden, b_hh))
    )
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return (n + z * (hx - n),)


def plain_of(model: Tensor, step: Any, inputs: tuple, outputs: tuple) -> None:
    if all_known(inputs, outputs):
        with _DisableTorchDispatch(), torch.no_grad():
            for target, value in zip(outputs, step(*map(plain_values, inputs)), strict=True):
                aten.copy_.default(target, value)
    gpu = model._gpu  # type: ignore[attr-defined]
    gpu.launch(sum(x.numel() * x.itemsize for x in tensors(inputs, outputs)), name=step.__name__)


def plain_gradients(step: Any, inputs: tuple, grads: tuple, targets: tuple) -> None:
    """The gradients of a step's values for the inputs that have a target."""
    inputs[0]._gpu.launch(
        2 * sum(x.numel() * x.itemsize for x in tensors(inputs)), name=f"{step.__name__}_backward"
    )
    if not all_known(inputs, tuple(tensors(grads)), targets):
        return
    with _DisableTorchDispatch(), torch.enable_grad():
        plain = [None if x is None else plain_values(x).detach().requires_grad_() for x in inputs]  # type: ignore[union-attr]
        results = step(*plain)
        wanted = [
            (x, t) for x, t in zip(plain, targets, strict=True) if x is not None and t is not None
        ]
        given = [
            (result, plain_values(g))
            for result, g in zip(results, grads, strict=True)
            if g is not None
        ]
        values = torch.autograd.grad(
            [r for r, _ in given], [x for x, _ in wanted], [g for _, g in given]
        )
    with _DisableTorchDispatch(), torch.no_grad():
        for (_, target), value in zip(wanted, values, strict=True):
            aten.copy_.default(target, value)


def again(step: Any, inputs: tuple, grads: tuple) -> tuple:
    """The gradients as a graph of their own, of ordinary operators."""
    results = step(*inputs)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    given = [(result, g) for result, g in zip(results, grads, strict=True) if g is not None]
    values = iter(
        torch.autograd.grad([r for r, _ in given], wanted, [g for _, g in given], create_graph=True)
    )
    return tuple(next(values) if x is not None and x.requires_grad else None for x in inputs)


@composes("lstm_cell")
def lstm_cell(
    x: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return LstmCell.apply(x @ w_ih.t(), hx[0] @ w_hh.t(), hx[1], b_ih, b_hh)


@composes("gru_cell")
def gru_cell(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    return GruCell.apply(x @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)
