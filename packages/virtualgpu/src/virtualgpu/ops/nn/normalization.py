"""Layer, RMS, group and batch norm: statistics, values, memory and time.

The rules are those of PyTorch's aten/src/ATen/native/Normalization.cpp and cuda/Normalization.cu(h)
(batch norm), cuda/layer_norm_kernel.cu (layer and RMS norm) and cuda/group_norm_kernel.cu. Compared
with recordings from an H200 (torch 2.11, CUDA 13.0). With channels last, cuDNN chooses a workspace
for batch norm by itself. It is assumed to be empty.
"""

from math import prod
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.errors import scalar_name, tensor_type
from virtualgpu.hardware import Gpu
from virtualgpu.ops import operators
from virtualgpu.ops.call import (
    Call,
    Work,
    bytes_of,
    common_gpu,
    composes,
    cuda_operator,
    device_time,
    handles,
    temporaries,
)
from virtualgpu.ops.elementwise import contiguous_copies
from virtualgpu.ops.passes import compared
from virtualgpu.ops.reductions import sum_bytes
from virtualgpu.ops.without_values import all_known, loses_values
from virtualgpu.tensor import empty_without_values, tensors, wrap_all

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
# The launch of batch norm's channels-last kernels (cuda/Normalization.cuh).
TILE_WIDTH, VALUES_PER_THREAD, MAX_BLOCK, MAX_GRID_HEIGHT, MIN_GRID_HEIGHT = 32, 16, 512, 128, 8
# Clocks of a block of threads that normalizes one row, and its number of threads
# (ATen/native/cuda/layer_norm_kernel.cu).
ROW_BLOCK, ROW_THREADS = 366, 128
# Clocks of the backward pass per row, and per element, of which the weight's gradient takes most.
ROW_BLOCK_BACKWARD, LAYER_NORM_BACKWARD = 145, 1.2
# A few blocks of threads sum up the weight's gradient of a narrow layer, each over all rows, one
# after the other. Above this number of rows, the sum is computed in two steps
# (ATen/native/cuda/layer_norm_kernel.cu).
SUMMED_ROW_CLOCKS, TWO_STEPS_ABOVE_ROWS = 8.7, 1 << 16
# Clocks of an element of a group, which one block of threads sums up
# (ATen/native/cuda/group_norm_kernel.cu).
GROUP_ELEMENT = 1.05
# Elements per clock of the block that sums up one channel (ATen/native/cuda/Normalization.cuh).
CHANNEL, CHANNEL_BACKWARD = 0.9, 0.33
# Host time in launches beside one, of a backward pass. Measured by
# benchmarks/timing/host_functions.py as the time of a node beyond its memory and one launch,
# rounded.
LAUNCHES_BACK, LAUNCHES_BACK_IN_EVALUATION = 1, 2
# The most samples that cuDNN's batch norm takes.
CUDNN_MAX_TRAINING, CUDNN_MAX_EVALUATION = 880801, 65535

cuda_operator("_native_batch_norm_legit", "native_batch_norm")


def _widened(x: torch.Tensor | None) -> torch.Tensor | None:
    """Convert the tensor to float32. None remains None."""
    if x is None:
        return None
    return x.float()


def _accumulated(x: torch.Tensor) -> torch.Tensor:
    """Convert the tensor to the dtype in which CUDA accumulates it: float32 for half precision."""
    if x.dtype in _LOW:
        return x.float()
    return x


def _last_power_of_two(n: int) -> int:
    """Return the largest power of two that is not larger than n, or 1."""
    return 1 << max(n, 1).bit_length() - 1


# Layer norm


@handles("native_layer_norm")
def layer_norm(call: Call) -> Any:
    """Run the operator `native_layer_norm`. CUDA first copies an input that is not contiguous.

    Raises RuntimeError if a parameter has another dtype than the input.
    """
    x, _, weight, bias = call.args[:4]
    _require_dtype_of_input(x, weight, bias)
    copies = [x._gpu.allocate(size) for size in contiguous_copies(x)]
    try:
        return _layer_norm(call)
    finally:
        _free(x._gpu, copies)


