"""LSTM, GRU and RNN as cuDNN runs them, with one operator for all layers, directions and steps.

The operator has a buffer for the weights, a workspace, and a reserve space for the backward pass.
The order of the allocations and the results of the backward pass are those of PyTorch's
native/cudnn/RNN.cpp.

The reserve space was found by measurement and is exact for all shapes that were tried. For each
layer and direction it has steps x batch x hidden numbers per gate, and for an LSTM also for the
cell. Added to this are the hidden states between layers, a bit per element of dropout between them,
and 256 bytes.

The workspace has the weights, 8 MiB per layer and direction, and numbers for each step, sequence,
input and hidden unit, which depend on the algorithm that cuDNN chooses. The rule was derived from
59,000 layers on an H200 (benchmarks/fidelity/cudnn.py). It is within 512 bytes for 96% of them. If
several wide layers train in one direction, it is up to 10% too large.
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
from virtualgpu.ops.passes import compared
from virtualgpu.ops.sequence import play
from virtualgpu.ops.tf32 import round_to_tf32
from virtualgpu.ops.without_values import all_known
from virtualgpu.profiles import Profile
from virtualgpu.source_lines import warn_as_cpp
from virtualgpu.tensor import VirtualTensor, empty, wrap

aten = torch.ops.aten
Tensor = torch.Tensor
MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # cuDNN's numbers of the kinds
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
WORKSPACE_PER_LAYER = 8 << 20  # bytes per layer and direction
# The most hidden units for which cuDNN keeps the weights on the chip.
NARROW = {"lstm": 128, "gru": 128, "rnn_tanh": 256, "rnn_relu": 256}
DROPOUT_STATE = 49152  # bytes per multiprocessor
# The least seconds of the kernels of a step of a layer, by whether its numbers have two bytes.
# These are small kernels that wait for each other, and the backward pass has more of them. If the
# weights stay on the chip, one kernel computes all steps. Measured by
# benchmarks/timing/small_kernels.py on an H200. Other GPUs are assumed to be alike.
STEP_SECONDS = {True: 5e-6, False: 6.5e-6}
STEP_BACK_SECONDS = {True: 6.5e-6, False: 13e-6}
STEP_ON_CHIP_SECONDS = 3e-6
# Host time, in launches, of the kernels of a step of a layer, if the host is the limit. From both
# LSTMs of benchmarks/timing/kernels.json, with 256 steps on an H200.
LAUNCHES_OF_A_STEP, LAUNCHES_BACK_OF_A_STEP = 2.37, 3.64
# Host time in launches, because cuDNN launches many kernels. Measured by
# benchmarks/timing/host_functions.py on an H200: "lstm", "gru" and "two layers of gru", less
# memory, module, nodes and leaves.
LAUNCHES_OF_A_CALL, LAUNCHES_OF_A_LAYER, LAUNCHES_BACK_OF_A_LAYER = 7, 6, 50


class Setup(NamedTuple):
    """The arguments of a call that are not tensors. `batch_sizes` are of a packed sequence."""

    kind: str
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    batch_sizes: Tensor | None


class Shares(NamedTuple):
    """The numbers in a workspace, besides the weights.

    states: numbers per sequence and hidden unit of each layer
    inputs: numbers per step, sequence and input
    hidden: numbers per step, sequence and hidden unit
    """

    states: int
    inputs: int
    hidden: int


_NOTHING = Shares(0, 0, 0)
# By kind ("rnn" for both activations) and whether the weights stay on the chip: the shares in one
# direction and in both, in evaluation.
SHARES = {
    ("lstm", True): (Shares(8, 1, 21), Shares(18, 1, 30)),
    ("lstm", False): (Shares(10, 1, 5), Shares(24, 1, 14)),
    ("gru", True): (Shares(4, 1, 16), Shares(10, 1, 24)),
    ("gru", False): (Shares(5, 1, 4), Shares(14, 1, 12)),
    ("rnn", True): (Shares(4, 1, 6), Shares(10, 1, 12)),
    ("rnn", False): (Shares(3, 1, 2), Shares(10, 1, 8)),
}
# The same in training.
TRAINING = SHARES | {
    ("gru", True): (Shares(6, 2, 18), Shares(14, 2, 24)),
    ("gru", False): (Shares(5, 2, 4), Shares(14, 1, 12)),
    ("rnn", True): (Shares(6, 2, 13), Shares(14, 2, 19)),
    ("rnn", False): (Shares(5, 2, 4), Shares(14, 2, 10)),
}
# What several layers add in training, per direction, and only with both directions.
BETWEEN = {("gru", True): Shares(0, 0, 1), ("rnn", True): Shares(0, 0, 1)}
BETWEEN_BOTH = {("gru", False): Shares(0, 1, 0), ("rnn", False): Shares(0, 0, 2)}


def _on_chip(kind: str, hidden: int, dtype: str) -> bool:
    """Return whether cuDNN keeps the weights of a layer on the chip during all steps.

    `kind` is a key of `NARROW`, `hidden` the number of hidden units, and `dtype` a name.
    """
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
    """Return the numbers that make up the workspace of these layers, besides the weights.

    `kind`, `dtype` and the sizes are those of `workspace`.
    """
    on_chip = _on_chip(kind, hidden, dtype)
    kind = kind.partition("_")[0]
    if kind != "gru" and layers == directions == 1 and dtype in ("float16", "bfloat16"):
        on_chip |= batch % 8 == inputs % 8 == hidden % 64 == 0  # sizes that tensor cores take
    key = kind, on_chip
    if not train:
        return SHARES[key][directions - 1]
    shares = TRAINING[key][directions - 1]
    if key == ("lstm", False) and directions == 1 and inputs >= hidden:
        shares = shares._replace(states=shares.states + 1)
    if layers == 1:
        return shares
    more = BETWEEN.get(key, _NOTHING)
    both = _NOTHING
    if directions == 2:
        both = BETWEEN_BOTH.get(key, _NOTHING)
    return Shares(*(a + directions * b + c for a, b, c in zip(shares, more, both, strict=True)))


def _aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 32."""
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
    """Return the bytes of cuDNN's workspace for recurrent layers.

    `kind` is a key of `GATES`, `rows` is steps x batch, and `dtype` is a name such as "float32".
    `inputs` and `hidden` are the sizes of a layer.
    """
    shares = _shares(kind, batch, inputs, hidden, layers, directions, dtype, train)
    item = getattr(torch, dtype).itemsize
    widths = [inputs, *[directions * hidden] * (layers - 1)]
    weights = sum(directions * GATES[kind] * hidden * (width + hidden) for width in widths) * item
    states = (shares.states * layers * batch + shares.hidden * rows) * hidden * item
    of_inputs = shares.inputs * _aligned(rows * inputs * item)
    constant = WORKSPACE_PER_LAYER * layers * directions
    return constant + _aligned(weights) + of_inputs + states + _aligned(8 * batch) + 256


