"""What normalizations ask for: statistics in the type of accumulation, parameters of fused kernels, and cuDNN's choices.

Rules from PyTorch's sources: aten/src/ATen/native/Normalization.cpp and cuda/Normalization.cu(h) (batch norm),
cuda/layer_norm_kernel.cu (layer and RMS norm), cuda/group_norm_kernel.cu. Held against recordings from an H200 (torch 2.11,
CUDA 13.0). An estimate: cuDNN's workspace for batch norm in channels-last order, which it chooses by itself, counts as none.
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
from virtualgpu.ops.reductions import sum_bytes
from virtualgpu.ops.without_values import all_known, loses_values
from virtualgpu.tensor import empty_without_values, tensors, wrap_all

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
# The launch of batch norm's channels-last kernels
TILE_WIDTH, VALUES_PER_THREAD, MAX_BLOCK, MAX_GRID_HEIGHT, MIN_GRID_HEIGHT = 32, 16, 512, 128, 8
ROW_BLOCK, ROW_THREADS = (
    366,
    128,
)  # clocks of a block of threads that does one row, and its threads (ATen/native/cuda/layer_norm_kernel.cu)
ROW_BLOCK_BACKWARD, LAYER_NORM_BACKWARD = (
    145,
    1.2,
)  # clocks a row, and an element, of which the weight's gradient takes most
# Few blocks of threads sum up the weight's gradient of a narrow layer, each over all rows, one after
# the other. Above so many rows, the sum goes in two steps (ATen/native/cuda/layer_norm_kernel.cu).
SUMMED_ROW, TWO_STEPS = 8.7, 1 << 16  # clocks, rows
# Clocks of an element of a group, which one block of threads sums up
# (ATen/native/cuda/group_norm_kernel.cu).
GROUP_ELEMENT = 1.05
CHANNEL, CHANNEL_BACKWARD = (
    0.9,
    0.33,
)  # elements a clock of the block that sums up one channel (ATen/native/cuda/Normalization.cuh)
# Host time in launches beside one, of a backward pass. Measured by benchmarks/timing/host_functions.py
# as the time of a node beyond its memory and one launch, rounded.
LAUNCHES_BACK, LAUNCHES_BACK_IN_EVALUATION = 1, 2
CUDNN_MAX_TRAINING, CUDNN_MAX_EVALUATION = 880801, 65535  # samples that cuDNN's batch norm takes

cuda_operator("_native_batch_norm_legit", "native_batch_norm")


def _widened(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()


def _power(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


# Layer norm


@handles("native_layer_norm")
def layer_norm(call: Call) -> Any:
    """The kernels read contiguous memory: a copy comes first otherwise."""
    x, _, weight = call.args[:3]
    if weight is not None and weight.dtype is not x.dtype:
        raise RuntimeError(
            f"expected scalar type {scalar_name(x.dtype)} but found {scalar_name(weight.dtype)}"
        )
    copies = [x._gpu.allocate(size) for size in contiguous_copies(x)]
    try:
        return _layer_norm(call)
    finally:
        _free(x._gpu, copies)


def _free(gpu: Gpu, blocks: list[Any]) -> None:
    for block in blocks:
        if block is not None:
            gpu.allocator.free(block)


def _layer_norm(call: Call) -> Any:
    """The statistics of half precision are float32; the CPU gives them the type of the parameters."""
    x, shape, weight, bias, epsilon = call.args
    if x.dtype not in _LOW or call.kwargs:
        return operators.compute(call)

    def values() -> Any:
        factors = torch.ones(shape, device="cpu") if weight is None else weight.float()
        return call.func(x, shape, factors, _widened(bias), epsilon)

    return operators.compute(call, values)


@handles("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Any:
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
    rows = results[1].numel()
    work = of_rows(call.gpu, rows, moved)
    if call.op.name == "native_group_norm" and rows:
        waves = max(1.0, rows / call.gpu.profile.multiprocessors)
        work = work._replace(serial=GROUP_ELEMENT * waves * results[0].numel() / rows)
    return work


def of_rows(gpu: Gpu, rows: int, moved: int) -> Work:
    """Rows that are normalized, each by a block of threads, which reads it twice: the second time from the L2 cache, if what all
    multiprocessors have under way fills at most half of it. (From about half on, an H200, an A100, an L4 and a T4 slow down.)"""
    profile = gpu.profile
    under_way = profile.multiprocessors * (profile.max_threads_per_multiprocessor // ROW_THREADS)
    again = min(under_way, rows) * moved > rows * profile.l2_bytes  # a half of `moved` is read
    return Work(1.5 * moved if again else moved, clocks=ROW_BLOCK * rows)


@device_time("native_layer_norm_backward", "native_group_norm_backward")
def layer_norm_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    rows = call.argument("mean").numel()
    work = of_rows_backward(call.args[1].numel(), rows, moved)
    if call.op.name == "native_layer_norm_backward" and rows <= TWO_STEPS:
        shared = work.clocks / call.gpu.profile.multiprocessors
        work = work._replace(serial=max(0.0, SUMMED_ROW * rows - shared))
    return work


def of_rows_backward(elements: int, rows: int, moved: int) -> Work:
    return Work(moved, clocks=LAYER_NORM_BACKWARD * elements + ROW_BLOCK_BACKWARD * rows)


# RMS norm


@composes("rms_norm")
def rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """One fused kernel each way, where input and weight have one type (aten/src/ATen/native/layer_norm.cpp)."""
    _require_shapes(x, list(shape), weight)
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    if weight is not None and weight.dtype is not x.dtype:
        return _rms_norm(x, shape, weight, epsilon)
    return _RmsNorm.apply(x, shape, weight, epsilon)


def _require_shapes(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None) -> None:
    if not shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got normalized_shape = []"
        )
    if weight is not None and list(weight.shape) != shape:
        raise RuntimeError(
            "Expected weight to be of same shape as normalized_shape, but got weight of shape "
            f"{list(weight.shape)} and normalized_shape = {shape}"
        )
    if list(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*{str(shape)[1:]}, but got input of size{list(x.shape)}"
        )


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    wide = x.float() if x.dtype in _LOW else x
    normalized = wide * torch.rsqrt(
        wide.square().mean(tuple(range(-len(shape), 0)), True) + epsilon
    )
    return (normalized if weight is None else normalized * weight).to(
        x.dtype if weight is None else torch.result_type(x, weight)
    )


class _RmsNorm(torch.autograd.Function):
    """The fused kernel and its backward; a backward that is differentiated again is made of single operators."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        rows = x.shape[: x.dim() - len(shape)]
        statistics = (*rows, *(1 for _ in shape))
        dims = tuple(range(-len(shape), 0))

        def values() -> tuple[torch.Tensor, torch.Tensor]:
            wide = x.float() if x.dtype in _LOW else x
            rstd = torch.rsqrt(wide.square().mean(dims, True) + epsilon)
            output = wide * rstd if weight is None else wide * rstd * weight
            return output.to(x.dtype).contiguous(), rstd

        def shapes() -> tuple[torch.Tensor, torch.Tensor]:
            accumulated = torch.float32 if x.dtype in _LOW else x.dtype
            return torch.empty(x.shape, dtype=x.dtype, device="meta"), torch.empty(
                statistics, dtype=accumulated, device="meta"
            )

        output, rstd = _fused("rms_norm", prod(rows), values, shapes, x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape, ctx.epsilon = shape, epsilon
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        x, weight, rstd = ctx.saved_tensors
        wants = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            inputs = [v for v in (x, weight) if v is not None and v.requires_grad]
            gradients = iter(
                torch.autograd.grad(
                    _rms_norm(x, ctx.shape, weight, ctx.epsilon),
                    inputs,
                    gradient,
                    create_graph=True,
                )
            )
            into_x = next(gradients) if x.requires_grad else None
            return into_x, None, next(gradients, None), None
        dims = tuple(range(-len(ctx.shape), 0))

        def values() -> tuple:
            wide, given = (v.float() if v.dtype in _LOW else v for v in (x, gradient))
            normalized = wide * rstd
            scaled = given if weight is None else given * weight
            into_x = (
                rstd * (scaled - normalized * (scaled * normalized).mean(dims, True))
                if wants[0]
                else None
            )
            into_weight = None
            if wants[1]:
                into_weight = (given * normalized).reshape(-1, *ctx.shape).sum(0).to(weight.dtype)
            return None if into_x is None else into_x.to(x.dtype).contiguous(), into_weight

        def shapes() -> tuple:
            return tuple(
                torch.empty(v.shape, dtype=v.dtype, device="meta") if wanted else None
                for v, wanted in zip((x, weight), wants, strict=True)
            )

        into_x, into_weight = _fused(
            "rms_norm_backward", rstd.numel(), values, shapes, gradient, x, weight, rstd
        )
        gradient._gpu.scratch(contiguous_copies(gradient))  # type: ignore[attr-defined]
        return into_x, None, into_weight, None


def _fused(name: str, rows: int, values: Any, shapes: Any, *inputs: torch.Tensor | None) -> Any:
    """The results of one kernel: of `values`, or of the shapes alone where values are not kept."""
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
    back = name.endswith("backward")
    work = of_rows_backward(inputs[0].numel(), rows, moved) if back else of_rows(gpu, rows, moved)  # type: ignore[union-attr]
    gpu.launch(*work, name=name)
    return results


# Group norm


@temporaries("native_group_norm")
def group_norm(call: Call, result: Any) -> tuple[int, ...]:
    """A factor and a summand for every channel of every sample."""
    x, weight, bias, samples, channels, positions = call.args[:6]
    if positions == 1 or (weight is None and bias is None):
        return ()
    size = samples * channels * sum_bytes(x.dtype)
    return size, size


@handles("native_group_norm_backward")
def group_norm_backward(call: Call) -> Any:
    """Sums for every channel, then the coefficients of the input's gradient, which are freed before the sums."""
    results = operators.compute(call)
    gradient, x, _, _, weight, samples, channels, positions, groups, mask = call.args
    gpu = gradient._gpu
    item = sum_bytes(x.dtype)
    per_channel, per_group = samples * channels * item, samples * groups * item
    sums = [] if positions == 1 else [gpu.allocate(per_channel) for _ in range(2)]
    sizes = [per_group, per_group]
    if weight is not None and positions > 1:
        sizes.append(per_channel)
    blocks = [gpu.allocate(size) for size in sizes] if mask[0] else []
    _free(gpu, [*blocks, *sums])
    return results


# Batch norm


def uses_cudnn(x: torch.Tensor, weight: Any, bias: Any, mean: Any, training: bool) -> bool:
    """Does batch norm go to cuDNN? It takes images, with weight and bias (and statistics, outside training), in its types."""
    if (
        weight is None
        or bias is None
        or (mean is None and not training)
        or not torch.backends.cudnn.enabled
    ):
        return False
    if (
        x.dtype is torch.bfloat16
        or (x.dtype is torch.float16 and weight.dtype is not torch.float32)
        or x.dim() == 2
    ):
        return False
    return x.shape[0] <= (CUDNN_MAX_TRAINING if training else CUDNN_MAX_EVALUATION)


@handles("native_batch_norm")
def batch_norm(call: Call) -> Any:
    """CUDA's own kernels keep the statistics of evaluation, too, and in the type of accumulation."""
    x, weight, bias, mean, variance, training, _, epsilon = call.args
    if call.kwargs:
        return operators.into_given(call)
    cudnn = uses_cudnn(x, weight, bias, mean, training)
    if weight is not None and x.dtype is torch.float32 and weight.dtype in _LOW:
        _refuse_narrow_weight(x.dtype, weight.dtype, cudnn)
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
    """Are the parameters in half precision too, or, where there are none, the running statistics? The CPU does not take all of these."""
    given = weight if weight is not None else mean
    return x.dtype in _LOW and given is not None and given.dtype is x.dtype


def _refuse_narrow_weight(kind: torch.dtype, narrow: torch.dtype, cudnn: bool) -> None:
    """Raises RuntimeError, in cuDNN's words for float16, which it takes, and in those of CUDA's own kernels otherwise."""
    if cudnn and narrow is torch.float16:
        raise RuntimeError(
            "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 'weight'; but type "
            f"{tensor_type(kind)} does not equal {tensor_type(narrow)} (while checking arguments for cudnn_batch_norm)"
        )
    raise RuntimeError(
        f"Expected weight to have type {scalar_name(kind)} but got {scalar_name(narrow)}"
    )


def _in_float32(func: Any, args: tuple) -> Any:
    x, weight, bias, mean, variance, training, momentum, epsilon = args
    running = [_widened(mean), _widened(variance)]
    results = func(x, _widened(weight), _widened(bias), *running, training, momentum, epsilon)
    for kept, new in zip((mean, variance), running, strict=True):
        if kept is not None:
            kept.copy_(new)
    return results


@handles("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Any:
    """Where a channel's values do not lie together (two dimensions, channels last), sums come first and the input's gradient last.

    cuDNN, which has no backward of evaluation, reads a gradient that lies as the image does: another is copied first.
    """
    gradient, x, weight, mean, _, _, _, training, _, mask = call.args
    narrow = _is_narrow(x, weight, mean)
    if call.kwargs:
        return operators.into_given(call)
    cudnn = training and uses_cudnn(x, weight, weight, mean, training)
    separate = not cudnn and x.stride(1) == 1 and x.shape[1] > 1
    gpu = call.common_gpu()
    channels = x.shape[1]
    size = channels * sum_bytes(x.dtype)
    sums = (
        [gpu.allocate(size), gpu.allocate(size)]
        if separate and (training or mask[1] or mask[2])
        else []
    )
    if not narrow and not separate:
        copies = (
            [gpu.allocate(size) for size in contiguous_copies(gradient)]
            if cudnn and gradient.stride() != x.stride()
            else []
        )
        results = operators.compute(call)
        _free(gpu, copies)
        return results

    def values() -> Any:
        results = (
            call.func(*(v.float() if isinstance(v, torch.Tensor) else v for v in call.args))
            if narrow
            else call.func(*call.args)
        )
        into_x, into_weight, into_bias = (
            None if v is None else v.to(x.dtype) if narrow else v for v in results
        )
        return (into_weight, into_bias, into_x) if separate else (into_x, into_weight, into_bias)

    if loses_values(call):
        results = operators.compute(call)
    else:
        results = operators.compute(call, values)
        if separate:
            into_weight, into_bias, into_x = results
            results = into_x, into_weight, into_bias
    gpu.scratch(backward_staging(x.numel() // channels, channels) if sums else ())
    _free(gpu, sums)
    return results


def backward_staging(reduction: int, channels: int) -> tuple[int, ...]:
    """Where several blocks share a channel: two sums for each, and a semaphore (cuda/Normalization.cuh, flexible_launch_configs)."""
    width = min(_power(channels), TILE_WIDTH)
    height = min(_power(-(-reduction // VALUES_PER_THREAD)), MAX_BLOCK // width)
    if width * height != MAX_BLOCK:
        width = min(_power(channels), MAX_BLOCK // height)
    grid = min(-(-reduction // (height * VALUES_PER_THREAD)), MAX_GRID_HEIGHT)
    if grid < MIN_GRID_HEIGHT:
        return ()
    return 2 * channels * grid * 4, -(-channels // width) * 4


@device_time(
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"
)
def batch_norm_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """In training each channel is summed up by one block, whatever else the GPU could do meanwhile.

    In evaluation the host takes as long as for a kernel of PyTorch's own, also where cuDNN runs it
    (benchmarks/timing/host_functions.json).
    """
    training = "training" not in call.op.arguments or call.argument("training")
    x, weight, bias, mean = (
        call.argument(name) for name in ("input", "weight", "bias", "running_mean")
    )
    cudnn = (
        training
        and call.op.name != "_native_batch_norm_legit"
        and uses_cudnn(x, weight, bias, mean, training)
    )
    return Work(moved, serial=_a_channel(x) / CHANNEL if training else 0.0, cudnn=int(cudnn))


@device_time("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")
def batch_norm_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    x, weight, mean = (call.argument(name) for name in ("input", "weight", "running_mean"))
    training = "train" not in call.op.arguments or call.argument("train")
    cudnn = int(training and uses_cudnn(x, weight, weight, mean, training))
    launches = LAUNCHES_BACK if training else LAUNCHES_BACK_IN_EVALUATION
    return Work(moved, serial=_a_channel(x) / CHANNEL_BACKWARD, cudnn=cudnn, launches=launches)


def _a_channel(x: torch.Tensor) -> float:
    return x.numel() / x.shape[1] if x.numel() else 0.0
