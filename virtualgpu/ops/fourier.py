"""Fourier transforms by cuFFT, whose plans need no workspace of PyTorch's allocator.

Order of allocations: PyTorch's native/cuda/SpectralOps.cpp, held against an H200 (torch 2.11) on PyTorch's operator database.
"""

from typing import Any

import torch

from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, bytes_of, handles, refuses_half
from virtualgpu.ops.sequence import Out, Plan, perform

Tensor = torch.Tensor

refuses_half("_fft")


def _gathered(x: Tensor, dims: Any) -> int:
    """Bytes of the copy that brings the transformed dimensions last, where no view does (`_exec_fft`)."""
    dims = [d % x.dim() for d in dims]
    if any(x.stride(d) == 0 and x.shape[d] > 1 for d in range(x.dim())):
        return bytes_of(x)
    rest = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: x.stride()[d], reverse=True)
    ordered = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").permute(*rest, *dims)
    try:
        ordered.view(-1, *(x.shape[d] for d in dims))
    except RuntimeError:
        return bytes_of(x)
    return 0


def _step_by_step(call: Call, dims: Any) -> bool:
    """Is one dimension transformed after the other? cuFFT takes three; real ones that begin with the first two go one by one
    (`use_optimized_cufft_path`)."""
    return len(dims) > 3 or (call.op.name == "_fft_r2c" and list(dims[:2]) == [0, 1])


@handles("_fft_r2c", "_fft_c2c")
def transform(call: Call) -> Any:
    x, dims = call.args[:2]
    if call.op.outs or not x.numel() or not dims:
        return operators.compute_or_into_given(call)
    several = _step_by_step(call, dims)
    copy = _gathered(x, dims[-1:] if several else dims)

    def plan(outputs: list[Any]) -> Plan:
        other = bytes_of(outputs[0]) if several else 0
        return Out(0), copy, -copy, other, -other

    return perform(call, plan)


@handles("_fft_c2r")
def complex_to_real(call: Call) -> Any:
    """cuFFT overwrites its input here, so a copy is transformed."""
    if call.op.outs:
        return operators.into_given(call)
    size = bytes_of(call.args[0])
    return perform(call, (Out(0), size, -size))
