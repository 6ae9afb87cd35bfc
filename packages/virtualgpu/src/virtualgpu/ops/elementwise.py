"""Pointwise operators and softmax, where CUDA computes differently from the CPU.

Most pointwise operators allocate only their output and take the time of `work.pointwise`. The
others follow PyTorch's sources, which are named at each. Compared with recordings from an H200
(torch 2.11, CUDA 13.0).
"""

from collections.abc import Callable
from math import inf, log, pi
from typing import Any

import torch

from virtualgpu.clock.costs import clocks_beyond_memory
from virtualgpu.errors import not_implemented
from virtualgpu.ops import operators
from virtualgpu.ops.call import (
    Call,
    Work,
    bytes_of,
    composes,
    cuda_kernel,
    device_time,
    handles,
    made_of,
    operator,
    overwrites,
    refuses_half,
    temporaries,
)
from virtualgpu.ops.half import HALF, lacks
from virtualgpu.ops.reductions import staging, sum_bytes
from virtualgpu.ops.sequence import OUT, perform

aten = torch.ops.aten
# Elements of the longest row that stays in the registers between two passes
# (ATen/native/cuda/PersistentSoftmax.cuh).
LONG_ROW = 1024
# Clocks per element of a longer row (cunn_SoftMaxForward, ATen/native/cuda/SoftMax.cu).
LONG_ROW_ELEMENT = 0.8

overwrites("fill_", "zero_", "_foreach_zero_")
cuda_kernel("host_softmax", "_softmax", "_log_softmax")
refuses_half("polar", "complex", "special_")
for _name in ("igamma", "igamma_", "igammac", "igammac_"):
    lacks(f"{_name.removesuffix('_')}_cuda", getattr(aten, _name))
# Sources, in ATen/native/cuda: BinaryMulKernel.cu, AbsKernel.cu, UfuncCUDA_add.cu,
# CompareKernels.cu, BinaryDivTrueKernel.cu, MaxMinElementwiseKernel.cu, UnarySignKernels.cu,
# UnaryOpsKernel.cu and ReduceSumProdKernel.cu. CUDA can store these formats, but few of its kernels
# compute with them.
_STORED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
for _name in ("mul", "mul_", "abs", "abs_"):
    lacks(f"{_name.removesuffix('_')}_cuda", getattr(aten, _name), _STORED)
for _name in ("addcmul", "addcmul_"):
    lacks("addcmul_cuda", getattr(aten, _name), (torch.complex32,))
for _name in ("and", "or", "xor"):
    for _end in ("", "_"):
        lacks(f"bitwise_{_name}_cuda", getattr(aten, f"bitwise_{_name}{_end}"), _STORED)
for _name, _kernel in (("any", "or_cuda"), ("all", "and_cuda")):
    lacks(_kernel, getattr(aten, _name), (torch.complex32,))
cuda_kernel("ufunc_add_CUDA", "add", "add_", "sub", "sub_")
cuda_kernel("div_true_cuda", "div", "div_")
cuda_kernel("compare_cuda", "lt", "le", "gt", "ge")
cuda_kernel("max_elementwise_cuda", "maximum")
cuda_kernel("min_elementwise_cuda", "minimum")
cuda_kernel("neg_cuda", "neg", "neg_")
cuda_kernel("exp_cuda", "exp", "exp_")
cuda_kernel("sum_cuda", "sum")
cuda_kernel("max_all_cuda", "max")
cuda_kernel("min_all_cuda", "min")
cuda_kernel("mean_cuda", "mean")
cuda_kernel("std_cuda", "std", "var", "std_mean", "var_mean")
cuda_kernel("cumsum_cuda", "cumsum", "cumsum_")
cuda_kernel("cumprod_cuda", "cumprod", "cumprod_")
cuda_kernel("logcumsumexp_cuda", "_logcumsumexp", "logcumsumexp")
cuda_kernel("sigmoid_cuda", "sigmoid", "sigmoid_")
cuda_kernel("log_sigmoid_forward_cuda", "log_sigmoid_forward")
cuda_kernel("addcmul_cuda", "addcmul", "addcmul_")
cuda_kernel("addcdiv_cuda", "addcdiv", "addcdiv_")
cuda_kernel("lerp_cuda", "lerp", "lerp_")
cuda_kernel("GeluCUDAKernelImpl", "gelu", "gelu_")


