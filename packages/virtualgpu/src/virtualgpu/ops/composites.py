"""Operators that consist of others, which reach the virtual GPU one by one.

These are PyTorch's composite operators and operators that a program adds in Python. Autograd takes
composites apart, unless it is off or has been passed already, as with inference tensors and inside
another operator's function. The C++ of some composites creates the result before it sees a device
tensor, and therefore on the CPU. They are composed here.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.library import _impls  # Python's registrations: "namespace/name.overload/key"

from virtualgpu import hardware
from virtualgpu.errors import VERSION, argument_differs, at_least_two, unsupported
from virtualgpu.ops.call import Call, checks, composes, handles, made_of, made_on
from virtualgpu.tensor import VirtualTensor, tensors


def composite(call: Call) -> Any:
    """Run an operator that PyTorch composes of other operators on every device."""
    key = DispatchKey.CompositeImplicitAutograd
    if _in_python(call.func, "CPU"):  # virtualgpu.install replaces some
        key = DispatchKey.CPU
    with hardware.machine().host_operators:
        return call.func._op_dk(key, *call.args, **call.kwargs)


def in_python(call: Call) -> Any:
    """Run an operator that the program has added, with its Python function for CUDA.

    PyTorch raises an error if there is none.
    """
    if call.func.namespace == "fsdp":
        _advance_fsdp(call)
    with hardware.machine().host_operators:
        return call.func.redispatch(DispatchKeySet(DispatchKey.CUDA), *call.args, **call.kwargs)


def _advance_fsdp(call: Call) -> None:
    """Advance the clock by the host time of FSDP2's hooks around one of its operators."""
    machine = hardware.machine()
    profile = machine.profile
    count = len(list(call.tensors()))
    machine.clock.advance_host(profile.fsdp_seconds + count * profile.fsdp_tensor_seconds)


@handles("fsdp::chunk_cat_mixed_dtype")
def _copy_in(call: Call) -> None:
    """Run FSDP2's operator that arranges gradients for a reduce-scatter.

    Since torch 2.15 it uses `_chunk_cat`, which on CUDA converts other dtypes.
    """
    _advance_fsdp(call)
    tensors, out = call.argument("tensors"), call.argument("out")
    with hardware.machine().host_operators:
        if len({x.dtype for x in tensors}) > 1:
            tensors = [x.to(out.dtype) for x in tensors]
        torch._chunk_cat(tensors, call.argument("dim"), call.argument("num_chunks"), out=out)


def is_made_of_others(func: Any) -> bool:
    """Return whether PyTorch runs the operator `func` on a GPU as a sequence of other operators."""
    if not _has(func, "CompositeImplicitAutograd"):
        return False
    return _in_python(func, "CPU") or not _has(func, "CPU")


def is_written_in_python(func: Any) -> bool:
    """Return whether CUDA would run the operator `func` with a Python function.

    For a compiled CUDA kernel the CPU's kernel is run. Raises NotImplementedError if there is none.
    """
    runs = "CPU"
    if _has(func, "CUDA"):
        runs = "CUDA"
    elif _has(func, "CompositeExplicitAutograd"):
        runs = "CompositeExplicitAutograd"
    lacks_cpu_kernel = _in_python(func, "CPU") or not _has(func, "CPU")
    if runs == "CUDA" and not _in_python(func, "CUDA") and lacks_cpu_kernel:
        raise unsupported(f"{func.name()}, a CUDA kernel of another library,")
    return _in_python(func, runs)