def reserve(setup: Setup, rows: int, hidden: int, item: int) -> int:
    """Return the bytes that cuDNN reserves for the backward pass of recurrent layers.

    `rows` is steps x batch, `hidden` the number of hidden units, and `item` the bytes of an
    element.
    """
    size = rows * hidden * item
    between = (setup.layers - 1) * _directions(setup)
    numbers = {"lstm": (4, 1), "gru": (6,), "rnn_tanh": (1,), "rnn_relu": (1,)}[setup.kind]
    parts = [*(n * _units(setup) * size for n in numbers), between * size]
    dropout_bytes = 0
    if setup.dropout > 0:
        dropout_bytes = between * rows * hidden // 8
    return sum(map(_aligned, parts)) + dropout_bytes + 256


class Recurrent(torch.autograd.Function):
    """Autograd function that runs all layers, directions and steps in one operator."""

    @staticmethod
    @compared
    def forward(
        ctx: Any, setup: Setup, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> Any:
        """Return the output and the last states.

        `x` has the shape (steps, batch, inputs), or (batch, steps, inputs) with `batch_first`.
        `hx` and `cx` have the shape (layers * directions, batch, hidden). `cx` is None except
        for an LSTM.
        """
        gpu = x._gpu  # type: ignore[attr-defined]
        gpu.machine.require_alive()
        gpu.machine.selected.gpu = gpu
        needs_gradient = any(ctx.needs_input_grad)
        drops = setup.dropout > 0 and setup.train
        if drops:
            _dropout_state(gpu)
        time_first_copy = _time_first_copy(gpu, x, setup)
        hidden, item = hx.shape[2] if cx is None else cx.shape[2], x.itemsize
        directions = _directions(setup)
        out = _empty_sequences(gpu, (*x.shape[:-1], hx.shape[2] * directions), x.dtype, setup)
        states = [
            empty(gpu, y.shape, _strides(y.shape), x.dtype) for y in (hx, cx) if y is not None
        ]
        buffer = None
        if not one_chunk(weights):
            warn_as_cpp(_SCATTERED)
            buffer = scratch_tensor(gpu, sum(w.numel() * w.itemsize for w in weights))
        dtype = _dtype_name(x)
        rows = x.numel() // x.shape[-1]
        space = workspace(
            setup.kind, rows, _batch(x, setup), x.shape[-1], hidden, setup.layers, directions,
            dtype, setup.train,
        )  # fmt: skip
        if drops and setup.kind == "lstm":
            space += (setup.layers - 1) * directions * rows * hidden * item
        reserved = 0
        if setup.train:
            reserved = reserve(setup, rows, hidden, item)
        kept = _with_workspace(gpu, space, reserved)
        del time_first_copy
        keeps_graph = needs_gradient and setup.train
        inner = _compute(gpu, setup, (x, hx, cx, *weights), (out, *states), keeps_graph)
        matrices = sum(w.numel() for w in weights if w.dim() > 1)
        work = Work(
            sum(map(bytes_of, (x, out, *weights))),
            2 * rows * matrices,
            product_format(x.dtype, gpu, "rnn"),
            out.numel() * GATES[setup.kind],
            cudnn=1,
            launches=LAUNCHES_OF_A_CALL + LAUNCHES_OF_A_LAYER * _units(setup),
        )
        on_chip = _on_chip(setup.kind, hidden, dtype)
        seconds = STEP_SECONDS[x.itemsize == 2]
        _launch(gpu, work, setup.kind, _steps(setup, x), on_chip, seconds, LAUNCHES_OF_A_STEP)
        if needs_gradient:
            if kept is not None:
                # The inner graph is freed when autograd's graph drops the reserve space.
                kept.inner = inner  # type: ignore[method-assign]
            ctx.save_for_backward(x, hx, cx, buffer, out, kept, *weights)
            ctx.setup, ctx.space = setup, space
            ctx.set_materialize_grads(False)
        return (out, *states)

    @staticmethod
    @once_differentiable
    @compared
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the input, of the states and of the weights.

        Raises cuDNN's RuntimeError outside training mode.
        """
        setup, space = ctx.setup, ctx.space
        if not setup.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        x, hx, cx, _, out, kept, *weights = ctx.saved_tensors
        gpu = x._gpu
        gpu.machine.selected.gpu = gpu
        models = [y for y in (out, hx, cx) if y is not None]
        zeros = []
        for grad, model in zip(grads, models, strict=True):
            if grad is None:
                zeros.append(scratch_tensor(gpu, model.numel() * model.itemsize))
        dx = _empty_sequences(gpu, x.shape, x.dtype, setup)
        copies = [_time_first_copy(gpu, y, setup) for y in (x, grads[0]) if y is not None]
        for grad in grads[1:]:
            if grad is not None and not grad.is_contiguous():
                copies.append(scratch_tensor(gpu, bytes_of(grad)))
        states = [empty(gpu, y.shape, _strides(y.shape), y.dtype) for y in models[1:]]
        play(gpu, (space, -space))
        copies.clear()
        copies.append(_time_first_copy(gpu, x, setup))
        total = sum(w.numel() for w in weights)
        flat = empty(gpu, (total,), (1,), weights[0].dtype)
        scratch = scratch_tensor(gpu, space)
        weight_grads = _parts(flat, weights)
        if not setup.has_biases:
            weight_grads = [weight_grad.clone() for weight_grad in weight_grads]
        del scratch, copies, flat
        _write_gradients(kept.inner, grads, (dx, *states, *weight_grads))
        zeros.clear()
        work = Work(
            2 * sum(map(bytes_of, (x, out, *weights))),
            4 * (x.numel() // x.shape[-1]) * total,  # gradients of the inputs and of the weights
            product_format(x.dtype, gpu, "rnn"),
            2 * out.numel() * GATES[setup.kind],
            cudnn=2,
            launches=LAUNCHES_BACK_OF_A_LAYER * _units(setup),
        )
        on_chip = _on_chip(setup.kind, models[-1].shape[2], _dtype_name(x))
        seconds = STEP_BACK_SECONDS[x.itemsize == 2]
        name, steps = f"{setup.kind}_backward", _steps(setup, x)
        _launch(gpu, work, name, steps, on_chip, seconds, LAUNCHES_BACK_OF_A_STEP)
        inputs = zip((dx, *states, None), ctx.needs_input_grad[1:4], strict=False)
        return None, *(y if needed else None for y, needed in inputs), *weight_grads


Recurrent._backward_cls.__name__ = "CudnnRnnBackward0"  # autograd's name for cuDNN's operator


class CastWeights(torch.autograd.Function):
    """Copy of the weights in another dtype, in one new buffer, for autocast.

    It is PyTorch's `_cudnn_rnn_cast_reflatten`.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Any:
        """Return copies of the weights in this dtype, which are views of one new buffer."""
        ctx.dtypes = [w.dtype for w in weights]
        gpu = weights[0]._gpu  # type: ignore[attr-defined]
        flat = empty(gpu, (sum(w.numel() for w in weights),), (1,), dtype)
        views = _parts(flat, weights)
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the weights in the weights' own dtypes."""
        pairs = list(zip(grads, ctx.dtypes, strict=True))
        cast = [grad.to(dtype) for grad, dtype in reversed(pairs)]
        return None, *reversed(cast)


def _directions(setup: Setup) -> int:
    if setup.bidirectional:
        return 2
    return 1


def _units(setup: Setup) -> int:
    """Return the number of layers of a recurrent network, each direction counted separately."""
    return setup.layers * _directions(setup)


def _dtype_name(x: Tensor) -> str:
    """Return the name of the tensor's dtype, such as "float32"."""
    return str(x.dtype).removeprefix("torch.")


def _steps(setup: Setup, x: Tensor) -> int:
    """Return the number of steps of all layers and directions for the input `x`."""
    if setup.batch_sizes is not None:
        return len(setup.batch_sizes) * _units(setup)
    return x.shape[1 if setup.batch_first else 0] * _units(setup)


def _launch(
    gpu: Gpu, work: Work, name: str, steps: int, on_chip: bool, seconds: float, launches: float
) -> None:
    """Launch the kernels of `steps` steps of a recurrent network, named `name`.

    `work` is the work of all steps. Each step takes at least `seconds` on the GPU, and the host's
    time of `launches` launches. With `on_chip`, the weights stay on the chip and one kernel
    computes all steps.
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
    """Return the seconds that a matrix product with this work takes on a GPU model."""
    return costs.kernel_seconds(
        profile,
        bytes_moved=work.bytes,
        flops=work.flops,
        format=work.format,
        matmul=True,
        outputs=work.outputs,
    )


def _for_at_least(seconds: float, work: Work, profile: Profile) -> Work:
    """Return `work`, extended so that a kernel with it takes at least this many seconds."""
    missing = max(0.0, seconds - _product_seconds(work, profile))
    return work._replace(serial=missing * 1e3 * profile.sm_clock_khz)


def _with_workspace(gpu: Gpu, space: int, reserved: int) -> Tensor | None:
    """Allocate a workspace of `space` bytes and a reserve space, then free the workspace.

    Returns the reserve space, which has `reserved` bytes, or None for 0 bytes.
    """
    work = scratch_tensor(gpu, space)
    result = None
    if reserved:
        result = scratch_tensor(gpu, reserved)
    del work
    return result


_SCATTERED = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to "
    "be compacted at every call, possibly greatly increasing memory usage. To compact weights "
    "again call flatten_parameters(). "
    "(Triggered internally at /pytorch/aten/src/ATen/native/cudnn/RNN.cpp.)"
)


def one_chunk(weights: Any) -> bool:
    """Return whether all weights are views of one storage, as `flatten_parameters` makes them."""
    return len({w.untyped_storage().data_ptr() for w in weights}) == 1 and len(weights) > 1


def _strides(shape: Any) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _batch(x: Tensor, setup: Setup) -> int:
    """Return the number of sequences in the input `x`.

    A packed sequence has as many as its first step.
    """
    if setup.batch_sizes is not None:
        return int(setup.batch_sizes[0])
    if setup.batch_first:
        return x.shape[0]
    return x.shape[1]


def _time_first_copy(gpu: Gpu, x: Tensor, setup: Setup) -> Tensor | None:
    """Return memory for a copy of the input `x` whose steps follow one another.

    Returns None if `x` has this order already. cuDNN reads sequences step by step.
    """
    ordered = x
    if setup.batch_first:
        ordered = x.transpose(0, 1)
    if ordered.is_contiguous():
        return None
    return scratch_tensor(gpu, x.numel() * x.itemsize)


def _empty_sequences(gpu: Gpu, shape: Any, dtype: torch.dtype, setup: Setup) -> VirtualTensor:
    """Return an empty tensor for sequences of this shape.

    In memory, the steps follow one another.
    """
    if not setup.batch_first:
        return empty(gpu, shape, _strides(shape), dtype)
    batch, _, width = shape
    return empty(gpu, shape, (width, batch * width, 1), dtype)


def _parts(flat: Tensor, weights: Any) -> list[Tensor]:
    """Return views of the buffer `flat` with the shapes of the weights, in the weights' order.

    In the buffer, all matrices come first and then all biases, as in cuDNN.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i].dim() < 2, i))
    views: list[Any] = [None] * len(weights)
    gpu = flat._gpu  # type: ignore[attr-defined]
    # Separate operators on the GPU would take half of a small layer's time.
    with _DisableTorchDispatch():
        for i, part in zip(order, flat.split([weights[i].numel() for i in order]), strict=True):
            views[i] = wrap(part.view(weights[i].shape), gpu)
    gpu.machine.clock.advance_host(2 * len(weights) * gpu.profile.view_seconds)
    return views


