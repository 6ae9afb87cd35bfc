"""What the operators on lists of tensors ask for, of which optimizers and gradient clipping are made.

Most ask for their outputs alone: the kernels walk over many tensors at once. A norm of every tensor is computed chunk by chunk
first. Rule from PyTorch's aten/src/ATen/native/cuda/ForeachReduceOp.cu; held against recordings from an H200 (torch 2.11).
"""

from math import inf
from typing import Any

from virtualgpu.ops import operators
from virtualgpu.ops.reductions import sum_bytes
from virtualgpu.ops.registry import handles

CHUNK = 65536  # elements
FUSED_ORDERS = (1, 2, inf)


@handles("_foreach_norm", "_foreach_max")
def foreach_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """A partial result for every chunk of every tensor, as many for each as the largest has, before the results."""
    tensors = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    fast = "out" not in kwargs and len({(x.dtype, x.device) for x in tensors}) == 1 and all(x.numel() for x in tensors)
    if "norm" in func._schema.name:
        fast = fast and order in FUSED_ORDERS and tensors[0].dtype.is_floating_point
    if not fast:
        return operators.compute(func, args, kwargs)
    gpu, _ = operators.common_gpu(args, kwargs)
    chunks = max(-(-x.numel() // CHUNK) for x in tensors)
    item = sum_bytes((args[2] if len(args) > 2 else kwargs.get("dtype")) or tensors[0].dtype)
    if "max" in func._schema.name:
        item = tensors[0].itemsize
    partial = gpu.allocate(len(tensors) * chunks * item)
    try:
        return operators.compute(func, args, kwargs)
    finally:
        if partial is not None:
            gpu.allocator.free(partial)
