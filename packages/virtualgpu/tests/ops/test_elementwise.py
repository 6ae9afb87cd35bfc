"""The allocations of softmax, dropout, losses and pointwise operators, as recorded on an H200."""

import pytest
import torch
import torch.nn.functional as F

from .asked import asked


def matrix(rows: int = 64, columns: int = 100, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("work", "forward", "backward"),
    [
        (lambda x: F.dropout(x, 0.5), "+6400 +25600", "+25600 -6400"),
        (lambda x: x.softmax(1), "+25600", "+25600 +25600 -25600"),
        (lambda x: F.logsigmoid(x), "+25600", "+25600"),
        (lambda x: x.logsumexp(1), "+256 +256 +64 -64 -256 +25600 +256 -25600 -256", None),
        (lambda x: torch.where(x > 0, x, 0.0), "+6400 +4 +25600 -4", None),
        (lambda x: torch.complex(x, x).abs(), "+51200 +25600 +51200 -51200", None),
    ],
)
def test_operators(work, forward, backward):
    assert " ".join(asked(work, setup=matrix)).removesuffix(" -6400") == forward
    if backward:
        assert " ".join(asked(work, setup=matrix, backward=True)) == backward


def test_half_precision_goes_to_single_in_one_kernel():
    half = torch.float16
    assert asked(
        lambda x: F.softmax(x, -1, dtype=torch.float32), setup=lambda: matrix(dtype=half)
    ) == ["+25600"]
    x = torch.randn(8, 10, dtype=half)
    with_float = asked(
        lambda y: F.softmax(y, -1, dtype=torch.float32),
        setup=lambda: x.cuda().requires_grad_(),
        backward=True,
    )
    assert with_float == ["+160", "+320", "-320"]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x, y: F.huber_loss(x, y), "+25600 +4 -25600"),
        (lambda x, y: F.mse_loss(x, y), "+25600 +25600 -25600"),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y), "+25600 +25600 +4 -25600 -25600"),
        (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), "+25600 +25600 +4 -4"),
    ],
)
def test_losses(loss, expected):
    assert (
        " ".join(
            asked(
                lambda inputs: loss(*inputs),
                setup=lambda: (matrix(), torch.rand(64, 100, device="cuda")),
            )
        )
        == expected
    )


def test_a_large_loss_is_reduced_by_many_blocks():
    work = asked(
        lambda inputs: F.mse_loss(*inputs), setup=lambda: (matrix(3000, 1000), matrix(3000, 1000))
    )
    assert " ".join(work) == "+12000000 +12000000 +1468 +4 -4 -1468 -12000000"
