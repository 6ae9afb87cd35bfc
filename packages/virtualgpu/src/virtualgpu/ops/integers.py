"""Integer results of CUDA that differ from those of the CPU.

The CPU raises an error for a division by zero. The CPU converts floating-point numbers that an
integer type cannot hold to other integers than CUDA. The values of int32 and int64 were measured on
an H100 with torch 2.11. CUDA raises no error in either case.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple

import torch

from virtualgpu.ops import half  # noqa: F401 - imported first, because it registers kernels, too
from virtualgpu.ops.call import CPU_KERNELS

Tensor = torch.Tensor
aten = torch.ops.aten
_to, _vector_norm = torch.Tensor.to, torch.linalg.vector_norm
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = 2**32  # non-negative int64 numbers below this are divided in 32 bits


def _divisions() -> Iterator[Any]:
    """Yield the overloads of operators that divide integers."""
    always = (
        aten.floor_divide,
        aten.floor_divide_,
        aten.remainder,
        aten.remainder_,
        aten.fmod,
        aten.fmod_,
    )
    for packet in always:
        yield from (getattr(packet, overload) for overload in packet.overloads())
    for packet in (aten.div, aten.div_):
        for overload in packet.overloads():
            if "mode" in overload:
                yield getattr(packet, overload)


def _dividing(func: Any) -> Callable[..., Any]:
    """Return a kernel of the division `func` with CUDA's results for integers divided by zero."""
    divide = CPU_KERNELS.get(func, getattr(func, "_op", func))
    name = func._schema.name.removeprefix("aten::").rstrip("_")

    writes = any(argument.alias_info is not None for argument in func._schema.arguments)

    def kernel(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        integral = writes and _is_integral(x) and _is_integral(y)
        if integral and bool((_plain(y) == 0).any()):
            # The CPU would write a part of the results before it raises an error.
            return by_zero(x, y, *args, **kwargs)
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
        nonzero: Any = 1
        if isinstance(y, Tensor):
            nonzero = y.masked_fill(zero, 1)
        result = divide(x, nonzero, *args, **kwargs)
        result.copy_(torch.where(zero, undefined.to(result.dtype), result))
        return result

    return kernel


def _plain(x: Any) -> Tensor:
    """Return `x`, an operand of a division, as a plain tensor. Numbers become int64."""
    if isinstance(x, Tensor):
        return x
    return torch.full((), x, dtype=torch.int64, device="cpu")


def _is_integral(x: Any) -> bool:
    """Return whether `x`, an operand of a division, has integers or booleans."""
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex())
    return isinstance(x, int)


def _divided_by_zero(x: Tensor, dtype: torch.dtype, floors: bool) -> Tensor:
    """Return CUDA's quotient of the integers `x` and zero, which is also the remainder.

    `dtype` is the dtype of the division. With `floors`, quotients are rounded down, which changes
    those of negative numbers.
    """
    x = x.to(torch.int64)
    quotient = torch.full_like(x, -1)
    if dtype is torch.int64:
        quotient.masked_fill_((x >= 0) & (x < UNSIGNED), UNSIGNED - 1)
    if floors:
        return quotient - (x < 0).long()
    return quotient


class Conversion(NamedTuple):
    """A conversion of floating-point numbers to integers, as CUDA's instruction does it.

    The instruction clamps to the range from `least` to `largest`, which has `bits` bits. The lowest
    bits of the result are those of the integer type. The instruction is `cvt` (NVIDIA's PTX ISA).
    NVIDIA's compiler uses it for c10/util/TypeCast.h.
    """

    bits: int
    least: int
    largest: int

    def of_nan(self, source: torch.dtype) -> int:
        """Return the integer to which the instruction converts NaN of the dtype `source`."""
        if self.bits == 32 and source is not torch.float64:
            return 0
        return 2 ** (self.bits - 1)


