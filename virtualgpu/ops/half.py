"""Half precision as CUDA's libraries compute it: products of float16 or bfloat16 are summed in float32 and rounded once.

The CPU's own kernels round the same way at best, and take up to a hundred times as long as those of float32. Where the CPU has no kernel
for half precision, and CUDA has one, the result is computed in float32 and rounded too.
"""

from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.errors import scalar_name

HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
# Operators that CUDA refuses in half precision too: those of its solvers, and functions that it compiles for float32 and float64 alone.
NOT_ON_CUDA = (
    "linalg_", "_linalg_", "cholesky", "geqrf", "ormqr", "orgqr", "lu_", "triangular_solve", "ldl_", "_cdist", "_pdist", "_fft", "polar",
    "complex", "special_", "igamma", "_ctc_loss",
)  # fmt: skip
PRODUCTS = (
    aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addmv, aten.addmv_,
    aten.addr, aten.addbmm, aten._addmm_activation, aten.convolution, aten.convolution_overrideable, aten.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
)  # fmt: skip
# Outputs that are float32 whatever the inputs are: the logarithm of the sums of a softmax.
STAY_FLOAT32 = {aten._scaled_dot_product_flash_attention_for_cpu: (1,)}


def widened(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x


def require_floating_convolution(dtype: torch.dtype) -> None:
    """cuDNN convolves no integers: raises RuntimeError for them."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {scalar_name(dtype)}")


def in_float32(packet: Any, func: Any) -> Callable[..., Any]:
    """The operator, computed in float32 and rounded where its tensors are in half precision. For plain tensors."""
    name = func._schema.name.removeprefix("aten::")
    writes_first = name.endswith("_")
    pure = getattr(aten, name.removesuffix("_")) if writes_first else packet
    stay = STAY_FLOAT32.get(packet, ())
    convolves = packet is aten.convolution
    plain = getattr(func, "_op", func)

    def rounded(result: Any, dtype: torch.dtype, index: int = -1) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(rounded(x, dtype, index) for index, x in enumerate(result))
        fits = not isinstance(result, torch.Tensor) or result.dtype is not torch.float32 or index in stay
        return result if fits else result.to(dtype)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if convolves:
            require_floating_convolution(dtype)
        if dtype not in HALF:
            return plain(*args, **kwargs)
        out = kwargs.pop("out", None)
        result = pure(*map(widened, args), **{key: widened(x) for key, x in kwargs.items()})
        if writes_first:
            return args[0].copy_(result)
        if out is not None:
            return out.resize_(result.shape).copy_(result)
        return rounded(result, dtype)

    return kernel


def into_format(packet: Any, func: Any) -> Callable[..., Any]:
    """A product with `out_dtype`, which only CUDA has: that of half precision can stay float32. For plain tensors.

    Raises RuntimeError as CUDA does (aten/src/ATen/native/cuda/Blas.cpp).
    """
    place = next(index for index, argument in enumerate(func._schema.arguments) if argument.name == "out_dtype")
    first = func._schema.arguments[place - 2].name

    def kernel(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        *summand, left, right = args[:place]
        dtype = args[place]
        if left.dtype != right.dtype:
            raise RuntimeError("input dtypes must be the same")
        if dtype != left.dtype and not (dtype is torch.float32 and left.dtype in HALF):
            raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
        if out is not None and out.dtype != dtype:
            raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
        if any(x.dtype not in (dtype, left.dtype) for x in summand):
            raise RuntimeError(f"self dtype must match either out_dtype or {first} dtype")
        result = packet(*map(widened, args[:place]), **kwargs).to(dtype)
        return result if out is None else out.resize_(result.shape).copy_(result)

    return kernel


def counting(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`histc`, of integers too: CUDA counts them, the CPU has no kernel for them."""
    made = aten.histc.default(x if x.dtype.is_floating_point else x.double(), *args, **kwargs)
    return made.to(x.dtype)


KERNELS = {
    func: (into_format if overload.startswith("dtype") else in_float32)(packet, func)
    for packet in PRODUCTS
    for overload, func in ((overload, getattr(packet, overload)) for overload in packet.overloads())
} | {aten.histc.default: counting}