def _has(func: Any, key: str) -> bool:
    """Return whether the operator `func` has a kernel for the dispatch key `key`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def _in_python(func: Any, key: str) -> bool:
    """Return whether the kernel of `func` for the dispatch key `key` is a Python function."""
    return f"{func.name().replace('::', '/')}/{key}" in _impls


# Composites whose parts depend on the device


@composes("vander")
def vander(
    x: torch.Tensor,
    N: int | None = None,  # noqa: N803 (torch's name)
    increasing: bool = False,
) -> torch.Tensor:
    """Return the Vandermonde matrix with `N` powers of the elements of `x`."""
    count = x.shape[0] if N is None else N
    powers = torch.arange(count, device=x.device)
    if increasing:
        return x.unsqueeze(-1) ** powers
    return x.unsqueeze(-1) ** powers.flip(0)


def _with_number(operator: Any) -> Any:
    """Return `operator`, quantile or nanquantile, for a fraction that is a Python number.

    The number becomes a tensor on the GPU. Source: native/Sorting.cpp.
    """

    def composed(
        x: torch.Tensor,
        q: float,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> torch.Tensor:
        fraction = torch.scalar_tensor(q, dtype=x.dtype, device=x.device)
        return operator(x, fraction, dim, keepdim, interpolation=interpolation)

    return composed


composes("quantile.scalar")(_with_number(torch.quantile))
composes("nanquantile.scalar")(_with_number(torch.nanquantile))


def _by_rank(operator: Any, ignores_nan: bool) -> Any:
    """Return `operator`, quantile or nanquantile, composed so that the host reads no values.

    Its fractions are a tensor. With `ignores_nan`, NaNs are not counted. native/Sorting.cpp
    composes it in this way on CUDA.
    """

    def composed(
        x: torch.Tensor,
        q: torch.Tensor,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> torch.Tensor:
        plain = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, q)]
        # This also raises C++'s errors.
        shape = made_of(operator, *plain, dim, keepdim, interpolation=interpolation).shape
        if dim is None or x.dim() == 0:
            x = x.flatten()
        else:
            x = x.unsqueeze(-1).transpose(dim % x.dim(), -1)
        values = x.sort()[0]
        values = values.reshape(*shape[q.dim() :], values.shape[-1])
        last = values.shape[-1] - 1
        if ignores_nan:
            present = values.isnan().logical_not_()
            count = present.sum(-1, keepdim=True)
            ranks = q * (count - 1)
            del count, present  # C++ frees them in this order
            ranks.masked_fill_(ranks < 0, 0)
        else:
            any_missing = values.isnan().any(-1, keepdim=True)
            scaled, missing = torch.broadcast_tensors(q * last, any_missing)
            del any_missing
            ranks = torch.masked_fill(scaled, missing, last)
            del scaled, missing
        roundings = {"lower": ranks.floor_, "higher": ranks.ceil_, "nearest": ranks.round_}
        if interpolation in roundings:
            result = values.gather(-1, roundings[interpolation]().long())
        else:
            below = ranks.long()
            if interpolation == "midpoint":
                weights = torch.full_like(ranks, 0.5)
            else:
                weights = ranks - below
            result = values.gather(-1, below)
            result.lerp_(values.gather(-1, ranks.ceil_().long()), weights)
        if q.dim() == 0:
            return result.squeeze_(-1)
        return result.unsqueeze_(0).transpose_(0, -1).squeeze_(-1)

    return composed


if VERSION < (2, 13):  # newer versions do not read the values of any tensor subclass
    composes("quantile")(_by_rank(torch.ops.aten.quantile.default, ignores_nan=False))
    composes("nanquantile")(_by_rank(torch.ops.aten.nanquantile.default, ignores_nan=True))


@composes("linalg_eigvalsh")
def eigvalsh(x: torch.Tensor, UPLO: str = "L") -> torch.Tensor:  # noqa: N803 (torch's name)
    """Return the eigenvalues of symmetric matrices. Eigenvectors are computed only for a gradient.

    C++ would compute them for any subclass of a tensor (native/BatchLinearAlgebra.cpp).
    """
    return torch.ops.aten._linalg_eigh(x, UPLO, torch.is_grad_enabled() and x.requires_grad)[0]


@composes("linalg_svdvals")
def svdvals(x: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    """Return the singular values of matrices. Singular vectors are computed only for a gradient."""
    needs_vectors = torch.is_grad_enabled() and x.requires_grad
    return torch.ops.aten._linalg_svd(x, False, needs_vectors, driver=driver)[1]


@checks("gradient.tensorarrayint", "gradient.tensorarray")
def check_devices(args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError unless the coordinates and the values are on one device.

    The text of the error is that of native/ReduceOps.cpp.
    """
    for coordinates in kwargs["spacing"]:
        if coordinates.device != args[0].device:
            devices = f"{args[0].device} and {coordinates.device}"
            raise RuntimeError(
                "torch.gradient expected each tensor to be on the same device, but got devices "
                f"{devices}!"
            )


