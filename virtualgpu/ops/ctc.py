"""Connectionist temporal classification: lengths may lie on the host, as in PyTorch's own example.

Source: PyTorch's native/LossCTC.cpp and native/cuda/LossCTC.cu.
"""

from typing import Any

import torch

from virtualgpu.ops import registry
from virtualgpu.ops.sequence import Out, Plan, perform

aten = torch.ops.aten


def _integers(lengths: Any) -> list[int]:
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)]


@registry.composes("ctc_loss.Tensor", "ctc_loss.IntList")
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    single = log_probs.dim() == 2
    wide = log_probs.unsqueeze(1) if single else log_probs
    lengths = _integers(target_lengths)
    loss = aten._ctc_loss.default(wide, targets, _integers(input_lengths), lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == torch.inf, torch.zeros((), dtype=loss.dtype, device=loss.device), loss)
    if reduction == 1:
        divisors = torch.tensor(lengths, dtype=loss.dtype, device=loss.device).clamp_min(1)
        return (loss / divisors).mean()
    if reduction == 2:
        return loss.sum()
    return loss.squeeze(0) if single else loss


@registry.handles("_ctc_loss")
def forward(func: Any, args: tuple, kwargs: dict) -> Any:
    """Offsets of the targets and both lengths lie on the GPU meanwhile."""
    lengths = 8 * args[0].shape[1]
    return perform(func, args, kwargs, lambda outputs: (lengths, lengths, lengths, Out(1), Out(0), -lengths, -lengths, -lengths))


@registry.handles("_ctc_loss_backward")
def backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """The mirror of the forward's table, too."""
    log_probs, log_alpha = args[1], args[6]
    lengths, table = 8 * log_probs.shape[1], log_alpha.numel() * log_alpha.itemsize

    def plan(outputs: list[Any]) -> Plan:
        return lengths, lengths, lengths, table, Out(0), -table, -lengths, -lengths, -lengths

    return perform(func, args, kwargs, plan)
