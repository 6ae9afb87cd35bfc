"""Fourier transforms by cuFFT, whose plans need no workspace of PyTorch's allocator.

Order of allocations: PyTorch's native/cuda/SpectralOps.cpp, held against an H200 (torch 2.11) on PyTorch's operator database.
Half precision, which only CUDA transforms, follows the same file and CuFFTPlanCache.h.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, bytes_of, handles
from virtualgpu.ops.half import OF_TWO_BYTES, sums_in_float32
from virtualgpu.ops.sequence import Out, Plan, perform
from virtualgpu.tensor import VirtualTensor

Tensor = torch.Tensor
aten = torch.ops.aten

sums_in_float32(aten._fft_r2c, aten._fft_c2c, aten._fft_c2r, formats=OF_TWO_BYTES)


def _gathered(x: Tensor, dims: Any) -> int:
    """Bytes of the copy that brings the transformed dimensions last, where no view does (`_exec_fft`). Of half precision, the last of them
    must lie without gaps."""
    dims = [d % x.dim() for d in dims]
    if any(x.stride(d) == 0 and x.shape[d] > 1 for d in range(x.dim())):
        return bytes_of(x)
    rest = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: x.stride()[d], reverse=True)
    ordered = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").permute(*rest, *dims)
    try:
        ordered.view(-1, *(x.shape[d] for d in dims))
    except RuntimeError:
        return bytes_of(x)
    return bytes_of(x) if x.dtype in OF_TWO_BYTES and x.stride(dims[-1]) != 1 else 0


def _step_by_step(call: Call, dims: Any) -> bool:
    """Is one dimension transformed after the other? cuFFT takes three; real ones that begin with the first two go one by one
    (`use_optimized_cufft_path`)."""
    return len(dims) > 3 or (call.op.name == "_fft_r2c" and list(dims[:2]) == [0, 1])


def _require_powers_of_two(sizes: list[int], *rounds: slice) -> None:
    """cuFFT transforms no other sizes in half precision. The error names those of the first plan that fails."""
    for part in rounds:
        if any(n & (n - 1) for n in sizes[part]):
            raise RuntimeError(
                "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, "
                f"but got a signal size of{sizes[part]}"
            )


@handles("_fft_r2c", "_fft_c2c")
def transform(call: Call) -> Any:
    x, dims = call.args[:2]
    several = _step_by_step(call, dims)
    if x.dtype in OF_TWO_BYTES:
        if call.op.name == "_fft_c2c":
            dims = sorted(dims, key=lambda d: x.stride()[d], reverse=True)
        _require_powers_of_two([x.shape[d] for d in dims], *([slice(-1, None), slice(-1)] if several else [slice(None)]))
    if call.op.outs or not x.numel() or not dims:
        return operators.compute_or_into_given(call)
    copy = _gathered(x, dims[-1:] if several else dims)

    def plan(outputs: list[Any]) -> Plan:
        other = bytes_of(outputs[0]) if several else 0
        return Out(0), copy, -copy, other, -other

    return perform(call, plan)


@handles("_fft_c2r")
def complex_to_real(call: Call) -> Any:
    """cuFFT overwrites its input here, so a copy is transformed."""
    x, dims, _, last = call.args
    if x.dtype in OF_TWO_BYTES:
        _require_powers_of_two([*(x.shape[d] for d in dims[:-1]), last], slice(None))
    if call.op.outs:
        return operators.into_given(call)
    size = bytes_of(x)
    return perform(call, (Out(0), size, -size))


# Half precision, which PyTorch's C++ refuses before any kernel, because it takes these tensors for the CPU's

_OF_COMPLEX = ("fft2", "ifft2", "fftn", "ifftn", "irfft", "irfft2", "irfftn", "hfft", "hfft2", "hfftn")
_OF_REAL = ("fft", "ifft", "rfft", "ihfft", "rfft2", "rfftn", "ihfft2", "ihfftn")
_NONE, _BY_ROOT, _BY_N = range(3)  # what a result is divided by
_NORMALIZATIONS = {None: (_NONE, _BY_N), "backward": (_NONE, _BY_N), "ortho": (_BY_ROOT, _BY_ROOT), "forward": (_BY_N, _NONE)}


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield torch.fft, {name: _also_of_half(name) for name in (*_OF_COMPLEX, *_OF_REAL)}


def _also_of_half(name: str) -> Callable[..., Tensor]:
    """The function of `torch.fft`, which takes CUDA tensors in half precision too."""
    original = getattr(torch.fft, name)

    @wraps(original)
    def transformed(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(input) is not VirtualTensor or input.dtype is not torch.float16:
            return original(input, *args, **kwargs)
        if name in _OF_COMPLEX:
            return original(input.to(torch.complex32), *args, **kwargs)
        return _of_half(name, input, *args, **kwargs)

    return transformed


def _of_half(
    name: str, x: Tensor, n: Any = None, dim: Any = None, norm: str | None = None, *, s: Any = None, out: Tensor | None = None
) -> Tensor:
    """What a function of `torch.fft` makes of real numbers (`fft_r2c`, `fft_rfftn`, `fft_ihfftn` of native/SpectralOps.cpp)."""
    from torch._refs.fft import _canonicalize_fft_shape_and_dim_args, _resize_fft_input  # takes a second to import

    if norm not in _NORMALIZATIONS:
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    if dim is None and not name.endswith("n"):
        dim = (-2, -1) if name.endswith("2") else -1
    sizes, dims = _canonicalize_fft_shape_and_dim_args(x, n if s is None else s, dim)
    if not dims:
        raise RuntimeError(f"{name} must transform at least one axis")
    x = _resize_fft_input(x, dims, sizes)
    into = {} if out is None else {"out": out}
    inverse = name.startswith("i")
    mode, onesided = _NORMALIZATIONS[norm][inverse], name not in ("fft", "ifft")
    if not inverse:
        return aten._fft_r2c(x, dims, mode, onesided, **into)
    *others, last = dims  # cuFFT has no inverse transform of real numbers: the conjugate is
    y = aten._fft_r2c(x, [last], mode, onesided)
    if others:
        return aten._fft_c2c(y.conj_physical(), others, mode, False, **into)
    return y.conj() if out is None else torch.conj_physical(y, out=out)
