"""LSTM, GRU and RNN as cuDNN runs them: one operator with a weight buffer, a reserve space for the backward, and a workspace.

Source: PyTorch's native/cudnn/RNN.cpp (order of allocations, what a backward returns).
Reserve space: per layer and direction, steps x batch x hidden numbers for each gate (LSTM: and the cell), the hidden states between
layers, a bit an element of dropout between them, and 256 bytes; found by measurement, equal for all shapes tried.
Workspace: the weights, 8 MiB a layer and direction, and numbers for each step, sequence, input and hidden unit, by the algorithm that
cuDNN chooses; read off 59,000 layers on an H200 (benchmarks/fidelity/cudnn.py), of which 96 % are equal within 512 bytes. An estimate
where several wide layers train in one direction (up to 10 % too much). Dropout's state: 49,152 bytes a multiprocessor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch
from torch.autograd.function import once_differentiable

from virtualgpu.clock import costs
from virtualgpu.errors import scalar_name
from virtualgpu.hardware import Gpu
from virtualgpu.ops import operators
from virtualgpu.ops.blas import product_format
from virtualgpu.ops.call import Call, Work, bytes_of, checks, common_gpu, composes, handles, made_of
from virtualgpu.ops.half import HALF
from virtualgpu.ops.nn.attention import scratch_tensor
from virtualgpu.ops.nn.recurrent_cells import plain_values
from virtualgpu.ops.sequence import play
from virtualgpu.ops.tf32 import round_to_tf32
from virtualgpu.ops.without_values import all_known
from virtualgpu.profiles import Profile
from virtualgpu.source_lines import warn_as_cpp
from virtualgpu.tensor import VirtualTensor, empty, wrap

aten = torch.ops.aten
Tensor = torch.Tensor
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # cuDNN's numbers for them
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
CONSTANT = 8 << 20  # bytes of workspace a layer and direction
NARROW = {
    "lstm": 128,
    "gru": 128,
    "rnn_tanh": 256,
    "rnn_relu": 256,
}  # hidden units up to which cuDNN keeps the weights on the chip
DROPOUT_STATE = 49152  # bytes a multiprocessor
# Seconds that the kernels of a step of a layer take at least, by whether its numbers have two bytes:
# small kernels that wait for each other. In the backward there are more. Where the weights stay on the
# chip, one kernel takes all steps. Measured by benchmarks/timing/small_kernels.py on an H200.
# Assumed: other GPUs alike.
STEP_SECONDS = {True: 5e-6, False: 6.5e-6}
STEP_BACK_SECONDS = {True: 6.5e-6, False: 13e-6}
STEP_ON_CHIP_SECONDS = 3e-6
# Host time, in launches, of the kernels of a step. Where the host is the limit, a step of a layer
# takes so long: both LSTMs of benchmarks/timing/kernels.json, 256 steps on an H200.
LAUNCHES_OF_A_STEP, LAUNCHES_BACK_OF_A_STEP = 2.37, 3.64
# Host time in launches: cuDNN launches many kernels. Measured by benchmarks/timing/host_functions.py
# on an H200: "lstm", "gru" and "two layers of gru", less memory, module, nodes and leaves.
LAUNCHES_OF_A_CALL, LAUNCHES_OF_A_LAYER, LAUNCHES_BACK_OF_A_LAYER = 7, 6, 50


class Setup(NamedTuple):
    """The arguments of a call that are no tensors. `batch_sizes` are those of a packed sequence."""

    kind: str
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    batch_sizes: Tensor | None


class Shares(NamedTuple):
    """Numbers in a workspace: a sequence and hidden unit of each layer; a step, sequence and input; a step, sequence and hidden unit."""

    states: int
    inputs: int
    hidden: int


# By kind (for a plain one whatever its activation), training, on-chip weights, and one direction or two.
SHARES = {
    ("lstm", True): (Shares(8, 1, 21), Shares(18, 1, 30)),
    ("lstm", False): (Shares(10, 1, 5), Shares(24, 1, 14)),
    ("gru", True): (Shares(4, 1, 16), Shares(10, 1, 24)),
    ("gru", False): (Shares(5, 1, 4), Shares(14, 1, 12)),
    ("rnn", True): (Shares(4, 1, 6), Shares(10, 1, 12)),
    ("rnn", False): (Shares(3, 1, 2), Shares(10, 1, 8)),
}
TRAINING = SHARES | {
    ("gru", True): (Shares(6, 2, 18), Shares(14, 2, 24)),
    ("gru", False): (Shares(5, 2, 4), Shares(14, 1, 12)),
    ("rnn", True): (Shares(6, 2, 13), Shares(14, 2, 19)),
    ("rnn", False): (Shares(5, 2, 4), Shares(14, 2, 10)),
}
BETWEEN = {
    ("gru", True): Shares(0, 0, 1),
    ("rnn", True): Shares(0, 0, 1),
}  # more where several layers train, a direction
BETWEEN_BOTH = {
    ("gru", False): Shares(0, 1, 0),
    ("rnn", False): Shares(0, 0, 2),
}  # the same, in both directions alone


def _on_chip(kind: str, hidden: int, dtype: str) -> bool:
    return hidden <= NARROW[kind] and dtype != "float64"


def _shares(
    kind: str,
    batch: int,
    inputs: int,
    hidden: int,
    layers: int,
    directions: int,
    dtype: str,
    train: bool,
) -> Shares:
    on_chip, kind = _on_chip(kind, hidden, dtype), kind.partition("_")[0]
    if kind != "gru" and layers == directions == 1 and dtype in ("float16", "bfloat16"):
        on_chip |= batch % 8 == inputs % 8 == hidden % 64 == 0  # what tensor cores take
    key = kind, on_chip
    shares = (TRAINING if train else SHARES)[key][directions - 1]
    if not train:
        return shares
    if key == ("lstm", False) and directions == 1 and inputs >= hidden:
        shares = shares._replace(states=shares.states + 1)
    if layers > 1:
        more = BETWEEN.get(key, Shares(0, 0, 0))
        both = BETWEEN_BOTH.get(key, Shares(0, 0, 0)) if directions == 2 else Shares(0, 0, 0)
        shares = Shares(
            *(a + directions * b + c for a, b, c in zip(shares, more, both, strict=True))
        )
    return shares


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 32) * 32


@lru_cache(maxsize=1024)
def workspace(
    kind: str,
    rows: int,
    batch: int,
    inputs: int,
    hidden: int,
    layers: int,
    directions: int,
    dtype: str,
    train: bool,
) -> int:
    """Bytes of cuDNN's workspace for `rows` = steps x batch."""
    shares = _shares(kind, batch, inputs, hidden, layers, directions, dtype, train)
    item = getattr(torch, dtype).itemsize
    widths = [inputs, *[directions * hidden] * (layers - 1)]
    weights = sum(directions * GATES[kind] * hidden * (width + hidden) for width in widths) * item
    states = (shares.states * layers * batch + shares.hidden * rows) * hidden * item
    given = shares.inputs * _aligned(rows * inputs * item)
    return (
        CONSTANT * layers * directions
        + _aligned(weights)
        + given
        + states
        + _aligned(8 * batch)
        + 256
    )


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
    def forward(
        ctx: Any, setup: Setup, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> Any:
        gpu = x._gpu  # type: ignore[attr-defined]
        gpu.machine.require_alive()
        gpu.machine.selected.gpu = gpu
        needs = any(ctx.needs_input_grad)
        if setup.dropout > 0 and setup.train:
            _dropout_state(gpu)
        turned = _turned(gpu, x, setup)
        hidden, item = hx.shape[2] if cx is None else cx.shape[2], x.itemsize
        directions = 2 if setup.bidirectional else 1
        shape = (*x.shape[:-1], hx.shape[2] * directions)
        out = _time_first(gpu, shape, x.dtype, setup)
        states = [
            empty(gpu, y.shape, _strides(y.shape), x.dtype) for y in (hx, cx) if y is not None
        ]
        buffer = None
        if not one_chunk(weights):
            warn_as_cpp(_SCATTERED)
            buffer = scratch_tensor(gpu, sum(w.numel() * w.itemsize for w in weights))
        training = (str(x.dtype)[6:], setup.train)
        rows = x.numel() // x.shape[-1]
        space = workspace(
            setup.kind,
            rows,
            _batch(x, setup),
            x.shape[-1],
            hidden,
            setup.layers,
            directions,
            *training,
        )
        if setup.dropout > 0 and setup.train and setup.kind == "lstm":
            space += (setup.layers - 1) * directions * rows * hidden * item
        kept = _with_workspace(gpu, space, reserve(setup, rows, hidden, item) if setup.train else 0)
        del turned
        inner = _compute(gpu, setup, (x, hx, cx, *weights), (out, *states), needs and setup.train)
        moved, total = (
            sum(map(bytes_of, (x, out, *weights))),
            sum(w.numel() for w in weights if w.dim() > 1),
        )
        format = product_format(x.dtype, gpu, "rnn")
        work = Work(
            moved,
            2 * rows * total,
            format,
            out.numel() * GATES[setup.kind],
            cudnn=1,
            launches=LAUNCHES_OF_A_CALL + LAUNCHES_OF_A_LAYER * _layers(setup),
        )
        on_chip = _on_chip(setup.kind, hidden, training[0])
        seconds = STEP_SECONDS[x.itemsize == 2]
        _launch(gpu, work, setup.kind, _steps(setup, x), on_chip, seconds, LAUNCHES_OF_A_STEP)
        if needs:
            if kept is not None:
                kept.inner = inner  # type: ignore[method-assign]  # so that it goes when the graph lets go of the reserve space
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
        zeros = [
            scratch_tensor(gpu, y.numel() * y.itemsize)
            for g, y in zip(grads, models, strict=True)
            if g is None
        ]
        dx = _time_first(gpu, x.shape, x.dtype, setup)
        turned = [_turned(gpu, y, setup) for y in (x, grads[0]) if y is not None]
        turned += [
            scratch_tensor(gpu, bytes_of(g))
            for g in grads[1:]
            if g is not None and not g.is_contiguous()
        ]
        states = [empty(gpu, y.shape, _strides(y.shape), y.dtype) for y in models[1:]]
        play(gpu, (space, -space))
        turned.clear()
        turned.append(_turned(gpu, x, setup))
        total = sum(w.numel() for w in weights)
        flat = empty(gpu, (total,), (1,), weights[0].dtype)
        scratch = scratch_tensor(gpu, space)
        dws = _parts(flat, weights)
        if not setup.has_biases:
            dws = [dw.clone() for dw in dws]
        del scratch, turned, flat
        _inner_gradients(kept.inner, grads, (dx, *states, *dws))
        zeros.clear()
        flops = 4 * (x.numel() // x.shape[-1]) * total  # of the inputs and of the weights
        moved, outputs = (
            2 * sum(map(bytes_of, (x, out, *weights))),
            2 * out.numel() * GATES[setup.kind],
        )
        launches = LAUNCHES_BACK_OF_A_LAYER * _layers(setup)
        format = product_format(x.dtype, gpu, "rnn")
        work = Work(moved, flops, format, outputs, cudnn=2, launches=launches)
        on_chip = _on_chip(setup.kind, models[-1].shape[2], str(x.dtype)[6:])
        seconds = STEP_BACK_SECONDS[x.itemsize == 2]
        name, steps = f"{setup.kind}_backward", _steps(setup, x)
        _launch(gpu, work, name, steps, on_chip, seconds, LAUNCHES_BACK_OF_A_STEP)
        return (
            None,
            *(
                y if needed else None
                for y, needed in zip((dx, *states, None), ctx.needs_input_grad[1:4], strict=False)
            ),
            *dws,
        )


Recurrent._backward_cls.__name__ = "CudnnRnnBackward0"  # as autograd calls cuDNN's operator


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


def _layers(setup: Setup) -> int:
    """Layers, each direction counted."""
    return setup.layers * (2 if setup.bidirectional else 1)


def _steps(setup: Setup, x: Tensor) -> int:
    """Steps of all layers and directions."""
    steps = (
        x.shape[1 if setup.batch_first else 0]
        if setup.batch_sizes is None
        else len(setup.batch_sizes)
    )
    return steps * _layers(setup)


def _launch(
    gpu: Gpu, work: Work, name: str, steps: int, on_chip: bool, seconds: float, launches: float
) -> None:
    """Launch the kernels of all steps, which take so many `seconds` each.

    If the weights stay on the chip, launch one kernel.
    """
    if on_chip or steps < 2:
        gpu.launch(*_for_at_least(steps * STEP_ON_CHIP_SECONDS, work, gpu.profile), name=name)
        return
    bytes, flops, outputs = work.bytes / steps, work.flops / steps, max(1, work.outputs // steps)
    first = work._replace(bytes=bytes, flops=flops, outputs=outputs)
    seconds = max(seconds, _product_seconds(first, gpu.profile))
    gpu.launch(*_for_at_least(seconds, first, gpu.profile), name=name)
    further = _for_at_least(seconds, Work(0, launches=launches - 1), gpu.profile)
    for _ in range(steps - 1):
        gpu.launch(*further, name=name)


def _product_seconds(work: Work, profile: Profile) -> float:
    return costs.kernel_seconds(
        profile,
        bytes_moved=work.bytes,
        flops=work.flops,
        format=work.format,
        matmul=True,
        outputs=work.outputs,
    )


def _for_at_least(seconds: float, work: Work, profile: Profile) -> Work:
    """The work, which takes so long or longer."""
    missing = max(0.0, seconds - _product_seconds(work, profile))
    return work._replace(serial=missing * 1e3 * profile.sm_clock_khz)


def _with_workspace(gpu: Gpu, space: int, kept: int) -> Tensor | None:
    work = scratch_tensor(gpu, space)
    result = scratch_tensor(gpu, kept) if kept else None
    del work
    return result


_SCATTERED = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at every call, "
    "possibly greatly increasing memory usage. To compact weights again call flatten_parameters(). "
    "(Triggered internally at /pytorch/aten/src/ATen/native/cudnn/RNN.cpp.)"
)


def one_chunk(weights: Any) -> bool:
    """Do all weights lie in one storage, as `flatten_parameters` leaves them?"""
    return len({w.untyped_storage().data_ptr() for w in weights}) == 1 and len(weights) > 1


def _strides(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _batch(x: Tensor, setup: Setup) -> int:
    """Sequences, in the first step of packed ones."""
    if setup.batch_sizes is not None:
        return int(setup.batch_sizes[0])
    return x.shape[0] if setup.batch_first else x.shape[1]


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
    gpu = flat._gpu  # type: ignore[attr-defined]
    with (
        _DisableTorchDispatch()
    ):  # one by one, as operators, they take half of a small layer's time
        for i, part in zip(order, flat.split([weights[i].numel() for i in order]), strict=True):
            views[i] = wrap(part.view(weights[i].shape), gpu)
    gpu.machine.clock.advance_host(2 * len(weights) * gpu.profile.view_seconds)
    return views


def _dropout_state(gpu: Gpu) -> None:
    """The state of cuDNN's dropout stays for good: made at its first use on a GPU, from a seed."""
    if "cudnn dropout" not in gpu.libraries:
        play(gpu, (8, -8))
        gpu.libraries["cudnn dropout"] = gpu.allocate(DROPOUT_STATE * gpu.profile.multiprocessors)


def has_dropout_state(gpu: Gpu) -> bool:
    """Return whether cuDNN has made the state of its dropout on this GPU."""
    return "cudnn dropout" in gpu.libraries


def free_dropout_state(gpu: Gpu) -> None:
    """Free the state of cuDNN's dropout, if there is one. The next dropout makes it again."""
    block = gpu.libraries.pop("cudnn dropout", None)
    if block is not None:
        gpu.allocator.free(block)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's LSTM, which PyTorch takes on some processors, gives states of another shape than the caller's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _rounded_factors(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Round the input and the weights' matrices to TF32.

    The hidden states, which cuDNN rounds at each step, are not rounded.
    """
    rounded = list(tensors)
    for index, x in enumerate(tensors):
        is_state = index in (1, 2)
        if x is not None and x.dim() > 1 and not is_state:
            rounded[index] = round_to_tf32(x)
    return rounded


def _compute(gpu: Gpu, setup: Setup, inputs: tuple, outputs: tuple, needs: bool) -> Any:
    """The values by the CPU's kernels, with a graph of their own for the gradients. None if values were not kept."""
    if not all_known(inputs, outputs):
        return None
    with _DisableTorchDispatch(), torch.set_grad_enabled(needs):
        plain = [None if x is None else plain_values(x).detach() for x in inputs]  # type: ignore[union-attr]
        if product_format(inputs[0].dtype, gpu, "rnn") == "tf32":
            plain = _rounded_factors(plain)
        plain = [None if x is None else x.requires_grad_(needs) for x in plain]
        plain[1:3] = [
            None if y is None else y.detach().clone().requires_grad_(needs) for y in plain[1:3]
        ]  # may be freed before the rest
        x, hx, cx, *weights = plain
        state = (hx, cx) if setup.kind == "lstm" else hx
        rest = (
            weights,
            setup.has_biases,
            setup.layers,
            setup.dropout,
            setup.train,
            setup.bidirectional,
        )
        packet = getattr(aten, setup.kind)
        with gpu.generator.as_default(inputs[0].numel()), _without_onednn():
            if setup.batch_sizes is None:
                results = made_of(packet.input, x, state, *rest, setup.batch_first)
            else:
                results = made_of(packet.data, x, setup.batch_sizes, state, *rest)
        for target, value in zip(outputs, results, strict=True):
            aten.copy_.default(target, value.detach())
    return ([y for y in plain if y is not None], results) if needs else None


def _inner_gradients(inner: Any, grads: tuple, targets: tuple) -> None:
    if inner is None:
        return
    with _DisableTorchDispatch():
        inputs, results = inner
        pairs = [(y, plain_values(g)) for y, g in zip(results, grads, strict=True) if g is not None]
        values = torch.autograd.grad(
            [y for y, _ in pairs],
            inputs,
            [g for _, g in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for target, value in zip(targets, values, strict=True):
            aten.zero_.default(target) if value is None else aten.copy_.default(target, value)


def _run(
    kind: str, x: Tensor, state: Any, params: Any, *settings: Any, batch_sizes: Tensor | None = None
) -> Any:
    biases, layers, dropout, train, bidirectional, *first = settings
    setup = Setup(
        kind, biases, layers, dropout, train, bidirectional, bool(first and first[0]), batch_sizes
    )
    common_gpu(x, state, params)
    hx, cx = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda") and x.dtype in (torch.float32, *HALF):
        dtype = torch.get_autocast_dtype("cuda")
        params = CastWeights.apply(dtype, *params)
        hx, cx, x = hx.to(dtype), None if cx is None else cx.to(dtype), x.to(dtype)
    return Recurrent.apply(setup, x, hx, cx, *params)


def _require_beside_input(x: Tensor, hidden: Any, weights: Any) -> None:
    """Raises RuntimeError, as PyTorch does, for a state or a weight that is not where the input is."""
    named = [("hidden", y) for y in (hidden if isinstance(hidden, (list, tuple)) else (hidden,))]
    named += [("parameter", y) for y in weights]
    for name, y in named:
        if y.device != x.device:
            raise RuntimeError(
                f"Input and {name} tensors are not at the same device, found input tensor at {x.device} and {name} tensor at {y.device}"
            )


@checks(*(f"{kind}.input" for kind in GATES))
def check_devices(args: tuple, kwargs: dict) -> None:
    _require_beside_input(*args[:3])


@checks(*(f"{kind}.data" for kind in GATES))
def check_devices_of_packed(args: tuple, kwargs: dict) -> None:
    data, _, hidden, weights = args[:4]
    _require_beside_input(data, hidden, weights)


for _kind in GATES:

    def _of_input(x: Tensor, state: Any, params: Any, *settings: Any, kind: str = _kind) -> Any:
        return _run(kind, x, state, params, *settings)

    def _of_packed(
        data: Tensor,
        batch_sizes: Tensor,
        state: Any,
        params: Any,
        *settings: Any,
        kind: str = _kind,
    ) -> Any:
        return _run(kind, data, state, params, *settings, batch_sizes=batch_sizes)

    composes(f"{_kind}.input")(_of_input)
    composes(f"{_kind}.data")(_of_packed)


@handles("_cudnn_rnn_flatten_weight")
def flatten_weight(call: Call) -> Tensor:
    """Move all weights of a module into one buffer, of which they become views."""
    weights = call.args[0]
    gpu = call.common_gpu()
    flat = empty(gpu, (sum(w.numel() for w in weights),), (1,), weights[0].dtype)
    with torch.no_grad():
        for view, weight in zip(_parts(flat, weights), weights, strict=True):
            view.copy_(weight)
            weight.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    return flat


# Packed sequences: the sizes of the batches stay on the host


@handles("_pack_padded_sequence")
def pack_padded_sequence(call: Call) -> Any:
    """Raises RuntimeError, as PyTorch does, for lengths on a GPU."""
    lengths = call.args[1]
    if type(lengths) is VirtualTensor:
        kind = f"{lengths.dim()}D {lengths.device} {scalar_name(lengths.dtype)}"
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {kind} tensor"
        )
    gpu = call.common_gpu(host=True)
    data, sizes = call.on_cpu()
    gpu.launch(2 * call.moved, name="_pack_padded_sequence")
    return wrap(data, gpu), sizes


handles("_pack_padded_sequence_backward")(operators.mixed)
