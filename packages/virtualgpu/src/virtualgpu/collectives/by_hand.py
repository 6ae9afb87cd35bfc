"""Process groups that a program makes itself with `dist.ProcessGroupNCCL(store, rank, size)`.

The program calls the methods of such a group directly. PyTorch's own groups reach them through the
operators of `c10d::` instead.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from virtualgpu.tensor import VirtualTensor

_COLLECTIVES = [
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base",
    "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base",
    "send", "recv",
]  # fmt: skip


def called_by_hand(group: type) -> type:
    """Make the collective methods of `group` work for virtual tensors.

    This is a class decorator. With virtual tensors the methods call the operators of `c10d::`. All
    other calls go to the methods of gloo, which the class inherits.
    """
    for name in _COLLECTIVES:
        setattr(group, name, _through_operator(name, getattr(group, name)))
    return group


def _through_operator(name: str, gloo_method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective method that also works for virtual tensors.

    For virtual tensors it calls the operator `name` of `c10d::`, and otherwise `gloo_method`.
    """

    @wraps(gloo_method)
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is VirtualTensor for x in tree_leaves((args, kwargs))):
            return getattr(_group_around(self), name)(*args, **kwargs)
        return gloo_method(self, *args, **kwargs)

    return collective


def _group_around(backend: Any) -> Any:
    """Return the `torch.distributed.ProcessGroup` that has `backend` as its only backend.

    The methods of a ProcessGroup call the operators of `c10d::`.
    """
    if backend.group_around is None:
        group = c10d.ProcessGroup(backend.store, backend.rank(), backend.size())
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, backend)
        backend.group_around = group
    return backend.group_around
