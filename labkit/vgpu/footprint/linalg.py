"""Linear algebra by cuSOLVER, cuBLAS and cuFFT, and distances.

Order of allocations: PyTorch's native/BatchLinearAlgebra.cpp and native/cuda/linalg/BatchLinearAlgebra*.cpp. The workspaces of cuSOLVER
are estimates, measured on an H200 (CUDA 13.0) for matrices of 1 to 1024 rows; batches of matrices are not covered.
"""

from typing import Any

import torch

from labkit.vgpu import footprint, operators
from labkit.vgpu.footprint.sequence import Out, Plan, perform, play

Tensor = torch.Tensor


# Workspace in bytes of a float32 matrix of up to so many rows, as measured; of float64 where no other is given twice as much.
GETRF = {32: 768, 64: 1280, 128: 2304, 200: 4096, 256: 4352, 300: 6912, 512: 8448, 1024: 12544}
POTRF = {64: 160, 128: 192, 200: 352, 256: 384, 300: 544, 512: 1152, 1024: 4224}
SYEVD = {
    1: 265496, 3: 271816, 8: 287820, 16: 314636, 31: 369160, 32: 12436, 33: 16848, 50: 22560, 64: 29000, 100: 61152, 128: 86800,
    200: 194380, 256: 301088, 300: 407896, 512: 1124416, 1024: 17429388,
}  # fmt: skip
GESVD = {
    32: 3968,
    33: 29568,
    50: 40960,
    64: 53632,
    100: 117632,
    128: 168832,
    200: 383104,
    256: 596096,
    300: 808960,
    512: 2238592,
    1024: 8675456,
}  # fmt: skip
GEQRF = {256: 3145856, 300: 3326080, 500: 4145280, 512: 4194432, 1024: 6291584}
ORGQR = {
    3: 132224, 8: 132352, 16: 133120, 32: 136192, 33: 136576, 50: 142208, 64: 148480, 100: 186624, 128: 263168, 200: 373760, 256: 459776,
    300: 527360, 512: 852992, 1024: 1639424,
}  # fmt: skip
TALL_SVD = 3145984  # of a matrix that is not square


def workspace(table: dict[int, int], n: int, scale: int = 1) -> int:
    """The table's entry for the next larger matrix; beyond its end in proportion to the rows. An estimate."""
    for rows, size in table.items():
        if n <= rows:
            return size * scale
    rows, size = next(reversed(table.items()))
    return size * scale * n // rows


def _single(x: Tensor) -> bool:
    """Is it one matrix of real numbers? Batches go to other libraries, which are not covered."""
    return x.dim() == 2 and x.dtype in (torch.float32, torch.float64) and x.numel() > 0


def _one_matrix(*names: str) -> Any:
    """Register a rule for single matrices: (x, n, bytes of an element, operator's arguments) -> plan."""

    def register(rule: Any) -> Any:
        def run(func: Any, args: tuple, kwargs: dict) -> Any:
            if any(argument.alias_info is not None for argument in func._schema.arguments):
                return operators.into_given(func, args, kwargs)
            if not _single(args[0]):
                return operators.compute(func, args, kwargs)
            plan = rule(args[0], args[0].shape[-1], args[0].itemsize, args)
            return perform(func, args, kwargs, lambda outputs: plan)

        footprint.handles(*names)(run)
        return rule

    return register


