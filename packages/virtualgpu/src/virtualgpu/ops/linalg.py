"""Linear algebra by cuSOLVER and cuBLAS: what the operators allocate.

Order of allocations: PyTorch's native/BatchLinearAlgebra.cpp and
native/cuda/linalg/BatchLinearAlgebra*.cpp. The workspaces of cuSOLVER are estimates, measured on
an H200 (CUDA 13.0) for matrices of 1 to 1024 rows; so are those of batches.
"""

from math import nan, prod
from typing import Any

import torch

from virtualgpu.errors import at_least_two
from virtualgpu.ops import blas, operators
from virtualgpu.ops.call import (
    CPU_KERNELS,
    Call,
    cuda_kernel,
    device_error,
    handles,
    refuses_half,
)
from virtualgpu.ops.sequence import Out, Plan, perform, play
from virtualgpu.tf32_guard import without_tf32

Tensor = torch.Tensor

# Workspace in bytes of a float32 matrix of up to so many rows, as measured. A float64 matrix takes
# twice as much, except where a table of its own follows.
GETRF = {32: 768, 64: 1280, 128: 2304, 200: 4096, 256: 4352, 300: 6912, 512: 8448, 1024: 12544}
POTRF = {64: 160, 128: 192, 200: 352, 256: 384, 300: 544, 512: 1152, 1024: 4224}
SYEVD = {
    1: 265496, 2: 268716, 3: 271816, 8: 287820, 16: 314636, 20: 328684, 31: 369160, 32: 12436,
    33: 16848, 40: 18920, 50: 22560, 64: 29000, 65: 33700, 100: 61152, 128: 86800, 200: 194380,
    256: 301088, 300: 407896, 512: 1124416, 1024: 17429388,
}  # fmt: skip
SYEVD_DOUBLE = {
    2: 537304, 3: 543504, 8: 575512, 16: 629144, 20: 657240, 31: 738192, 32: 745880, 33: 753840,
    50: 892120, 64: 1016472, 65: 1025712, 100: 1379416, 128: 1704600, 200: 2713880, 256: 3670680,
    300: 4528088, 512: 9962136,
}  # fmt: skip
GESVD = {
    32: 3968,
    33: 29568,
    40: 33536,
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
SYTRF, XGEEV = 98432, 132608  # of matrices of 5 rows; an estimate for others
TALL_SVD = 3 << 20  # of a matrix that is not square, and a little by its columns

cuda_kernel("cholesky_cusolver", "linalg_cholesky_ex", "cholesky")
cuda_kernel("linalg_eigh_cuda", "_linalg_eigh")
cuda_kernel("geqrf_cuda", "geqrf", "linalg_qr")
cuda_kernel(
    "lu_factor_cusolver",
    "_linalg_det",
    "_linalg_slogdet",
    "linalg_lu_factor_ex",
    "_linalg_solve_ex",
    "linalg_inv_ex",
)
refuses_half(
    "linalg_", "_linalg_", "cholesky", "geqrf", "ormqr", "orgqr", "lu_", "triangular_solve", "ldl_"
)


def between(table: dict[int, int], n: int) -> int:
    """Return an estimate for matrices of size n, from a table of bytes by size.

    It is interpolated linearly between the neighbouring entries.
    """
    below = max((r for r in table if r <= n), default=1)
    above = min((r for r in table if r >= n), default=max(table))
    if above <= below:
        return table[above]
    return table[below] + (table[above] - table[below]) * (n - below) // (above - below)


def workspace(table: dict[int, int], n: int, scale: int = 1) -> int:
    """Return the bytes of a workspace for matrices of n rows, from a table of bytes by rows.

    The next larger entry counts, times `scale`. Beyond the end of the table, the estimate grows
    with the number of rows.
    """
    for rows, size in table.items():
        if n <= rows:
            return size * scale
    rows, size = next(reversed(table.items()))
    return size * scale * n // rows


def _covered(x: Tensor) -> bool:
    """Return whether `x` holds matrices whose dtype has known workspace sizes."""
    return x.dim() >= 2 and x.dtype in (torch.float32, torch.float64, torch.complex64)


def _matrices(*names: str, empty: bool = False) -> Any:
    """Return a decorator that makes a function the memory plan of operators on matrices.

    The decorated function takes the matrices, the number of columns, the bytes of an element and
    the operator's arguments, and returns the plan.

    Args:
        names: the names of the operators
        empty: whether the plan also holds for matrices without elements
    """

    def register(rule: Any) -> Any:
        """Make `rule` the memory plan of the operators, and return it."""

        def run(call: Call) -> Any:
            """Run an operator with the memory plan that `rule` returns for it."""
            if call.op.written:
                return operators.into_given(call)
            if not _covered(call.args[0]) or not (empty or call.args[0].numel()):
                return operators.compute(call)
            plan = rule(call.args[0], call.args[0].shape[-1], call.args[0].itemsize, call.args)
            return perform(call, plan)

        handles(*names)(run)
        return rule

    return register


def _batch(x: Tensor) -> int:
    """Return the number of matrices in the batch `x`."""
    return prod(x.shape[:-2])


def _pointers(b: int, tables: int = 2) -> Plan:
    """Return the memory plan of tables with pointers to the `b` matrices of a batch."""
    return (8 * b,) * tables + (-8 * b,) * tables


def _factored(x: Tensor, n: int) -> Plan:
    """Return the memory plan of the LU decomposition of the matrices `x` with `n` columns.

    A batch needs a table of pointers. Only one square matrix needs a workspace.
    """
    if x.dim() > 2:
        return _pointers(_batch(x), 1)
    if x.shape[-2] != n or n == 0:
        return ()
    work = workspace(GETRF, n)
    return work, -work


def _triangular(x: Tensor, b: int, n: int) -> Plan:
    """Return the memory plan of triangular systems, which cuBLAS solves.

    `x` holds their `b` matrices of `n` rows. cuBLAS solves several systems as a batch if that is
    faster (`triangular_solve_kernel`).
    """
    use: Plan = (blas.handles(x._gpu).use,)  # type: ignore[attr-defined]
    if b <= 8 and n >= 64:
        return use
    return 8 * b, 8 * b, *use, -8 * b, -8 * b


def _substitution(x: Tensor, b: int, n: int, columns: int, item: int) -> Plan:
    """Return the memory plan of solving systems with the factors of an LU decomposition.

    `x` holds the factors of `b` matrices of `n` rows, with elements of `item` bytes. `columns` is
    the number of right sides. cuBLAS solves them as a batch, cuSOLVER matrix by matrix, or cuBLAS
    as two triangular systems (`lu_solve_kernel`).
    """
    square = columns == n
    if n <= 8 or (square and n <= 16) or (b > 2 and n <= 128 and not square):
        return 8 * b, 8 * b, blas.handles(x._gpu).use, -8 * b, -8 * b  # type: ignore[attr-defined]
    if n <= 128 and not square:
        return 4, -4
    right, order = b * n * columns * item, 8 * b * n
    first: Plan = (8 * n,)
    if b > 1:
        first = (8 * n, order, -8 * n)
    systems = (*_triangular(x, b, n), *_triangular(x, b, n))
    return *first, 8 * n, order, right, *systems, -right, -order, -8 * n, -order


@_matrices("linalg_cholesky_ex")
def cholesky(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of a Cholesky decomposition with its error codes.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), Out(1), *_cholesky(x, workspace(POTRF, n))


def _cholesky(x: Tensor, work: int) -> Plan:
    """Return the memory plan of a Cholesky decomposition of the matrices `x`.

    A batch needs tables of pointers, and one matrix a workspace of `work` bytes.
    """
    if x.dim() > 2:
        return _pointers(_batch(x), 1)
    return work, -work


@_matrices("linalg_lu_factor_ex")
def lu_factor(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of an LU decomposition with its pivots and error codes.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), Out(1), Out(2), *_factored(x, n)


@_matrices("lu_unpack")
def unpack(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of unpacking. First, the pivots become a 64-bit permutation.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    order = 0 if args[3:] == (False,) else 8 * _batch(x) * x.shape[-2]
    return Out(0), Out(1), Out(2), order, -order


@_matrices("linalg_lu")
def factors(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of an LU decomposition into separate factors.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, m, size = _batch(x), x.shape[-2], x.numel() * item
    pivots, order = 4 * b * min(m, n), 8 * b * m
    outputs = Out(0), Out(1), Out(2)
    factored = (size, pivots, 4 * b, *_factored(x, n), -size)
    return *outputs, *factored, order, -order, -4 * b, -pivots


@_matrices("linalg_lu_solve")
def solve_factored(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of solving systems with given factors.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), *_substitution(x, _batch(x), n, args[2].shape[-1], item)


@_matrices("linalg_inv_ex")
def inverse(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of an inverse: an LU decomposition, then systems with its factors.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, size = _batch(x), x.numel() * item
    factored, solved = _factored(x, n), _substitution(x, b, n, n, item)
    return Out(0), Out(1), size, 4 * b * n, *factored, *solved, -4 * b * n, -size


@_matrices("_linalg_solve_ex")
def solve(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of solving systems. A vector on the right is copied to a matrix.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, right = _batch(x), args[1]
    columns, copy = right.shape[-1], 0
    if right.dim() == 1 or (x.dim() - 1 == right.dim() and right.shape == x.shape[:-1]):
        columns, copy = 1, b * n * item
    outputs = Out(0), Out(1), Out(2), Out(3)
    solved = _substitution(x, b, n, columns, item)
    return *outputs, *_factored(x, n), copy, *solved, -copy


def _parity(b: int, n: int) -> Plan:
    """Return the memory plan of finding the parity of `b` permutations of `n` pivots.

    The memory is for the positions, which of them moved, and how many. The last one remains
    allocated.
    """
    return 4 * n, b * n, 8 * b, 8 * b * n, -8 * b * n, -b * n, -4 * n


@_matrices("_linalg_det", empty=True)
def determinant(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of a determinant: an LU decomposition, and its pivots' parity.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b = _batch(x)
    outputs = Out(0), Out(1), Out(2)
    factored, parity = _factored(x, n), _parity(b, n)
    return *outputs, 4 * b, *factored, item * b, *parity, -8 * b, -item * b, -4 * b


@_matrices("_linalg_slogdet", empty=True)
def logarithm_of_determinant(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of a determinant's sign and logarithm.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b = _batch(x)
    diagonal, one = item * b * n, item * b
    signs = diagonal, one, -one, -diagonal, -8 * b, diagonal, -diagonal
    outputs = Out(0), Out(1), Out(2), Out(3)
    return *outputs, 4 * b, *_factored(x, n), *_parity(b, n), *signs, -4 * b


@_matrices("linalg_solve_triangular")
def triangular(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of `torch.linalg.solve_triangular`.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), *_triangular(x, _batch(x), n)


@_matrices("triangular_solve")
def triangular_solve(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of `torch.triangular_solve`, whose matrix is the second argument.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), Out(1), *_triangular(args[1], _batch(args[1]), args[1].shape[-1])


@_matrices("linalg_ldl_factor_ex")
def symmetric_factor(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of an LDL decomposition.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), Out(1), Out(2), SYTRF, -SYTRF


@_matrices("linalg_ldl_solve")
def solve_symmetric(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of solving systems with the factors of an LDL decomposition.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    pivots = 8 * _batch(x) * n
    return Out(0), pivots, 4, -4, -pivots


@_matrices("cholesky")
def cholesky_checked(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of a Cholesky decomposition whose error codes the host reads.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    codes = 4 * _batch(x)
    factored = _cholesky(x, workspace(POTRF, n, item // 4))
    return Out(0), codes, *factored, *_check_plan(x), -codes


@handles("cholesky_inverse")
def cholesky_inverse(call: Call) -> Any:
    """Run the operator `cholesky_inverse` with the memory of its error code."""
    if call.op.outs:
        return operators.into_given(call)
    return perform(call, (4, Out(0), -4))


@_matrices("linalg_householder_product", "orgqr")
def reflections(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of computing the product of Householder reflections.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    work = orgqr_bytes(x.shape[-2], args[1].shape[-1], n, item)
    return Out(0), *_in_turn(_batch(x), work)


@_matrices("ormqr")
def reflected(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of multiplying by a product of Householder reflections.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    work = ormqr_bytes(x.shape[-2], args[1].shape[-1], args[2].shape[-1], item)
    return Out(0), *_in_turn(_batch(x), work)


@_matrices("geqrf")
def factored_orthogonally(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of `torch.geqrf`: a QR decomposition that keeps the reflections.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    return Out(0), Out(1), *_factored_orthogonally(x, min(x.shape[-2:]), item)


@_matrices("linalg_eig")
def eigenvectors(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of eigenvalues and eigenvectors (`linalg_eig`).

    First, PyTorch looks for numbers that are not finite. For real matrices, pairs of columns
    become complex columns at the end.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, size, numbers = _batch(x), x.numel() * item, x.numel()
    finite = size, numbers, numbers, numbers, -numbers, -numbers, -size, 1, -1, -numbers
    values = 2 * b * n * item
    computed = values, -values, values, -values, size, size, XGEEV, -XGEEV, -size
    joined = b * n, 1, -1, -b * n, -size
    return *finite, 4 * b, Out(1), Out(0), *computed, *joined, *_check_plan(x), -4 * b


@_matrices("_cholesky_solve_helper", "cholesky_solve")
def cholesky_solve(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of solving systems with the factor of a Cholesky decomposition.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    factor = args[1].numel() * item
    if x.dim() == 2:
        return 4, Out(0), factor, -factor, -4
    return Out(0), factor, -factor


def _check_plan(x: Tensor) -> Plan:
    """Return the memory plan of `_linalg_check_errors` for the matrices `x`.

    In this operator the host reads whether any error code is set.
    """
    if x.dim() > 2:
        return 1, -1
    return 1, 1, -1, -1


_svd, _eigh = torch.ops.aten._linalg_svd.default, torch.ops.aten._linalg_eigh.default


def _svd_values(x: Tensor, full_matrices: bool = False, vectors: bool = True, **kwargs: Any) -> Any:
    """Return the results of `_linalg_svd` as CUDA computes them.

    The arguments are the operator's, and `vectors` is its `compute_uv`. Without vectors, cuSOLVER
    returns NaN for NaN, and LAPACK raises an error. cuSOLVER has three drivers, whose values differ
    by rounding only.
    """
    driver = kwargs.pop("driver", None)
    if driver not in (None, "gesvd", "gesvdj", "gesvda"):
        raise RuntimeError(
            f"torch.linalg.svd: unknown svd driver {driver} in svd_cusolver computation. Check doc "
            "at https://pytorch.org/docs/stable/generated/torch.linalg.svd.html"
        )
    if vectors or x.isfinite().all():
        return _svd(x, full_matrices, vectors, **kwargs)
    u, values, v = _svd(torch.zeros_like(x), full_matrices, vectors, **kwargs)
    return u, values.fill_(nan), v


def _eigh_values(x: Tensor, triangle: str = "L", vectors: bool = True) -> Any:
    """Return the results of `_linalg_eigh` as CUDA computes them.

    `x` holds symmetric matrices. Like cuSOLVER, raise the error that the algorithm fails to
    converge if there is a NaN. LAPACK would return NaN.
    """
    finite = x.isfinite().flatten(-2).all(-1)
    if not finite.all():
        where = ""
        if x.dim() > 2:
            first = int(finite.flatten().logical_not().nonzero()[0])
            where = f"(Batch element {first}): "
        raise torch.linalg.LinAlgError(
            f"linalg.eigh: {where}The algorithm failed to converge because the input matrix is "
            "ill-conditioned or has too many repeated eigenvalues "
            f"(error code: {x.shape[-1] - 1})."
        )
    return _eigh(x, triangle, vectors)


_lu_factor, _lu = torch.ops.aten.linalg_lu_factor_ex.default, torch.ops.aten.linalg_lu.default


def _eliminated(x: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose matrices into L and U without exchanging rows.

    Returns (both factors in one tensor, number of the first zero pivot or 0).
    """
    lu = x.clone()
    steps = min(x.shape[-2:])
    info = torch.zeros(x.shape[:-2], dtype=torch.int32, device="cpu")
    for k in range(steps):
        pivot = lu[..., k, k]
        info = torch.where((info == 0) & (pivot == 0), k + 1, info)
        lu[..., k + 1 :, k] /= torch.where(pivot == 0, 1, pivot).unsqueeze(-1)
        lu[..., k + 1 :, k + 1 :] -= lu[..., k + 1 :, k, None] * lu[..., k, None, k + 1 :]
    return lu.mT.contiguous().mT, info


def _lu_factor_values(x: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """Return the results of `linalg_lu_factor_ex` as CUDA computes them.

    LAPACK always exchanges rows (pivots). CUDA's libraries do not if `pivot` is false.
    """
    if pivot:
        return _lu_factor(x, check_errors=check_errors)
    lu, info = _eliminated(x)
    if check_errors:
        name = "torch.linalg.lu_factor_ex"
        torch.ops.aten._linalg_check_errors(info, name, is_matrix=x.dim() == 2)
    pivots = torch.arange(1, min(x.shape[-2:]) + 1, dtype=torch.int32, device="cpu")
    return lu, pivots.expand(*x.shape[:-2], -1).contiguous(), info


def _lu_values(x: Tensor, *, pivot: bool = True) -> Any:
    """Return the three factors of an LU decomposition as CUDA computes them.

    Without `pivot`, rows are not exchanged, and the first factor is empty.
    """
    if pivot:
        return _lu(x)
    lu, k = _eliminated(x)[0], min(x.shape[-2:])
    lower = lu[..., :k].tril(-1) + torch.eye(x.shape[-2], k, dtype=x.dtype, device="cpu")
    return x.new_empty(0), lower, lu[..., :k, :].triu()


CPU_KERNELS[_svd] = _svd_values
CPU_KERNELS[_lu_factor] = _lu_factor_values
CPU_KERNELS[_lu] = _lu_values
CPU_KERNELS[_eigh] = _eigh_values


@_matrices("_linalg_svd")
def singular_values(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of singular values and vectors.

    A batch has one workspace for all its matrices, as large as that of one matrix.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, m, size = _batch(x), x.shape[-2], x.numel() * item
    less, more = min(m, n), max(m, n)
    end = *_check_plan(x), -4 * b
    full: Plan = ()
    if m != n and more <= 32:  # the solver of small ones writes all columns of the larger side
        work = workspace(GESVD, more, item // 4)
        if args[1:2] != (True,):
            full = (b * more * more * item,)
    elif m == n or x.dim() > 2:
        work = workspace(GESVD, more, item // 4)
    else:
        work = TALL_SVD * item // 4 + 128 + aligned(item * less)
        if m < n:  # a wide matrix is transposed
            work += size
    if len(args) > 2 and not args[2] and m == n:
        # No vectors are asked for: the library writes them all the same.
        return Out(1), 4 * b, size, size, size, work, -work, -size, -size, -size, *end
    outputs = Out(0), Out(2), Out(1)
    freed = (-work, *(-extra for extra in full), -size)
    return *outputs, 4 * b, size, *full, work, *freed, *end


@_matrices("_linalg_eigh")
def eigenvalues(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of the eigenvalues of symmetric matrices.

    Without vectors, a copy of the matrix is overwritten. Small matrices of a batch are computed
    together (`syevj_batched`), others one after the other.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b = _batch(x)
    outputs: Plan = (Out(1), Out(0))
    copy = x.numel() * item
    if len(args) < 3 or args[2]:
        copy = 0
    if copy:
        outputs = (Out(0), copy)
    if x.dim() > 2 and n <= 32:
        work = b * workspace(SYEVD, min(n, 31), item // 4)  # an estimate
        turns: Plan = (work, -work)
    else:
        work = between(SYEVD_DOUBLE if item == 8 else SYEVD, n)
        turns = (work, -work) * b
    return *outputs, 4 * b, *turns, *_check_plan(x), -4 * b, -copy


def _together(x: Tensor) -> bool:
    """Return whether cuBLAS factors all matrices of the batch `x` in one call.

    Sources: `geqrf_kernel` and `lstsq_kernel`.
    """
    return x.dim() > 2 and x.shape[-2] <= 256 and _batch(x) >= max(2, x.shape[-2] // 16)


def _in_turn(b: int, work: int) -> Plan:
    """Return the memory plan of calling a cuSOLVER routine for each of `b` matrices in turn.

    Each call has a workspace of `work` bytes. All calls share one error code.
    """
    return 4, *((work, -work) * b), -4


def _factored_orthogonally(x: Tensor, less: int, item: int) -> Plan:
    """Return the memory plan of the QR decomposition of the matrices `x`.

    `less` is the smaller one of a matrix's two dimensions, and `item` the bytes of an element.
    """
    if _together(x):
        return _pointers(_batch(x))
    return _in_turn(_batch(x), workspace(GEQRF, less, item // 4))


def orgqr_bytes(m: int, reflections: int, columns: int, item: int) -> int:
    """Return the bytes of the workspace of cuSOLVER's orgqr.

    It multiplies `reflections` Householder reflections of m rows into `columns` columns. `item` is
    the bytes of an element. The result agrees with measurements of float32. float64 is assumed to
    need twice as much.
    """
    panel = min(reflections, 128)
    short, long = 4 * m * panel, 4 * panel * (m + 2 * columns)
    return (1024 + max((128 << 10) + aligned(short), (64 << 10) + aligned(long))) * item // 4


def ormqr_bytes(m: int, k: int, columns: int, item: int) -> int:
    """Return the bytes of the workspace of cuSOLVER's ormqr for k reflections of m rows.

    `columns` is the number of columns on the right side, and `item` the bytes of an element. This
    is an estimate from 16 measurements of float32.
    """
    size = 263168 + 2048 * columns + 1024 * m + aligned(4 * k * (m + k))
    if m > 32:
        size += 128
    return size * item // 4


def aligned(size: int) -> int:
    """Return `size` bytes, rounded up to a multiple of 128."""
    return -(-size // 128) * 128


@_matrices("linalg_qr")
def qr(x: Tensor, n: int, item: int, args: tuple) -> Plan:
    """Return the memory plan of a QR decomposition into both factors.

    `x` holds the matrices, which have `n` columns of elements of `item` bytes each. `args` are the
    arguments of the operator.
    """
    b, m = _batch(x), x.shape[-2]
    less = min(m, n)
    taus = b * less * item
    columns = m if args[1:] == ("complete",) else less
    vectors = _in_turn(b, orgqr_bytes(m, less, columns, item))
    return Out(0), Out(1), taus, *_factored_orthogonally(x, less, item), *vectors, -taus


@handles("linalg_lstsq")
def least_squares(call: Call) -> Any:
    """Compute `torch.linalg.lstsq`, for which CUDA has only the driver gels.

    It computes a QR decomposition, a product and a triangular system (`linalg_lstsq_gels`), or
    cuBLAS solves a whole batch. Raises RuntimeError for another driver.
    """
    if call.op.written:
        return operators.into_given(call)
    x, right = call.args[:2]
    driver = call.kwargs.get("driver")
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: parameter `driver` should be one of (gels)")
    call.kwargs["driver"] = "gels"
    if not _covered(x) or not x.numel():
        return operators.compute(call)
    b, m, n = _batch(x), x.shape[-2], x.shape[-1]
    item, size = x.itemsize, x.numel() * x.itemsize
    columns = 1
    if right.dim() > x.dim() - 1:
        columns = right.numel() // (b * m)
    solution = Out(0, b * max(m, n) * columns * item)

    def plan(outputs: list[Any]) -> Plan:
        """Return the memory plan for these outputs. Empty residuals are not computed."""
        end = *_check_plan(x), -4 * b
        residuals: Plan = ()
        if outputs[1].numel():
            residuals = (Out(1),)
        if _together(x) and m >= n:
            return 4 * b, solution, size, size, *_pointers(b), -size, *residuals, -size, *end
        less = min(m, n)
        taus = b * less * item
        factors = _factored_orthogonally(x, less, item)
        product = _in_turn(b, ormqr_bytes(max(m, n), less, columns, item))
        system = _triangular(x, b, less)
        begin = 4 * b, solution, size, taus
        if m < n:  # the transposed matrix is factored
            return *begin, size, *factors, *system, *product, -size, -taus, -size, *end
        return *begin, *factors, *product, *system, -taus, *residuals, -size, *end

    return perform(call, plan)


def _on_gpu(x: Tensor, number: Any) -> Tensor:
    """Return a tolerance, which may be a Python number, as a tensor on the GPU of `x`.

    C++ would make a CPU tensor of a number.
    """
    if isinstance(number, Tensor) and number.device == x.device:
        return number
    return torch.full((), float(number), dtype=torch.float64, device=x.device)


@handles("linalg_pinv")
def pseudoinverse(call: Call) -> Any:
    """Compute `torch.linalg.pinv` with singular values.

    The tolerances are float64 on the GPU (`get_atol_rtol` and `linalg_pinv` in
    native/LinearAlgebra.cpp).
    """
    x = call.args[0]
    if call.op.outs:
        return operators.into_given(call)
    call.require_one_device()  # of the tolerances too, which get a dimension
    if call.kwargs.get("hermitian") or not _covered(x):
        return operators.compute(call)
    atol, rtol = call.kwargs.get("atol"), call.kwargs.get("rtol")
    if rtol is None:
        rtol = 0.0
        if atol is None:
            rtol = torch.finfo(x.dtype).eps * max(x.shape[-2:])
    atol = _on_gpu(x, 0.0 if atol is None else atol)
    rtol = _on_gpu(x, rtol)
    if not x.numel():
        return x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2])
    u, values, v = torch.ops.aten._linalg_svd(x)
    relative = rtol.unsqueeze(-1) * values[..., :1]
    limit = torch.maximum(atol.unsqueeze(-1), relative)
    del relative
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    reciprocal = values.reciprocal()
    above = values > limit
    inverse = torch.where(above, reciprocal, zero)
    del above, reciprocal, zero
    scaled = v.mH * inverse.unsqueeze(-2)
    with without_tf32():
        result = scaled @ u.mH
    del scaled, inverse, limit, u, values, v
    return result


device_error("linalg_pinv")(at_least_two)


@handles("_linalg_check_errors")
def check_errors(call: Call) -> Any:
    """Run `_linalg_check_errors`, in which the host waits and reads the error codes."""
    result = operators.compute(call)
    if call.args[0].dim() == 0:
        play(call.args[0]._gpu, (1, 1, -1, -1))
    else:
        play(call.args[0]._gpu, (1, -1))
    return result
