"""PyTorch's operators with small inputs, which `test_operators` compares with the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F


class Inputs:
    """Random inputs of a case on the CPU, which are the same in every run."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.dtype = dtype

    def unit(self, *shape: int) -> torch.Tensor:
        """Return numbers between 0.1 and 0.9, in the domain of nearly every function."""
        return (
            torch.rand(shape, generator=self.generator)
            .mul(0.8)
            .add(0.1)
            .to(self.dtype)
            .requires_grad_()
        )

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).requires_grad_()

    def whole(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def truth(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) > 0.5

    def definite(self, n: int) -> torch.Tensor:
        """Return a symmetric positive definite matrix."""
        matrix = torch.randn(n, n, generator=self.generator)
        return (matrix @ matrix.T + n * torch.eye(n)).to(self.dtype).requires_grad_()


POINTWISE = [
    "abs", "acos", "angle", "arccos", "arcsin", "arctan", "asin", "asinh", "atan", "atanh", "ceil",
    "cos", "cosh", "deg2rad", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix",
    "floor", "frac", "i0", "lgamma", "log", "log10", "log1p", "log2", "logit", "neg", "negative",
    "positive", "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "sin",
    "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc", "nan_to_num", "isfinite", "isinf",
    "isnan", "isreal", "signbit", "logical_not", "zeros_like", "ones_like",
]  # fmt: skip
SPECIAL = [
    "entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr", "ndtr", "ndtri", "bessel_j0", "bessel_j1",
    "spherical_bessel_j0",
]  # fmt: skip
ACTIVATIONS = [
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign",
    "tanhshrink",
]  # fmt: skip
BINARY = [
    "add", "sub", "mul", "div", "true_divide", "pow", "atan2", "fmax", "fmin", "fmod", "remainder",
    "hypot", "maximum", "minimum", "logaddexp", "logaddexp2", "xlogy", "eq", "ne", "lt", "le", "gt",
    "ge", "isclose", "copysign", "nextafter", "logical_and", "logical_or", "logical_xor", "ldexp",
    "dist", "inner",
]  # fmt: skip
REDUCTIONS = [
    "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "std", "var", "median", "nanmedian",
    "norm", "logsumexp", "nansum", "nanmean", "all", "any", "std_mean", "var_mean", "aminmax",
    "count_nonzero", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "softmax",
    "log_softmax", "sort", "argsort", "msort", "mode", "max", "min", "unbind",
]  # fmt: skip


def along(name: str, x: torch.Tensor) -> Any:
    """Return a reduction over the last dimension, or over all if it takes no dimension."""
    function = getattr(torch, name)
    if name in ("norm", "aminmax"):
        return function(x, dim=-1)
    return function(x) if name == "msort" else function(x, -1)


Case = tuple[Callable[..., Any], Callable[[Inputs], tuple]]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in POINTWISE:
        found[name] = getattr(torch, name), lambda i: (i.unit(3, 5),)
    for name in SPECIAL:
        found[f"special.{name}"] = getattr(torch.special, name), lambda i: (i.unit(3, 5),)
    for name in ACTIVATIONS:
        found[f"F.{name}"] = getattr(F, name), lambda i: (i.real(4, 6),)
    for name in BINARY:
        found[name] = getattr(torch, name), lambda i: (i.unit(4, 3), i.unit(4, 3))
    for name in REDUCTIONS:
        found[name] = partial(along, name), lambda i: (i.unit(4, 6),)
    return found | SHAPES | INDEXING | MATRICES | LAYERS | LOSSES | OTHERS


SHAPES: dict[str, Case] = {
    "cat": (lambda x, y: torch.cat([x, y], 1), lambda i: (i.real(2, 3), i.real(2, 4))),
    "stack": (lambda x, y: torch.stack([x, y], -1), lambda i: (i.real(2, 3), i.real(2, 3))),
    "hstack": (lambda x, y: torch.hstack([x, y]), lambda i: (i.real(2, 3), i.real(2, 3))),
    "vstack": (lambda x, y: torch.vstack([x, y]), lambda i: (i.real(2, 3), i.real(2, 3))),
    "block_diag": (lambda x, y: torch.block_diag(x, y), lambda i: (i.real(2, 3), i.real(1, 2))),
    "chunk": (lambda x: x.chunk(3, 1), lambda i: (i.real(2, 7),)),
    "split": (lambda x: x.split([2, 5], 1), lambda i: (i.real(2, 7),)),
    "tensor_split": (lambda x: x.tensor_split(3), lambda i: (i.real(7, 2),)),
    "reshape": (lambda x: x.T.reshape(4, 3) * 2, lambda i: (i.real(2, 6),)),
    "permute": (lambda x: x.permute(2, 0, 1) + 1, lambda i: (i.real(2, 3, 4),)),
    "expand": (lambda x: x.expand(4, 3) * 2, lambda i: (i.real(1, 3),)),
    "unfold": (lambda x: x.unfold(0, 3, 2), lambda i: (i.real(9),)),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 2), 1), lambda i: (i.real(8),)),
    "flip": (lambda x: x.flip(0, 1), lambda i: (i.real(2, 3),)),
    "roll": (lambda x: x.roll(2, 1), lambda i: (i.real(2, 5),)),
    "rot90": (lambda x: x.rot90(), lambda i: (i.real(2, 5),)),
    "repeat": (lambda x: x.repeat(2, 3), lambda i: (i.real(2, 2),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 0), lambda i: (i.real(2, 2),)),
    "repeat_interleave counts": (
        lambda x, n: x.repeat_interleave(n, 0),
        lambda i: (i.real(3, 2), i.whole(4, 3)),
    ),
    "tile": (lambda x: x.tile(2, 2), lambda i: (i.real(2, 2),)),
    "tril": (lambda x: x.tril(-1), lambda i: (i.real(4, 4),)),
    "triu": (lambda x: x.triu(1), lambda i: (i.real(4, 4),)),
    "diag": (lambda x: x.diag(), lambda i: (i.real(4, 4),)),
    "diag_embed": (lambda x: x.diag_embed(), lambda i: (i.real(2, 3),)),
    "diagonal": (lambda x: x.diagonal(1), lambda i: (i.real(4, 4),)),
    "trace": (lambda x: x.trace(), lambda i: (i.real(4, 4),)),
    "meshgrid": (
        lambda x, y: torch.meshgrid(x, y, indexing="ij"),
        lambda i: (i.real(3), i.real(2)),
    ),
    "cartesian_prod": (lambda x, y: torch.cartesian_prod(x, y), lambda i: (i.real(3), i.real(2))),
    "combinations": (lambda x: torch.combinations(x), lambda i: (i.real(4),)),
    "broadcast_tensors": (
        lambda x, y: torch.broadcast_tensors(x, y),
        lambda i: (i.real(3, 1), i.real(2)),
    ),
    "swapaxes": (lambda x: x.swapaxes(0, 2).contiguous(), lambda i: (i.real(2, 3, 4),)),
    "movedim": (lambda x: x.movedim(0, -1).clone(), lambda i: (i.real(2, 3, 4),)),
    "channels_last": (
        lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
        lambda i: (i.real(2, 3, 4, 4),),
    ),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), lambda i: (i.real(2, 3),)),
    "pad reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), lambda i: (i.real(2, 2, 5),)),
    "pad replicate": (lambda x: F.pad(x, (1, 2), mode="replicate"), lambda i: (i.real(2, 2, 5),)),
    "pad circular": (lambda x: F.pad(x, (1, 2), mode="circular"), lambda i: (i.real(2, 2, 5),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), lambda i: (i.real(1, 8, 2, 2),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), lambda i: (i.real(1, 2, 4, 4),)),
    "flatten": (lambda x: x.flatten(1).unflatten(1, (2, -1)).exp(), lambda i: (i.real(2, 3, 4),)),
    "view_as_complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(x) ** 2),
        lambda i: (i.real(3, 2),),
    ),
}

