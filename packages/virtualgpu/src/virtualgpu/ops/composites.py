"""Operators that are made of others, which come to the virtual GPU one by one: PyTorch's composites, and what a program adds in Python.

Autograd takes composites apart, unless it is off or was passed already: with inference tensors, and within another operator's function.
The C++ of some makes its result before it looks at any device tensor, and so on the CPU: they are made here of others.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.library import _impls  # what Python has registered: "namespace/name.overload/key"

from virtualgpu import hardware
from virtualgpu.errors import VERSION, argument_differs, at_least_two, unsupported
from virtualgpu.ops.call import Call, checks, composes, handles, made_of, made_on
from virtualgpu.tensor import VirtualTensor, tensors


def composite(call: Call) -> Any:
    """An operator that PyTorch makes of others on any device."""
    key = DispatchKey.CPU if _in_python(call.func, "CPU") else DispatchKey.CompositeImplicitAutograd  # virtualgpu.install replaces some
    with hardware.machine().host_operators:
        return call.func._op_dk(key, *call.args, **call.kwargs)


def in_python(call: Call) -> Any:
    """An operator that a program adds: its function for CUDA is run. PyTorch says so where it has none for CUDA."""
    if call.func.namespace == "fsdp":
        _advance_fsdp(call)
    with hardware.machine().host_operators:
        return call.func.redispatch(DispatchKeySet(DispatchKey.CUDA), *call.args, **call.kwargs)


def _advance_fsdp(call: Call) -> None:
    """Let the host work for as long as FSDP2's hooks around one of its own operators take."""
    machine = hardware.machine()
    profile = machine.profile
    machine.clock.advance_host(profile.fsdp_seconds + len(list(call.tensors())) * profile.fsdp_tensor_seconds)


@handles("fsdp::chunk_cat_mixed_dtype")
def _copy_in(call: Call) -> None:
    """How FSDP2 sets gradients out for a reduce-scatter since torch 2.15: by `_chunk_cat`, which on CUDA casts what has another dtype."""
    _advance_fsdp(call)
    tensors, out = call.argument("tensors"), call.argument("out")
    with hardware.machine().host_operators:
        alike = tensors if len({x.dtype for x in tensors}) == 1 else [x.to(out.dtype) for x in tensors]
        torch._chunk_cat(alike, call.argument("dim"), call.argument("num_chunks"), out=out)


def is_made_of_others(func: Any) -> bool:
    return _has(func, "CompositeImplicitAutograd") and (_in_python(func, "CPU") or not _has(func, "CPU"))


def is_written_in_python(func: Any) -> bool:
    """Is what CUDA would run a Python function? Instead of a compiled kernel the CPU's is run; without one the operator is refused."""
    runs = next((key for key in ("CUDA", "CompositeExplicitAutograd") if _has(func, key)), "CPU")
    if runs == "CUDA" and not _in_python(func, "CUDA") and (_in_python(func, "CPU") or not _has(func, "CPU")):
        raise unsupported(f"{func.name()}, a CUDA kernel of another library,")
    return _in_python(func, runs)


def _has(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def _in_python(func: Any, key: str) -> bool:
    return f"{func.name().replace('::', '/')}/{key}" in _impls


# Composites that choose by device what they are made of


@composes("vander")
def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:  # noqa: N803 (torch's name)
    powers = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))


