"""Convolutions as cuDNN computes them: a workspace for the output, one for the input's gradient, one for the weight's.

`convolution_workspaces` says how many bytes cuDNN takes. Order of allocations: PyTorch's native/cudnn/ConvShared.cpp and
native/Convolution.cpp.
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
CONVOLUTION, CONVOLUTION_BACKWARD = 0.85, 0.5  # of a product's rate
CHANNEL_TILE, CHANNEL_VECTOR = (
    128,
    8,
)  # output channels are computed so many at a time, input channels read so many at a time
# Host time in launches, beside one, of PyTorch's own depthwise kernels and of their backward pass.
# Measured by benchmarks/timing/host_functions.py, rounded.
DEPTHWISE_LAUNCHES = 1
FEW_PIXELS = 75  # an image of so many takes a depthwise weight's gradient twice as long a pixel as a large one
WIDE = 7  # a window
FEW = 8  # channels on either side, up to which the rule of few channels holds
VECTOR = 4  # channels, from which on cuDNN copies so few into whole vectors


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
    """Return the bytes of the three workspaces. `result` has the shape of the output."""
    dims = x.dim() - 2
    name = str(x.dtype)[6:]
    if name not in DTYPES:  # cuDNN's kernels for images of float64 asked for none
        copies = 0 if dims == 2 else bytes_of(x) + bytes_of(result) + bytes_of(weight)
        return copies, copies, copies
    tensors = (x, weight)
    last = dims == 2 and any(lies_channels_last(tensor, dims) for tensor in tensors)
    into, out = _channels(weight, transposed, groups)
    if max(into, out) <= FEW:
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
    """Return three numbers: those of each dimension, or one number for all, and then `fill`."""
    given = tuple(numbers)
    if len(given) == 1:
        given *= dims
    return given + (fill,) * (3 - dims)


def _channels(weight: Tensor, transposed: bool, groups: int) -> tuple[int, int]:
    """Channels of the input and of the output."""
    first, second = weight.shape[0], weight.shape[1] * groups
    return (first, second) if transposed else (second, first)


def few_channels(
    x: Tensor, y: int, weight: Tensor, transposed: bool, groups: int
) -> tuple[int, ...]:
    """Return the workspaces if the channels do not fill the vectors that tensor cores read.

    cuDNN then takes nothing, or it copies with channels last, filled up to whole vectors of
    16 bytes. This is an estimate after 150 convolutions of three to eight channels.
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
    if min(into, out) < VECTOR:
        if x.dim() != 5:
            return 0, 0, 0
        if half:
            return filled, 0, 0
        return 0, 0, filled
    if x.dim() == 5:
        forward = filled if transposed or x.dtype is torch.bfloat16 else plain
        return forward, filled, filled
    if not half:
        return 0, 0, 0
    if transposed:
        return filled, 0, 0
    return 0, filled, 0