INDEXING: dict[str, Case] = {
    "slice": (lambda x: x[1:, ::2, None, ..., -1], lambda i: (i.real(3, 4, 5),)),
    "index": (lambda x, k: x[k], lambda i: (i.real(5, 2), i.whole(5, 7))),
    "index pair": (
        lambda x, k, m: x[k, :, m],
        lambda i: (i.real(5, 2, 4), i.whole(5, 3), i.whole(4, 3)),
    ),
    "index mask": (lambda x, m: x[m], lambda i: (i.real(5, 2), i.truth(5))),
    "index list": (lambda x: x[[0, 2, 2]], lambda i: (i.real(3, 2),)),
    "masked_select": (lambda x, m: x.masked_select(m), lambda i: (i.real(5, 2), i.truth(5, 2))),
    "masked_fill": (lambda x, m: x.masked_fill(m, 3.0), lambda i: (i.real(5, 2), i.truth(5, 2))),
    "masked_scatter": (
        lambda x, m, y: x.masked_scatter(m, y),
        lambda i: (i.real(5, 2), i.truth(5, 2), i.real(10)),
    ),
    "where": (
        lambda m, x, y: torch.where(m, x, y),
        lambda i: (i.truth(3, 4), i.real(3, 4), i.real(4)),
    ),
    "where scalar": (lambda m, x: torch.where(m, x, 0.0), lambda i: (i.truth(3, 4), i.real(3, 4))),
    "gather": (lambda x, k: x.gather(1, k), lambda i: (i.real(3, 5), i.whole(5, 3, 4))),
    "scatter": (
        lambda x, k, y: x.scatter(1, k, y),
        lambda i: (i.real(3, 5), torch.tensor([[0, 2], [1, 4], [3, 0]]), i.real(3, 2)),
    ),
    "scatter_add": (
        lambda x, k, y: x.scatter_add(1, k, y),
        lambda i: (i.real(3, 5), i.whole(5, 3, 4), i.real(3, 4)),
    ),
    "scatter_reduce": (
        lambda x, k, y: x.scatter_reduce(1, k, y, "amax"),
        lambda i: (i.real(3, 5), i.whole(5, 3, 4), i.real(3, 4)),
    ),
    "index_select": (lambda x, k: x.index_select(0, k), lambda i: (i.real(5, 2), i.whole(5, 7))),
    "index_add": (
        lambda x, k, y: x.index_add(0, k, y, alpha=2),
        lambda i: (i.real(5, 2), i.whole(5, 7), i.real(7, 2)),
    ),
    "index_copy": (
        lambda x, k, y: x.index_copy(0, k, y),
        lambda i: (i.real(5, 2), torch.tensor([3, 1]), i.real(2, 2)),
    ),
    "index_fill": (
        lambda x, k: x.index_fill(0, k, 2.0),
        lambda i: (i.real(5, 2), torch.tensor([3, 1])),
    ),
    "index_put accumulate": (
        lambda x, k, y: x.index_put((k,), y, True),
        lambda i: (i.real(5, 2), i.whole(5, 7), i.real(7, 2)),
    ),
    "take": (lambda x, k: x.take(k), lambda i: (i.real(3, 4), i.whole(12, 5))),
    "take_along_dim": (
        lambda x, k: x.take_along_dim(k, 1),
        lambda i: (i.real(3, 4), i.whole(4, 3, 2)),
    ),
    "topk": (lambda x: x.topk(3), lambda i: (i.real(2, 8),)),
    "kthvalue": (lambda x: x.kthvalue(2), lambda i: (i.real(2, 8),)),
    "nonzero": (lambda m: m.nonzero(), lambda i: (i.truth(5, 4),)),
    "nonzero tuple": (lambda m: m.nonzero(as_tuple=True), lambda i: (i.truth(5, 4),)),
    "argwhere": (lambda m: m.argwhere(), lambda i: (i.truth(5, 4),)),
    "unique": (
        lambda k: k.unique(return_inverse=True, return_counts=True),
        lambda i: (i.whole(5, 20),),
    ),
    "unique rows": (lambda k: k.unique(dim=0), lambda i: (i.whole(2, 9, 2),)),
    "unique_consecutive": (
        lambda k: k.unique_consecutive(return_counts=True),
        lambda i: (i.whole(2, 20),),
    ),
    "bincount": (lambda k: k.bincount(minlength=7), lambda i: (i.whole(5, 20),)),
    "histc": (lambda x: x.detach().histc(5, 0, 1), lambda i: (i.unit(20),)),
    "bucketize": (
        lambda x, e: torch.bucketize(x, e.sort().values),
        lambda i: (i.unit(9), i.unit(4)),
    ),
    "searchsorted": (
        lambda e, x: torch.searchsorted(e.sort().values, x),
        lambda i: (i.unit(6), i.unit(9)),
    ),
    "isin": (lambda k: torch.isin(k, k[:2]), lambda i: (i.whole(9, 12),)),
    "one_hot": (lambda k: F.one_hot(k, 6), lambda i: (i.whole(6, 8),)),
    "one_hot classes from values": (lambda k: F.one_hot(k), lambda i: (i.whole(6, 8),)),
    "embedding": (
        lambda w, k: F.embedding(k, w, padding_idx=1),
        lambda i: (i.real(5, 3), i.whole(5, 2, 4)),
    ),
    "embedding_bag": (
        lambda w, k: F.embedding_bag(k, w, mode="mean"),
        lambda i: (i.real(5, 3), i.whole(5, 2, 4)),
    ),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 1), lambda i: (i.real(3, 2), i.real(2))),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y), lambda i: (i.real(3, 3), i.real(3))),
    "tril_indices": (
        lambda k: torch.tril_indices(3, 3, device=k.device),
        lambda i: (i.whole(2, 2),),
    ),
}

