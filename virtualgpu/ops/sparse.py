"""Sparse tensors: their indices and values are tensors of their own, with memory of their own."""

from typing import Any

import torch

from virtualgpu.ops import operators
from virtualgpu.ops.registry import handles

_node, _graph_task = torch._C._current_autograd_node, torch._C._current_graph_task_id


@handles("clone")
def clone(func: Any, args: tuple, kwargs: dict) -> Any:
    """Of a sparse tensor, part by part. A gradient that nobody else holds is kept as it is (autograd/functions/accumulate_grad.h)."""
    x = args[0]
    if x.layout is not torch.sparse_coo:
        return operators.compute(func, args, kwargs)
    if _graph_task() != -1 and not torch.is_grad_enabled() and _node().name() == "torch::autograd::AccumulateGrad":
        return x
    indices, values = x._indices().clone(), x._values().clone()
    return torch.sparse_coo_tensor(indices, values, x.size(), is_coalesced=x.is_coalesced(), check_invariants=False)