def _with_number(operator: Any) -> Any:
    """A quantile by a tensor of fractions, which is made of a number (native/Sorting.cpp)."""

    def composed(
        x: torch.Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> torch.Tensor:
        return operator(x, torch.scalar_tensor(q, dtype=x.dtype, device=x.device), dim, keepdim, interpolation=interpolation)

    return composed


composes("quantile.scalar")(_with_number(torch.quantile))
composes("nanquantile.scalar")(_with_number(torch.nanquantile))


def _by_rank(operator: Any, ignores_nan: bool) -> Any:
    """A quantile by a tensor of fractions, as native/Sorting.cpp makes it on CUDA: without a look at their values."""

    def composed(
        x: torch.Tensor, q: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> torch.Tensor:
        plain = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, q))
        shape = made_of(operator, *plain, dim, keepdim, interpolation=interpolation).shape  # and what C++ refuses is refused
        x = x.flatten() if dim is None or x.dim() == 0 else x.unsqueeze(-1).transpose(dim % x.dim(), -1)
        values = x.sort()[0]
        values = values.reshape(*shape[q.dim() :], values.shape[-1])
        last = values.shape[-1] - 1
        if ignores_nan:
            present = values.isnan().logical_not_()
            count = present.sum(-1, keepdim=True)
            ranks = q * (count - 1)
            del count, present  # in C++'s order
            ranks.masked_fill_(ranks < 0, 0)
        else:
            scaled, missing = torch.broadcast_tensors(q * last, values.isnan().any(-1, keepdim=True))
            ranks = torch.masked_fill(scaled, missing, last)
            del scaled, missing
        if rounded := {"lower": ranks.floor_, "higher": ranks.ceil_, "nearest": ranks.round_}.get(interpolation):
            result = values.gather(-1, rounded().long())
        else:
            below = ranks.long()
            weights = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
            result = values.gather(-1, below)
            result.lerp_(values.gather(-1, ranks.ceil_().long()), weights)
        return result.squeeze_(-1) if q.dim() == 0 else result.unsqueeze_(0).transpose_(0, -1).squeeze_(-1)

    return composed


if VERSION < (2, 13):  # from then on C++ leaves the values of any subclass of a tensor alone
    composes("quantile")(_by_rank(torch.ops.aten.quantile.default, ignores_nan=False))
    composes("nanquantile")(_by_rank(torch.ops.aten.nanquantile.default, ignores_nan=True))


@composes("linalg_eigvalsh")
def eigvalsh(x: torch.Tensor, UPLO: str = "L") -> torch.Tensor:  # noqa: N803 (torch's name)
    """Vectors are computed for a gradient alone; C++ does so for any subclass of a tensor, too (native/BatchLinearAlgebra.cpp)."""
    return torch.ops.aten._linalg_eigh(x, UPLO, torch.is_grad_enabled() and x.requires_grad)[0]