def _require_dtype_of_input(x: torch.Tensor, *parameters: torch.Tensor | None) -> None:
    """Raise CUDA's RuntimeError for a parameter of another dtype, which the CPU would accept."""
    for parameter in parameters:
        if parameter is not None and parameter.dtype is not x.dtype:
            raise RuntimeError(
                f"expected scalar type {scalar_name(x.dtype)} but found "
                f"{scalar_name(parameter.dtype)}"
            )


@handles("native_group_norm")
def group_norm(call: Call) -> Any:
    """Run the operator `native_group_norm`.

    Raises RuntimeError if the input is in half precision and a parameter is not.
    """
    if call.args[0].dtype in _LOW:  # the CPU refuses the reverse in CUDA's words
        _require_dtype_of_input(*call.args[:3])
    return operators.compute_or_into_given(call)


def _free(gpu: Gpu, blocks: list[Any]) -> None:
    """Free memory blocks of a GPU. None in the list stands for no block."""
    for block in blocks:
        if block is not None:
            gpu.allocator.free(block)


def _layer_norm(call: Call) -> Any:
    """Run the operator `native_layer_norm`, whose operands are contiguous.

    For inputs in half precision the statistics are float32. The CPU's kernel would give them the
    dtype of the parameters.
    """
    x, shape, weight, bias, epsilon = call.args
    if x.dtype not in _LOW or call.kwargs:
        return operators.compute(call)

    def values() -> Any:
        factors = torch.ones(shape, device="cpu") if weight is None else weight.float()
        return call.func(x, shape, factors, _widened(bias), epsilon)

    return operators.compute(call, values)


