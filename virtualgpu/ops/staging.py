"""What a copy between a GPU and the host allocates on the GPU beside its target.

The rule is that of `copy_kernel_cuda` and `copy_requires_temporaries` in PyTorch's native/cuda/Copy.cu: a copy that is no plain block of
memory goes through contiguous copies on both sides. A blocking copy converts the type on the host, another one on the GPU.
"""

import torch

from virtualgpu.hardware import Gpu
from virtualgpu.tensor import span_bytes


def staging(source: torch.Tensor, target: torch.Tensor, there: Gpu | None, here: Gpu | None, non_blocking: bool) -> tuple[int, ...]:
    """Bytes of the temporaries on the GPU, of a copy between it and the host; `there` and `here` are where source and target lie."""
    same_type = source.dtype is target.dtype
    if same_type and _one_block(source, target):
        return ()
    count = target.numel()
    if here is not None:  # to the GPU
        converts_here = non_blocking and not same_type
        return () if target.is_contiguous() and not converts_here else (count * (source if converts_here else target).itemsize,)
    sizes = []
    if non_blocking and not same_type:
        sizes.append(count * target.itemsize)
    if not source.is_contiguous() or source.numel() != count:
        sizes.append(count * (target if non_blocking else source).itemsize)
    return tuple(sizes)


def _one_block(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Do both fill their memory in the same order?"""
    if source.is_contiguous() and target.is_contiguous():
        return True
    same_order = source.stride() == target.stride() and source.shape == target.shape
    return same_order and span_bytes(source.size(), source.stride(), source.dtype) == source.numel() * source.itemsize
