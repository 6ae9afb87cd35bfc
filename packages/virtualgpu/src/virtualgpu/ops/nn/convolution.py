"""Convolutions as cuDNN computes them: values, memory, time and refusals.

cuDNN uses a workspace for each of three results: the output, the input's gradient and the weight's
gradient. `convolution_workspaces` has their sizes. The order of the allocations is that of
PyTorch's native/cudnn/ConvShared.cpp and native/Convolution.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from virtualgpu.clock.costs import clocks_beyond_memory
from virtualgpu.errors import argument_differs, scalar_name, tensor_type
from virtualgpu.ops import operators, reductions
from virtualgpu.ops.blas import product_format
from virtualgpu.ops.call import (
    CPU_KERNELS,
    Call,
    Devices,
    Work,
    bytes_of,
    cuda_operator,
    device_error,
    device_time,
    handles,
    operator,
    shapes_by,
)
from virtualgpu.ops.half import sums_in_float32
from virtualgpu.ops.nn.convolution_workspaces import (
    DTYPES,
    INPUT_GRADIENT,
    OUTPUT,
    WEIGHT_GRADIENT,
    Convolution,
    workspaces,
)
from virtualgpu.ops.sequence import Out, Plan, perform
from virtualgpu.ops.tf32 import round_to_tf32, rounds_factors
from virtualgpu.ops.work import UNVECTORIZED

aten = torch.ops.aten
Tensor = torch.Tensor
_select_on_cpu = torch._C._select_conv_backend
_cudnn_is_enabled = torch._C._get_cudnn_enabled
# Shares of a product's rate, from benchmarks/timing/kernels.json (one H200, torch 2.11,
# cuDNN 9.19), rounded.
CONVOLUTION, CONVOLUTION_BACKWARD = 0.85, 0.5
CHANNEL_TILE = 128  # output channels that tensor cores compute at a time
CHANNEL_VECTOR = 8  # input channels that they read at a time
# Host time in launches beside one, of PyTorch's own depthwise kernels and of their backward pass.
# Measured by benchmarks/timing/host_functions.py, rounded.
DEPTHWISE_LAUNCHES = 1
# The number of pixels of an image for which the gradient of a depthwise weight takes twice as long
# per pixel as for a large image.
FEW_PIXELS = 75
WIDE_WINDOW = 7  # the side from which on a window is wide
FEW_CHANNELS = 8  # the most input and output channels for which `few_channels` holds
VECTOR_CHANNELS = 4  # the least number of channels that cuDNN copies into whole vectors


def figures(
    x: Tensor,
    result: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    groups: int,
) -> tuple[int, ...]:
    """Return the bytes of cuDNN's three workspaces for a convolution.

    They are for the output, the input's gradient and the weight's gradient. `result` has the shape
    of the output. The other arguments are those of `aten::convolution`.
    """
    dims = x.dim() - 2
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        # These are float64 and others. cuDNN's kernels for images of float64 allocate nothing.
        copies = 0
        if dims != 2:
            copies = bytes_of(x) + bytes_of(result) + bytes_of(weight)
        return copies, copies, copies
    last = dims == 2 and (lies_channels_last(x, dims) or lies_channels_last(weight, dims))
    into, out = _channels(weight, transposed, groups)
    if max(into, out) <= FEW_CHANNELS:
        return few_channels(x, bytes_of(result), weight, transposed, groups)
    return workspaces(
        Convolution(
            dtype=DTYPES.index(name),
            channels_last=last,
            transposed=transposed,
            into=into,
            out=out,
            groups=groups,
            batch=x.shape[0],
            dims=dims,
            kernel=_triple(weight.shape[2:], dims),
            stride=_triple(stride, dims),
            padding=_triple(padding, dims, fill=0),
            dilation=_triple(dilation, dims),
            extent=_triple(x.shape[2:], dims),
            result=_triple(result.shape[2:], dims),
        )
    )


def _triple(numbers: Sequence[int], dims: int, fill: int = 1) -> tuple[int, ...]:
    """Return numbers per dimension as a triple, with `fill` for missing dimensions at the end.

    `numbers` may be one number for all dimensions.
    """
    given = tuple(numbers)
    if len(given) == 1:
        given *= dims
    return given + (fill,) * (3 - dims)


def _channels(weight: Tensor, transposed: bool, groups: int) -> tuple[int, int]:
    """Return the numbers of input and output channels of a convolution with this weight."""
    first, second = weight.shape[0], weight.shape[1] * groups
    if transposed:
        return (first, second)
    return (second, first)


def few_channels(
    x: Tensor, y: int, weight: Tensor, transposed: bool, groups: int
) -> tuple[int, ...]:
    """Return the bytes of the three workspaces of a convolution of at most eight channels.

    So few channels do not fill the vectors that tensor cores read. cuDNN then allocates nothing, or
    it copies the tensors with channels last, padded to whole vectors of 16 bytes. This is an
    estimate from 150 convolutions of three to eight channels. `x` is the input, and `y` the bytes
    of the output.
    """
    if groups > 1:
        return 0, 0, 0
    item = x.itemsize
    into, out = _channels(weight, transposed, groups)
    wide_into = -(-into * item // 16) * 16  # bytes of a position
    wide_out = -(-out * item // 16) * 16
    copies = x.numel() // into * wide_into + y // (item * out) * wide_out
    copies += prod(weight.shape[2:]) * wide_into * wide_out // item
    filled, plain = copies + 16, bytes_of(x) + y + bytes_of(weight) + 16
    half = item == 2
    if min(into, out) < VECTOR_CHANNELS:
        if x.dim() != 5:
            return 0, 0, 0
        if half:
            return filled, 0, 0
        return 0, 0, filled
    if x.dim() == 5:
        forward = plain
        if transposed or x.dtype is torch.bfloat16:
            forward = filled
        return forward, filled, filled
    if not half:
        return 0, 0, 0
    if transposed:
        return filled, 0, 0
    return 0, filled, 0


def _require_floating(dtype: torch.dtype) -> None:
    """Raise cuDNN's RuntimeError for integers, which it does not convolve."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"getCudnnDataTypeFromScalarType() not supported for {scalar_name(dtype)}"
        )


