"""Linear algebra asks for what a real GPU was asked for."""

import pytest
import torch
from recorded import check

from labkit.vgpu.footprint.linalg import GETRF, workspace

NAMES = (
    "shared/inverse", "shared/cholesky", "shared/cdist", "more/solve", "more/det", "more/svd", "more/qr", "more/eigh", "more/irfft",
    "more/cdist_big", "more/cdist_1", "more/pdist", "more/fft",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_workspace_grows_beyond_the_table():
    assert workspace(GETRF, 2048) == 2 * workspace(GETRF, 1024) > workspace(GETRF, 1)


def test_distances_agree_with_the_cpu(machine):
    x, y = torch.randn(30, 5), torch.randn(40, 5)
    torch.testing.assert_close(torch.cdist(x.cuda(), y.cuda()).cpu(), torch.cdist(x, y), atol=1e-3, rtol=1e-3)