@_one_matrix("linalg_cholesky_ex")
def cholesky(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(POTRF, n)
    return Out(0), Out(1), work, -work


@_one_matrix("linalg_lu_factor_ex")
def lu_factor(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(GETRF, n)
    return Out(0), Out(1), Out(2), work, -work


def _substitution(n: int, columns: int, item: int) -> Plan:
    """Solving with the factors: by pointers to batches of one, or with the right sides permuted by 64-bit positions."""
    if n < 32:
        return 8, 8, -8, -8
    return 8 * n, 8 * n, 8 * n, n * columns * item, -n * columns * item, -8 * n, -8 * n, -8 * n


@_one_matrix("linalg_inv_ex")
def inverse(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work, size = workspace(GETRF, n), n * n * item
    return Out(0), Out(1), size, 4 * n, work, -work, *_substitution(n, n, item), -4 * n, -size


@_one_matrix("_linalg_solve_ex")
def solve(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(GETRF, n)
    right = args[1]
    columns = right.shape[-1] if right.dim() > 1 else 1
    back: Plan = (4, -4) if 32 <= n <= 64 else _substitution(n, columns, item)
    return Out(0), Out(1), Out(2), Out(3), work, -work, *back


@_one_matrix("_linalg_det")
def determinant(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(GETRF, n)
    counts = (item, 4 * n, n, 8, 8 * n, -8 * n, -n, -4 * n, -8, -item)
    return Out(0), Out(1), Out(2), 4, work, -work, *counts, -4


@_one_matrix("_linalg_svd")
def singular_values(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(GESVD, n, item // 4) if x.shape[0] == n else TALL_SVD * item // 4
    size = x.numel() * item
    return Out(0), Out(2), Out(1), 4, size, work, -work, -size, 1, 1, -1, -1, -4


@_one_matrix("_linalg_eigh")
def eigenvalues(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    work = workspace(SYEVD, n, item // 4)
    return Out(1), Out(0), 4, work, -work, 1, 1, -1, -1, -4


@_one_matrix("linalg_qr")
def qr(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    factors, vectors = (workspace(table, n, item // 4) for table in (GEQRF, ORGQR))
    vectors += 32 * item * max(0, x.shape[0] - n)
    taus = min(x.shape) * item
    return Out(0), Out(1), taus, 4, factors, -factors, -4, 4, vectors, -vectors, -4, -taus


@footprint.handles("_linalg_check_errors")
def check_errors(func: Any, args: tuple, kwargs: dict) -> Any:
    """The host reads whether any of the error codes is set."""
    result = operators.compute(func, args, kwargs)
    play(args[0]._gpu, (1, 1, -1, -1) if args[0].dim() == 0 else (1, -1))
    return result


@footprint.handles("_fft_c2r")
def complex_to_real(func: Any, args: tuple, kwargs: dict) -> Any:
    """cuFFT overwrites its input here, so a copy is transformed."""
    if kwargs:
        return operators.into_given(func, args, kwargs)
    size = args[0].numel() * args[0].itemsize
    return perform(func, args, kwargs, lambda outputs: (Out(0), size, -size))


@footprint.handles("_euclidean_dist")
def euclidean_distance(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """One matrix product of rows that carry their own norms (native/Distance.cpp)."""
    x, y = args
    sides = []
    for tensor in (x, y):
        norm = tensor.pow(2).sum(-1, keepdim=True)
        sides.append([norm, torch.ones_like(norm)])
    (norm_x, one_x), (norm_y, one_y) = sides
    del norm, tensor
    sides.clear()
    scaled = x.mul(-2)
    left = torch.cat([scaled, norm_x, one_x], -1)
    del norm_x, one_x, scaled
    right = torch.cat([y, one_y, norm_y], -1)
    del one_y, norm_y
    result = left @ right.mT
    del right, left
    return result.clamp_min_(0).sqrt_()


@footprint.handles("_cdist_backward")
def cdist_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """A row of partial gradients for each pair, then their sum (native/cuda/DistanceKernel.cu)."""
    if kwargs:
        return operators.into_given(func, args, kwargs)
    size = args[4].numel() * args[1].shape[-1] * args[1].itemsize
    return perform(func, args, kwargs, lambda outputs: (Out(0), size, -size))


@footprint.handles("_pdist_backward")
def pdist_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    if kwargs:
        return operators.into_given(func, args, kwargs)
    n, m = args[1].shape
    size = max(n - 1, 0) * n * m * args[1].itemsize

    def plan(outputs: list[Any]) -> Plan:
        return Out(0), size, -size

    return perform(func, args, kwargs, plan)
