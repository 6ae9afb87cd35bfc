"""The memory, time and refusals of losses.

Most kernels compute a loss for each element or row and then reduce these losses. Each rule names
its source in PyTorch. Compared with recordings from an H200 (torch 2.11, CUDA 13.0).
"""

from math import prod
from typing import Any

import torch

from virtualgpu.errors import not_implemented, scalar_name
from virtualgpu.ops import operators
from virtualgpu.ops.call import (
    Call,
    Work,
    asserts,
    bytes_of,
    composes,
    cuda_kernel,
    device_time,
    handles,
    refuses_half,
    shapes_by,
    temporaries,
)
from virtualgpu.ops.elementwise import contiguous_gradient
from virtualgpu.ops.reductions import contiguous_staging, sum_bytes
from virtualgpu.ops.sequence import OUT, Out, Plan, perform

aten = torch.ops.aten
NONE, MEAN = 0, 1  # reductions of a loss (aten/src/ATen/core/Reduction.h)
LOSS_ROW = 2  # clocks per row, because one block adds the losses (ATen/native/cuda/Loss.cu)

asserts(
    "t >= 0 && t < n_classes",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "nll_loss_backward",
    "nll_loss2d_backward",
)
asserts("target_k < dim", "multi_margin_loss")
asserts("input_val >= zero && input_val <= one", "binary_cross_entropy", cpu="between 0 and 1")
refuses_half("_ctc_loss")
cuda_kernel("ctc_loss_cuda", "_ctc_loss")


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """Reduce losses to their mean or sum, or return them unchanged.

    `reduction` is PyTorch's number for one of the three.
    """
    if reduction == NONE:
        return loss
    if reduction == MEAN:
        return loss.mean()
    return loss.sum()


def _reduction_of_elements(call: Call, numel: int) -> tuple[int, ...]:
    """Return the bytes of the staging buffer with which a loss reduces `numel` values."""
    return contiguous_staging(call.gpu, numel, sum_bytes(call.args[0].dtype))


@handles("huber_loss")
def huber_loss(call: Call) -> torch.Tensor:
    """Run `huber_loss`: the losses of all elements, then their reduction.

    Source: aten/src/ATen/native/Loss.cpp.
    """
    if call.op.outs:
        return operators.into_given(call)
    x, y = call.args[:2]
    losses = operators.compute(call.with_arguments(x, y, NONE, call.argument("delta")))
    return _reduced(losses, call.argument("reduction"))


@handles("binary_cross_entropy_with_logits")
def cross_entropy_with_logits(call: Call) -> torch.Tensor:
    """Run `binary_cross_entropy_with_logits` with the operators that C++ calls.

    Source: aten/src/ATen/native/Loss.cpp.
    """
    if call.op.outs:
        return operators.into_given(call)
    x, y = call.args[:2]
    weight, pos_weight = call.argument("weight"), call.argument("pos_weight")
    log_sigmoid = torch.nn.functional.logsigmoid(x)
    if pos_weight is not None:
        log_sigmoid.mul_((pos_weight - 1).mul(y).add_(1))
    loss = (1 - y).mul_(x).sub_(log_sigmoid)
    if weight is not None:
        loss.mul_(weight)
    return _reduced(loss, call.argument("reduction"))