def _require_floating(dtype: torch.dtype) -> None:
    """cuDNN convolves no integers: raises RuntimeError for them."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            f"getCudnnDataTypeFromScalarType() not supported for {scalar_name(dtype)}"
        )


def _takes(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.dim() > 2 and x.numel() > 0


cuda_operator("convolution", "_slow_conv2d_forward", input="self")
sums_in_float32(aten.convolution, require=_require_floating)
sums_in_float32(aten.convolution_overrideable, aten.convolution_backward)


def convolution_format(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> str:
    """Return the format in which a convolution multiplies. No depthwise kernel uses tensor cores."""
    # Without cuDNN, PyTorch's own kernels multiply with cuBLAS.
    operation = "conv" if _cudnn_is_enabled() else "matmul"
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
    """Return whether a convolution, or its backward pass, uses TF32."""
    return convolution_format(x, weight, transposed, groups) == "tf32"


def _rounding_backward(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Add TF32 to a kernel of `convolution_backward`.

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
    """Return whether a convolution with these arguments uses TF32."""
    return _in_tf32(x, weight, *sizes, **named)


rounds_factors(aten.convolution, (0, 1), _forward_in_tf32)
for _overload in aten.convolution_backward.overloads():
    _func = getattr(aten.convolution_backward, _overload)
    CPU_KERNELS[_func] = _rounding_backward(CPU_KERNELS[_func])


@device_error("convolution")
def operands_elsewhere(given: Devices) -> str | None:
    found = dict(given)
    image = found["input"]
    argument = next(
        name for name in ("weight", "bias") if name in found and found[name].device != image.device
    )
    if found[argument].is_cuda:
        return None
    return f"Input type ({image.type()}) and {argument} type ({found[argument].type()}) should be the same"


# The kernels that the CPU would choose, and the operators by which they begin.
FIRST_OPERATORS = {
    "Slow2d": "__slow_conv2d_forward",
    "SlowTranspose2d": "_slow_conv_transpose2d",
    "SlowDilated2d": "__slow_conv_dilated2d",
    "SlowDilated3d": "__slow_conv_dilated3d",
    "SlowTranspose3d": "__slow_conv_transpose3d",
}


def image_on_host(call: Call) -> Exception:
    """CUDA's error for an image on the CPU, by the kernel that PyTorch then chooses (native/Convolution.cpp): one of the CPU's."""
    x, weight, bias = call.args[:3]
    chosen = _select_on_cpu(*call.args[:9]).name
    argument, other = ("weight", weight) if weight.is_cuda else ("bias", bias)
    if chosen in ("Mkldnn", "???"):  # Python has no name for oneDNN's transposed convolution
        return RuntimeError(
            f"Input type ({x.type()}) and {argument} type ({other.type()}) should be the same "
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
    return RuntimeError(
        f"Input type ({x.type()}) and {argument} type ({other.type()}) should be the same"
    )


@shapes_by("convolution")
def convolution_shape(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Channels last where those of the input or the weight are (cudnn_conv_suggest_memory_format, native/ConvUtils.h)."""
    shape = aten.convolution.default(x, weight, *rest)
    forms = [
        form
        for form in map(suggest_memory_format, (x, weight))
        if form is not torch.contiguous_format
    ]
    return (
        shape.contiguous(memory_format=forms[0])
        if forms and x.dtype is not torch.float64
        else shape
    )


@handles("convolution")
def convolution(call: Call) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if not x.is_cuda:
        raise image_on_host(call)
    if x.dtype != weight.dtype and (
        bias is None or transposed
    ):  # else the bias is looked at first, in the CPU's words
        raise RuntimeError(
            f"Input type ({tensor_type(x.dtype)}) and weight type ({tensor_type(weight.dtype)}) should be the same"
        )
    if call.kwargs or not _takes(x):
        return operators.compute(call)

    def plan(outputs: list[Any]) -> Plan:
        space = figures(x, outputs[0], weight, stride, padding, dilation, transposed, groups)[
            OUTPUT
        ]
        return Out(0), space, -space

    return perform(call, plan)


@handles("cudnn_convolution", "cudnn_convolution_transpose")
def cudnn_convolution(call: Call) -> Any:
    """The same, asked of cuDNN by name."""
    x, weight, padding, *rest = call.args
    transposed = call.op.name.endswith("transpose")
    added = rest.pop(0) if transposed else [0] * (x.dim() - 2)
    stride, dilation, groups = rest[:3]
    args = (x, weight, None, stride, padding, dilation, transposed, added, groups)
    return convolution(Call(operator(aten.convolution.default), args, {}))


def select_backend(
    on_cpu: Any, input: Tensor, weight: Tensor, bias: Any, *sizes: Any, **named: Any
) -> Any:
    """Whose kernels convolve: cuDNN's, or PyTorch's own where cuDNN is off, and for groups of one channel (native/Convolution.cpp).

    That cuDNN takes some such groups in half precision, by a table of its sizes, is left out.
    """
    if not input.is_cuda or not input.numel():
        return on_cpu(input, weight, bias, *sizes, **named)
    given = named | dict(
        zip(
            ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
            sizes,
            strict=False,
        )
    )
    groups, transposed = given["groups"], given["transposed"]
    dims = max(weight.dim() - 2, 2)
    cudnn = torch.backends.cudnn.enabled and all(
        more < step for more, step in zip(given["output_padding"], given["stride"], strict=True)
    )
    if is_depthwise(input, weight, transposed, groups) and not (
        cudnn and lies_channels_last(input, dims)
    ):
        name = f"CudaDepthwise{dims}d"
    elif cudnn:
        name = "CudnnTranspose" if transposed else "Cudnn"
    else:
        kind = (
            "Transpose"
            if transposed
            else "Dilated"
            if dims == 3 or max(given["dilation"]) > 1
            else ""
        )
        name = f"Slow{kind}{dims}d"
    return getattr(torch._C._ConvBackend, name)  # type: ignore[attr-defined]


