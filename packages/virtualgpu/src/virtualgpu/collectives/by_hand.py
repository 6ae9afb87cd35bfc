"""A group that a program makes itself, `dist.ProcessGroupNCCL(store, rank, size)`, and calls without PyTorch's own group around it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from virtualgpu.tensor import VirtualTensor

_COLLECTIVES = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "allgather",
        "_allgather_base",
        "gather",
        "scatter",
    ),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "send", "recv"),
)


def called_by_hand(group: type) -> type:
    """Of its methods, which are gloo's, those that get tensors on virtual GPUs go the way of all others: by the operators of `c10d::`."""
    for name in _COLLECTIVES:
        setattr(group, name, _by_operator(name, getattr(group, name)))
    return group


def _by_operator(name: str, of_gloo: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of_gloo)
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is VirtualTensor for x in tree_leaves((args, kwargs))):
            return getattr(_group_around(self), name)(*args, **kwargs)
        return of_gloo(self, *args, **kwargs)

    return collective


def _group_around(backend: Any) -> Any:
    """A group of PyTorch's with this backend alone."""
    if backend.group_around is None:
        group = c10d.ProcessGroup(backend.store, backend.rank(), backend.size())
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, backend)
        backend.group_around = group
    return backend.group_around