MATRICES: dict[str, Case] = {
    "mm": (torch.mm, lambda i: (i.real(3, 4), i.real(4, 2))),
    "bmm": (torch.bmm, lambda i: (i.real(2, 3, 4), i.real(2, 4, 2))),
    "mv": (torch.mv, lambda i: (i.real(3, 4), i.real(4))),
    "dot": (torch.dot, lambda i: (i.real(4), i.real(4))),
    "vdot": (torch.vdot, lambda i: (i.real(4), i.real(4))),
    "outer": (torch.outer, lambda i: (i.real(3), i.real(4))),
    "matmul broadcast": (torch.matmul, lambda i: (i.real(2, 1, 3, 4), i.real(5, 4, 2))),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        lambda i: (i.real(2), i.real(3, 4), i.real(4, 2)),
    ),
    "baddbmm": (torch.baddbmm, lambda i: (i.real(2, 3, 2), i.real(2, 3, 4), i.real(2, 4, 2))),
    "addbmm": (torch.addbmm, lambda i: (i.real(3, 2), i.real(2, 3, 4), i.real(2, 4, 2))),
    "addmv": (torch.addmv, lambda i: (i.real(3), i.real(3, 4), i.real(4))),
    "addr": (torch.addr, lambda i: (i.real(3, 4), i.real(3), i.real(4))),
    "addcmul": (
        lambda x, y, z: x.addcmul(y, z, value=0.3),
        lambda i: (i.real(3), i.real(3), i.real(3)),
    ),
    "addcdiv": (
        lambda x, y, z: x.addcdiv(y, z, value=0.3),
        lambda i: (i.real(3), i.real(3), i.unit(3)),
    ),
    "lerp": (lambda x, y: x.lerp(y, 0.3), lambda i: (i.real(3), i.real(3))),
    "einsum": (
        lambda a, b: torch.einsum("bij,bkj->bik", a, b),
        lambda i: (i.real(2, 3, 4), i.real(2, 5, 4)),
    ),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, 2),
        lambda i: (i.real(2, 3, 4), i.real(3, 4, 5)),
    ),
    "kron": (torch.kron, lambda i: (i.real(2, 3), i.real(2, 2))),
    "chain_matmul": (
        lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
        lambda i: (i.real(2, 3), i.real(3, 4), i.real(4, 2)),
    ),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), lambda i: (i.real(3, 3),)),
    "matrix_exp": (torch.matrix_exp, lambda i: (i.unit(3, 3),)),
    "cdist": (torch.cdist, lambda i: (i.real(3, 4), i.real(5, 4))),
    "pdist": (F.pdist, lambda i: (i.real(4, 3),)),
    "linalg.cross": (torch.linalg.cross, lambda i: (i.real(4, 3), i.real(4, 3))),
    "linalg.inv": (torch.linalg.inv, lambda i: (i.definite(4),)),
    "linalg.det": (torch.linalg.det, lambda i: (i.definite(4),)),
    "linalg.slogdet": (torch.linalg.slogdet, lambda i: (i.definite(4),)),
    "linalg.solve": (torch.linalg.solve, lambda i: (i.definite(4), i.real(4, 2))),
    "linalg.solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        lambda i: (i.definite(4), i.real(4, 2)),
    ),
    "linalg.lstsq": (
        lambda a, b: torch.linalg.lstsq(a, b).solution,
        lambda i: (i.definite(4), i.real(4, 2)),
    ),
    "linalg.pinv": (torch.linalg.pinv, lambda i: (i.definite(4),)),
    "linalg.cholesky": (torch.linalg.cholesky, lambda i: (i.definite(4),)),
    "linalg.qr": (torch.linalg.qr, lambda i: (i.definite(4),)),
    "linalg.svdvals": (torch.linalg.svdvals, lambda i: (i.real(4, 3),)),
    "linalg.eigvalsh": (torch.linalg.eigvalsh, lambda i: (i.definite(4),)),
    "linalg.eigh values": (lambda a: torch.linalg.eigh(a).eigenvalues, lambda i: (i.definite(4),)),
    "linalg.eigvals": (
        lambda a: torch.linalg.eigvals(a.detach()).abs().sort().values,
        lambda i: (i.definite(4),),
    ),
    "linalg.norm": (torch.linalg.norm, lambda i: (i.real(4, 3),)),
    "linalg.matrix_norm": (lambda a: torch.linalg.matrix_norm(a, "nuc"), lambda i: (i.real(4, 3),)),
    "linalg.cond": (torch.linalg.cond, lambda i: (i.definite(3),)),
    "linalg.vector_norm": (lambda a: torch.linalg.vector_norm(a, 3, -1), lambda i: (i.real(4, 3),)),
    "cholesky_solve": (
        lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(a)),
        lambda i: (i.real(4, 2), i.definite(4)),
    ),
    "lu": (lambda a: torch.linalg.lu(a), lambda i: (i.definite(4),)),
    "cov": (torch.cov, lambda i: (i.real(3, 6),)),
    "corrcoef": (torch.corrcoef, lambda i: (i.real(3, 6),)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), lambda i: (i.real(3, 6),)),
    "F.linear": (F.linear, lambda i: (i.real(5, 3), i.real(2, 3), i.real(2))),
    "F.bilinear": (F.bilinear, lambda i: (i.real(5, 3), i.real(5, 2), i.real(4, 3, 2), i.real(4))),
    "F.normalize": (F.normalize, lambda i: (i.real(5, 3),)),
    "F.cosine_similarity": (F.cosine_similarity, lambda i: (i.real(5, 3), i.real(5, 3))),
    "F.pairwise_distance": (F.pairwise_distance, lambda i: (i.real(5, 3), i.real(5, 3))),
    "fft": (lambda x: torch.fft.fft(x).abs(), lambda i: (i.real(3, 8),)),
    "rfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2), lambda i: (i.real(3, 8),)),
    "fft2": (lambda x: torch.fft.fft2(x).real, lambda i: (i.real(4, 8),)),
    "fftshift": (torch.fft.fftshift, lambda i: (i.real(4, 8),)),
    "stft": (
        lambda x: torch.stft(
            x, 8, window=torch.hann_window(8, device=x.device), return_complex=True
        ).abs(),
        lambda i: (i.real(32),),
    ),
}

