"""LSTM, GRU and RNN as cuDNN runs them: one operator with a weight buffer, a reserve space for the backward, and a workspace.

Sources: PyTorch's native/cudnn/RNN.cpp (order of allocations, what a backward returns) and native/cuda/RNN.cu (fused cells).
Reserve space: per layer and direction, steps x batch x hidden numbers for each gate (LSTM: and the cell), the hidden states between
layers, a bit an element of dropout between them, and 256 bytes; found by measurement, equal for all shapes tried.
Workspace: an estimate. cuDNN chooses an algorithm by itself; the table beside this file holds what it asked for on an H200, and other
shapes get the linear fit to that table (median error 6 %). Dropout's state: 49,152 bytes a multiprocessor.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch
from torch.autograd.function import once_differentiable

from labkit.vgpu import footprint, operators
from labkit.vgpu.footprint.attention import HALF, scratch_tensor
from labkit.vgpu.footprint.sequence import play
from labkit.vgpu.hardware import Gpu
from labkit.vgpu.tensor import VirtualTensor, empty, memory_of, wrap

aten = torch.ops.aten
Tensor = torch.Tensor
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # cuDNN's numbers for them
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
CONSTANT = 8 << 20  # bytes of workspace a layer and direction
NARROW = 128  # hidden units up to which cuDNN takes another algorithm
DROPOUT_STATE = 49152  # bytes a multiprocessor


class Setup(NamedTuple):
    """What a call says beside its tensors. `batch_sizes` are those of a packed sequence."""

    kind: str
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    batch_sizes: Tensor | None


@lru_cache(maxsize=1)
def _recording() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("cudnn_rnn_h200.json").read_text())


@lru_cache(maxsize=1024)
def workspace(kind: str, steps: int, batch: int, inputs: int, hidden: int, layers: int, directions: int, dtype: str, train: bool) -> int:
    """Bytes of cuDNN's workspace: as measured, or by the fit. An estimate."""
    recording, name = _recording(), NAMES[kind]
    key = f"{name} {steps} {batch} {inputs} {hidden} {layers} {directions} {dtype} {int(train)}"
    if key in recording["measured"]:
        return recording["measured"][key]
    item = getattr(torch, dtype).itemsize
    widths = [inputs, *[directions * hidden] * (layers - 1)]
    weights = sum(directions * GATES[kind] * hidden * (width + hidden) for width in widths) * item
    states = layers * directions * steps * batch * hidden * item
    narrow = hidden <= NARROW
    terms = (states * narrow, states * (not narrow), weights * narrow, weights * (not narrow), steps * batch * inputs * item)
    fit = recording["fit"][f"{name} {int(train)}"]
    return CONSTANT * layers * directions + max(0, round(sum(a * b for a, b in zip(fit, terms, strict=True)))) // 32 * 32