@handles("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Any:
    """Compute the gradients of a layer norm, after copying operands that are not contiguous."""
    gradient, x = call.args[:2]
    gpu = x._gpu
    copies = [gpu.allocate(size) for size in contiguous_copies(x)]
    try:
        results = _layer_norm_backward(call)
        gpu.scratch(contiguous_copies(gradient))
        return results
    finally:
        _free(gpu, copies)


def _layer_norm_backward(call: Call) -> Any:
    """Compute the gradients of a layer norm in float32 for inputs in half precision."""
    gradient, x, shape, mean, rstd, weight, bias, mask = call.args
    if x.dtype not in _LOW or call.kwargs:
        return operators.compute(call)

    def values() -> Any:
        wide = call.func(
            gradient.float(), x.float(), shape, mean, rstd, _widened(weight), _widened(bias), mask
        )
        return tuple(None if value is None else value.to(x.dtype) for value in wide)

    return operators.compute(call, values)


@device_time("native_layer_norm", "native_group_norm")
def layer_norm_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of normalizing rows. The rows of a group norm are its groups.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    rows = results[1].numel()
    work = of_rows(call.gpu, rows, moved)
    if call.op.name == "native_group_norm" and rows:
        waves = max(1.0, rows / call.gpu.profile.multiprocessors)
        work = work._replace(serial=GROUP_ELEMENT * waves * results[0].numel() / rows)
    return work


def of_rows(gpu: Gpu, rows: int, moved: int) -> Work:
    """Return the work of normalizing `rows` rows, which have `moved` bytes with their results.

    A block of threads normalizes a row and reads it twice. The second time, it reads from the L2
    cache if the rows that all multiprocessors work on fill at most half of it. (From about half on,
    an H200, an A100, an L4 and a T4 slow down.)
    """
    profile = gpu.profile
    at_once = profile.multiprocessors * (profile.max_threads_per_multiprocessor // ROW_THREADS)
    # Half of `moved` is read, and half of the cache may be full.
    reads_memory_again = min(at_once, rows) * moved > rows * profile.l2_bytes
    return Work(1.5 * moved if reads_memory_again else moved, clocks=ROW_BLOCK * rows)


@device_time("native_layer_norm_backward", "native_group_norm_backward")
def layer_norm_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of the gradients of normalized rows.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    rows = call.argument("mean").numel()
    work = of_rows_backward(call.args[1].numel(), rows, moved)
    if call.op.name == "native_layer_norm_backward" and rows <= TWO_STEPS_ABOVE_ROWS:
        shared = work.clocks / call.gpu.profile.multiprocessors
        work = work._replace(serial=max(0.0, SUMMED_ROW_CLOCKS * rows - shared))
    return work


def of_rows_backward(elements: int, rows: int, moved: int) -> Work:
    """Return the work of computing the gradients of normalized rows.

    The rows have `elements` elements in total. `moved` is the bytes of all arguments and results.
    """
    return Work(moved, clocks=LAYER_NORM_BACKWARD * elements + ROW_BLOCK_BACKWARD * rows)


# RMS norm


@composes("rms_norm")
def rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Compute an RMS norm over the last dimensions, whose sizes are `shape`.

    If input and weight have one dtype, CUDA has one fused kernel for the forward pass and one for
    the backward pass (aten/src/ATen/native/layer_norm.cpp). Raises RuntimeError for shapes that do
    not fit.
    """
    _require_shapes(x, list(shape), weight)
    if eps is None:
        dtype = torch.float32 if x.dtype in _LOW else x.dtype
        eps = torch.finfo(dtype).eps
    if weight is not None and weight.dtype is not x.dtype:
        return _rms_norm(x, shape, weight, eps)
    return _RmsNorm.apply(x, shape, weight, eps)


def _require_shapes(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> None:
    """Raise PyTorch's RuntimeError if the shapes of input and weight do not fit."""
    if not shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
            "element, but got normalized_shape = []"
        )
    if weight is not None and list(weight.shape) != shape:
        raise RuntimeError(
            "Expected weight to be of same shape as normalized_shape, but got weight of shape "
            f"{list(weight.shape)} and normalized_shape = {shape}"
        )
    if list(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*{str(shape)[1:]}, but "
            f"got input of size{list(x.shape)}"
        )


def _normalized_dims(shape: list[int]) -> tuple[int, ...]:
    """Return the numbers of the normalized dimensions, -1 for the last one.

    `shape` has their sizes.
    """
    return tuple(range(-len(shape), 0))


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Compute an RMS norm with single operators instead of the fused kernel.

    The last dimensions, whose sizes are `shape`, are normalized.
    """
    wide = _accumulated(x)
    mean = wide.square().mean(_normalized_dims(shape), True)
    normalized = wide * torch.rsqrt(mean + epsilon)
    if weight is None:
        return normalized.to(x.dtype)
    return (normalized * weight).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """The fused kernels of an RMS norm.

    If the gradient will be differentiated again, the backward pass uses single operators.
    """

    @staticmethod
    @compared
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        """Normalize `x` over its last dimensions, whose sizes are `shape`, and return the result.

        The statistics are kept for the backward pass.
        """
        rows = x.shape[: x.dim() - len(shape)]
        statistics = (*rows, *(1 for _ in shape))

        def values() -> tuple[torch.Tensor, torch.Tensor]:
            wide = _accumulated(x)
            rstd = torch.rsqrt(wide.square().mean(_normalized_dims(shape), True) + epsilon)
            output = wide * rstd
            if weight is not None:
                output = output * weight
            return output.to(x.dtype).contiguous(), rstd

        def shapes() -> tuple[torch.Tensor, torch.Tensor]:
            accumulated = torch.float32 if x.dtype in _LOW else x.dtype
            return (
                torch.empty(x.shape, dtype=x.dtype, device="meta"),
                torch.empty(statistics, dtype=accumulated, device="meta"),
            )

        output, rstd = _fused("rms_norm", prod(rows), values, shapes, x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape, ctx.epsilon = shape, epsilon
        return output

    @staticmethod
    @compared
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradients of input and weight, and None for the other arguments."""
        x, weight, rstd = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[0]
        wants_weight = weight is not None and ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            return _RmsNorm._differentiable_backward(ctx, gradient)

        def values() -> tuple:
            wide, given = _accumulated(x), _accumulated(gradient)
            normalized = wide * rstd
            into_x = into_weight = None
            if wants_x:
                scaled = given
                if weight is not None:
                    scaled = given * weight
                mean = (scaled * normalized).mean(_normalized_dims(ctx.shape), True)
                into_x = (rstd * (scaled - normalized * mean)).to(x.dtype).contiguous()
            if wants_weight:
                into_weight = (given * normalized).reshape(-1, *ctx.shape).sum(0).to(weight.dtype)
            return into_x, into_weight

        def shapes() -> tuple:
            into_x = into_weight = None
            if wants_x:
                into_x = torch.empty(x.shape, dtype=x.dtype, device="meta")
            if wants_weight:
                into_weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            return into_x, into_weight

        into_x, into_weight = _fused(
            "rms_norm_backward", rstd.numel(), values, shapes, gradient, x, weight, rstd
        )
        gradient._gpu.scratch(contiguous_copies(gradient))  # type: ignore[attr-defined]
        return into_x, None, into_weight, None

    @staticmethod
    def _differentiable_backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Return the gradients of an RMS norm as results that autograd can differentiate again."""
        x, weight, _ = ctx.saved_tensors
        inputs = [v for v in (x, weight) if v is not None and v.requires_grad]
        output = _rms_norm(x, ctx.shape, weight, ctx.epsilon)
        gradients = iter(torch.autograd.grad(output, inputs, gradient, create_graph=True))
        into_x = None
        if x.requires_grad:
            into_x = next(gradients)
        return into_x, None, next(gradients, None), None


def _fused(name: str, rows: int, values: Any, shapes: Any, *inputs: torch.Tensor | None) -> Any:
    """Launch the kernel `name` of an RMS norm and return its results, some of which may be None.

    `rows` is the number of normalized rows. `values` computes the results on the CPU. If values are
    not kept, `shapes` returns the results as meta tensors.
    """
    gpu = common_gpu(*inputs)
    if gpu.machine.valueless_storages and not all_known(*inputs):
        results = tuple(
            None if x is None else empty_without_values(gpu, x.size(), x.stride(), x.dtype)
            for x in shapes()
        )
    else:
        with _DisableTorchDispatch():
            results = values()
        results = wrap_all(results, gpu)
    moved = sum(map(bytes_of, tensors(inputs, results)))
    if name.endswith("backward"):
        work = of_rows_backward(inputs[0].numel(), rows, moved)  # type: ignore[union-attr]
    else:
        work = of_rows(gpu, rows, moved)
    gpu.launch(*work, name=name)
    return results


# Group norm


@temporaries("native_group_norm")
def factors_and_summands(call: Call, result: Any) -> tuple[int, ...]:
    """Return the bytes of two temporaries of a group norm.

    They hold a factor and a summand for every channel of every sample.
    """
    x, weight, bias, samples, channels, positions = call.args[:6]
    if positions == 1 or (weight is None and bias is None):
        return ()
    size = samples * channels * sum_bytes(x.dtype)
    return size, size


@handles("native_group_norm_backward")
def group_norm_backward(call: Call) -> Any:
    """Compute the gradients of a group norm.

    CUDA allocates sums for every channel, and then the coefficients of the input's gradient. It
    frees the coefficients first.
    """
    results = operators.compute(call)
    gradient, x, _, _, weight, samples, channels, positions, groups, mask = call.args
    gpu = gradient._gpu
    item = sum_bytes(x.dtype)
    per_channel, per_group = samples * channels * item, samples * groups * item
    sums = []
    if positions != 1:
        sums = [gpu.allocate(per_channel) for _ in range(2)]
    coefficients = []
    if mask[0]:
        sizes = [per_group, per_group]
        if weight is not None and positions > 1:
            sizes.append(per_channel)
        coefficients = [gpu.allocate(size) for size in sizes]
    _free(gpu, [*coefficients, *sums])
    return results


# Batch norm


def uses_cudnn(x: torch.Tensor, weight: Any, bias: Any, mean: Any, training: bool) -> bool:
    """Return whether cuDNN computes a batch norm, and not PyTorch's own kernels.

    cuDNN takes images of some dtypes, with weight and bias. In evaluation, it also needs the
    running statistics, of which `mean` is one. `training` says whether the norm uses the batch's
    own statistics.
    """
    if weight is None or bias is None or not torch.backends.cudnn.enabled:
        return False
    if mean is None and not training:
        return False
    if x.dtype is torch.bfloat16 or x.dim() == 2:
        return False
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    return x.shape[0] <= (CUDNN_MAX_TRAINING if training else CUDNN_MAX_EVALUATION)


@handles("native_batch_norm")
def batch_norm(call: Call) -> Any:
    """Compute a batch norm.

    PyTorch's own CUDA kernels return the statistics in the dtype of accumulation. They also do so
    in evaluation, where the CPU returns none. Raises RuntimeError for a weight in half precision
    with an input in float32.
    """
    x, weight, bias, mean, variance, training, _, epsilon = call.args
    if call.kwargs:
        return operators.into_given(call)
    cudnn = uses_cudnn(x, weight, bias, mean, training)
    if weight is not None and x.dtype is torch.float32 and weight.dtype in _LOW:
        raise _narrow_weight_error(x.dtype, weight.dtype, cudnn)
    if cudnn:
        return operators.compute(call)
    narrow = _is_narrow(x, weight, mean)

    def values() -> Any:
        results = _in_float32(call.func, call.args) if narrow else call.func(*call.args)
        if training:
            return results
        kind = torch.float32 if x.dtype in _LOW else x.dtype
        return results[0], mean.to(kind, copy=True), torch.rsqrt(variance.to(kind) + epsilon)

    return operators.compute(call, values)


def _is_narrow(x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None) -> bool:
    """Return whether the input and the parameters of a batch norm are all in half precision.

    Without parameters, the running statistics (`mean` is one) count instead. The CPU's kernels do
    not support all of these combinations.
    """
    given = mean if weight is None else weight
    return x.dtype in _LOW and given is not None and given.dtype is x.dtype


def _narrow_weight_error(kind: torch.dtype, narrow: torch.dtype, cudnn: bool) -> Exception:
    """Return the RuntimeError of a batch norm for a weight in half precision.

    `kind` is the dtype of the input, and `narrow` that of the weight. For float16, the text is that
    of cuDNN if `cudnn` is true. For other dtypes, it is that of PyTorch's own kernels.
    """
    if cudnn and narrow is torch.float16:
        return RuntimeError(
            "Expected tensor for argument #1 'input' to have the same type as tensor for argument "
            f"#2 'weight'; but type {tensor_type(kind)} does not equal {tensor_type(narrow)} "
            "(while checking arguments for cudnn_batch_norm)"
        )
    return RuntimeError(
        f"Expected weight to have type {scalar_name(kind)} but got {scalar_name(narrow)}"
    )


def _in_float32(func: Any, args: tuple) -> Any:
    """Call the batch norm `func` with parameters in float32, and update the running statistics."""
    x, weight, bias, mean, variance, training, momentum, epsilon = args
    running = [_widened(mean), _widened(variance)]
    results = func(x, _widened(weight), _widened(bias), *running, training, momentum, epsilon)
    for kept, new in zip((mean, variance), running, strict=True):
        if kept is not None:
            kept.copy_(new)
    return results


@handles("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Any:
    """Compute the gradients of a batch norm.

    If a channel's values are not adjacent (two dimensions, or channels last), PyTorch's own kernels
    compute sums first, and the input's gradient last. cuDNN copies a gradient whose strides differ
    from the input's. It has no backward pass in evaluation.
    """
    gradient, x, weight, mean, _, _, _, training, _, mask = call.args
    narrow = _is_narrow(x, weight, mean)
    if call.kwargs:
        return operators.into_given(call)
    cudnn = training and uses_cudnn(x, weight, weight, mean, training)
    separate_sums = not cudnn and x.stride(1) == 1 and x.shape[1] > 1
    gpu = call.common_gpu()
    channels = x.shape[1]
    sums = []
    if separate_sums and (training or mask[1] or mask[2]):
        size = channels * sum_bytes(x.dtype)
        sums = [gpu.allocate(size), gpu.allocate(size)]
    if not narrow and not separate_sums:
        copies = []
        if cudnn and gradient.stride() != x.stride():
            copies = [gpu.allocate(size) for size in contiguous_copies(gradient)]
        results = operators.compute(call)
        _free(gpu, copies)
        return results

    def values() -> Any:
        args = call.args
        if narrow:
            args = tuple(v.float() if isinstance(v, torch.Tensor) else v for v in args)
        results = call.func(*args)
        if narrow:
            results = [None if v is None else v.to(x.dtype) for v in results]
        into_x, into_weight, into_bias = results
        if separate_sums:  # results are allocated in their order
            return into_weight, into_bias, into_x
        return into_x, into_weight, into_bias

    if loses_values(call):
        results = operators.compute(call)
    else:
        results = operators.compute(call, values)
        if separate_sums:
            into_weight, into_bias, into_x = results
            results = into_x, into_weight, into_bias
    gpu.scratch(backward_staging(x.numel() // channels, channels) if sums else ())
    _free(gpu, sums)
    return results


def backward_staging(reduction: int, channels: int) -> tuple[int, ...]:
    """Return the bytes of the two buffers with which a batch norm's gradient sums up channels.

    They are needed if several blocks of threads share a channel. `reduction` is the number of
    elements per channel. The staging buffer has two sums for each block, and the other one
    semaphores (cuda/Normalization.cuh, flexible_launch_configs).
    """
    width = min(_last_power_of_two(channels), TILE_WIDTH)
    height = min(_last_power_of_two(-(-reduction // VALUES_PER_THREAD)), MAX_BLOCK // width)
    if width * height != MAX_BLOCK:
        width = min(_last_power_of_two(channels), MAX_BLOCK // height)
    grid = min(-(-reduction // (height * VALUES_PER_THREAD)), MAX_GRID_HEIGHT)
    if grid < MIN_GRID_HEIGHT:
        return ()
    return 2 * channels * grid * 4, -(-channels // width) * 4


@device_time(
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"
)
def batch_norm_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a batch norm.

    In training, one block of threads sums up each channel, so a channel's time cannot be shared. In
    evaluation, the host takes as long as for a kernel of PyTorch's own, even if cuDNN runs it
    (benchmarks/timing/host_functions.json).

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    training = "training" not in call.op.arguments or call.argument("training")
    if not training:
        return Work(moved)
    names = ("input", "weight", "bias", "running_mean")
    x, weight, bias, mean = (call.argument(name) for name in names)
    cudnn = False
    if call.op.name != "_native_batch_norm_legit":
        cudnn = uses_cudnn(x, weight, bias, mean, training)
    return Work(moved, serial=_elements_per_channel(x) / CHANNEL, cudnn=int(cudnn))


@device_time("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")
def batch_norm_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of the gradients of a batch norm.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x, weight, mean = (call.argument(name) for name in ("input", "weight", "running_mean"))
    training = "train" not in call.op.arguments or call.argument("train")
    cudnn = int(training and uses_cudnn(x, weight, weight, mean, training))
    launches = LAUNCHES_BACK_IN_EVALUATION
    if training:
        launches = LAUNCHES_BACK
    serial = _elements_per_channel(x) / CHANNEL_BACKWARD
    return Work(moved, serial=serial, cudnn=cudnn, launches=launches)


def _elements_per_channel(x: torch.Tensor) -> float:
    """Return the number of elements of a channel in all samples."""
    if x.numel():
        return x.numel() / x.shape[1]
    return 0.0