_TO_INT32, _TO_INT64 = Conversion(32, -(2**31), 2**31 - 1), Conversion(64, -(2**63), 2**63 - 1)
_TO_UINT32, _TO_UINT64 = Conversion(32, 0, 2**32 - 1), Conversion(64, 0, 2**64 - 1)
CONVERSIONS = {
    torch.int8: _TO_INT32,
    torch.int16: _TO_INT32,
    torch.int32: _TO_INT32,
    torch.int64: _TO_INT64,
    torch.uint8: _TO_INT64,
    torch.uint16: _TO_UINT32,
    torch.uint32: _TO_UINT32,
    torch.uint64: _TO_UINT64,
}
# Non-negative numbers below these need no correction.
_HELD_BY_ALL = {32: 2.0**31, 64: 2.0**63}
# The signed type with the same bits, because the CPU can fill few unsigned types.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# Floating-point types that `vector_norm` accepts.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def saturate(target: Tensor, source: Tensor) -> None:
    """Correct the integers in `target`, which were converted from the numbers in `source`.

    The CPU and CUDA differ for numbers that the integer type cannot hold. Both tensors are plain.
    """
    conversion = CONVERSIONS.get(target.dtype)
    if conversion is None or not source.numel():
        return
    if source.dtype not in _FLOATS:
        if source.is_complex():
            source = source.real
        elif source.is_floating_point():
            source = source.float()
        else:
            return
    # One operator is enough in the usual case. NaN counts as the largest magnitude.
    if source.numel() == 1:
        magnitude = abs(source.item())
    else:
        magnitude = _vector_norm(source, inf).item()
    fits = magnitude < _HELD_BY_ALL[conversion.bits]
    if fits and (conversion.least or bool((source >= 0).all())):
        return
    wide = source.double().expand(target.shape)
    target = target.view(_SIGNED.get(target.dtype, target.dtype))
    if conversion.bits == 32:
        target.copy_(wide.clamp(conversion.least, conversion.largest).long())
    else:
        largest = _lowest_bits(conversion.largest, target.dtype)
        least = _lowest_bits(conversion.least, target.dtype)
        target.masked_fill_(wide >= float(conversion.largest + 1), largest)
        target.masked_fill_(wide < float(conversion.least), least)
    of_nan = _lowest_bits(conversion.of_nan(source.dtype), target.dtype)
    target.masked_fill_(wide.isnan(), of_nan)


def _lowest_bits(number: int, dtype: torch.dtype) -> int:
    """Return the integer of this dtype that has the lowest bits of `number`."""
    bits = 8 * dtype.itemsize
    lowest = number % 2**bits
    if dtype.is_signed and lowest >= 2 ** (bits - 1):
        return lowest - 2**bits
    return lowest


def _converting(func: Any) -> Callable[..., Tensor]:
    """Return a kernel of `func` that converts to integers as CUDA does.

    `func` is an overload of `_to_copy`.
    """
    convert = CPU_KERNELS.get(func, func._op)

    def kernel(source: Tensor, **kwargs: Any) -> Tensor:
        dtype = kwargs.get("dtype")
        if dtype is None or len(kwargs) > 1:
            result = convert(source, **kwargs)
        else:
            result = _to(source, dtype, False, True)  # the same in half the time
        if dtype in CONVERSIONS:
            saturate(result, source)
        return result

    return kernel


for _func in _divisions():
    CPU_KERNELS[_func] = _dividing(_func)
CPU_KERNELS[aten._to_copy.default] = _converting(aten._to_copy.default)


def _spaced(start: Any, end: Any, steps: int, *, out: Tensor) -> Tensor:
    """Write `steps` integers with equal distances from `start` to `end` to `out`.

    CUDA computes them in float32, and does not round the product before the sum
    (native/cuda/RangeFactories.cu).
    """
    if out.dtype not in INTEGERS or out.dtype is torch.bool or steps < 2:
        return aten.linspace.out(start, end, steps, out=out)
    limits = torch.tensor([int(start), int(end)], dtype=torch.int64, device="cpu").float()
    step = ((limits[1] - limits[0]) / (steps - 1)).double()
    first, last = limits.double()
    index = torch.arange(steps, dtype=torch.float64, device="cpu")
    up, down = first + step * index, last - step * (steps - 1 - index)
    exact = torch.where(index < steps // 2, up, down)
    return out.resize_(steps).copy_(exact.to(torch.float32).to(out.dtype))


CPU_KERNELS[aten.linspace.out] = _spaced

# Operators that CUDA computes for these formats, and the CPU does not.

_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
    torch.complex32: torch.int32,
}


def _of_signed(func: Any, formats: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    """Return a kernel of `func` for dtypes that only CUDA supports.

    It reads tensors with one of the `formats` as integers of another dtype with the same bits.
    """

    def kernel(x: torch.Tensor, *args: Any) -> Any:
        if x.dtype not in formats:
            return func(x, *args)
        result = func(x.view(_SIGNED[x.dtype]), *args)
        if isinstance(result, torch.Tensor):
            return result.view(x.dtype)
        values, indices = result
        return values.view(x.dtype), indices

    return kernel


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
CPU_KERNELS[aten.index_select.default] = _of_signed(aten.index_select.default, _UNSIGNED)
CPU_KERNELS[aten.flip.default] = _of_signed(aten.flip.default, (*_UNSIGNED, torch.complex32))
for _func in (aten.median.default, aten.median.dim):
    CPU_KERNELS[_func] = _of_signed(_func, (torch.bool,))