def _dropout_state(gpu: Gpu) -> None:
    """Allocate the state of cuDNN's dropout on a GPU, at its first use there."""
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
    """Switch oneDNN off in the block.

    On some processors PyTorch uses oneDNN's LSTM, which returns states of another shape than it
    was given.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _rounded_factors(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors with the input and the weights' matrices rounded to TF32.

    The tensors are the input, the states and the weights. cuDNN rounds the hidden states at each
    step, so they are not rounded here.
    """
    rounded = list(tensors)
    for index, x in enumerate(tensors):
        is_state = index in (1, 2)
        if x is not None and x.dim() > 1 and not is_state:
            rounded[index] = round_to_tf32(x)
    return rounded


def _compute(gpu: Gpu, setup: Setup, inputs: tuple, outputs: tuple, keeps_graph: bool) -> Any:
    """Compute a recurrent network with the CPU's kernels and write the values to `outputs`.

    `inputs` are the input, the states and the weights. With `keeps_graph`, return the plain inputs
    and results, which have an autograd graph of their own. Otherwise, or if values are not kept,
    return None.
    """
    if not all_known(inputs, outputs):
        return None
    with _DisableTorchDispatch(), torch.set_grad_enabled(keeps_graph):
        plain: list[Any] = [plain_values(x) for x in inputs]
        plain = [None if x is None else x.detach() for x in plain]
        if product_format(inputs[0].dtype, gpu, "rnn") == "tf32":
            plain = _rounded_factors(plain)
        plain = [None if x is None else x.requires_grad_(keeps_graph) for x in plain]
        for index in (1, 2):  # the program may free the states before the other inputs
            state = plain[index]
            if state is not None:
                plain[index] = state.detach().clone().requires_grad_(keeps_graph)
        x, hx, cx, *weights = plain
        hidden = hx
        if setup.kind == "lstm":
            hidden = (hx, cx)
        settings = (
            setup.has_biases,
            setup.layers,
            setup.dropout,
            setup.train,
            setup.bidirectional,
        )
        packet = getattr(aten, setup.kind)
        with gpu.generator.as_default(inputs[0].numel()), _without_onednn():
            if setup.batch_sizes is None:
                results = made_of(packet.input, x, hidden, weights, *settings, setup.batch_first)
            else:
                results = made_of(packet.data, x, setup.batch_sizes, hidden, weights, *settings)
        for target, value in zip(outputs, results, strict=True):
            aten.copy_.default(target, value.detach())
    if not keeps_graph:
        return None
    return [y for y in plain if y is not None], results


