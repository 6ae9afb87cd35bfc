"""Errors of NCCL and of ProcessGroupNCCL for ranks, tensors, reductions, and shared GPUs.

The checks and their texts are those of ProcessGroupNCCL.cpp and NCCLUtils.cpp
(torch/csrc/distributed/c10d), and of NCCL's init.cc and argcheck.cc.
"""

import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from virtualgpu.hardware import Gpu

Tensor = torch.Tensor

# Arguments of each operator whose tensors must be contiguous.
_CONTIGUOUS = {
    "allreduce_": ("tensors",),
    "broadcast_": ("tensors",),
    "reduce_": ("tensors",),
    "allgather_": ("input_tensors",),
    "gather_": ("input_tensors",),
    "_allgather_base_": ("input_tensor", "output_tensor"),
    "reduce_scatter_": ("output_tensors",),
    "alltoall_base_": ("output", "input"),
    "alltoall_": ("output_tensors", "input_tensors"),
}
_REDUCE_SCATTER = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
# Reductions that check whether NCCL knows the float8 dtype. `reduce_` does not, and adds the bytes.
_CHECK_FLOAT8 = ("allreduce_", "allreduce_coalesced_", *_REDUCE_SCATTER)
_POINT_TO_POINT = ("send", "recv_")
# Operators that go through torch/csrc/cuda/nccl.cpp.
_THROUGH_CUDA_NCCL = (*_POINT_TO_POINT, "alltoall_", "alltoall_base_")
_BITWISE = ("BAND", "BOR", "BXOR")
_NOT_IN_NCCL = {
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}
# Only reduce_scatter refuses complex tensors. The others send them as pairs of real numbers.
_COMPLEX = {torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}
UNSUPPORTED_FLOAT8 = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_PREMULTIPLIED_DTYPES = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_STRIDED_P2P = (
    "Detected non-contiguous tensor in P2P operations. It is user responsibility to guarantee that "
    "source and destination tensors have the same contiguity format."
)


# What NCCL calls the operators whose root rank it checks itself.
_CHECKED_BY_NCCL = {"broadcast_": "Broadcast", "reduce_": "Reduce"}


def check_ranks(operator: str, call: Any, size: int) -> None:
    """Raise an error if a call of `operator` names a rank that its group does not have.

    The group has `size` ranks. The errors of roots are those of ProcessGroupNCCL (ValueError) and
    NCCL (DistBackendError). A send to such a rank is a DistBackendError, because NCCL would wait
    for the rank.
    """
    root = call.argument("root_rank")
    if operator in ("gather_", "scatter_") and not 0 <= root < size:
        raise ValueError(f"ProcessGroupNCCL::{operator.strip('_')}: invalid root rank: {root}")
    if operator in _CHECKED_BY_NCCL and not 0 <= root < size:
        raise _error(
            "invalid argument (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidArgument: Invalid value for an argument.",
            f"{_CHECKED_BY_NCCL[operator]} : invalid root {root} "
            f"(root should be in the 0..{size} range)",
            where="ProcessGroupNCCL.cpp:3690",
        )
    if operator in _POINT_TO_POINT:
        peer = call.argument("dst" if operator == "send" else "src")
        if not 0 <= peer < size:
            raise torch.distributed.DistBackendError(
                f"{operator.strip('_')} with rank {peer} in a group of {size} ranks. NCCL would "
                f"wait until the group's timeout, because rank {peer} never connects. Name a rank "
                f"from 0 to {size - 1}."
            )


def refuse_sparse(operator: str, call: Any) -> None:
    """Raise PyTorch's error if a collective gets a sparse tensor on a GPU.

    `operator` is the name without `c10d::`, and `call` has the arguments.
    """
    if all(x.layout is torch.strided for x in call.tensors()):
        return
    if operator == "allreduce_":
        raise RuntimeError(
            "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
            "instead."
        )
    raise NotImplementedError(
        f"Could not run 'c10d::{operator}' with arguments from the 'SparseCUDA' backend."
    )


