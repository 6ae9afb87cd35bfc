"""SyncBatchNorm's kernels on two ranks give the results of one batch norm of the whole batch."""

import pytest
import torch

from virtualgpu import hardware


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_come_to_the_whole(machine, dtype):
    torch.manual_seed(0)
    x, grad = (torch.randn(6, 3, 4, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (
        torch.rand(3, device="cuda", requires_grad=True),
        torch.rand(3, device="cuda", requires_grad=True),
    )
    running = [torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")]
    expected = [x.clone() for x in running]
    whole = x.float().requires_grad_()
    y = torch.nn.functional.batch_norm(whole, *expected, weight, bias, training=True)
    y.backward(grad.float())
    parts = [(x[:2], grad[:2]), (x[2:], grad[2:])]
    counts = torch.tensor([8.0, 16.0], device="cuda")
    means, scales = map(
        torch.stack, zip(*(torch.batch_norm_stats(part, 1e-5) for part, _ in parts), strict=True)
    )
    mean, scale = torch.batch_norm_gather_stats_with_counts(
        x, means, scales, *running, 0.1, 1e-5, counts
    )
    close = {"atol": 2e-3, "rtol": 2e-3} if dtype is torch.float16 else {}
    torch.testing.assert_close(running, expected, **close)
    for part, rows in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        made = torch.batch_norm_elemt(part[0], weight, bias, mean, scale, 1e-5)
        assert made.dtype is dtype
        torch.testing.assert_close(made.float(), y[rows], **close)
    reduced = [
        torch.batch_norm_backward_reduce(dy, part, mean, scale, weight, True, True, True)
        for part, dy in parts
    ]
    sums, products, into_weight, into_bias = (sum(values) for values in zip(*reduced, strict=True))
    torch.testing.assert_close([into_weight, into_bias], [weight.grad, bias.grad], **close)
    for (part, dy), rows in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        made = torch.batch_norm_backward_elemt(
            dy, part, mean, scale, weight, sums, products, counts.int()
        )
        torch.testing.assert_close(made.float(), whole.grad[rows], **close)


def test_equal_parts_need_one_count(machine):
    ones = torch.ones(2, 3, device="cuda")
    found = torch.batch_norm_gather_stats(
        torch.randn(1, 3, 3, device="cuda"), ones, ones, None, None, 0.1, 1e-5, 2
    )
    assert [x.tolist() for x in found] == [[1, 1, 1], [1, 1, 1]]


def test_without_values(machine, monkeypatch):
    monkeypatch.setattr(hardware.machine(), "values", False)
    x = torch.randn(6, 3, 400, device="cuda")
    mean, scale = torch.batch_norm_stats(x, 1e-5)
    assert torch.batch_norm_elemt(x, None, None, mean, scale, 1e-5).shape == x.shape
    assert torch.batch_norm_backward_reduce(x, x, mean, scale, None, True, False, False)[
        0
    ].shape == (3,)