def _write_gradients(inner: Any, grads: tuple, targets: tuple) -> None:
    """Compute the gradients of a recurrent network's inputs, and write them to `targets`.

    `inner` is what `_compute` has returned, and `grads` are the gradients of the results.
    """
    if inner is None:
        return
    with _DisableTorchDispatch():
        inputs, results = inner
        given = []
        for result, grad in zip(results, grads, strict=True):
            if grad is not None:
                given.append((result, plain_values(grad)))
        values = torch.autograd.grad(
            [result for result, _ in given],
            inputs,
            [grad for _, grad in given],
            retain_graph=True,
            allow_unused=True,
        )
        for target, value in zip(targets, values, strict=True):
            if value is None:
                aten.zero_.default(target)
            else:
                aten.copy_.default(target, value)


def _run(
    kind: str, x: Tensor, state: Any, params: Any, *settings: Any, batch_sizes: Tensor | None = None
) -> Any:
    """Run recurrent layers of this kind, and return the output and the last states.

    The arguments after `kind` are those of PyTorch's operator, such as `aten::lstm.input`.
    """
    biases, layers, dropout, train, bidirectional, *first = settings
    batch_first = bool(first and first[0])
    setup = Setup(kind, biases, layers, dropout, train, bidirectional, batch_first, batch_sizes)
    common_gpu(x, state, params)
    hx, cx = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda") and x.dtype in (torch.float32, *HALF):
        dtype = torch.get_autocast_dtype("cuda")
        params = CastWeights.apply(dtype, *params)
        hx = hx.to(dtype)
        if cx is not None:
            cx = cx.to(dtype)
        x = x.to(dtype)
    _require_dtype_of_input(x, (hx, cx), params)
    return Recurrent.apply(setup, x, hx, cx, *params)


