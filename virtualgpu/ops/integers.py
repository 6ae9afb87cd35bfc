"""Integer results of CUDA that differ from those of the CPU.

The CPU raises an error for a division by zero. Floating point numbers that no integer can hold
become other integers on the CPU.

An H100 with torch 2.11 gave these values. CUDA raises no error for either.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from virtualgpu.ops import half  # noqa: F401 (first, because it has kernels of its own for half precision)
from virtualgpu.ops.call import CPU_KERNELS

Tensor = torch.Tensor
aten = torch.ops.aten
BITS = {torch.int32: 31, torch.int64: 63}  # of the magnitude
UNSIGNED = 2**32  # an int64 that is 0 or more and less than this is divided in 32 bits


def _divisions() -> Iterator[Any]:
    """The overloads that divide integers."""
    for packet in (aten.floor_divide, aten.floor_divide_, aten.remainder, aten.remainder_, aten.fmod, aten.fmod_):
        yield from (getattr(packet, overload) for overload in packet.overloads())
    for packet in (aten.div, aten.div_):
        yield from (getattr(packet, overload) for overload in packet.overloads() if "mode" in overload)


def _dividing(func: Any) -> Callable[..., Any]:
    """The kernel of a division, whose results are CUDA's where an integer is divided by zero."""
    divide = CPU_KERNELS.get(func, getattr(func, "_op", func))
    name = func._schema.name.removeprefix("aten::").rstrip("_")

    writes = any(argument.alias_info is not None for argument in func._schema.arguments)

    def kernel(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if writes and _is_integral(x) and _is_integral(y) and bool((_plain(y) == 0).any()):
            return by_zero(x, y, *args, **kwargs)  # beforehand, because the CPU would write a part before it raises an error
        try:
            return divide(x, y, *args, **kwargs)
        except RuntimeError as error:
            if str(error) != "ZeroDivisionError":
                raise
        return by_zero(x, y, *args, **kwargs)

    def by_zero(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        zero = _plain(y) == 0
        floors = name == "floor_divide" or kwargs.get("rounding_mode") == "floor"
        undefined = _divided_by_zero(_plain(x), torch.result_type(x, y), floors)
        nonzero = y.masked_fill(zero, 1) if isinstance(y, Tensor) else 1
        result = divide(x, nonzero, *args, **kwargs)
        result.copy_(torch.where(zero, undefined.to(result.dtype), result))
        return result

    return kernel


def _plain(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device="cpu")


def _is_integral(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex())
    return isinstance(x, int)


def _divided_by_zero(x: Tensor, dtype: torch.dtype, floors: bool) -> Tensor:
    """Return the quotient by zero, which is the remainder, too. Rounding down changes negative ones."""
    x = x.to(torch.int64)
    quotient = torch.full_like(x, -1)
    if dtype is torch.int64:
        quotient.masked_fill_((x >= 0) & (x < UNSIGNED), UNSIGNED - 1)
    return quotient - (x < 0).long() if floors else quotient


def saturate(target: Tensor, source: Tensor) -> None:
    """Correct integers that were converted from floating point numbers that the type cannot hold.

    The result is the nearest integer of the type. NaN becomes 0, or the least int64.

    The tensors are plain. Narrower types than 32 bits stay as the CPU converts them.
    """
    bits = BITS.get(target.dtype)
    if bits is None or not source.is_floating_point():
        return
    limit = 2.0**bits
    source = source.double().expand(target.shape)
    if bool((source.abs() < limit).all()):
        return
    target.masked_fill_(source.isnan(), 0 if bits == 31 else -(2**63))
    target.masked_fill_(source >= limit, 2**bits - 1)
    target.masked_fill_(source < -limit, -(2**bits))


def _converting(convert: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(source: Tensor, **kwargs: Any) -> Tensor:
        result = convert(source, **kwargs)
        if kwargs.get("dtype") in BITS:
            saturate(result, source)
        return result

    return kernel


for _func in _divisions():
    CPU_KERNELS[_func] = _dividing(_func)
CPU_KERNELS[aten._to_copy.default] = _converting(CPU_KERNELS.get(aten._to_copy.default, aten._to_copy.default._op))