LAYERS: dict[str, Case] = {
    "conv1d": (F.conv1d, lambda i: (i.real(2, 3, 9), i.real(4, 3, 3), i.real(4))),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, 2, 1),
        lambda i: (i.real(2, 3, 8, 8), i.real(4, 3, 3, 3), i.real(4)),
    ),
    "conv2d groups": (
        lambda x, w: F.conv2d(x, w, groups=2, dilation=2),
        lambda i: (i.real(2, 4, 8, 8), i.real(4, 2, 3, 3)),
    ),
    "conv2d same": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        lambda i: (i.real(2, 3, 8, 8), i.real(4, 3, 3, 3)),
    ),
    "conv3d": (F.conv3d, lambda i: (i.real(1, 2, 4, 4, 4), i.real(3, 2, 2, 2, 2), i.real(3))),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda i: (i.real(1, 3, 4, 4), i.real(3, 2, 3, 3)),
    ),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), lambda i: (i.real(2, 3, 6, 6),)),
    "max_pool2d indices": (
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda i: (i.real(2, 3, 6, 6),),
    ),
    "max_unpool2d": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda i: (i.real(2, 3, 6, 6),),
    ),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 1, 1), lambda i: (i.real(2, 3, 6, 6),)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), lambda i: (i.unit(2, 3, 6, 6),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), lambda i: (i.real(2, 3, 7, 6),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), lambda i: (i.real(2, 3, 7, 6),)),
    "unfold image": (lambda x: F.unfold(x, 3), lambda i: (i.real(2, 3, 6, 6),)),
    "fold": (lambda x: F.fold(x, (4, 4), 2), lambda i: (i.real(1, 12, 9),)),
    "interpolate nearest": (
        lambda x: F.interpolate(x, scale_factor=2),
        lambda i: (i.real(1, 2, 4, 4),),
    ),
    "interpolate bilinear": (
        lambda x: F.interpolate(x, size=7, mode="bilinear"),
        lambda i: (i.real(1, 2, 4, 4),),
    ),
    "interpolate bicubic": (
        lambda x: F.interpolate(x, size=7, mode="bicubic"),
        lambda i: (i.real(1, 2, 4, 4),),
    ),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        lambda i: (i.real(1, 2, 4, 4), i.unit(1, 3, 3, 2)),
    ),
    "affine_grid": (
        lambda t: F.affine_grid(t, (1, 1, 3, 3), align_corners=False),
        lambda i: (i.real(1, 2, 3),),
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda i: (i.real(4, 3, 5), i.real(3), i.real(3)),
    ),
    "batch_norm eval": (
        lambda x, m, v: F.batch_norm(x, m.detach(), v.detach(), training=False),
        lambda i: (i.real(4, 3), i.real(3), i.unit(3)),
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b),
        lambda i: (i.real(4, 5), i.real(5), i.real(5)),
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda i: (i.real(3, 4, 5), i.real(4), i.real(4)),
    ),
    "instance_norm": (lambda x: F.instance_norm(x), lambda i: (i.real(3, 4, 5),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), lambda i: (i.real(4, 5), i.real(5))),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), lambda i: (i.real(2, 4, 5),)),
    "prelu": (F.prelu, lambda i: (i.real(4, 3), i.real(3))),
    "glu": (F.glu, lambda i: (i.real(4, 6),)),
    "threshold": (lambda x: F.threshold(x, 0.1, 3.0), lambda i: (i.real(4, 6),)),
    "softmin": (lambda x: F.softmin(x, 1), lambda i: (i.real(4, 6),)),
    "attention": (
        F.scaled_dot_product_attention,
        lambda i: (i.real(2, 2, 5, 4), i.real(2, 2, 6, 4), i.real(2, 2, 6, 4)),
    ),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda i: (i.real(2, 2, 5, 4), i.real(2, 2, 5, 4), i.real(2, 2, 5, 4)),
    ),
    "attention mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, m | torch.eye(5, device=m.device, dtype=torch.bool)
        ),
        lambda i: (i.real(2, 2, 5, 4), i.real(2, 2, 5, 4), i.real(2, 2, 5, 4), i.truth(5, 5)),
    ),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), lambda i: (i.real(1, 4, 3, 3),)),
}