def _require_dtype_of_input(x: Tensor, hidden: tuple[Tensor | None, ...], weights: Any) -> None:
    """Raise cuDNN's RuntimeError for a state or a weight of another dtype than the input.

    Source: `check_attributes`, which aten/src/ATen/native/cudnn/RNN.cpp calls.
    """
    named = [("hidden", y) for y in hidden] + [("parameter", y) for y in weights]
    for name, y in named:
        if y is not None and y.dtype is not x.dtype:
            raise RuntimeError(
                f"Input and {name} tensors are not the same dtype, found input tensor with "
                f"{scalar_name(x.dtype)} and {name} tensor with {scalar_name(y.dtype)}"
            )


def _require_beside_input(x: Tensor, hidden: Any, weights: Any) -> None:
    """Raise PyTorch's RuntimeError for a state or a weight that is not on the input's device."""
    states = hidden if isinstance(hidden, (list, tuple)) else (hidden,)
    named = [("hidden", y) for y in states] + [("parameter", y) for y in weights]
    for name, y in named:
        if y.device != x.device:
            raise RuntimeError(
                f"Input and {name} tensors are not at the same device, found input tensor at "
                f"{x.device} and {name} tensor at {y.device}"
            )


@checks(*(f"{kind}.input" for kind in GATES))
def check_devices(args: tuple, kwargs: dict) -> None:
    """Check the devices of an operator for recurrent layers with padded sequences.

    Raises RuntimeError if a state or a weight is not on the input's device.
    """
    _require_beside_input(*args[:3])


