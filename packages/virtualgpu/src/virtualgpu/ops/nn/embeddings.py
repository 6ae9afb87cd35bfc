"""Embeddings, and the gradients of their rows: added by atomic operations where they are few, else sorted first.

Sources: PyTorch's native/cuda/Embedding.cu with EmbeddingBackwardKernel.cu, and EmbeddingBag.cu. Checked against an H200 (PyTorch 2.11,
CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from typing import Any

import torch

from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import Call, composes, handles
from virtualgpu.ops.elementwise import contiguous_copies
from virtualgpu.ops.sequence import OUT, Out, Plan, every_output, perform

ATOMIC_UP_TO = 3072  # indices whose gradients are added by atomic operations; more are sorted
ROWS_A_THREAD = 10


@lru_cache(maxsize=4096)
def sorted_gradient(
    n: int, rows: int, columns: int, item: int, grad: int, by_frequency: bool
) -> Plan:
    """`embedding_backward_cuda_kernel`: sorted indices, their segments, partial sums of segments in float32."""
    size = n * item
    temp, segments = cub.radix_sort(n, item, item), min(n, rows)
    partial = n // ROWS_A_THREAD + segments
    unique, starts = cub.unique_by_key(n, item), cub.scan(segments, item)
    sums = partial * columns * max(grad, 4)
    frequency = (
        (size, 1279, -1279, 1279, -1279) if by_frequency else ()
    )  # an estimate above 50,000 indices
    return (
        size, size, size, temp, -temp, -size, *frequency,
        OUT, size, 8, size, unique, -unique, -size, segments * item, segments * item, starts, -starts, 8,
        partial * item, sums, -sums, -partial * item, -8, -segments * item, -segments * item, -8, -size,
        *((-size,) if by_frequency else ()), -size, -size,
    )  # fmt: skip


@handles("embedding_dense_backward")
def embedding_dense_backward(call: Call) -> Any:
    if call.kwargs:
        return operators.into_given(call)
    grad, indices, rows, _, by_frequency = call.args
    n, copies = indices.numel(), contiguous_copies(grad)
    if (n <= ATOMIC_UP_TO and not by_frequency) or n == 0:
        plan: Plan = (OUT,)
    else:
        plan = sorted_gradient(
            n, rows, grad.shape[-1], indices.itemsize, grad.itemsize, bool(by_frequency)
        )
    return perform(call, (*copies, *plan, *(-size for size in copies)))


MAXIMUM = 2  # the mode of an embedding bag


@handles("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Any:
    """The bag of each index is noted at its own length, bags' sizes at theirs; the CPU's kernel notes them otherwise."""
    indices, offsets, mode = (call.argument(name) for name in ("indices", "offsets", "mode"))
    bags = offsets.numel() - bool(call.argument("include_last_offset"))
    size = max(indices.itemsize, offsets.itemsize)

    def plan(outputs: list[Any]) -> Plan:
        return Out(2), Out(1), Out(0), Out(3)

    def kernel(*args: Any, **kwargs: Any) -> tuple:
        output, _, _, maxima = call.func(*args, **kwargs)
        kind = torch.int64 if size == 8 else torch.int32
        starts = offsets[:bags].to(torch.int64)
        ends = torch.cat([starts[1:], starts.new_full((1,), indices.numel())]) if bags else starts
        bag_of = torch.repeat_interleave(torch.arange(bags, device="cpu"), ends - starts)
        bag_size = torch.bincount(
            bag_of[indices != call.argument("padding_idx")], minlength=bags
        ).to(kind)
        return (
            output,
            bag_of.to(kind),
            bag_size,
            maxima if mode == MAXIMUM else torch.empty(0, dtype=kind, device="cpu"),
        )

    return perform(call, plan, kernel=kernel)


@handles("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(call: Call) -> Any:
    """The gradients of an embedding's rows, always sorted. The largest of a bag has one place each, and is added there."""
    names = ("grad", "indices", "num_weights", "scale_grad_by_freq", "mode")
    grad, indices, rows, by_frequency, mode = (call.argument(name) for name in names)
    if call.argument("sparse"):
        return operators.compute(call)
    if mode == MAXIMUM or indices.numel() == 0:
        return perform(call, every_output)
    plan, copies = (
        sorted_gradient(
            indices.numel(),
            rows,
            grad.shape[-1],
            indices.itemsize,
            grad.itemsize,
            bool(by_frequency),
        ),
        contiguous_copies(grad),
    )
    return perform(call, (*copies, *plan, *(-size for size in copies)))


@composes("one_hot")
def one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """CUDA checks no index beforehand, and scatters ones."""
    if indices.dtype is not torch.int64:
        raise RuntimeError(
            f"one_hot is only applicable to index tensor of type LongTensor, but got {indices.type()}"
        )
    if indices.numel() == 0:
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return indices.new_empty((*indices.shape, num_classes))
    if num_classes == -1:
        num_classes = int(indices.max().item()) + 1
    result = indices.new_zeros((*indices.shape, num_classes))
    return result.scatter_(-1, indices.unsqueeze(-1), 1)