LOSSES: dict[str, Case] = {
    "mse_loss": (F.mse_loss, lambda i: (i.real(4, 3), i.real(4, 3))),
    "l1_loss": (F.l1_loss, lambda i: (i.real(4, 3), i.real(4, 3))),
    "smooth_l1_loss": (F.smooth_l1_loss, lambda i: (i.real(4, 3), i.real(4, 3))),
    "huber_loss": (F.huber_loss, lambda i: (i.real(4, 3), i.real(4, 3))),
    "cross_entropy": (F.cross_entropy, lambda i: (i.real(4, 3), i.whole(3, 4))),
    "cross_entropy smoothed": (
        lambda x, k, w: F.cross_entropy(x, k, w.detach(), label_smoothing=0.1),
        lambda i: (i.real(4, 3), i.whole(3, 4), i.unit(3)),
    ),
    "cross_entropy image": (
        lambda x, k: F.cross_entropy(x, k, ignore_index=0),
        lambda i: (i.real(2, 3, 4, 4), i.whole(3, 2, 4, 4)),
    ),
    "nll_loss": (
        lambda x, k: F.nll_loss(x.log_softmax(1), k),
        lambda i: (i.real(4, 3), i.whole(3, 4)),
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x, y.detach()),
        lambda i: (i.unit(4, 3), i.unit(4, 3)),
    ),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, lambda i: (i.real(4, 3), i.unit(4, 3))),
    "kl_div": (
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda i: (i.real(4, 3), i.real(4, 3)),
    ),
    "poisson_nll_loss": (F.poisson_nll_loss, lambda i: (i.real(4), i.unit(4))),
    "gaussian_nll_loss": (F.gaussian_nll_loss, lambda i: (i.real(4), i.real(4), i.unit(4))),
    "hinge_embedding_loss": (
        lambda x, m: F.hinge_embedding_loss(x, m * 2 - 1),
        lambda i: (i.real(6), i.whole(2, 6)),
    ),
    "margin_ranking_loss": (
        lambda x, y, m: F.margin_ranking_loss(x, y, m * 2 - 1),
        lambda i: (i.real(6), i.real(6), i.whole(2, 6)),
    ),
    "triplet_margin_loss": (
        F.triplet_margin_loss,
        lambda i: (i.real(4, 3), i.real(4, 3), i.real(4, 3)),
    ),
    "cosine_embedding_loss": (
        lambda x, y, m: F.cosine_embedding_loss(x, y, m * 2 - 1),
        lambda i: (i.real(4, 3), i.real(4, 3), i.whole(2, 4)),
    ),
    "multi_margin_loss": (F.multi_margin_loss, lambda i: (i.real(4, 3), i.whole(3, 4))),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        lambda i: (i.real(4, 3), i.whole(3, 4, 3)),
    ),
    "multilabel_soft_margin_loss": (
        lambda x, m: F.multilabel_soft_margin_loss(x, m.float()),
        lambda i: (i.real(4, 3), i.truth(4, 3)),
    ),
    "soft_margin_loss": (
        lambda x, m: F.soft_margin_loss(x, m * 2 - 1),
        lambda i: (i.real(6), i.whole(2, 6)),
    ),
    "ctc_loss": (
        lambda x, k: F.ctc_loss(
            x.log_softmax(2), k + 1, torch.tensor([8, 7]), torch.tensor([3, 2])
        ),
        lambda i: (i.real(8, 2, 5), i.whole(4, 2, 3)),
    ),
}