def check_tensors(operator: str, call: Any) -> None:
    """Raise the error of ProcessGroupNCCL if a call has tensors that the operator refuses.

    `operator` is the name without `c10d::`. Raises ValueError, TypeError or RuntimeError. Warns
    about strided tensors of a send.
    """
    for name in _CONTIGUOUS.get(operator, ()):
        given = call.argument(name)
        tensors = given
        if isinstance(given, Tensor):
            tensors = [given]
        for x in tensors:
            if not _is_contiguous(x):
                raise ValueError("Tensors must be contiguous")
    for x in call.tensors():
        if operator in _POINT_TO_POINT and not _is_contiguous(x):
            if not torch.ops.aten.is_non_overlapping_and_dense(x):
                raise ValueError("Tensors for P2P must be non-overlapping and dense")
            warnings.warn(_STRIDED_P2P, UserWarning, stacklevel=2)
        if x.dtype in UNSUPPORTED_FLOAT8 and operator in _CHECK_FLOAT8:
            raise RuntimeError("Unsupported Float8 type for NCCL reduction")
        if x.dtype in _NOT_IN_NCCL and operator in _THROUGH_CUDA_NCCL:
            raise RuntimeError(f"Unconvertible NCCL type {_NOT_IN_NCCL[x.dtype]}")
        unknown = _NOT_IN_NCCL
        if operator in _REDUCE_SCATTER:
            unknown = _NOT_IN_NCCL | _COMPLEX
        if x.dtype in unknown:
            raise TypeError(
                "Input tensor data type is not supported for NCCL process group: "
                f"{unknown[x.dtype]}"
            )


def _is_contiguous(x: Tensor) -> bool:
    """Return whether a tensor is contiguous, either as usual or with its channels last."""
    if x.is_contiguous():
        return True
    return x.dim() in _CHANNELS_LAST and x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def check_reduction(name: str, dtype: torch.dtype) -> None:
    """Raise the error of ProcessGroupNCCL for a reduction that NCCL lacks for this dtype.

    `name` is the name of a `ReduceOp`. Raises TypeError or ValueError.
    """
    if name == "PREMUL_SUM" and dtype not in _PREMULTIPLIED_DTYPES:
        raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
    if name in _BITWISE:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if name == "AVG" and dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")


def identity(gpu: Gpu) -> list[Any]:
    """Return the values by which all ranks can tell this virtual GPU from others.

    They are [host name, port of its machine on the host, index, number of the machine's GPUs].
    """
    machine = gpu.machine
    return [
        socket.gethostname(),
        machine.usage.address.rpartition(":")[2],
        gpu.index,
        len(machine.gpus),
    ]


def check_own_gpus(rank: int, gpus: Sequence[list[Any] | None]) -> None:
    """Raise NCCL's error if ranks that connect share a GPU.

    `rank` is this rank, and `gpus` has the identity of each rank's GPU. It has None for ranks that
    are only simulated. Raises torch.distributed.DistBackendError.
    """
    if None in gpus:
        return
    different = {tuple(gpu or ()) for gpu in gpus}
    if len(different) == len(gpus):
        return
    mine = gpus[rank] or []
    sharing = [other for other, gpu in enumerate(gpus) if gpu == mine and other != rank]
    if not sharing:
        raise _error(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "Other ranks share a GPU.",
        )
    bus = f"{(mine[2] + 1) << 12:x}"
    here = sum(gpu is not None and gpu[:2] == mine[:2] for gpu in gpus)
    advice = (
        "Each rank needs a GPU of its own. Call torch.cuda.set_device(local_rank) before the rank "
        "first uses CUDA."
    )
    if here > mine[3]:
        advice = (
            f"Each rank needs a GPU of its own, and this machine has {mine[3]} for {here} ranks."
        )
    raise _error(
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        f"Duplicate GPU detected : rank {rank} and rank {sharing[0]} both on CUDA device {bus}",
        advice,
    )


def _error(
    what: str, explained: str, last: str, advice: str = "", where: str = "NCCLUtils.cpp:93"
) -> Exception:
    """Return the DistBackendError that PyTorch raises for an error of NCCL.

    `what`, `explained` and `last` are NCCL's texts. `advice` is a sentence of our own. `where` is
    the line of PyTorch's source that the message names.
    """
    version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    source = f"/pytorch/torch/csrc/distributed/c10d/{where}"
    lines = [f"NCCL error in: {source}, {what}, NCCL version {version}"]
    lines += [explained, "Last error:", last]
    if advice:
        lines.append(advice)
    return torch.distributed.DistBackendError("\n".join(lines))
