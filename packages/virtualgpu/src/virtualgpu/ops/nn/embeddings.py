"""Embeddings and the gradients of their rows.

CUDA adds the gradients of a few rows with atomic operations. For more rows, it sorts the indices
first, so that the gradients of one row become adjacent.

Sources: PyTorch's native/cuda/Embedding.cu with EmbeddingBackwardKernel.cu, and EmbeddingBag.cu.
Checked against an H200 (PyTorch 2.11, CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from typing import Any

import torch

from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import Call, composes, handles
from virtualgpu.ops.elementwise import contiguous_copies
from virtualgpu.ops.sequence import OUT, Out, Plan, every_output, perform

ATOMIC_UP_TO = 3072  # the most indices whose gradients are added with atomic operations
ROWS_PER_THREAD = 10
MAXIMUM = 2  # the mode of an embedding bag that keeps the largest elements


@lru_cache(maxsize=4096)
def sorted_gradient(
    n: int, rows: int, columns: int, item: int, grad: int, by_frequency: bool
) -> Plan:
    """Return the memory plan of an embedding's gradient that sorts the indices.

    The memory of `embedding_backward_cuda_kernel` holds the sorted indices, the segments of equal
    indices, and partial sums of the segments in float32. There are `n` indices of `item` bytes into
    a table of `rows` times `columns` elements. `grad` is the size of a gradient's element in bytes.
    With `by_frequency`, gradients are divided by how often their index occurs.
    """
    size = n * item
    sort_storage = cub.radix_sort(n, item, item)
    segments = min(n, rows)
    partial = n // ROWS_PER_THREAD + segments
    unique, starts = cub.unique_by_key(n, item), cub.scan(segments, item)
    sums = partial * columns * max(grad, 4)
    counts: Plan = ()
    counts_end: Plan = ()
    if by_frequency:
        counts = size, 1279, -1279, 1279, -1279  # an estimate above 50,000 indices
        counts_end = (-size,)
    return (
        size, size, size, sort_storage, -sort_storage, -size, *counts,
        OUT, size, 8, size, unique, -unique, -size,
        segments * item, segments * item, starts, -starts, 8, partial * item, sums,
        -sums, -partial * item, -8, -segments * item, -segments * item, -8, -size,
        *counts_end, -size, -size,
    )  # fmt: skip


@handles("embedding_dense_backward")
def embedding_dense_backward(call: Call) -> Any:
    """Compute the gradient of an embedding's table, with or without sorting the indices."""
    if call.kwargs:
        return operators.into_given(call)
    grad, indices, rows, _, by_frequency = call.args
    n = indices.numel()
    if n == 0 or (n <= ATOMIC_UP_TO and not by_frequency):
        plan: Plan = (OUT,)
    else:
        plan = sorted_gradient(
            n, rows, grad.shape[-1], indices.itemsize, grad.itemsize, bool(by_frequency)
        )
    copies = contiguous_copies(grad)
    return perform(call, (*copies, *plan, *(-size for size in copies)))


@handles("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Any:
    """Compute the bags' sums, means or maxima, and what the backward pass needs, as CUDA does.

    CUDA's kernel returns the bag of each index and the sizes of the bags, in tensors of exactly
    that length. The CPU's kernel returns other tensors there.
    """
    indices, offsets, mode = (call.argument(name) for name in ("indices", "offsets", "mode"))
    bags = offsets.numel() - bool(call.argument("include_last_offset"))
    size = max(indices.itemsize, offsets.itemsize)

    def plan(outputs: list[Any]) -> Plan:
        return Out(2), Out(1), Out(0), Out(3)

    def kernel(*args: Any, **kwargs: Any) -> tuple:
        output, _, _, maxima = call.func(*args, **kwargs)
        kind = torch.int64 if size == 8 else torch.int32
        starts = offsets[:bags].to(torch.int64)
        ends = starts
        if bags:
            ends = torch.cat([starts[1:], starts.new_full((1,), indices.numel())])
        bag_of = torch.repeat_interleave(torch.arange(bags, device="cpu"), ends - starts)
        counted = bag_of[indices != call.argument("padding_idx")]
        bag_size = torch.bincount(counted, minlength=bags).to(kind)
        if mode != MAXIMUM:
            maxima = torch.empty(0, dtype=kind, device="cpu")
        return output, bag_of.to(kind), bag_size, maxima

    return perform(call, plan, kernel=kernel)


@handles("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(call: Call) -> Any:
    """Compute the gradient of an embedding bag's table.

    CUDA always sorts the indices, unless the bags keep their largest elements. Those have one index
    each, to which the gradient is added.
    """
    names = ("grad", "indices", "num_weights", "scale_grad_by_freq", "mode")
    grad, indices, rows, by_frequency, mode = (call.argument(name) for name in names)
    if call.argument("sparse"):
        return operators.compute(call)
    n = indices.numel()
    if mode == MAXIMUM or n == 0:
        return perform(call, every_output)
    plan = sorted_gradient(
        n, rows, grad.shape[-1], indices.itemsize, grad.itemsize, bool(by_frequency)
    )
    copies = contiguous_copies(grad)
    return perform(call, (*copies, *plan, *(-size for size in copies)))


@composes("one_hot")
def one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return one-hot vectors of the indices, with a new last dimension of `num_classes` elements.

    -1 means one class more than the largest index. CUDA scatters ones and does not check the
    indices before. Raises RuntimeError for indices that are not int64, and for no indices without a
    number of classes.
    """
    if indices.dtype is not torch.int64:
        raise RuntimeError(
            "one_hot is only applicable to index tensor of type LongTensor, but got "
            f"{indices.type()}"
        )
    if indices.numel() == 0:
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return indices.new_empty((*indices.shape, num_classes))
    if num_classes == -1:
        num_classes = int(indices.max().item()) + 1
    result = indices.new_zeros((*indices.shape, num_classes))
    return result.scatter_(-1, indices.unsqueeze(-1), 1)