def is_depthwise(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return groups == x.shape[1] > 1 and not transposed and not weight.shape[0] % groups


def lies_channels_last(x: Tensor, dims: int) -> bool:
    form = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    return x.dim() == dims + 2 and not x.is_contiguous() and x.is_contiguous(memory_format=form)


def replacements(machine: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield torch._C, {"_select_conv_backend": partial(select_backend, torch._C._select_conv_backend)}


@handles("convolution_backward")
def convolution_backward(call: Call) -> Any:
    """The input's gradient, the weight's, then the bias's as a sum; each copies a gradient that does not lie dense."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args
    if call.kwargs or not _takes(x):
        return operators.compute(call)
    spaces = figures(x, grad, weight, stride, padding, dilation, transposed, groups)
    own_kernels = groups == x.shape[1] > 1 and not any(
        spaces
    )  # PyTorch's for depthwise convolutions: the weight's gradient comes first
    copy = (
        0
        if grad.is_contiguous() or grad.is_contiguous(memory_format=torch.channels_last)
        else bytes_of(grad)
    )
    both, each = (copy, 0) if transposed else (0, copy)
    of_input: Plan = (
        (Out(0), each, spaces[INPUT_GRADIENT], -spaces[INPUT_GRADIENT], -each) if mask[0] else ()
    )
    of_weight: Plan = (
        (each, Out(1), spaces[WEIGHT_GRADIENT], -spaces[WEIGHT_GRADIENT], -each) if mask[1] else ()
    )
    steps: list[Any] = (
        [both, *of_weight, *of_input, -both]
        if own_kernels
        else [both, *of_input, *of_weight, -both]
    )
    if mask[2]:
        dims = [d for d in range(grad.dim()) if d != 1]
        sums = reductions.staging(grad, dims, reductions.sum_bytes(grad.dtype))
        steps += [Out(2), *sums, *(-size for size in reversed(sums))]
    return perform(call, lambda outputs: tuple(steps))


# Time: the shares of a product's rate are read off benchmarks/timing/kernels.json (one H200, torch 2.11, cuDNN 9.19), rounded


@device_time("convolution")
def convolution_time(call: Call, results: list[Tensor], moved: int) -> Work:
    """A product, for which tensor cores want the channels last; a kernel of its own adds the bias (ATen/native/cudnn/ConvShared.cpp)."""
    x, weight, bias, transposed, groups = (
        call.argument(name) for name in ("input", "weight", "bias", "transposed", "groups")
    )
    out = results[0]
    if not x.numel() or x.dim() != weight.dim():  # nothing to do, or one sample without a batch
        return Work(moved)
    cudnn = _calls(x, weight, transposed, groups)
    beside = int(bias is not None and cudnn > 0)
    clocks = 0.0 if bias is None else UNVECTORIZED * out.numel()
    if is_depthwise(x, weight, transposed, groups):
        clocks += _depthwise_clocks(x, weight, cudnn)[OUTPUT] * out.numel()
        clocks = clocks_beyond_memory(call.gpu.profile, clocks, moved)
        if cudnn == 0:
            beside = DEPTHWISE_LAUNCHES
        return Work(moved, clocks=clocks, cudnn=cudnn, launches=beside)
    flops = _flops(x, weight, transposed, out.shape[2:]) / CONVOLUTION
    format = convolution_format(x, weight, transposed, groups)
    wasted = _wasted(x, weight, transposed, groups, format)
    around = _reordered(x, weight, out, format) + (0 if bias is None else 2 * bytes_of(out))
    outputs = round(out.numel() * wasted)
    return Work(
        moved, flops * wasted, format, outputs, clocks, around=around, cudnn=cudnn, launches=beside
    )


@device_time("convolution_backward")
def convolution_backward_time(call: Call, results: list[Tensor], moved: int) -> Work:
    names = ("grad_output", "input", "weight", "transposed", "groups", "output_mask")
    grad, x, weight, transposed, groups, mask = (call.argument(name) for name in names)
    if not x.numel():
        return Work(moved)
    gradients = mask[0] + mask[1]
    calls = _calls(x, weight, transposed, groups)
    cudnn = gradients * calls
    if is_depthwise(x, weight, transposed, groups):
        _, an_input, a_tap = _depthwise_clocks(x, weight, calls)
        taps = grad.numel() * prod(weight.shape[2:]) * (1 + FEW_PIXELS / prod(grad.shape[2:]))
        clocks = mask[0] * an_input * x.numel() + mask[1] * a_tap * taps
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
    wasted = _wasted(x, weight, transposed, groups, format)
    around = gradients * _reordered(x, weight, grad, format) + mask[2] * bytes_of(grad)
    return Work(
        moved, flops * wasted, format, round(grad.numel() * wasted), around=around, cudnn=cudnn
    )


def _calls(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> int:
    """Calls of cuDNN for each result: none where PyTorch's own kernels convolve."""
    own = is_depthwise(x, weight, transposed, groups) and not lies_channels_last(
        x, max(weight.dim() - 2, 2)
    )
    return int(torch.backends.cudnn.enabled and not own)


def _depthwise_clocks(x: Tensor, weight: Tensor, cudnn: int) -> tuple[float, float, float]:
    """Clocks of a multiprocessor for an output, for an input's gradient, and for a product of the weight's gradient.

    No tensor cores: PyTorch's kernels (ATen/native/cuda/DepthwiseConv2d.cu) are unrolled for squares of 1, 3 and 5, and any dtype takes as
    long. With channels last cuDNN's do it, whose kernel for the weight's gradient of wide windows in float32 is slow. Read off
    benchmarks/timing/convolutions.json, where the channels make no difference and the stride makes little.
    """
    taps, sides = prod(weight.shape[2:]), set(weight.shape[2:])
    if cudnn:
        return (
            (0.05 if x.itemsize == 2 else 0.09) * taps,
            0.1 * taps,
            1.25 if max(sides) >= WIDE and x.itemsize == 4 else 0.065,
        )
    if weight.dim() == 4 and sides in ({1}, {3}, {5}):
        return 1.5 + 0.107 * taps, 4.3 + 0.02 * taps, 0.39
    return 0.175 * taps, 0.227 * taps, 0.39


def _in_tensor_cores(x: Tensor, format: str) -> bool:
    """Return whether the GPU has tensor cores for the format.

    Kernels without tensor cores take the channels as they are.
    """
    rates = x._gpu.profile.peak_flops  # type: ignore[attr-defined]
    return rates[format] > rates["float32"]


def _wasted(x: Tensor, weight: Tensor, transposed: bool, groups: int, format: str) -> float:
    """How many times more tensor cores compute than is asked for: channels come in tiles and vectors, but where a group is one channel."""
    into, out = (
        (weight.shape[0] // groups, weight.shape[1])
        if transposed
        else (weight.shape[1], weight.shape[0] // groups)
    )
    if not weight.numel() or into == out == 1 or not _in_tensor_cores(x, format):
        return 1.0
    return (
        -(-out // CHANNEL_TILE)
        * CHANNEL_TILE
        / out
        * (-(-into // CHANNEL_VECTOR) * CHANNEL_VECTOR / into)
    )


def _reordered(x: Tensor, weight: Tensor, out: Tensor, format: str) -> int:
    """Bytes of reading and writing input and output once more: tensor cores want the channels last, unless the weight is a point."""
    last = x.dim() == 4 and any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
        for t in (x, weight)
    )
    return (
        0
        if last or prod(weight.shape[2:]) == 1 or not _in_tensor_cores(x, format)
        else 2 * (bytes_of(x) + bytes_of(out))
    )


def _flops(x: Tensor, weight: Tensor, transposed: bool, extent: Sequence[int]) -> int:
    """Floating-point operations: every output position has all weights, or every input position, of a transposed convolution."""
    return 2 * x.shape[0] * prod(x.shape[2:] if transposed else extent) * weight.numel()
