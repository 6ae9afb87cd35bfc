"""Fourier transforms with cuFFT, whose plans use no memory of PyTorch's allocator.

The order of allocations is that of PyTorch's native/cuda/SpectralOps.cpp. It was compared with an
H200 (torch 2.11) for PyTorch's operator database. Half precision, which only CUDA transforms,
follows the same file and CuFFTPlanCache.h.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, bytes_of, handles
from virtualgpu.ops.fft_plans import plans_of
from virtualgpu.ops.half import OF_TWO_BYTES, sums_in_float32
from virtualgpu.ops.sequence import Out, Plan, perform
from virtualgpu.tensor import VirtualTensor

Tensor = torch.Tensor
aten = torch.ops.aten

sums_in_float32(aten._fft_r2c, aten._fft_c2c, aten._fft_c2r, formats=OF_TWO_BYTES)


def _copied_bytes(x: Tensor, dims: Any) -> int:
    """Return the bytes of the copy that moves the transformed dimensions `dims` to the end.

    Returns 0 if a view can do this (`_exec_fft`). In half precision the last dimension must be
    contiguous.
    """
    dims = [d % x.dim() for d in dims]
    if any(x.stride(d) == 0 and x.shape[d] > 1 for d in range(x.dim())):
        return bytes_of(x)
    others = [d for d in range(x.dim()) if d not in dims]
    others.sort(key=lambda d: x.stride()[d], reverse=True)
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    ordered = shape.permute(*others, *dims)
    try:
        ordered.view(-1, *(x.shape[d] for d in dims))
    except RuntimeError:
        return bytes_of(x)
    if x.dtype in OF_TWO_BYTES and x.stride(dims[-1]) != 1:
        return bytes_of(x)
    return 0


def _step_by_step(call: Call, dims: Any) -> bool:
    """Return whether the dimensions `dims` are transformed one after the other.

    cuFFT transforms up to three at a time. Real tensors whose dimensions begin with the first two
    are transformed one by one (`use_optimized_cufft_path`).
    """
    return len(dims) > 3 or (call.op.name == "_fft_r2c" and list(dims[:2]) == [0, 1])


def _require_powers_of_two(sizes: list[int], *rounds: slice) -> None:
    """Raise RuntimeError unless the transformed sizes are powers of two.

    Half precision needs this. Each of `rounds` selects the sizes of one plan. The error names the
    sizes of the first plan that fails.
    """
    for part in rounds:
        if any(n & (n - 1) for n in sizes[part]):
            raise RuntimeError(
                "cuFFT only supports dimensions whose sizes are powers of two when computing in "
                f"half precision, but got a signal size of{sizes[part]}"
            )


def _use_plans(call: Call, dims: Sequence[int], several: bool) -> None:
    """Mark the cuFFT plans of a transform over `dims` as used.

    There is one plan for each dimension if `several` is true, and otherwise one for all. A plan is
    for one shape, layout, dtype and kind of transform, in both directions
    (aten/src/ATen/native/cuda/CuFFTPlanCache.h).
    """
    x = call.args[0]
    plans = plans_of(call.common_gpu())
    last = call.argument("last_dim_size")
    for part in [(d,) for d in dims] if several else [tuple(dims)]:
        plans.use((call.op.name, x.dtype, tuple(x.shape), x.stride(), part, last))


@handles("_fft_r2c", "_fft_c2c")
def transform(call: Call) -> Any:
    """Compute a Fourier transform with complex results."""
    x, dims = call.args[:2]
    several = _step_by_step(call, dims)
    if x.dtype in OF_TWO_BYTES:
        if call.op.name == "_fft_c2c":
            dims = sorted(dims, key=lambda d: x.stride()[d], reverse=True)
        sizes = [x.shape[d] for d in dims]
        if several:
            _require_powers_of_two(sizes, slice(-1, None), slice(-1))
        else:
            _require_powers_of_two(sizes, slice(None))
    if x.numel() and dims:
        _use_plans(call, dims, several)
    if call.op.outs or not x.numel() or not dims:
        return operators.compute_or_into_given(call)
    copy = _copied_bytes(x, dims[-1:] if several else dims)

    def plan(outputs: list[Any]) -> Plan:
        other = bytes_of(outputs[0]) if several else 0
        return Out(0), copy, -copy, other, -other

    return perform(call, plan)


@handles("_fft_c2r")
def complex_to_real(call: Call) -> Any:
    """Compute a Fourier transform with real results.

    cuFFT overwrites its input in this transform, so a copy is transformed.
    """
    x, dims, _, last = call.args
    if x.dtype in OF_TWO_BYTES:
        _require_powers_of_two([*(x.shape[d] for d in dims[:-1]), last], slice(None))
    if x.numel():
        _use_plans(call, dims, several=False)
    if call.op.outs:
        return operators.into_given(call)
    size = bytes_of(x)
    return perform(call, (Out(0), size, -size))


# PyTorch's C++ refuses half precision before any kernel, because it takes these tensors for CPU
# tensors.

_OF_COMPLEX = (
    "fft2",
    "ifft2",
    "fftn",
    "ifftn",
    "irfft",
    "irfft2",
    "irfftn",
    "hfft",
    "hfft2",
    "hfftn",
)
_OF_REAL = ("fft", "ifft", "rfft", "ihfft", "rfft2", "rfftn", "ihfft2", "ihfftn")
_NONE, _BY_ROOT, _BY_N = range(3)  # the divisor of a result
_NORMALIZATIONS = {
    None: (_NONE, _BY_N),
    "backward": (_NONE, _BY_N),
    "ortho": (_BY_ROOT, _BY_ROOT),
    "forward": (_BY_N, _NONE),
}


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch.fft, {name: _also_of_half(name) for name in (*_OF_COMPLEX, *_OF_REAL)}


def _also_of_half(name: str) -> Callable[..., Tensor]:
    """Return a function of `torch.fft`, changed to accept CUDA tensors in half precision.

    `name` is the function's name.
    """
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
    name: str,
    x: Tensor,
    n: Any = None,
    dim: Any = None,
    norm: str | None = None,
    *,
    s: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the function `name` of `torch.fft` for a real tensor in half precision.

    The other arguments are those of the function. Source: `fft_r2c`, `fft_rfftn` and `fft_ihfftn`
    of native/SpectralOps.cpp.
    """
    # This import takes a second.
    from torch._refs.fft import _canonicalize_fft_shape_and_dim_args, _resize_fft_input

    if norm not in _NORMALIZATIONS:
        raise RuntimeError(f'Invalid normalization mode: "{norm}"')
    if dim is None and not name.endswith("n"):
        dim = (-2, -1) if name.endswith("2") else -1
    sizes, dims = _canonicalize_fft_shape_and_dim_args(x, n if s is None else s, dim)
    if not dims:
        raise RuntimeError(f"{name} must transform at least one axis")
    x = _resize_fft_input(x, dims, sizes)
    into = {}
    if out is not None:
        into["out"] = out
    inverse = name.startswith("i")
    mode, onesided = _NORMALIZATIONS[norm][inverse], name not in ("fft", "ifft")
    if not inverse:
        return aten._fft_r2c(x, dims, mode, onesided, **into)
    # cuFFT has no inverse transform of real numbers, so the conjugate is computed.
    *others, last = dims
    y = aten._fft_r2c(x, [last], mode, onesided)
    if others:
        return aten._fft_c2c(y.conj_physical(), others, mode, False, **into)
    if out is None:
        return y.conj()
    return torch.conj_physical(y, out=out)
