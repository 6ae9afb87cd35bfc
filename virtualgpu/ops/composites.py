"""Composite operators whose C++ makes its result before it looks at any device tensor, and so on the CPU: made here of others."""

import warnings
from typing import Any

import torch

from virtualgpu.errors import VERSION
from virtualgpu.ops.registry import composes, made_of


@composes("vander")
def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:  # noqa: N803 (torch's name)
    powers = torch.arange(x.shape[0] if N is None else N, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))


def _with_number(operator: Any) -> Any:
    """A quantile by a tensor of fractions, which is made of a number (native/Sorting.cpp)."""

    def composed(
        x: torch.Tensor, q: float, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> torch.Tensor:
        return operator(x, torch.scalar_tensor(q, dtype=x.dtype, device=x.device), dim, keepdim, interpolation=interpolation)

    return composed


composes("quantile.scalar")(_with_number(torch.quantile))
composes("nanquantile.scalar")(_with_number(torch.nanquantile))


def _by_rank(operator: Any, ignores_nan: bool) -> Any:
    """A quantile by a tensor of fractions, as native/Sorting.cpp makes it on CUDA: without a look at their values."""

    def composed(
        x: torch.Tensor, q: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> torch.Tensor:
        plain = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, q))
        shape = made_of(operator, *plain, dim, keepdim, interpolation=interpolation).shape  # and what C++ refuses is refused
        x = x.flatten() if dim is None or x.dim() == 0 else x.unsqueeze(-1).transpose(dim % x.dim(), -1)
        values = x.sort()[0]
        values = values.reshape(*shape[q.dim() :], values.shape[-1])
        last = values.shape[-1] - 1
        if ignores_nan:
            present = values.isnan().logical_not_()
            count = present.sum(-1, keepdim=True)
            ranks = q * (count - 1)
            del count, present  # in C++'s order
            ranks.masked_fill_(ranks < 0, 0)
        else:
            scaled, missing = torch.broadcast_tensors(q * last, values.isnan().any(-1, keepdim=True))
            ranks = torch.masked_fill(scaled, missing, last)
            del scaled, missing
        if rounded := {"lower": ranks.floor_, "higher": ranks.ceil_, "nearest": ranks.round_}.get(interpolation):
            result = values.gather(-1, rounded().long())
        else:
            below = ranks.long()
            weights = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
            result = values.gather(-1, below)
            result.lerp_(values.gather(-1, ranks.ceil_().long()), weights)
        return result.squeeze_(-1) if q.dim() == 0 else result.unsqueeze_(0).transpose_(0, -1).squeeze_(-1)

    return composed


if VERSION < (2, 13):  # from then on C++ leaves the values of any subclass of a tensor alone
    composes("quantile")(_by_rank(torch.ops.aten.quantile.default, ignores_nan=False))
    composes("nanquantile")(_by_rank(torch.ops.aten.nanquantile.default, ignores_nan=True))


@composes("linalg_eigvalsh")
def eigvalsh(x: torch.Tensor, UPLO: str = "L") -> torch.Tensor:  # noqa: N803 (torch's name)
    """Vectors are computed for a gradient alone; C++ does so for any subclass of a tensor, too (native/BatchLinearAlgebra.cpp)."""
    return torch.ops.aten._linalg_eigh(x, UPLO, torch.is_grad_enabled() and x.requires_grad)[0]


@composes("linalg_svdvals")
def svdvals(x: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    return torch.ops.aten._linalg_svd(x, False, torch.is_grad_enabled() and x.requires_grad, driver=driver)[1]


@composes("cov")
def cov(x: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> torch.Tensor:
    """As native/Correlation.cpp, with the number of observations on the GPU."""
    if fweights is not None or aweights is not None or x.dim() > 2:
        return made_of(torch.ops.aten.cov.default, x, correction=correction, fweights=fweights, aweights=aweights)
    x = x if x.dim() == 2 else x.unsqueeze(0)
    count = torch.scalar_tensor(x.shape[1], dtype=torch.int64, device=x.device)
    mean = x.sum(1) / count
    divisor = count - correction
    if torch.equal(divisor <= 0, torch.ones((), dtype=torch.bool, device=x.device)):
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number of observations.", stacklevel=2
        )
        divisor.zero_()
    x = x - mean.unsqueeze(1)
    return (torch.mm(x, x.t().conj()) / divisor).squeeze()


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
