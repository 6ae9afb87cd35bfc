"""Linear algebra allocates the same sizes as on a real GPU."""

import pytest
import torch

from virtualgpu.ops.linalg import GETRF, workspace

from .asked import recorded
from .recorded import check

NAMES = (
    "shared/inverse", "shared/cholesky", "shared/cdist", "more/solve", "more/det", "more/svd",
    "more/qr", "more/eigh", "more/irfft", "more/cdist_big", "more/cdist_1", "more/pdist",
    "more/fft",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_workspace_grows_beyond_the_table():
    assert workspace(GETRF, 2048) == 2 * workspace(GETRF, 1024) > workspace(GETRF, 1)


def test_distances_agree_with_the_cpu(machine):
    x, y = torch.randn(30, 5), torch.randn(40, 5)
    torch.testing.assert_close(
        torch.cdist(x.cuda(), y.cuda()).cpu(), torch.cdist(x, y), atol=1e-3, rtol=1e-3
    )


BATCHES = (
    "inv_b4x16", "inv_b3x40", "inv_b5x100", "solve_b8x32", "solve1_33", "solve1_2", "cholesky_b2x4",
    "det_b8x32", "slogdet_b3x40", "slogdet_64", "lu_b2x4", "tri_b8x32", "tri_b5x100",
    "chsolve_b2x4", "qr_32x64", "svd_32x64", "qr_b4x16", "qr_b5x100", "qr_500x100",
    "qr_complete_500x100", "svd_b2x4", "svd_b3x40", "eigh_b3x40", "lstsq_16", "lstsq_b2x4",
    "lstsq_b5x100", "lstsq_64x32", "lstsq_32x64", "pinv_64x32", "grad_pinv",
)  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_and_vectors_ask_for_what_an_h200_was_asked_for(name, machine):
    check(f"further/{name}")


@pytest.mark.parametrize("shape", [(20, 10), (10, 20), (3, 8, 5), (2, 4, 4), (3, 5, 8)])
def test_least_squares_and_pseudoinverses_agree_with_the_cpu(shape, machine):
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(*shape, generator=generator),
        torch.randn(*shape[:-1], 2, generator=generator),
    )
    close = {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(
        torch.linalg.lstsq(x.cuda(), y.cuda()).solution.cpu(),
        torch.linalg.lstsq(x, y).solution,
        **close,
    )
    for rtol in (None, 0.3):
        torch.testing.assert_close(
            torch.linalg.pinv(x.cuda(), rtol=rtol).cpu(), torch.linalg.pinv(x, rtol=rtol), **close
        )


def test_least_squares_has_one_driver(machine):
    x = torch.eye(3, device="cuda")
    with pytest.raises(RuntimeError, match="should be one of \\(gels\\)"):
        torch.linalg.lstsq(x, x, driver="gelsd")


@pytest.mark.parametrize(
    ("work", "count"),
    [(torch.linalg.det, 4), (torch.linalg.slogdet, 5), (torch.linalg.pinv, 2)],
    ids=["det", "slogdet", "pinv"],
)
def test_a_matrix_without_elements_asks_for_what_an_h200_was_asked_for(work, count, machine):
    """Run calls of PyTorch's database of operators (torch 2.11)."""
    assert (
        sum(size[0] == "+" for size in recorded(lambda: work(torch.empty(0, 0, device="cuda")))[1])
        == count
    )


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0), (0, 5)])
def test_matrices_without_elements_agree_with_the_cpu(shape, machine):
    x = torch.empty(shape)
    square = shape[-1] == shape[-2]
    for work in (torch.linalg.pinv, *((torch.linalg.det, torch.linalg.slogdet) if square else ())):
        torch.testing.assert_close(work(x.cuda()), work(x), check_device=False)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (3, 5)])
def test_factors_without_pivots(machine, shape):
    """LAPACK cannot factor without pivots, but CUDA's libraries can."""
    x = torch.randn(shape, dtype=torch.float64, device="cuda")
    x.diagonal(dim1=-2, dim2=-1).add_(10)
    p, lower, upper = torch.linalg.lu(x, pivot=False)
    assert p.numel() == 0 and torch.allclose(lower @ upper, x)
    packed, pivots, info = torch.linalg.lu_factor_ex(x, pivot=False)
    k = min(shape[-2:])
    assert torch.equal(packed[..., :k, :].triu(), upper) and not info.any()
    assert pivots.dtype is torch.int32 and pivots.shape == (*shape[:-2], k)
    with pytest.raises(RuntimeError, match=r"U\[1,1\] is zero"):
        torch.linalg.lu_factor(torch.zeros(2, 2, device="cuda"), pivot=False)


@pytest.mark.parametrize("driver", ["gesvd", "gesvdj", "gesvda"])
def test_drivers_of_singular_values(machine, driver):
    x = torch.randn(3, 3, device="cuda")
    assert torch.equal(torch.linalg.svdvals(x, driver=driver), torch.linalg.svdvals(x))
    assert torch.equal(torch.linalg.svd(x, driver=driver)[1], torch.linalg.svd(x)[1])
    with pytest.raises(RuntimeError, match="^torch.linalg.svd: unknown svd driver gesdd in"):
        torch.linalg.svd(x, driver="gesdd")