@checks(*(f"{kind}.data" for kind in GATES))
def check_devices_of_packed(args: tuple, kwargs: dict) -> None:
    """Check the devices of an operator for recurrent layers with packed sequences.

    Raises RuntimeError if a state or a weight is not on the input's device.
    """
    data, _, hidden, weights = args[:4]
    _require_beside_input(data, hidden, weights)


for _kind in GATES:

    def _of_input(x: Tensor, state: Any, params: Any, *settings: Any, kind: str = _kind) -> Any:
        """Run recurrent layers of this kind on padded sequences.

        Returns the output and the last states. The arguments are those of PyTorch's operator.
        """
        return _run(kind, x, state, params, *settings)

    def _of_packed(
        data: Tensor,
        batch_sizes: Tensor,
        state: Any,
        params: Any,
        *settings: Any,
        kind: str = _kind,
    ) -> Any:
        """Run recurrent layers of this kind on packed sequences.

        Returns the output and the last states. The arguments are those of PyTorch's operator.
        """
        return _run(kind, data, state, params, *settings, batch_sizes=batch_sizes)

    composes(f"{_kind}.input")(_of_input)
    composes(f"{_kind}.data")(_of_packed)


@handles("_cudnn_rnn_flatten_weight")
def flatten_weight(call: Call) -> Tensor:
    """Run the operator that moves all weights of a module into one buffer, and return the buffer.

    The weights become views of it.
    """
    weights = call.args[0]
    gpu = call.common_gpu()
    flat = empty(gpu, (sum(w.numel() for w in weights),), (1,), weights[0].dtype)
    with torch.no_grad():
        for view, weight in zip(_parts(flat, weights), weights, strict=True):
            view.copy_(weight)
            weight.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    return flat


# Packed sequences. The sizes of their batches stay on the host.


@handles("_pack_padded_sequence")
def pack_padded_sequence(call: Call) -> Any:
    """Run the operator that packs padded sequences.

    It returns the data on the GPU and the batch sizes on the host. Raises PyTorch's RuntimeError
    for lengths on a GPU.
    """
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