def reserve(setup: Setup, rows: int, hidden: int, item: int) -> int:
    """Bytes of the reserve space for `rows` = steps x batch."""
    directions = 2 if setup.bidirectional else 1
    size = rows * hidden * item
    units = setup.layers * directions
    numbers = {"lstm": (4, 1), "gru": (6,), "rnn_tanh": (1,), "rnn_relu": (1,)}[setup.kind]
    between = (setup.layers - 1) * directions
    parts = [*(n * units * size for n in numbers), between * size]
    bits = between * rows * hidden // 8 if setup.dropout > 0 else 0
    return sum(-(-part // 32) * 32 for part in parts) + bits + 256


class Recurrent(torch.autograd.Function):
    """All layers, directions and steps in one operator."""

    @staticmethod
    def forward(ctx: Any, setup: Setup, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        gpu = x._gpu  # type: ignore[attr-defined]
        gpu.machine.require_alive()
        gpu.machine.selected.gpu = gpu
        needs = any(ctx.needs_input_grad)
        if setup.dropout > 0 and setup.train:
            _dropout_state(gpu)
        buffer = None if one_chunk(weights) else scratch_tensor(gpu, sum(w.numel() * w.itemsize for w in weights))
        turned = _turned(gpu, x, setup)
        steps, batch = _extent(x, setup)
        hidden, item = hx.shape[2] if cx is None else cx.shape[2], x.itemsize
        directions = 2 if setup.bidirectional else 1
        shape = (*x.shape[:-1], hx.shape[2] * directions)
        out = _time_first(gpu, shape, x.dtype, setup)
        states = [empty(gpu, y.shape, _strides(y.shape), x.dtype) for y in (hx, cx) if y is not None]
        training = (str(x.dtype)[6:], setup.train)
        space = workspace(setup.kind, steps, batch, x.shape[-1], hidden, setup.layers, directions, *training)
        if setup.dropout > 0 and setup.train and setup.kind == "lstm":
            space += (setup.layers - 1) * directions * (x.numel() // x.shape[-1]) * hidden * item
        kept = _with_workspace(gpu, space, reserve(setup, x.numel() // x.shape[-1], hidden, item) if setup.train else 0)
        del turned
        inner = _compute(gpu, setup, (x, hx, cx, *weights), (out, *states), needs and setup.train)
        flops = 2 * (x.numel() // x.shape[-1]) * sum(w.numel() for w in weights if w.dim() > 1)
        gpu.launch(sum(y.numel() * y.itemsize for y in (x, out, *weights)), flops, operators.FORMATS.get(x.dtype, "tf32"))
        if needs:
            if kept is not None:
                kept.inner = inner  # so that it goes when the graph lets go of the reserve space
            ctx.save_for_backward(x, hx, cx, buffer, out, kept, *weights)
            ctx.setup, ctx.space = setup, space
            ctx.set_materialize_grads(False)
        return (out, *states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        setup, space = ctx.setup, ctx.space
        if not setup.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        x, hx, cx, _, out, kept, *weights = ctx.saved_tensors
        gpu = x._gpu
        gpu.machine.selected.gpu = gpu
        models = [y for y in (out, hx, cx) if y is not None]
        zeros = [scratch_tensor(gpu, y.numel() * y.itemsize) for g, y in zip(grads, models, strict=True) if g is None]
        dx = _time_first(gpu, x.shape, x.dtype, setup)
        turned = _turned(gpu, x, setup)
        states = [empty(gpu, y.shape, _strides(y.shape), y.dtype) for y in (hx, cx) if y is not None]
        play(gpu, (space, -space))
        turned = None
        turned = _turned(gpu, x, setup)
        total = sum(w.numel() for w in weights)
        flat = empty(gpu, (total,), (1,), weights[0].dtype)
        work = scratch_tensor(gpu, space)
        dws = _parts(flat, weights)
        if not setup.has_biases:
            dws = [dw.clone() for dw in dws]
        del work, turned, flat
        _inner_gradients(kept.inner, grads, (dx, *states, *dws))
        zeros.clear()
        gpu.launch(2 * sum(y.numel() * y.itemsize for y in (x, out, *weights)), 4 * x.shape[0] * x.shape[1] * total)
        states = [y if needed else None for y, needed in zip(states, ctx.needs_input_grad[2:4], strict=False)]
        return None, dx if ctx.needs_input_grad[1] else None, states[0], states[1] if cx is not None else None, *dws


class CastWeights(torch.autograd.Function):
    """Under autocast: the weights in another type, in one new buffer (`_cudnn_rnn_cast_reflatten`)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Any:
        ctx.dtypes = [w.dtype for w in weights]
        flat = empty(weights[0]._gpu, (sum(w.numel() for w in weights),), (1,), dtype)  # type: ignore[attr-defined]
        views = _parts(flat, weights)
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cast = [g.to(dtype) for g, dtype in reversed(list(zip(grads, ctx.dtypes, strict=True)))]
        return None, *reversed(cast)


def _with_workspace(gpu: Gpu, space: int, kept: int) -> Tensor | None:
    work = scratch_tensor(gpu, space)
    result = scratch_tensor(gpu, kept) if kept else None
    del work
    return result


def one_chunk(weights: Any) -> bool:
    """Do all weights lie in one storage, as `flatten_parameters` leaves them?"""
    return len({w.untyped_storage().data_ptr() for w in weights}) == 1 and len(weights) > 1


def _strides(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _extent(x: Tensor, setup: Setup) -> tuple[int, int]:
    """Steps, and sequences in the first of them."""
    if setup.batch_sizes is not None:
        return len(setup.batch_sizes), int(setup.batch_sizes[0])
    return (x.shape[1], x.shape[0]) if setup.batch_first else (x.shape[0], x.shape[1])


def _turned(gpu: Gpu, x: Tensor, setup: Setup) -> Tensor | None:
    """cuDNN reads the input step by step: a copy, if it does not lie so."""
    ordered = x.transpose(0, 1) if setup.batch_first else x
    return None if ordered.is_contiguous() else scratch_tensor(gpu, x.numel() * x.itemsize)


def _time_first(gpu: Gpu, shape: Any, dtype: torch.dtype, setup: Setup) -> VirtualTensor:
    if not setup.batch_first:
        return empty(gpu, shape, _strides(shape), dtype)
    batch, _, width = shape
    return empty(gpu, shape, (width, batch * width, 1), dtype)


def _parts(flat: Tensor, weights: Any) -> list[Tensor]:
    """Views of a flat buffer: all matrices first, then all biases, as cuDNN lays them out."""
    order = sorted(range(len(weights)), key=lambda i: (weights[i].dim() < 2, i))
    views: list[Any] = [None] * len(weights)
    offset = 0
    for i in order:
        views[i] = flat[offset : offset + weights[i].numel()].view(weights[i].shape)
        offset += weights[i].numel()
    return views


def _dropout_state(gpu: Gpu) -> None:
    """The state of cuDNN's dropout stays for good: made at its first use on a GPU, from a seed."""
    if "cudnn dropout" not in gpu.libraries:
        play(gpu, (8, -8))
        gpu.libraries["cudnn dropout"] = gpu.allocate(DROPOUT_STATE * gpu.profile.multiprocessors)


def _plain(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    x = aten.alias.default(x)
    return x.float() if x.dtype in HALF else x


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's LSTM, which PyTorch takes on some processors, gives states of another shape than the caller's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _compute(gpu: Gpu, setup: Setup, inputs: tuple, outputs: tuple, needs: bool) -> Any:
    """The values by the CPU's kernels, with a graph of their own for the gradients. None if values were not kept."""
    if not all(memory_of(x).kept is not None for x in (*inputs, *outputs) if x is not None):
        return None
    with _DisableTorchDispatch(), torch.set_grad_enabled(needs):
        plain = [None if x is None else _plain(x).detach().requires_grad_(needs) for x in inputs]  # type: ignore[union-attr]
        plain[1:3] = [None if y is None else y.detach().clone().requires_grad_(needs) for y in plain[1:3]]  # may be freed before the rest
        x, hx, cx, *weights = plain
        state = (hx, cx) if setup.kind == "lstm" else hx
        rest = (weights, setup.has_biases, setup.layers, setup.dropout, setup.train, setup.bidirectional)
        packet = getattr(aten, setup.kind)
        with gpu.generator.as_default(), _without_onednn():
            if setup.batch_sizes is None:
                results = footprint.made_of(packet.input, x, state, *rest, setup.batch_first)
            else:
                results = footprint.made_of(packet.data, x, setup.batch_sizes, state, *rest)
        for target, value in zip(outputs, results, strict=True):
            aten.copy_.default(target, value.detach())
    return ([y for y in plain if y is not None], results) if needs else None


def _inner_gradients(inner: Any, grads: tuple, targets: tuple) -> None:
    if inner is None:
        return
    with _DisableTorchDispatch():
        inputs, results = inner
        pairs = [(y, _plain(g)) for y, g in zip(results, grads, strict=True) if g is not None]
        values = torch.autograd.grad([y for y, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True)
        for target, value in zip(targets, values, strict=True):
            aten.zero_.default(target) if value is None else aten.copy_.default(target, value)


def _run(kind: str, x: Tensor, state: Any, params: Any, *settings: Any, batch_sizes: Tensor | None = None) -> Any:
    biases, layers, dropout, train, bidirectional, *first = settings
    setup = Setup(kind, biases, layers, dropout, train, bidirectional, bool(first and first[0]), batch_sizes)
    operators.common_gpu((x, state, params), {})
    hx, cx = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda") and x.dtype in (torch.float32, *HALF):
        dtype = torch.get_autocast_dtype("cuda")
        params = CastWeights.apply(dtype, *params)
        hx, cx, x = hx.to(dtype), None if cx is None else cx.to(dtype), x.to(dtype)
    return Recurrent.apply(setup, x, hx, cx, *params)


for _kind in GATES:

    def _of_input(x: Tensor, state: Any, params: Any, *settings: Any, kind: str = _kind) -> Any:
        return _run(kind, x, state, params, *settings)

    def _of_packed(data: Tensor, batch_sizes: Tensor, state: Any, params: Any, *settings: Any, kind: str = _kind) -> Any:
        return _run(kind, data, state, params, *settings, batch_sizes=batch_sizes)

    footprint.composes(f"{_kind}.input")(_of_input)
    footprint.composes(f"{_kind}.data")(_of_packed)


@footprint.handles("_cudnn_rnn_flatten_weight")
def flatten_weight(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Move all weights of a module into one buffer, of which they become views."""
    weights = args[0]
    gpu, _ = operators.common_gpu((list(weights),), {})
    flat = empty(gpu, (sum(w.numel() for w in weights),), (1,), weights[0].dtype)
    with torch.no_grad():
        for view, weight in zip(_parts(flat, weights), weights, strict=True):
            view.copy_(weight)
            weight.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    return flat


# Packed sequences: the sizes of the batches stay on the host


@footprint.handles("_pack_padded_sequence")
def pack_padded_sequence(func: Any, args: tuple, kwargs: dict) -> Any:
    gpu, moved = operators.common_gpu(args[:1], {})
    with _DisableTorchDispatch():
        data, sizes = func(*args, **kwargs)
    gpu.launch(2 * moved)
    return wrap(data, gpu), sizes


@footprint.handles("_pack_padded_sequence_backward")
def pack_padded_sequence_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    return operators.mixed(func, args, kwargs)


@footprint.composes("_pad_packed_sequence")
def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Steps with equally many sequences are copied at once, as PyTorch's native/PackedSequence.cpp does."""
    sizes = batch_sizes.tolist()
    steps, batch = len(sizes), sizes[0]
    if 0 < total_length < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {steps}"
        )
    output = data.new_full((max(total_length, steps), batch, *data.shape[1:]), padding_value)
    lengths = torch.zeros(batch, dtype=torch.int64)
    start = offset = 0
    for step in range(1, steps + 1):
        now = sizes[step] if step < steps else 0
        if now != sizes[start]:
            rows = (step - start) * sizes[start]
            part = data[offset : offset + rows].view(step - start, sizes[start], *data.shape[1:])
            output[start:step, : sizes[start]].copy_(part)
            lengths[now : sizes[start]] = step
            offset, start = offset + rows, step
    return output.transpose(0, 1) if batch_first else output, lengths


# Cells


class LstmCell(torch.autograd.Function):
    """`_thnn_fused_lstm_cell`: gates of the input and of the hidden state, and the cell, to the next hidden state and cell."""

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_hidden: Tensor, cx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Any:
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
        plain_gradients(lstm_step, (of_input, of_hidden, cx, b_ih, b_hh), (grad_hy, grad_cy), (gates, None, of_cell, None, None))
        bias = gates.sum(0) if b_ih is not None else None
        return gates, gates, of_cell if ctx.needs_input_grad[2] else None, bias, bias


class GruCell(torch.autograd.Function):
    """`_thnn_fused_gru_cell`: its workspace holds five numbers a hidden unit."""

    @staticmethod
    def forward(ctx: Any, of_input: Tensor, of_hidden: Tensor, hx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
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
        plain_gradients(gru_step, (of_input, of_hidden, hx, b_ih, b_hh), (grad,), (*targets, None, None))
        biases = [t.sum(0) for t in targets[:2]] if b_ih is not None else [None, None]
        return *targets[:2], targets[2] if ctx.needs_input_grad[2] else None, *biases


def lstm_step(of_input: Tensor, of_hidden: Tensor, cx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> tuple[Tensor, ...]:
    gates = of_input + of_hidden if b_ih is None else of_input + b_ih + of_hidden + b_hh
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy


def gru_step(of_input: Tensor, of_hidden: Tensor, hx: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> tuple[Tensor, ...]:
    (r, z, n), (hr, hz, hn) = ((x if b is None else x + b).chunk(3, 1) for x, b in ((of_input, b_ih), (of_hidden, b_hh)))
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return (n + z * (hx - n),)


def _all_known(*values: Any) -> bool:
    return all(type(x) is not VirtualTensor or memory_of(x).kept is not None for x in operators.tensors(values))


def plain_of(model: Tensor, step: Any, inputs: tuple, outputs: tuple) -> None:
    if _all_known(inputs, outputs):
        with _DisableTorchDispatch(), torch.no_grad():
            for target, value in zip(outputs, step(*map(_plain, inputs)), strict=True):
                aten.copy_.default(target, value)
    model._gpu.launch(sum(x.numel() * x.itemsize for x in operators.tensors(inputs, outputs)))  # type: ignore[attr-defined]


def plain_gradients(step: Any, inputs: tuple, grads: tuple, targets: tuple) -> None:
    """The gradients of a step's values for the inputs that have a target."""
    inputs[0]._gpu.launch(2 * sum(x.numel() * x.itemsize for x in operators.tensors(inputs)))
    if not _all_known(inputs, tuple(operators.tensors(grads)), targets):
        return
    with _DisableTorchDispatch(), torch.enable_grad():
        plain = [None if x is None else _plain(x).detach().requires_grad_() for x in inputs]  # type: ignore[union-attr]
        results = step(*plain)
        wanted = [(x, t) for x, t in zip(plain, targets, strict=True) if t is not None]
        given = [(result, _plain(g)) for result, g in zip(results, grads, strict=True) if g is not None]
        values = torch.autograd.grad([r for r, _ in given], [x for x, _ in wanted], [g for _, g in given])
    with _DisableTorchDispatch(), torch.no_grad():
        for (_, target), value in zip(wanted, values, strict=True):
            aten.copy_.default(target, value)


def again(step: Any, inputs: tuple, grads: tuple) -> tuple:
    """The gradients as a graph of their own, of ordinary operators."""
    results = step(*inputs)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    given = [(result, g) for result, g in zip(results, grads, strict=True) if g is not None]
    values = iter(torch.autograd.grad([r for r, _ in given], wanted, [g for _, g in given], create_graph=True))
    return tuple(next(values) if x is not None and x.requires_grad else None for x in inputs)


@footprint.composes("lstm_cell")
def lstm_cell(
    x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return LstmCell.apply(x @ w_ih.t(), hx[0] @ w_hh.t(), hx[1], b_ih, b_hh)


@footprint.composes("gru_cell")
def gru_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Tensor:
    return GruCell.apply(x @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)