OTHERS: dict[str, Case] = {
    "acosh": (lambda x: (x + 1).acosh(), lambda i: (i.unit(4),)),
    "mvlgamma": (lambda x: torch.mvlgamma(x + 2, 2), lambda i: (i.unit(4),)),
    "polygamma": (lambda x: torch.polygamma(1, x), lambda i: (i.unit(4),)),
    "zeta": (lambda x: torch.special.zeta(x.detach() + 2, 1.0), lambda i: (i.unit(4),)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda i: (i.real(4, 3),)),
    "clamp tensors": (lambda x, low: x.clamp(min=low), lambda i: (i.real(4, 3), i.real(3))),
    "complex": (lambda x, y: torch.complex(x, y).abs(), lambda i: (i.real(4), i.real(4))),
    "polar": (lambda x, y: torch.polar(x, y).real, lambda i: (i.unit(4), i.real(4))),
    "conj": (
        lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).imag,
        lambda i: (i.real(4), i.real(4)),
    ),
    "floor_divide": (lambda x, y: x.detach() // y.detach(), lambda i: (i.real(4), i.unit(4))),
    "heaviside": (
        lambda x, y: torch.heaviside(x.detach(), y.detach()),
        lambda i: (i.real(4), i.unit(4)),
    ),
    "rsub": (lambda x: 1 - x, lambda i: (i.real(4),)),
    "scalar power": (lambda x: 2**x, lambda i: (i.real(4),)),
    "float_power": (lambda x: x.float_power(2), lambda i: (i.real(4),)),
    "frexp": (lambda x: torch.frexp(x.detach()), lambda i: (i.real(4),)),
    "gradient": (lambda x: torch.gradient(x), lambda i: (i.real(9),)),
    "diff": (lambda x: x.diff(n=2), lambda i: (i.real(9),)),
    "trapezoid": (lambda x: torch.trapezoid(x, dx=0.5), lambda i: (i.real(3, 9),)),
    "cumulative_trapezoid": (lambda x: torch.cumulative_trapezoid(x), lambda i: (i.real(3, 9),)),
    "quantile": (lambda x: x.quantile(0.3), lambda i: (i.real(9),)),
    "vander": (lambda x: torch.vander(x.detach(), 3), lambda i: (i.real(4),)),
    "bitwise": (
        lambda k, m: (k & m, k | m, k ^ m, ~k, k << 1, k >> 1),
        lambda i: (i.whole(99, 6), i.whole(99, 6)),
    ),
    "gcd": (torch.gcd, lambda i: (i.whole(99, 6), i.whole(99, 6))),
    "integer division": (lambda k: (k // 7, k % 7, k / 7), lambda i: (i.whole(99, 6),)),
    "type promotion": (lambda k, x: k * x + True, lambda i: (i.whole(9, 4), i.real(4))),
    "conversions": (lambda x: (x.long(), x.bool(), x.double(), x.half()), lambda i: (i.real(4),)),
    "view dtype": (
        lambda x: x.detach().view(torch.int32 if x.dtype is torch.float32 else torch.int16) + 1,
        lambda i: (i.real(4),),
    ),
    "new tensors": (
        lambda x: (x.new_zeros(3), x.new_ones(2), x.new_full((2,), 5.0), torch.full_like(x, 2.0)),
        lambda i: (i.real(4),),
    ),
    "equal": (
        lambda x, y: (torch.equal(x, y), torch.allclose(x, x)),
        lambda i: (i.real(4), i.real(4)),
    ),
    "detach": (lambda x, y: x.detach() * y, lambda i: (i.real(4), i.real(4))),
    "in place": (lambda x: x.clone().add_(1).mul_(2).clamp_(max=2).t_(), lambda i: (i.real(4, 3),)),
    "in place view": (
        lambda x, y: (
            torch.zeros_like(x).copy_(x).index_fill_(0, torch.tensor([0], device=x.device), 1) + y
        ),
        lambda i: (i.real(4), i.real(4)),
    ),
    "assign": (lambda x, y: _assigned(x, y), lambda i: (i.real(4, 3), i.real(3))),
    "chain": (lambda x: (x**2).sum() / x.norm() - x.std(), lambda i: (i.real(4, 3),)),
    "nested lists": (
        lambda x: torch.stack([torch.cat([x, x]), torch.cat([x, -x])]),
        lambda i: (i.real(4),),
    ),
    "foreach": (
        lambda x, y: torch._foreach_add(
            [x.detach(), y.detach()], [y.detach(), x.detach()], alpha=2
        ),
        lambda i: (i.real(4), i.real(4)),
    ),
}


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[1] = y
    made[2:, 0] = x[0, 1]
    made[x.detach() > 1] += 3.0
    return made


CASES = cases()