@temporaries("binary_cross_entropy")
def cross_entropy(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the mean or sum, and of the staging buffer of its reduction.

    The losses of all elements fill the output, which shrinks to their mean or sum afterwards
    (aten/src/ATen/native/cuda/Loss.cu).
    """
    x = call.args[0]
    if call.argument("reduction") == NONE:
        return ()
    return x.itemsize, *_reduction_of_elements(call, x.numel())


@temporaries("multi_margin_loss")
def multi_margin_loss(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the rows' losses, and of the staging buffer of their sum.

    The source is aten/src/ATen/native/cuda/MultiMarginLoss.cu.
    """
    x = call.args[0]
    reduction = call.argument("reduction")
    if x.dim() < 2 or reduction == NONE:
        return ()
    rows = x.shape[0]
    return rows * x.itemsize, *_reduction_of_elements(call, rows)


@temporaries("soft_margin_loss")
def soft_margin_loss(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the mean or sum, and of the staging buffer of its reduction.

    The losses of all elements fill the output, which gets their mean or sum afterwards
    (aten/src/ATen/native/Loss.cpp).
    """
    x = call.args[0]
    if call.argument("reduction") == NONE:
        return ()
    return x.itemsize, *_reduction_of_elements(call, x.numel())


@handles("soft_margin_loss_backward")
def soft_margin_loss_backward(call: Call) -> Any:
    """Compute the gradient after the exponential of a product (aten/src/ATen/native/Loss.cpp)."""
    if call.op.outs:
        return operators.into_given(call)
    size = bytes_of(call.args[1])
    return perform(call, (size, size, size, -size, -size, OUT, -size))


temporaries(
    "nll_loss_backward",
    "nll_loss2d_backward",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_backward",
)(contiguous_gradient)


@handles("multilabel_margin_loss_forward")
def multilabel_margin_loss(call: Call) -> Any:
    """Compute the rows' losses and their sum.

    The source is aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu.
    """
    x = call.args[0]
    if call.op.outs:
        return operators.into_given(call)
    rows = 0  # bytes of the rows' losses
    if x.dim() == 2 and call.argument("reduction") != NONE:
        rows = bytes_of(x) // x.shape[1]
    return perform(call, (Out(1), rows, Out(0), -rows))


@shapes_by("mse_loss")
def squared_error(x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """Return the output of `mse_loss` on the meta device."""
    return _shrunk(torch.ops.aten.mse_loss.default(x, y, NONE), reduction)


@shapes_by("smooth_l1_loss")
def smooth_error(
    x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN, beta: float = 1.0
) -> torch.Tensor:
    """Return the output of `smooth_l1_loss` on the meta device."""
    return _shrunk(torch.ops.aten.smooth_l1_loss.default(x, y, NONE, beta), reduction)


def _shrunk(losses: torch.Tensor, reduction: int) -> torch.Tensor:
    """Return the losses as they are, or resize them to one number for a mean or sum.

    The memory keeps the size of all losses. CUDA allocates the output for all losses and resizes it
    when it writes their mean or sum (aten/src/ATen/native/Loss.cpp). `reduction` is PyTorch's
    number for none, mean or sum.
    """
    if reduction == NONE:
        return losses
    return losses.resize_(())


@temporaries("mse_loss", "smooth_l1_loss")
def pointwise_losses(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of all elements' losses, and of the staging buffer of their reduction.

    The source is aten/src/ATen/native/Loss.cpp.
    """
    x, y = call.args[:2]
    if call.argument("reduction") == NONE:
        return ()
    numel = x.numel()
    if x.shape != y.shape:
        numel = prod(torch.broadcast_shapes(x.shape, y.shape))
    return numel * x.itemsize, *_reduction_of_elements(call, numel)


@handles("nll_loss_forward")
def nll_loss(call: Call) -> Any:
    """Compute the loss for targets of the two dtypes that CUDA's kernel supports.

    Raises RuntimeError for other dtypes (aten/src/ATen/native/cuda/Loss.cu).
    """
    x, target = call.args[:2]
    kernel = f"nll_loss_forward_reduce_cuda_kernel_{x.dim()}d"
    if call.argument("reduction") == NONE and x.dim() == 2:
        kernel = "nll_loss_forward_no_reduce_cuda_kernel"
    if not x.dtype.is_floating_point:
        raise not_implemented(kernel, x.dtype)
    if target.dtype not in (torch.int64, torch.uint8):
        raise not_implemented(f"{kernel}_index", target.dtype)
    return operators.compute_or_into_given(call)


@handles("nll_loss2d_forward")
def nll_loss2d(call: Call) -> Any:
    """Compute the loss for int64 targets, the only ones that CUDA's kernel supports.

    Raises RuntimeError for other dtypes (aten/src/ATen/native/cuda/NLLLoss2d.cu).
    """
    target = call.args[1]
    if target.dtype is not torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {scalar_name(target.dtype)}")
    return operators.compute_or_into_given(call)


@device_time("nll_loss_forward")
def nll_loss_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of reading one sector of 32 bytes per row, and of adding the losses.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x, target = call.args[:2]
    rows = target.numel()
    is_reduced = results and results[0].dim() == 0
    return Work(moved - bytes_of(x) + 32 * rows, serial=LOSS_ROW * rows if is_reduced else 0.0)


# Connectionist temporal classification (native/LossCTC.cpp, native/cuda/LossCTC.cu). The lengths
# may be on the host.


def _integers(lengths: Any) -> list[int]:
    """Return sequence lengths, which may be a list or a tensor, as a list of integers."""
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.reshape(-1).tolist()
    return [int(n) for n in lengths]


@composes("ctc_loss.Tensor", "ctc_loss.IntList")
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute the CTC loss with the operators that native/LossCTC.cpp calls.

    `log_probs` has the shape (time, batch, classes), or (time, classes) for a single sequence.
    """
    single = log_probs.dim() == 2
    batch = log_probs
    if single:
        batch = log_probs.unsqueeze(1)
    lengths = _integers(target_lengths)
    targets = targets.to(log_probs.device, torch.int64)
    loss = aten._ctc_loss.default(
        batch, targets, _integers(input_lengths), lengths, blank, zero_infinity
    )[0]
    if zero_infinity:
        zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
        loss = torch.where(loss == torch.inf, zero, loss)
        del zero
    if reduction == 1:
        divisors = torch.tensor(lengths, dtype=loss.dtype, device=loss.device).clamp_min(1)
        return (loss / divisors).mean()
    if reduction == 2:
        return loss.sum()
    if single:
        return loss.squeeze(0)
    return loss


@handles("_ctc_loss")
def ctc_loss_forward(call: Call) -> Any:
    """Run the operator of the CTC loss.

    In the meantime, the targets' offsets and the lengths of inputs and targets are on the GPU.
    """
    lengths = 8 * call.args[0].shape[1]
    return perform(call, (lengths, lengths, lengths, Out(1), Out(0), -lengths, -lengths, -lengths))


@shapes_by("_ctc_loss_backward")
def ctc_loss_backward_shape(
    gradient: torch.Tensor, log_probs: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Return a meta tensor like the gradient of the CTC loss."""
    return torch.empty_like(log_probs)


@handles("_ctc_loss_backward")
def ctc_loss_backward(call: Call) -> Any:
    """Run the gradient of the CTC loss, with a second table like that of the forward pass."""
    log_probs, log_alpha = call.args[1], call.args[6]
    lengths, table = 8 * log_probs.shape[1], log_alpha.numel() * log_alpha.itemsize

    def plan(outputs: list[Any]) -> Plan:
        return lengths, lengths, lengths, table, Out(0), -table, -lengths, -lengths, -lengths

    return perform(call, plan)
