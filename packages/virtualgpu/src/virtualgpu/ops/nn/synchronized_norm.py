"""SyncBatchNorm's kernels: each rank reduces its part of the batch, and all combine what they have (cuda/Normalization.cuh)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules._functions import SyncBatchNorm

from virtualgpu.hardware import Machine
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, handles
from virtualgpu.ops.without_values import loses_values
from virtualgpu.tensor import VirtualTensor, empty_without_values

Tensor = torch.Tensor


def _by_channel(x: Tensor) -> Tensor:
    """Channels by all else, in float32 at least."""
    x = x.transpose(0, 1).reshape(x.shape[1], -1)
    return x.float() if x.itemsize < 4 else x


def _shaped(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(_by_channel(x), 1, correction=0)
    return mean, (variance + epsilon).rsqrt()


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    epsilon: float,
) -> tuple[Tensor, ...]:
    scale = scale if weight is None else scale * weight
    y = (x - _shaped(mean, x)) * _shaped(scale, x)
    return ((y if bias is None else y + _shaped(bias, x)).to(x.dtype),)


def _gathered(
    x: Tensor, mean: Tensor, scale: Tensor, running_mean: Tensor | None, running_variance: Tensor | None,
    momentum: float, epsilon: float, counts: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What all ranks' means and deviations, a row each, come to; `counts` are of their elements."""
    parts = (
        (counts if isinstance(counts, Tensor) else torch.full_like(mean[:, 0], counts))
        .to(mean.dtype)
        .unsqueeze(1)
    )
    total = parts.sum()
    whole = (parts * mean).sum(0) / total
    variance = (parts * (scale**-2 - epsilon + (mean - whole) ** 2)).sum(0) / total
    for running, now in ((running_mean, whole), (running_variance, variance * total / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    return whole, (variance + epsilon).rsqrt()


def _reduced(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor | None, ...]:
    dy = _by_channel(grad)
    sums, products = dy.sum(1), (dy * (_by_channel(x) - mean.unsqueeze(1))).sum(1)
    kind = mean.dtype if weight is None else weight.dtype
    into_weight, into_bias = (
        (products * scale).to(kind) if for_weight else None,
        sums.to(kind) if for_bias else None,
    )
    return sums if for_x else None, products if for_x else None, into_weight, into_bias


def _gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> tuple[Tensor, ...]:
    total = counts.sum()
    common = _shaped(sums / total, x) + (x - _shaped(mean, x)) * _shaped(
        scale**2 * products / total, x
    )
    return (
        ((grad - common) * _shaped(scale if weight is None else scale * weight, x)).to(x.dtype),
    )


_KERNELS: dict[str, Any] = {
    "batch_norm_stats": _stats,
    "batch_norm_elemt": _normalized,
    "batch_norm_gather_stats": _gathered,
    "batch_norm_gather_stats_with_counts": _gathered,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _gradient,
}


@handles(*_KERNELS)
def synchronized(call: Call) -> Any:
    gpu = call.common_gpu()
    kernel = _KERNELS[call.op.name]
    if not loses_values(call):
        results = operators.compute(call, lambda: kernel(*call.args))
        return results[0] if len(results) == 1 else results

    def on_meta(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if type(x) is VirtualTensor else x

    shapes = kernel(*map(on_meta, call.args))
    made = tuple(
        None if x is None else empty_without_values(gpu, x.shape, x.stride(), x.dtype)
        for x in shapes
    )
    gpu.launch(call.moved, name=call.op.name)
    return made[0] if len(made) == 1 else made


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield SyncBatchNorm, {"forward": staticmethod(_with_all_ranks(machine, SyncBatchNorm.forward))}


def _with_all_ranks(machine: Machine, forward: Callable[..., Any]) -> Callable[..., Any]:
    """It leaves out ranks without a part of the batch by a mask. Where that has no values, each rank is taken to have one."""

    def forward_of_all(*args: Any) -> Any:
        machine.selected.full_masks = True
        try:
            return forward(*args)
        finally:
            machine.selected.full_masks = False

    return forward_of_all
