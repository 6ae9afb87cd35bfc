"""Composite operators whose C++ makes its result before it looks at any device tensor, and so on the CPU: made here of others."""

import torch

from labkit.vgpu.footprint import composes


@composes("vander")
def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:  # noqa: N803 (torch's name)
    powers = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))


@composes("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.atol_rtol_float")
def matrix_rank(x: torch.Tensor, *, atol=None, rtol=None, hermitian: bool = False) -> torch.Tensor:
    """The number of singular values above a tolerance (documentation of torch.linalg.matrix_rank)."""
    values = torch.linalg.eigvalsh(x).abs() if hermitian else torch.linalg.svdvals(x)
    if rtol is None:
        rtol = torch.finfo(x.dtype).eps * max(x.shape[-2:]) if atol is None else 0.0
    largest = values.amax(-1, keepdim=True) if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    limit = largest * (rtol.unsqueeze(-1) if isinstance(rtol, torch.Tensor) and rtol.dim() else rtol)
    if atol is not None:
        limit = torch.maximum(limit, torch.as_tensor(atol, dtype=limit.dtype, device=limit.device).unsqueeze(-1))
    return (values > limit).sum(-1)


@composes("linalg_matrix_rank.tol_tensor", "linalg_matrix_rank")
def matrix_rank_of_tolerance(x: torch.Tensor, tol, hermitian: bool = False) -> torch.Tensor:
    return matrix_rank(x, atol=tol, rtol=0.0, hermitian=hermitian)


@composes("ctc_loss.Tensor", "ctc_loss.IntList")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank: int = 0, reduction: int = 1, zero_infinity: bool = False):
    """As LossCTC.cpp, with the divisor of the mean on the GPU. `reduction`: 0 none, 1 mean, 2 sum."""
    loss = torch.ops.aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction == 1:
        lengths = torch.as_tensor(target_lengths, dtype=loss.dtype, device=loss.device)
        return (loss / lengths.clamp_min(1)).mean()
    return loss.sum() if reduction == 2 else loss