@checks("cosine_similarity")
def check_both_devices(args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError unless both arguments are on one device.

    The smallest norm is created on the device of the first one (native/Distance.cpp).
    """
    first, second = args[:2]
    if first.device != second.device:
        given = [("self", second), ("min", first)]
        raise RuntimeError(argument_differs(given, "wrapper_CUDA_clamp_min__Tensor"))


@composes("cov")
def cov(
    x: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Compute covariances as native/Correlation.cpp does, with the count on the GPU."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        original = torch.ops.aten.cov.default
        return made_of(original, x, correction=correction, fweights=fweights, aweights=aweights)
    if x.dim() != 2:
        x = x.unsqueeze(0)
    count = torch.scalar_tensor(x.shape[1], dtype=torch.int64, device=x.device)
    mean = x.sum(1) / count
    divisor = count - correction
    if torch.equal(divisor <= 0, torch.ones((), dtype=torch.bool, device=x.device)):
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number "
            "of observations.",
            stacklevel=2,
        )
        divisor.zero_()
    x = x - mean.unsqueeze(1)
    return (torch.mm(x, x.t().conj()) / divisor).squeeze()


def _last_dimension_added(tolerance: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a tolerance as a tensor with the dtype and device of `like`.

    It gets one more dimension at the end.
    """
    return torch.as_tensor(tolerance, dtype=like.dtype, device=like.device).unsqueeze(-1)


_RANK_KINDS = ("tensor", "float", "tensor_out", "float_out")


@composes(*(f"linalg_matrix_rank.atol_rtol_{kind}" for kind in _RANK_KINDS))
def matrix_rank(
    x: torch.Tensor,
    *,
    atol: Any = None,
    rtol: Any = None,
    hermitian: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the singular values above a tolerance (documentation of torch.linalg.matrix_rank)."""
    if hermitian:
        values = torch.linalg.eigvalsh(x).abs()
    else:
        values = torch.linalg.svdvals(x)
    if rtol is None:
        rtol = 0.0
        if atol is None:
            rtol = torch.finfo(x.dtype).eps * max(x.shape[-2:])
    if values.shape[-1]:
        largest = values.amax(-1, keepdim=True)
    else:
        largest = values.new_zeros(*values.shape[:-1], 1)
    if isinstance(rtol, torch.Tensor) and rtol.dim():
        rtol = rtol.unsqueeze(-1)
    limit = largest * rtol
    if atol is not None:
        # No name for the tolerance's tensor, so that its memory is freed before the comparison.
        limit = torch.maximum(limit, _last_dimension_added(atol, limit))
    return torch.sum(values > limit, -1, out=out)


@composes(
    "linalg_matrix_rank.tol_tensor",
    "linalg_matrix_rank",
    "linalg_matrix_rank.out_tol_tensor",
    "linalg_matrix_rank.out",
)
def matrix_rank_of_tolerance(
    x: torch.Tensor, tol: Any, hermitian: bool = False, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the singular values above an absolute tolerance."""
    return matrix_rank(x, atol=tol, rtol=0.0, hermitian=hermitian, out=out)


def _into_output(operator: Any) -> Any:
    """Return `operator`, changed to create all its tensors on the GPU of its inputs.

    It writes its result to a given output. In C++ it creates further tensors before it sees a
    device tensor, and therefore on the CPU.
    """

    def composed(*args: Any, **kwargs: Any) -> Any:
        gpu = next((x._gpu for x in tensors(args) if type(x) is VirtualTensor), None)
        if gpu is None:  # only the output is on a GPU, which CUDA refuses
            raise RuntimeError(at_least_two([("", x) for x in tensors(args, kwargs)]))
        with made_on(gpu):
            return made_of(operator, *args, **kwargs)

    return composed


for _name in (
    "inverse",
    "linalg_cholesky",
    "linalg_det",
    "linalg_eigvalsh",
    "linalg_inv",
    "linalg_ldl_factor",
    "linalg_lu_factor",
    "linalg_slogdet",
    "linalg_svdvals",
    "log_sigmoid",
    "msort",
    "slogdet",
):
    composes(f"{_name}.out")(_into_output(getattr(torch.ops.aten, _name).out))


@composes("pad_sequence")
def pad_sequence(
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    """Pad sequences to the longest one. C++ would create the result on the CPU."""
    longest = max(len(x) for x in sequences)
    shape = (longest, len(sequences))
    if batch_first:
        shape = (len(sequences), longest)
    output = sequences[0].new_full((*shape, *sequences[0].shape[1:]), padding_value)
    for i, x in enumerate(sequences):
        row = output.select(0 if batch_first else 1, i)
        if padding_side == "right":
            row[: len(x)].copy_(x)
        else:
            row[longest - len(x) :].copy_(x)
    return output


@composes("_pad_packed_sequence")
def pad_packed_sequence(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack and pad sequences. Steps with the same number of sequences are copied together.

    Source: native/PackedSequence.cpp.
    """
    sizes = batch_sizes.tolist()
    steps, batch = len(sizes), sizes[0]
    if 0 < total_length < steps:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, but "
            f"got total_length={total_length} and max sequence length being {steps}"
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
    if batch_first:
        output = output.transpose(0, 1)
    return output, lengths
