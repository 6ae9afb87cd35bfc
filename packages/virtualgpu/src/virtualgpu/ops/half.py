"""Half precision as CUDA's libraries compute it.

Products of float16 or bfloat16 are summed in float32 and rounded once. The CPU's own kernels round
in the same way at best, and take up to a hundred times as long as float32 kernels. If CUDA has a
kernel for half precision and the CPU does not, the result is also computed in float32 and rounded.
Complex numbers of two halves (complex32) are computed in complex64.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.errors import not_implemented
from virtualgpu.ops.call import CPU_KERNELS

HALF = (torch.float16, torch.bfloat16)
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
OF_TWO_BYTES = (torch.float16, torch.complex32)
# Operators for which CUDA has complex32 kernels, unlike the CPU. PyTorch's native/cuda calls the
# dtype kComplexHalf.
FOR_COMPLEX_HALF = {
    "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "cos", "cosh", "div", "exp", "lerp",
    "log", "logaddexp", "pow", "prod", "rsqrt", "sigmoid", "sigmoid_backward", "sin", "sinh",
    "sqrt", "sum", "tan", "tanh", "tanh_backward", "trace",
}  # fmt: skip
UNIMPLEMENTED = re.compile(r'^"(\w+)" not implemented for')
aten = torch.ops.aten


def sums_in_float32(
    *packets: Any,
    stay: tuple[int, ...] = (),
    require: Callable[[torch.dtype], None] | None = None,
    formats: tuple[torch.dtype, ...] = HALF,
) -> None:
    """Make these operators compute in float32 for inputs in half precision, and round once.

    Outputs at the positions `stay` remain float32. `require` is called with the dtype first and may
    raise an error. `formats` are the dtypes to which this applies.
    """
    for packet in packets:
        for overload in packet.overloads():
            func = getattr(packet, overload)
            own_format = overload.startswith("dtype")
            if own_format:
                CPU_KERNELS[func] = into_format(packet, func)
            else:
                CPU_KERNELS[func] = in_float32(packet, func, stay, require, formats)


def widened(x: Any) -> Any:
    """Return a half-precision tensor or dtype in its wider format, and anything else unchanged.

    float16 and bfloat16 become float32, and complex32 becomes complex64.
    """
    if isinstance(x, torch.Tensor):
        if x.dtype in HALF:
            return x.float()
        if x.dtype is torch.complex32:
            return x.to(torch.complex64)
        return x
    if isinstance(x, torch.dtype):
        return WIDE.get(x, x)
    return x


def _differ(args: tuple, dtype: torch.dtype) -> bool:
    """Return whether a tensor argument has another floating-point dtype than `dtype`."""
    for x in args:
        if isinstance(x, torch.Tensor) and x.dtype is not dtype and x.dtype.is_floating_point:
            return True
    return False


def in_float32(
    packet: Any,
    func: Any,
    stay: tuple[int, ...] = (),
    require: Callable[[torch.dtype], None] | None = None,
    formats: tuple[torch.dtype, ...] = HALF,
) -> Callable[..., Any]:
    """Return a kernel of the operator `func` that computes in float32 and rounds the result.

    It does so if the first tensor has one of the `formats`, and computes in complex64 for
    complex32. Its arguments are plain tensors. Outputs at the positions `stay` remain float32.
    `require` is called with the dtype first and may raise an error.
    """
    name = func._schema.name.removeprefix("aten::")
    writes_first = name.endswith("_")
    pure = packet
    if writes_first:
        pure = getattr(aten, name.removesuffix("_"))
    plain = getattr(func, "_op", func)
    types = [str(argument.type) for argument in func._schema.arguments]
    place = types.index("Tensor") if "Tensor" in types else 0

    def rounded(result: Any, dtype: torch.dtype, index: int = -1) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(rounded(x, dtype, index) for index, x in enumerate(result))
        if not isinstance(result, torch.Tensor) or index in stay:
            return result
        if result.dtype is torch.float32:
            return result.to(torch.float16 if dtype is torch.complex32 else dtype)
        if result.dtype is torch.complex64 and dtype in OF_TWO_BYTES:
            return result.to(torch.complex32)
        return result

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[place].dtype
        if require is not None:
            require(dtype)
        if dtype not in formats and (not kwargs or kwargs.get("dtype") not in formats):
            return plain(*args, **kwargs)
        if _differ(args, dtype):
            try:
                return plain(*args, **kwargs)
            except RuntimeError as error:
                # Widened factors would be equal, and a GPU refuses different ones.
                if not UNIMPLEMENTED.match(str(error)):
                    raise
        out = kwargs.pop("out", None)
        result = pure(*map(widened, args), **{key: widened(x) for key, x in kwargs.items()})
        if writes_first:
            return args[0].copy_(result)
        if out is not None:
            return out.resize_(result.shape).copy_(result)
        if kwargs:
            dtype = kwargs.get("dtype") or dtype
        return rounded(result, dtype)

    return kernel


def into_format(packet: Any, func: Any) -> Callable[..., Any]:
    """Return a kernel for plain tensors of a product with `out_dtype`, which only CUDA has.

    The product of half precision can be float32.

    The kernel raises RuntimeError as CUDA does (aten/src/ATen/native/cuda/Blas.cpp).
    """
    place = [argument.name for argument in func._schema.arguments].index("out_dtype")
    first = func._schema.arguments[place - 2].name

    def kernel(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        *summand, left, right = args[:place]
        dtype = args[place]
        if left.dtype != right.dtype:
            raise RuntimeError("input dtypes must be the same")
        if dtype != left.dtype and not (dtype is torch.float32 and left.dtype in HALF):
            raise RuntimeError(
                "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs"
            )
        if out is not None and out.dtype != dtype:
            raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
        if any(x.dtype not in (dtype, left.dtype) for x in summand):
            raise RuntimeError(f"self dtype must match either out_dtype or {first} dtype")
        result = packet(*map(widened, args[:place]), **kwargs).to(dtype)
        if out is None:
            return result
        return out.resize_(result.shape).copy_(result)

    return kernel


def lacks(cuda_kernel: str, packet: Any, formats: tuple[torch.dtype, ...] = HALF) -> None:
    """Make an operator refuse dtypes that the CPU's kernel supports and CUDA's kernel does not.

    `packet` is the operator, `cuda_kernel` the name in the error, and `formats` are the dtypes.
    """

    def refusing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            first = getattr(args[0], "dtype", None)  # None for a number
            last = getattr(args[-1], "dtype", None)
            if first in formats or last in formats:
                tensors = [x for x in args if isinstance(x, torch.Tensor)]
                given = {x.dtype for x in tensors if x.dim()} or {x.dtype for x in tensors}
                # Of two dtypes, the common one is another.
                if len(given) == 1 and not given.isdisjoint(formats):
                    raise not_implemented(cuda_kernel, given.pop())
            return compute(*args, **kwargs)

        return kernel

    for overload in packet.overloads():
        func = getattr(packet, overload)
        CPU_KERNELS[func] = refusing(CPU_KERNELS.get(func, getattr(func, "_op", func)))
