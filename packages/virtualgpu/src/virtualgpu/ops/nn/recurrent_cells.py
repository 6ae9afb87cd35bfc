"""LSTM and GRU cells: two matrix products, and one fused kernel of pointwise formulas.

Source: PyTorch's native/cuda/RNN.cu.
"""

from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.ops.call import composes
from virtualgpu.ops.half import HALF
from virtualgpu.ops.passes import compared
from virtualgpu.ops.without_values import all_known
from virtualgpu.tensor import tensors

aten = torch.ops.aten
Tensor = torch.Tensor


def plain_values(x: Tensor | None) -> Tensor | None:
    """Return a device tensor's values as a CPU tensor, in float32 for half precision."""
    if x is None:
        return None
    x = aten.alias.default(x)
    if x.dtype in HALF:
        return x.float()
    return x


class LstmCell(torch.autograd.Function):
    """`_thnn_fused_lstm_cell`, the fused kernel of an LSTM cell.

    It computes the next hidden state and cell from the cell and from the gates' products with the
    input and with the hidden state.
    """

    @staticmethod
    @compared
    def forward(
        ctx: Any,
        of_input: Tensor,
        of_hidden: Tensor,
        cx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Any:
        """Return the next hidden state and cell, each of shape (batch, hidden)."""
        ctx.set_materialize_grads(False)  # CUDA's kernel takes a missing gradient for zeros
        work, hy, cy = torch.empty_like(of_input), torch.empty_like(cx), torch.empty_like(cx)
        run_step(lstm_step, (of_input, of_hidden, cx, b_ih, b_hh), (hy, cy))
        ctx.save_for_backward(of_hidden, b_hh, of_input, b_ih, cx, cy, work)
        return hy, cy

    @staticmethod
    @compared
    def backward(ctx: Any, grad_hy: Tensor, grad_cy: Tensor) -> Any:
        """Return the gradients of the forward pass's arguments."""
        of_hidden, b_hh, of_input, b_ih, cx, _, _ = ctx.saved_tensors
        inputs = of_input, of_hidden, cx, b_ih, b_hh
        if torch.is_grad_enabled():
            return differentiable_gradients(lstm_step, inputs, (grad_hy, grad_cy))
        gates, of_cell = torch.empty_like(of_input), torch.empty_like(cx)
        targets = gates, None, of_cell, None, None
        run_gradients(lstm_step, inputs, (grad_hy, grad_cy), targets)
        bias = None
        if b_ih is not None:
            bias = gates.sum(0)
        return gates, gates, of_cell if ctx.needs_input_grad[2] else None, bias, bias


class GruCell(torch.autograd.Function):
    """`_thnn_fused_gru_cell`, the fused kernel of a GRU cell.

    It computes the next hidden state from the hidden state and from the gates' products with the
    input and with the hidden state. Its workspace has five numbers per hidden unit.
    """

    @staticmethod
    @compared
    def forward(
        ctx: Any,
        of_input: Tensor,
        of_hidden: Tensor,
        hx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Tensor:
        """Return the next hidden state of shape (batch, hidden)."""
        work, hy = hx.new_empty((hx.shape[0], 5 * hx.shape[1])), torch.empty_like(hx)
        run_step(gru_step, (of_input, of_hidden, hx, b_ih, b_hh), (hy,))
        ctx.save_for_backward(of_hidden, b_hh, of_input, b_ih, hx, work)
        return hy

    @staticmethod
    @compared
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the forward pass's arguments."""
        of_hidden, b_hh, of_input, b_ih, hx, _ = ctx.saved_tensors
        inputs = of_input, of_hidden, hx, b_ih, b_hh
        if torch.is_grad_enabled():
            return differentiable_gradients(gru_step, inputs, (grad,))
        into_input, into_hidden = torch.empty_like(of_input), torch.empty_like(of_hidden)
        into_hx = torch.empty_like(hx)
        run_gradients(gru_step, inputs, (grad,), (into_input, into_hidden, into_hx, None, None))
        into_b_ih = into_b_hh = None
        if b_ih is not None:
            into_b_ih, into_b_hh = into_input.sum(0), into_hidden.sum(0)
        needed_hx = None
        if ctx.needs_input_grad[2]:
            needed_hx = into_hx
        return into_input, into_hidden, needed_hx, into_b_ih, into_b_hh


def lstm_step(
    of_input: Tensor, of_hidden: Tensor, cx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the next hidden state and cell of an LSTM cell."""
    if b_ih is None or b_hh is None:
        gates = of_input + of_hidden
    else:
        gates = of_input + b_ih + of_hidden + b_hh
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy


def gru_step(
    of_input: Tensor, of_hidden: Tensor, hx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the next hidden state of a GRU cell, as a tuple of one tensor."""
    if b_ih is not None:
        of_input = of_input + b_ih
    if b_hh is not None:
        of_hidden = of_hidden + b_hh
    (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return (n + z * (hx - n),)


def run_step(step: Any, inputs: tuple, outputs: tuple) -> None:
    """Launch the kernel of a cell's step, and write the values that `step` computes to `outputs`.

    `step` is `lstm_step` or `gru_step`, and `inputs` are its arguments.
    """
    if all_known(inputs, outputs):
        with _DisableTorchDispatch(), torch.no_grad():
            for target, value in zip(outputs, step(*map(plain_values, inputs)), strict=True):
                aten.copy_.default(target, value)
    gpu = inputs[0]._gpu
    gpu.launch(sum(x.numel() * x.itemsize for x in tensors(inputs, outputs)), name=step.__name__)


def run_gradients(step: Any, inputs: tuple, grads: tuple, targets: tuple) -> None:
    """Launch the backward kernel of a cell's step, and write the gradients to `targets`.

    `grads` are the gradients of the step's results. `targets` has a tensor or None per input.
    """
    moved = 2 * sum(x.numel() * x.itemsize for x in tensors(inputs))
    inputs[0]._gpu.launch(moved, name=f"{step.__name__}_backward")
    if not all_known(inputs, tuple(tensors(grads)), targets):
        return
    with _DisableTorchDispatch(), torch.enable_grad():
        plain: list[Any] = [plain_values(x) for x in inputs]
        plain = [None if x is None else x.detach().requires_grad_() for x in plain]
        results = step(*plain)
        wanted = []
        for x, target in zip(plain, targets, strict=True):
            if x is not None and target is not None:
                wanted.append((x, target))
        given = []
        for result, grad in zip(results, grads, strict=True):
            if grad is not None:
                given.append((result, plain_values(grad)))
        values = torch.autograd.grad(
            [result for result, _ in given], [x for x, _ in wanted], [grad for _, grad in given]
        )
    with _DisableTorchDispatch(), torch.no_grad():
        for (_, target), value in zip(wanted, values, strict=True):
            aten.copy_.default(target, value)


def differentiable_gradients(step: Any, inputs: tuple, grads: tuple) -> tuple:
    """Return the gradients of a cell's inputs as results that autograd can differentiate again.

    `step` is `lstm_step` or `gru_step`, and `grads` are the gradients of its results. There is one
    gradient per input, or None. Single operators on the GPU compute them.
    """
    results = step(*inputs)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    given = [
        (result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None
    ]
    values = iter(
        torch.autograd.grad(
            [result for result, _ in given], wanted, [grad for _, grad in given], create_graph=True
        )
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
    """Return the next hidden state and cell of `nn.LSTMCell`. `hx` is the current pair of them."""
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
    """Return the next hidden state of `nn.GRUCell`."""
    return GruCell.apply(x @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)