@device_time("fill_", "zero_")
def overwriting(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a kernel that overwrites its argument without reading it.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(moved - bytes_of(call.args[0]))


# Pointwise


@temporaries("abs")
def of_complex(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the temporary that a function of complex numbers needs.

    Returns () if the argument is real. Source: aten/src/ATen/native/UnaryOps.cpp.
    """
    x = call.args[0]
    if x.dtype.is_complex and not result.dtype.is_complex:
        return (x.numel() * x.itemsize,)
    return ()


@handles("angle")
def angle(call: Call) -> torch.Tensor:
    """Run the operator `angle`, and return the angles.

    For complex numbers a complex temporary is allocated before the result. Raises RuntimeError for
    half precision. Sources: aten/src/ATen/native/UnaryOps.cpp and
    aten/src/ATen/native/cuda/UnaryComplexKernels.cu.
    """
    x = call.args[0]
    if x.dtype in HALF:
        raise not_implemented("angle_cuda", x.dtype)
    if call.op.outs or not x.dtype.is_complex:
        return operators.compute_or_into_given(call)
    size = bytes_of(x)
    return perform(call, (size, OUT, -size))


@temporaries("pow")
def power_of_a_number(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the temporary for a power whose base is a Python number.

    The temporary is the number as a tensor on the GPU. Powers of 1 have none, because the result is
    only filled (aten/src/ATen/native/Pow.cpp).
    """
    if call.func is not aten.pow.Scalar or call.args[0] == 1:
        return ()
    return (_kind_of(call.args[0]).itemsize,)


def _kind_of(number: Any) -> torch.dtype:
    """Return the dtype of the tensor that C++ makes from a Python number."""
    return {bool: torch.bool, int: torch.int64, float: torch.float64}.get(
        type(number), torch.complex128
    )


@handles("ldexp")
def ldexp(call: Call) -> torch.Tensor:
    """Run the operator `ldexp`: multiply by powers of 2 (aten/src/ATen/native/BinaryOps.cpp)."""
    if call.op.outs:
        return operators.into_given(call)
    return call.args[0] * torch.pow(2.0, call.args[1])


@handles("mvlgamma")
def mvlgamma(call: Call) -> torch.Tensor:
    """Run the operator `mvlgamma`: logarithms of gamma at p points per element, then their sum.

    Source: aten/src/ATen/native/UnaryOps.cpp.
    """
    x, p = call.args
    if call.op.outs:
        return operators.into_given(call)
    if not x.dtype.is_floating_point or p < 1:
        return operators.compute(call)
    points = torch.arange((1 - p) / 2, 0.5, 0.5, dtype=x.dtype, device=x.device) + x.unsqueeze(-1)
    return points.lgamma_().sum(-1).add_(p * (p - 1) * log(pi) / 4)


@handles("log_sigmoid_forward")
def log_sigmoid(call: Call) -> Any:
    """Run the operator `log_sigmoid_forward`. CUDA keeps no buffer for the backward pass.

    Source: aten/src/ATen/native/Activation.cpp.
    """
    x = call.args[0]
    if call.op.outs:
        return operators.into_given(call)
    output = operators.compute(call.of(aten.log_sigmoid.default), lambda: call.func(x)[0])
    return output, x.new_empty(0)


@handles("log_sigmoid_backward")
def log_sigmoid_backward(call: Call) -> Any:
    """Run the gradient of `log_sigmoid`.

    The CPU's kernel needs the buffer that CUDA does not keep.
    """
    gradient, x = call.args[:2]
    formula = Call(operator(aten.sigmoid_backward.default), (gradient, x), call.kwargs)
    return operators.compute(formula, lambda: call.func(gradient, x, torch.exp(-x.abs())))


def _choice(x: Any, other: Any, condition: torch.Tensor) -> torch.Tensor:
    """Return `torch.where(condition, x, other)`, where `x` or `other` can be a number.

    A number first becomes a tensor on the GPU.
    """
    dtype = torch.result_type(x, other)
    device = condition.device
    if isinstance(x, torch.Tensor):
        x = x.to(dtype)
    else:
        x = torch.scalar_tensor(x, dtype=dtype, device=device)
    if isinstance(other, torch.Tensor):
        other = other.to(dtype)
    else:
        other = torch.scalar_tensor(other, dtype=dtype, device=device)
    return torch.where(condition, x, other)


@composes("where.ScalarOther")
def where_scalar_other(condition: torch.Tensor, x: torch.Tensor, other: Any) -> torch.Tensor:
    """Compute `torch.where` with a number in second place, which becomes a tensor on the GPU.

    Source: aten/src/ATen/native/TensorCompare.cpp.
    """
    return _choice(x, other, condition)


@composes("where.ScalarSelf")
def where_scalar_self(condition: torch.Tensor, x: Any, other: torch.Tensor) -> torch.Tensor:
    """Compute `torch.where` with a number in first place, which becomes a tensor on the GPU."""
    return _choice(x, other, condition)


@handles("allclose")
def allclose(call: Call) -> bool:
    """Return whether all elements are close, with the operators of `isclose`.

    Source: aten/src/ATen/native/TensorCompare.cpp.
    """
    close = made_of(aten.isclose.default, *call.args, **call.kwargs)
    return bool(close.all().item())


@handles("equal")
def equal(call: Call) -> bool:
    """Return whether all elements are equal. Views of the same memory are not read.

    Source: aten/src/ATen/native/cuda/Equal.cpp.
    """
    x, y = call.args
    call.common_gpu()
    if x.shape != y.shape or not x.numel():
        return bool(x.shape == y.shape)
    same = x.data_ptr() == y.data_ptr() and x.dtype is y.dtype and x.stride() == y.stride()
    if same:
        return True
    alike = x == y
    return bool(alike.all().item())


@handles("isfinite")
def isfinite(call: Call) -> torch.Tensor:
    """Run the operator `isfinite` as comparisons with infinity and NaN.

    PyTorch always runs it as these operators.
    """
    return made_of(call.func, *call.args, **call.kwargs)


@handles("count_nonzero")
def count_nonzero(call: Call) -> torch.Tensor:
    """Count the elements that are not zero, with a comparison and a sum.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    if call.op.outs:
        return operators.into_given(call)
    x = call.args[0]
    dims = call.argument("dim")
    if isinstance(dims, int):
        dims = [dims]
    else:
        dims = list(dims or range(x.dim()))
    return (x != 0).sum(dims)


# Softmax


def contiguous_copies(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the contiguous copies that a kernel makes of these tensors.

    Tensors that are already contiguous need no copy.
    """
    return tuple(x.numel() * x.itemsize for x in tensors if not x.is_contiguous())


def contiguous_gradient(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the copy of the gradient (first argument) if it is not contiguous."""
    return contiguous_copies(call.args[0])


@temporaries("_softmax", "_log_softmax")
def softmax_input(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of a contiguous copy of the input (aten/src/ATen/native/cuda/SoftMax.cu)."""
    return contiguous_copies(call.args[0])


@temporaries("_softmax_backward_data")
def softmax_backward(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the product of gradient and output, and of a contiguous output.

    Source: aten/src/ATen/native/cuda/SoftMax.cu.
    """
    return call.args[0].numel() * call.args[0].itemsize, *contiguous_copies(call.args[1])


@temporaries("_log_softmax_backward_data")
def log_softmax_backward(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of contiguous copies of the gradient and of the output."""
    return contiguous_copies(*call.args[:2])


@handles("_softmax", "_log_softmax")
def softmax(call: Call) -> Any:
    """Run the operator `_softmax`. CUDA can read float16 and write float32 in one kernel."""
    x, dim, to_float = call.args
    if call.op.outs or not to_float:
        return operators.compute_or_into_given(call)
    result = operators.compute(call, lambda: call.func(x.float(), dim, False))
    call.gpu.scratch(softmax_input(call, result))
    return result


@handles("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward_data(call: Call) -> Any:
    """Run the gradient of softmax. CUDA can write it in the dtype of the forward pass's input."""
    gradient, output, dim, dtype = call.args
    if call.op.outs or gradient.dtype is dtype:
        return operators.compute_or_into_given(call)
    own = gradient.dtype
    result = operators.compute(call, lambda: call.func(gradient, output, dim, own).to(dtype))
    rule = log_softmax_backward if "log" in call.op.name else softmax_backward
    call.gpu.scratch(rule(call, result))
    return result


@device_time("_softmax", "_log_softmax")
def softmax_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a softmax. A long row is read several times from the nearest cache.

    This takes time that does not depend on the memory's speed. A slow memory hides it.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x, dim = call.args[:2]
    if not x.dim() or x.shape[dim] <= LONG_ROW:
        return Work(moved)
    clocks = clocks_beyond_memory(call.gpu.profile, LONG_ROW_ELEMENT * x.numel(), moved)
    return Work(moved, clocks=clocks)


@device_time("_softmax_backward_data")
def softmax_backward_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a softmax's gradient, which takes two kernels.

    The first one multiplies the gradient by the output. Source: softmax_backward_cuda_out,
    ATen/native/cuda/SoftMax.cu.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return Work(2 * moved)


def _softmax_of(operator: Any) -> Callable[..., torch.Tensor]:
    """Return the composite function softmax, or log_softmax, that calls `operator`."""

    def composed(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Compute softmax over `dim` with the dtypes of aten/src/ATen/native/SoftMax.cpp."""
        if x.dtype is torch.float16 and dtype is torch.float32:
            return operator(x, dim, True)
        if dtype is not None:
            x = x.to(dtype)
        return operator(x, dim, False)

    return composed


composes("softmax.int")(_softmax_of(aten._softmax.default))
composes("log_softmax.int")(_softmax_of(aten._log_softmax.default))


@handles("logsumexp")
def logsumexp(call: Call) -> torch.Tensor:
    """Run `logsumexp` with the operators that aten/src/ATen/native/ReduceOps.cpp calls."""
    x, dims = call.args[:2]
    keepdim = call.argument("keepdim")
    has_exponential = x.dtype.is_floating_point or x.dtype.is_complex
    if "out" in call.kwargs or not x.numel() or not has_exponential:
        return operators.into_given(call)
    if x.dtype.is_complex:
        return operators.compute(call)
    largest = x.amax(dims, True)
    squeezed = largest
    if not keepdim:
        squeezed = largest.squeeze(tuple(dims) or tuple(range(x.dim())))
    sizes = squeezed.abs()
    infinite = sizes == inf
    squeezed.masked_fill_(infinite, 0)
    del infinite, sizes  # CUDA frees them in this order
    return (x - largest).exp_().sum(dims, keepdim).log_().add_(squeezed)


@temporaries("renorm", "renorm_")
def renorm(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the norms of the slices (aten/src/ATen/native/Normalization.cpp)."""
    x, _, dim = call.args[:3]
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    accumulator = sum_bytes(x.dtype)
    norms = x.shape[dim] * accumulator
    return norms, *staging(x, others, accumulator)
