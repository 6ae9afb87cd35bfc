"""The kernels of SyncBatchNorm, a batch norm over the batches of all ranks.

Each rank reduces its part of the batch. The ranks exchange the results and combine them
(cuda/Normalization.cuh). The functions here compute the values of these kernels on the CPU.
"""

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
    """Reshape `x` to (channels, all other elements), in float32 or a wider dtype."""
    x = x.transpose(0, 1).reshape(x.shape[1], -1)
    if x.itemsize < 4:
        return x.float()
    return x


def _like_image(channels: Tensor, x: Tensor) -> Tensor:
    """Reshape a tensor with one number per channel so that it broadcasts to the images `x`."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Return (mean, inverse standard deviation) of each channel of this rank's batch.

    `epsilon` is added to the variance.
    """
    variance, mean = torch.var_mean(_by_channel(x), 1, correction=0)
    return mean, (variance + epsilon).rsqrt()


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse_deviation: Tensor,
    epsilon: float,
) -> tuple[Tensor, ...]:
    """Return (the normalized input,).

    `x` is normalized with `mean` and `inverse_deviation`, one number per channel. Then it is scaled
    with the weight and shifted by the bias.
    """
    scale = inverse_deviation
    if weight is not None:
        scale = inverse_deviation * weight
    y = (x - _like_image(mean, x)) * _like_image(scale, x)
    if bias is not None:
        y = y + _like_image(bias, x)
    return (y.to(x.dtype),)


def _gathered(
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    epsilon: float,
    counts: Any,
) -> tuple[Tensor, ...]:
    """Combine the statistics of all ranks, and update the running statistics.

    Returns (mean, inverse standard deviation) of each channel. `mean` and `inverse_deviation` have
    a row per rank. `counts` is the number of elements per channel, of each rank or the same for
    all.
    """
    if not isinstance(counts, Tensor):
        counts = torch.full_like(mean[:, 0], counts)
    parts = counts.to(mean.dtype).unsqueeze(1)
    total = parts.sum()
    whole = (parts * mean).sum(0) / total
    variances = inverse_deviation**-2 - epsilon + (mean - whole) ** 2
    variance = (parts * variances).sum(0) / total
    unbiased = variance * total / (total - 1)
    for running, now in ((running_mean, whole), (running_variance, unbiased)):
        if running is not None:
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    return whole, (variance + epsilon).rsqrt()


def _reduced(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor | None,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return this rank's part of the gradients, from the output's gradient `grad`.

    They are the sums of the gradient and of the gradient times the centered input, and then the
    gradients of weight and bias. `for_x`, `for_weight` and `for_bias` say which of them are wanted.
    The others are None.
    """
    gradient = _by_channel(grad)
    sums = gradient.sum(1)
    products = (gradient * (_by_channel(x) - mean.unsqueeze(1))).sum(1)
    kind = mean.dtype if weight is None else weight.dtype
    into_weight = into_bias = None
    if for_weight:
        into_weight = (products * inverse_deviation).to(kind)
    if for_bias:
        into_bias = sums.to(kind)
    if not for_x:
        return None, None, into_weight, into_bias
    return sums, products, into_weight, into_bias


def _gradient(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> tuple[Tensor, ...]:
    """Return (the input's gradient,).

    `sums` and `products` are the sums that `_reduced` returns, added up over all ranks. `counts`
    has each rank's number of elements per channel.
    """
    total = counts.sum()
    slope = _like_image(inverse_deviation**2 * products / total, x)
    common = _like_image(sums / total, x) + (x - _like_image(mean, x)) * slope
    scale = inverse_deviation
    if weight is not None:
        scale = inverse_deviation * weight
    return (((grad - common) * _like_image(scale, x)).to(x.dtype),)


_KERNELS: dict[str, Any] = {
    "batch_norm_stats": _statistics,
    "batch_norm_elemt": _normalized,
    "batch_norm_gather_stats": _gathered,
    "batch_norm_gather_stats_with_counts": _gathered,
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": _gradient,
}


@handles(*_KERNELS)
def synchronized(call: Call) -> Any:
    """Run an operator that is one of the kernels of SyncBatchNorm."""
    gpu = call.common_gpu()
    kernel = _KERNELS[call.op.name]
    if not loses_values(call):
        results = operators.compute(call, lambda: kernel(*call.args))
    else:
        results = tuple(
            None if x is None else empty_without_values(gpu, x.shape, x.stride(), x.dtype)
            for x in kernel(*map(_on_meta, call.args))
        )
        gpu.launch(call.moved, name=call.op.name)
    if len(results) == 1:
        return results[0]
    return results


def _on_meta(argument: Any) -> Any:
    """Return a meta tensor with the shape of a virtual tensor, and other arguments unchanged."""
    if type(argument) is VirtualTensor:
        return torch.empty(argument.shape, dtype=argument.dtype, device="meta")
    return argument


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield SyncBatchNorm, {"forward": staticmethod(_with_all_ranks(machine, SyncBatchNorm.forward))}


def _with_all_ranks(machine: Machine, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, SyncBatchNorm's forward pass, changed to work without values.

    It uses a mask to leave out ranks without samples. If the mask has no values, each rank is
    assumed to have samples.
    """

    def forward_of_all(*args: Any) -> Any:
        machine.selected.full_masks = True
        try:
            return forward(*args)
        finally:
            machine.selected.full_masks = False

    return forward_of_all