@composes("linalg_svdvals")
def svdvals(x: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    return torch.ops.aten._linalg_svd(x, False, torch.is_grad_enabled() and x.requires_grad, driver=driver)[1]


@checks("gradient.tensorarrayint", "gradient.tensorarray")
def check_devices(args: tuple, kwargs: dict) -> None:
    """Raises RuntimeError, in PyTorch's words (native/ReduceOps.cpp), unless the coordinates are where the values are."""
    for coordinates in kwargs["spacing"]:
        if coordinates.device != args[0].device:
            devices = f"{args[0].device} and {coordinates.device}"
            raise RuntimeError(f"torch.gradient expected each tensor to be on the same device, but got devices {devices}!")


@checks("cosine_similarity")
def check_both_devices(args: tuple, kwargs: dict) -> None:
    """Raises RuntimeError unless both are on one device: the smallest norm is made where the first is (native/Distance.cpp)."""
    first, second = args[:2]
    if first.device != second.device:
        raise RuntimeError(argument_differs([("self", second), ("min", first)], "wrapper_CUDA_clamp_min__Tensor"))


@composes("cov")
def cov(x: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> torch.Tensor:
    """As native/Correlation.cpp, with the number of observations on the GPU."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        return made_of(torch.ops.aten.cov.default, x, correction=correction, fweights=fweights, aweights=aweights)
    x = x if x.dim() == 2 else x.unsqueeze(0)
    count = torch.scalar_tensor(x.shape[1], dtype=torch.int64, device=x.device)
    mean = x.sum(1) / count
    divisor = count - correction
    if torch.equal(divisor <= 0, torch.ones((), dtype=torch.bool, device=x.device)):
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.", stacklevel=2
        )
        divisor.zero_()
    x = x - mean.unsqueeze(1)
    return (torch.mm(x, x.t().conj()) / divisor).squeeze()


@composes(*(f"linalg_matrix_rank.atol_rtol_{kind}" for kind in ("tensor", "float", "tensor_out", "float_out")))
def matrix_rank(x: torch.Tensor, *, atol=None, rtol=None, hermitian: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """The number of singular values above a tolerance (documentation of torch.linalg.matrix_rank)."""
    values = torch.linalg.eigvalsh(x).abs() if hermitian else torch.linalg.svdvals(x)
    if rtol is None:
        rtol = torch.finfo(x.dtype).eps * max(x.shape[-2:]) if atol is None else 0.0
    largest = values.amax(-1, keepdim=True) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    limit = largest * (rtol.unsqueeze(-1) if isinstance(rtol, torch.Tensor) and rtol.dim() else rtol)
    if atol is not None:
        limit = torch.maximum(limit, torch.as_tensor(atol, dtype=limit.dtype, device=limit.device).unsqueeze(-1))
    return torch.sum(values > limit, -1, out=out)


@composes("linalg_matrix_rank.tol_tensor", "linalg_matrix_rank", "linalg_matrix_rank.out_tol_tensor", "linalg_matrix_rank.out")
def matrix_rank_of_tolerance(x: torch.Tensor, tol, hermitian: bool = False, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return matrix_rank(x, atol=tol, rtol=0.0, hermitian=hermitian, out=out)


def _with_room(operator: Any) -> Any:
    """Into a given output; what C++ needs room for beside it, it makes before it looks at any device tensor."""

    def composed(*args: Any, **kwargs: Any) -> Any:
        gpu = next((x._gpu for x in tensors(args) if type(x) is VirtualTensor), None)
        if gpu is None:  # only the output is on a GPU, which CUDA refuses
            raise RuntimeError(at_least_two([("", x) for x in tensors(args, kwargs)]))
        with made_on(gpu):
            return made_of(operator, *args, **kwargs)

    return composed


for _name in (
    "inverse", "linalg_cholesky", "linalg_det", "linalg_eigvalsh", "linalg_inv", "linalg_ldl_factor", "linalg_lu_factor", "linalg_slogdet",
    "linalg_svdvals", "log_sigmoid", "msort", "slogdet",
):  # fmt: skip
    composes(f"{_name}.out")(_with_room(getattr(torch.ops.aten, _name).out))


@composes("pad_sequence")
def pad_sequence(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> torch.Tensor:
    """C++ would make the result on the CPU."""
    longest = max(len(x) for x in sequences)
    shape = (len(sequences), longest) if batch_first else (longest, len(sequences))
    output = sequences[0].new_full((*shape, *sequences[0].shape[1:]), padding_value)
    for i, x in enumerate(sequences):
        row = output.select(0 if batch_first else 1, i)
        (row[: len(x)] if padding_side == "right" else row[longest - len(x) :]).copy_(x)
    return output


@composes("_pad_packed_sequence")
def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps with equally many sequences are copied at once, as PyTorch's native/PackedSequence.cpp does."""
    sizes = batch_sizes.tolist()
    steps, batch = len(sizes), sizes[0]
    if 0 < total_length < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={total_length} and max sequence length being {steps}"
        )
    output = data.new_full((max(total_length, steps), batch, *data.shape[1:]), padding_value)
    lengths = torch.zeros(batch, dtype=torch.int64, device="cpu")
    start = offset = 0
    for step in range(1, steps + 1):
        now = sizes[step] if step < steps else 0
        if now != sizes[start]:
            rows = (step - start) * sizes[start]
            part = data[offset : offset + rows].view(step - start, sizes[start], *data.shape[1:])
            output[start:step, : sizes[start]].copy_(part)
            lengths[now : sizes[start]] = step
            offset, start = offset + rows, step
    return output.transpose(0, 1) if batch_first else output, lengths