def _runs_on_cudnn(x: Tensor) -> bool:
    """Return whether cuDNN convolves `x`: a batch of floating-point samples that is not empty."""
    return x.dtype.is_floating_point and x.dim() > 2 and x.numel() > 0


cuda_operator("convolution", "_slow_conv2d_forward", input="self")
sums_in_float32(aten.convolution, require=_require_floating)
sums_in_float32(aten.convolution_overrideable, aten.convolution_backward)


def convolution_format(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> str:
    """Return the format in which a convolution multiplies its factors, such as "tf32".

    Depthwise kernels do not use tensor cores.
    """
    # Without cuDNN, PyTorch's own kernels multiply with cuBLAS.
    operation = "matmul"
    if _cudnn_is_enabled():
        operation = "conv"
    format = product_format(x.dtype, x._gpu, operation)  # type: ignore[attr-defined]
    if format == "tf32" and is_depthwise(x, weight, transposed, groups):
        return "float32"
    return format


def _in_tf32(
    x: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *mask: Any,
    **rest: Any,
) -> bool:
    """Return whether a convolution, or its backward pass, uses TF32.

    The arguments are those of `aten::convolution` without the bias.
    """
    return convolution_format(x, weight, transposed, groups) == "tf32"


def _rounding_backward(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, which is `convolution_backward`, with factors rounded to TF32 as on CUDA.

    The bias's gradient is a sum, so its terms are not rounded.
    """

    def kernel(
        grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *sizes: Any, **named: Any
    ) -> Any:
        if not _in_tf32(x, weight, *sizes, **named):
            return compute(grad, x, weight, bias_sizes, *sizes, **named)
        gradients = compute(*map(round_to_tf32, (grad, x, weight)), bias_sizes, *sizes, **named)
        if gradients[2] is not None:
            dims = [dim for dim in range(grad.dim()) if dim != 1]
            aten.sum.IntList_out(grad, dims, out=gradients[2])
        return gradients

    return kernel


def _forward_in_tf32(
    x: Tensor, weight: Tensor, bias: Any = None, *sizes: Any, **named: Any
) -> bool:
    """Return whether a convolution uses TF32. The arguments are those of `aten::convolution`."""
    return _in_tf32(x, weight, *sizes, **named)


rounds_factors(aten.convolution, (0, 1), _forward_in_tf32)
for _overload in aten.convolution_backward.overloads():
    _func = getattr(aten.convolution_backward, _overload)
    CPU_KERNELS[_func] = _rounding_backward(CPU_KERNELS[_func])


@device_error("convolution")
def operands_elsewhere(given: Devices) -> str | None:
    """Return PyTorch's message for a weight or a bias on the CPU and an input on a GPU.

    `given` has the name and the tensor of each argument. Returns None if the weight or the bias is
    on another GPU.
    """
    found = dict(given)
    image = found["input"]
    argument = next(
        name for name in ("weight", "bias") if name in found and found[name].device != image.device
    )
    if found[argument].is_cuda:
        return None
    return _types_differ(image, argument, found[argument])


def _types_differ(image: Tensor, argument: str, other: Tensor) -> str:
    """Return PyTorch's message that the input's type differs from that of another argument.

    `image` is the input, and `other` the argument with the name `argument`.
    """
    return f"Input type ({image.type()}) and {argument} type ({other.type()}) should be the same"


# The first operators of the kernels that the CPU may choose.
FIRST_OPERATORS = {
    "Slow2d": "__slow_conv2d_forward",
    "SlowTranspose2d": "_slow_conv_transpose2d",
    "SlowDilated2d": "__slow_conv_dilated2d",
    "SlowDilated3d": "__slow_conv_dilated3d",
    "SlowTranspose3d": "__slow_conv_transpose3d",
}


def image_on_host(call: Call) -> Exception:
    """Return CUDA's error for an input on the CPU and a weight or bias on a GPU.

    PyTorch chooses one of the CPU's kernels, and the error is that of this kernel
    (native/Convolution.cpp).
    """
    x, weight, bias = call.args[:3]
    chosen = _select_on_cpu(*call.args[:9]).name
    argument, other = ("weight", weight) if weight.is_cuda else ("bias", bias)
    if chosen in ("Mkldnn", "???"):  # Python has no name for oneDNN's transposed convolution
        return RuntimeError(
            f"{_types_differ(x, argument, other)} "
            f"or input should be a MKLDNN tensor and {argument} is a dense tensor"
        )
    if chosen in FIRST_OPERATORS:
        return RuntimeError(
            argument_differs(
                [("self", x), (argument, other)], f"wrapper_CUDA_{FIRST_OPERATORS[chosen]}"
            )
        )
    if chosen == "Slow3d":
        return NotImplementedError(
            "Could not run 'aten::slow_conv3d_forward' with arguments from the 'CUDA' backend."
        )
    return RuntimeError(_types_differ(x, argument, other))


@shapes_by("convolution")
def convolution_shape(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return a meta tensor like the output of a convolution.

    Its channels are last if those of the input or of the weight are
    (cudnn_conv_suggest_memory_format, native/ConvUtils.h).
    """
    shape = aten.convolution.default(x, weight, *rest)
    if x.dtype is torch.float64:
        return shape
    for tensor in (x, weight):
        form = suggest_memory_format(tensor)
        if form is not torch.contiguous_format:
            return shape.contiguous(memory_format=form)
    return shape


@handles("convolution")
def convolution(call: Call) -> Any:
    """Run the operator `convolution`, and allocate cuDNN's workspace for it."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if not x.is_cuda:
        raise image_on_host(call)
    # Otherwise the CPU's kernel checks the bias first, with the same words as CUDA.
    weight_is_first = bias is None or transposed
    if x.dtype != weight.dtype and weight_is_first:
        raise RuntimeError(
            f"Input type ({tensor_type(x.dtype)}) and weight type ({tensor_type(weight.dtype)}) "
            "should be the same"
        )
    if call.kwargs or not _runs_on_cudnn(x):
        return operators.compute(call)

    def plan(outputs: list[Any]) -> Plan:
        spaces = figures(x, outputs[0], weight, stride, padding, dilation, transposed, groups)
        return Out(0), spaces[OUTPUT], -spaces[OUTPUT]

    return perform(call, plan)


@handles("cudnn_convolution", "cudnn_convolution_transpose")
def cudnn_convolution(call: Call) -> Any:
    """Run the operators that call cuDNN by name, in the same way as `convolution`."""
    x, weight, padding, *rest = call.args
    transposed = call.op.name.endswith("transpose")
    output_padding = rest.pop(0) if transposed else [0] * (x.dim() - 2)
    stride, dilation, groups = rest[:3]
    args = (x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    return convolution(Call(operator(aten.convolution.default), args, {}))


def select_backend(
    on_cpu: Any, input: Tensor, weight: Tensor, bias: Any, *sizes: Any, **named: Any
) -> Any:
    """Return the backend of a convolution: cuDNN's kernels or PyTorch's own.

    PyTorch uses its own kernels if cuDNN is off, and for groups of one channel
    (native/Convolution.cpp). In half precision, cuDNN takes some of these groups, by a table of
    sizes in PyTorch. This rule ignores that.
    """
    if not input.is_cuda or not input.numel():
        return on_cpu(input, weight, bias, *sizes, **named)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    given = named | dict(zip(names, sizes, strict=False))
    groups, transposed = given["groups"], given["transposed"]
    dims = max(weight.dim() - 2, 2)
    padded = zip(given["output_padding"], given["stride"], strict=True)
    cudnn = torch.backends.cudnn.enabled and all(added < step for added, step in padded)
    own_depthwise = not (cudnn and lies_channels_last(input, dims))
    if is_depthwise(input, weight, transposed, groups) and own_depthwise:
        name = f"CudaDepthwise{dims}d"
    elif cudnn:
        name = "Cudnn"
        if transposed:
            name = "CudnnTranspose"
    elif transposed:
        name = f"SlowTranspose{dims}d"
    elif dims == 3 or max(given["dilation"]) > 1:
        name = f"SlowDilated{dims}d"
    else:
        name = f"Slow{dims}d"
    return getattr(torch._C._ConvBackend, name)  # type: ignore[attr-defined]


def is_depthwise(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """Return whether a convolution is depthwise: each input channel is a group of its own."""
    return groups == x.shape[1] > 1 and not transposed and not weight.shape[0] % groups


def lies_channels_last(x: Tensor, dims: int) -> bool:
    """Return whether the channels of `x` are last in memory.

    `x` is a batch of samples with `dims` dimensions besides the channels.
    """
    form = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    return x.dim() == dims + 2 and not x.is_contiguous() and x.is_contiguous(memory_format=form)


def replacements(machine: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch._C, {"_select_conv_backend": partial(select_backend, torch._C._select_conv_backend)}


@handles("convolution_backward")
def convolution_backward(call: Call) -> Any:
    """Compute the gradients of input, weight and bias, in this order.

    The bias's gradient is a sum. The kernels for the other two copy an output's gradient that is
    not dense.
    """
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args
    if call.kwargs or not _runs_on_cudnn(x):
        return operators.compute(call)
    spaces = figures(x, grad, weight, stride, padding, dilation, transposed, groups)
    is_dense = grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
    copy = 0
    if not is_dense:
        copy = bytes_of(grad)
    both, each = (copy, 0) if transposed else (0, copy)
    of_input: Plan = ()
    if mask[0]:
        space = spaces[INPUT_GRADIENT]
        of_input = Out(0), each, space, -space, -each
    of_weight: Plan = ()
    if mask[1]:
        space = spaces[WEIGHT_GRADIENT]
        of_weight = each, Out(1), space, -space, -each
    # PyTorch's own depthwise kernels compute the weight's gradient first.
    own_kernels = groups == x.shape[1] > 1 and not any(spaces)
    first, second = (of_weight, of_input) if own_kernels else (of_input, of_weight)
    steps: list[Any] = [both, *first, *second, -both]
    if mask[2]:
        dims = [d for d in range(grad.dim()) if d != 1]
        sums = reductions.staging(grad, dims, reductions.sum_bytes(grad.dtype))
        steps += [Out(2), *sums, *(-size for size in reversed(sums))]
    return perform(call, lambda outputs: tuple(steps))


# Time


@device_time("convolution")
def convolution_time(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of a convolution, which cuDNN computes as a matrix product.

    The work has the product's operations, the copies that reorder the channels, and the separate
    kernel that adds a bias (ATen/native/cudnn/ConvShared.cpp). `results[0]` is the output. `moved`
    is the bytes of all arguments and results.
    """
    names = ("input", "weight", "bias", "transposed", "groups")
    x, weight, bias, transposed, groups = (call.argument(name) for name in names)
    out = results[0]
    if not x.numel() or x.dim() != weight.dim():  # nothing to do, or one sample without a batch
        return Work(moved)
    cudnn = _cudnn_calls(x, weight, transposed, groups)
    launches = int(bias is not None and cudnn > 0)
    clocks = 0.0
    if bias is not None:
        clocks = UNVECTORIZED * out.numel()
    if is_depthwise(x, weight, transposed, groups):
        clocks += _depthwise_clocks(x, weight, cudnn)[OUTPUT] * out.numel()
        clocks = clocks_beyond_memory(call.gpu.profile, clocks, moved)
        if cudnn == 0:
            launches = DEPTHWISE_LAUNCHES
        return Work(moved, clocks=clocks, cudnn=cudnn, launches=launches)
    flops = _flops(x, weight, transposed, out.shape[2:]) / CONVOLUTION
    format = convolution_format(x, weight, transposed, groups)
    padding = _padding_factor(x, weight, transposed, groups, format)
    around = _reordered_bytes(x, weight, out, format)
    if bias is not None:
        around += 2 * bytes_of(out)
    return Work(
        moved,
        flops * padding,
        format,
        round(out.numel() * padding),
        clocks,
        around=around,
        cudnn=cudnn,
        launches=launches,
    )


@device_time("convolution_backward")
def convolution_backward_time(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of the gradients of input, weight and bias that are computed.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    names = ("grad_output", "input", "weight", "transposed", "groups", "output_mask")
    grad, x, weight, transposed, groups, mask = (call.argument(name) for name in names)
    if not x.numel():
        return Work(moved)
    gradients = mask[0] + mask[1]
    calls = _cudnn_calls(x, weight, transposed, groups)
    cudnn = gradients * calls
    if is_depthwise(x, weight, transposed, groups):
        _, per_input, per_tap = _depthwise_clocks(x, weight, calls)
        taps = grad.numel() * prod(weight.shape[2:]) * (1 + FEW_PIXELS / prod(grad.shape[2:]))
        clocks = mask[0] * per_input * x.numel() + mask[1] * per_tap * taps
        clocks = clocks_beyond_memory(call.gpu.profile, clocks, moved)
        return Work(
            moved,
            clocks=clocks,
            around=mask[2] * bytes_of(grad),
            cudnn=cudnn,
            launches=DEPTHWISE_LAUNCHES * (cudnn == 0),
        )
    flops = _flops(x, weight, transposed, grad.shape[2:]) * gradients / CONVOLUTION_BACKWARD
    format = convolution_format(x, weight, transposed, groups)
    padding = _padding_factor(x, weight, transposed, groups, format)
    around = gradients * _reordered_bytes(x, weight, grad, format) + mask[2] * bytes_of(grad)
    return Work(
        moved, flops * padding, format, round(grad.numel() * padding), around=around, cudnn=cudnn
    )


def _cudnn_calls(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> int:
    """Return the number of cuDNN calls for each result of a convolution.

    It is 1, or 0 if PyTorch's own kernels run instead.
    """
    dims = max(weight.dim() - 2, 2)
    depthwise = is_depthwise(x, weight, transposed, groups)
    own_kernels = depthwise and not lies_channels_last(x, dims)
    return int(torch.backends.cudnn.enabled and not own_kernels)


def _depthwise_clocks(x: Tensor, weight: Tensor, cudnn: int) -> tuple[float, float, float]:
    """Return the clocks of depthwise kernels on one multiprocessor.

    They are per element of the output, per element of the input's gradient, and per product of the
    weight's gradient. Depthwise kernels do not use tensor cores. PyTorch's kernels
    (ATen/native/cuda/DepthwiseConv2d.cu) are unrolled for squares of 1, 3 and 5 and take equally
    long for all dtypes. With channels last, cuDNN's kernels run. Their gradient of wide windows in
    float32 is slow. The numbers are from benchmarks/timing/convolutions.json, where the channels
    make no difference and the stride makes little.
    """
    taps, sides = prod(weight.shape[2:]), set(weight.shape[2:])
    if cudnn:
        per_output = 0.09
        if x.itemsize == 2:
            per_output = 0.05
        is_slow = max(sides) >= WIDE_WINDOW and x.itemsize == 4
        return per_output * taps, 0.1 * taps, 1.25 if is_slow else 0.065
    if weight.dim() == 4 and sides in ({1}, {3}, {5}):
        return 1.5 + 0.107 * taps, 4.3 + 0.02 * taps, 0.39
    return 0.175 * taps, 0.227 * taps, 0.39


def _has_tensor_cores(x: Tensor, format: str) -> bool:
    """Return whether the GPU of `x` has tensor cores that multiply in this format."""
    rates = x._gpu.profile.peak_flops  # type: ignore[attr-defined]
    return rates[format] > rates["float32"]


def _padding_factor(x: Tensor, weight: Tensor, transposed: bool, groups: int, format: str) -> float:
    """Return the factor by which padding increases the work of a convolution.

    Channels are padded to tiles and to vectors. Kernels without tensor cores, and groups of one
    channel, are not padded.
    """
    if transposed:
        into, out = weight.shape[0] // groups, weight.shape[1]
    else:
        into, out = weight.shape[1], weight.shape[0] // groups
    if not weight.numel() or into == out == 1 or not _has_tensor_cores(x, format):
        return 1.0
    padded_out = -(-out // CHANNEL_TILE) * CHANNEL_TILE
    padded_into = -(-into // CHANNEL_VECTOR) * CHANNEL_VECTOR
    return padded_out / out * (padded_into / into)


def _reordered_bytes(x: Tensor, weight: Tensor, out: Tensor, format: str) -> int:
    """Return the bytes that are moved to reorder the channels of a convolution's input and output.

    Both are read and written once more. Tensor cores need the channels last, unless the weight's
    window is a single point.
    """
    last = x.dim() == 4 and (lies_channels_last(x, 2) or lies_channels_last(weight, 2))
    if last or prod(weight.shape[2:]) == 1 or not _has_tensor_cores(x, format):
        return 0
    return 2 * (bytes_of(x) + bytes_of(out))


def _flops(x: Tensor, weight: Tensor, transposed: bool, extent: Sequence[int]) -> int:
    """Return the floating-point operations of a convolution. `extent` is the output's size.

    Every output position uses all weights. In a transposed convolution, every input position does.
    """
    positions = prod(x.shape[2:] if transposed else extent)
    return 2 * x.shape[0] * positions * weight.numel()
