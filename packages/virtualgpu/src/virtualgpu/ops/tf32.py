"""TF32 in the values: factors of float32 products are rounded to 10 bits of mantissa.

The sums are in float32. `Gpu.multiplies_in_tf32` tells when a GPU uses TF32. The rounding is that
of the PTX instruction `cvt.rna.tf32.f32`: to the nearest number, and ties away from zero.
"""

from collections.abc import Callable, Collection
from math import inf, isnan, nan
from typing import Any

import torch

from virtualgpu.ops.call import CPU_KERNELS

aten = torch.ops.aten
SINGLE = (torch.float32, torch.complex64)
DROPPED_BITS = 13  # float32 has 23 bits of mantissa
HALF_UNIT = 1 << (DROPPED_BITS - 1)
KEPT_BITS = -(1 << DROPPED_BITS)


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a float32 or complex64 tensor with TF32's mantissas.

    A tensor of another dtype is returned unchanged. The operator's kernel refuses it later.
    """
    if x.dtype not in SINGLE:
        return x
    if x.is_complex():
        return torch.view_as_complex(round_to_tf32(torch.view_as_real(x.resolve_conj())))
    if x.is_neg():
        x = x.resolve_neg()
    if isnan(x.sum().item()):
        # Give all NaNs the same bits, because the addition below would turn some into numbers.
        x = aten.nan_to_num.default(x, nan, inf, -inf)
    return x.view(torch.int32).add(HALF_UNIT).bitwise_and_(KEPT_BITS).view(torch.float32)


def rounds_factors(
    packet: Any, positions: Collection[int], multiplies_in_tf32: Callable[..., bool]
) -> None:
    """Make the operator `packet` round some arguments in calls that use TF32.

    `positions` are those of the arguments. `multiplies_in_tf32` gets the call's arguments and
    returns whether the call uses TF32.
    """
    for overload in packet.overloads():
        func = getattr(packet, overload)
        CPU_KERNELS[func] = _rounding(func, positions, multiplies_in_tf32)


def _rounding(
    func: Any, positions: Collection[int], multiplies_in_tf32: Callable[..., bool]
) -> Callable[..., Any]:
    """Return a kernel of `func` that rounds the arguments at these positions to TF32.

    It does so if `multiplies_in_tf32`, which gets the call's arguments, returns True.
    """
    names = {func._schema.arguments[position].name for position in positions}
    compute = CPU_KERNELS.get(func, getattr(func, "_op", func))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype in SINGLE and multiplies_in_tf32(*args, **kwargs):
            changed = list(args)
            for position in positions:
                if position < len(args):
                    changed[position] = round_to_tf32(args[position])
            if kwargs:
                for name in names & kwargs.keys():
                    kwargs[name] = round_to_tf32(kwargs[name])
            return compute(*changed, **kwargs)
        return compute(*args, **kwargs)

    return kernel
