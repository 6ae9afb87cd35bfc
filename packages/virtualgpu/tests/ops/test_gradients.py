"""Gradients are added in place only if nobody else uses them, and values stay right."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import virtualgpu
from virtualgpu.ops import gradients

from .asked import asked


def test_two_branches_meet_in_place():
    """Check x / (1 + |x|), whose two gradients an H200 added in the memory of one of them."""
    n = 588000
    got = asked(
        nn.functional.softsign,
        setup=lambda: torch.randn(700, 210, device="cuda", requires_grad=True),
        backward=True,
    )
    assert [int(size) for size in got] == [n, n, n, n, -n, -n, -n, n, -n, n, n, -n, -n, -n]


def test_a_gradient_that_another_holds_is_left_alone():
    with virtualgpu.use(gpus=1, like="H200"):
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x * 2
        y.retain_grad()
        given = torch.ones(4, device="cuda")
        (y + y.exp()).backward(given)
        assert given.tolist() == [1.0] * 4
        torch.testing.assert_close(x.grad.cpu(), 2 * (1 + torch.full((4,), 2.0).exp()))
        torch.testing.assert_close(y.grad.cpu(), 1 + torch.full((4,), 2.0).exp())


def test_a_square_has_two_gradients_of_one_node():
    x = torch.ones(4)
    with virtualgpu.use(gpus=1, like="H200"):
        y = x.cuda().requires_grad_()
        (y * y).sum().backward()
        assert y.grad.tolist() == [2.0] * 4


def first_by_grad():
    y = torch.func.grad(lambda x: (x.sin() + x.cos()).sum())(torch.zeros(4, device="cuda"))
    assert y.tolist() == [1.0] * 4


def first_of_two_sums():
    x = torch.zeros(4, device="cuda", requires_grad=True)
    (x.sin() + x.cos()).sum().backward()
    assert x.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("first", [first_by_grad, first_of_two_sums])
def test_references_are_counted_before_the_first_backward_wherever_it_runs(first, monkeypatch):
    with virtualgpu.use(gpus=1, like="H200"):
        first()
        once = gradients._ALONE[:], torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    monkeypatch.setattr(gradients, "_ALONE", [])
    with torch.inference_mode(), virtualgpu.use(gpus=1, like="H200"):
        assert gradients._ALONE == [] and torch.cuda.memory_allocated() == 0
        with torch.inference_mode(False):
            first()
        assert once == (
            gradients._ALONE,
            torch.cuda.memory_stats()["allocated_bytes.all.allocated"],
        )
    test_two_branches_meet_in_place()
    test_a_gradient_that_another_holds_is_left_alone()


def forward_and_backward(work, x, y):
    result = work(x.requires_grad_(), y.requires_grad_())
    result.backward(torch.ones_like(result))
    return x.grad, y.grad


@pytest.mark.parametrize(
    "work",
    [
        lambda x, y: x.clamp(0.2, 0.8),
        lambda x, y: x.clamp(y, y + 0.1),
        lambda x, y: x.clamp(min=y),
        lambda x, y: x.clamp_max(y),
        lambda x, y: x.clamp_min(0.5),
        torch.maximum,
        torch.minimum,
        torch.fmax,
        torch.fmin,
        torch.atan2,
        torch.hypot,
        lambda x, y: torch.linalg.vector_norm(x, 3),
        lambda x, y: x.norm(dim=1),
    ],
)
def test_a_formula_overwrites_in_the_installed_torch_what_it_overwrites_on_the_cpu(work):
    """Compare with the in-place operators that PyTorch's profiler reports on the CPU.

    Numbers are left out, because on the CPU they are tensors.
    """
    x, y = torch.rand(50, 30), torch.rand(50, 30)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        held = forward_and_backward(work, x, y)  # until the end, as in `asked`
    expected = [
        event.nbytes()
        for event in found.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    got = [
        int(size)
        for size in asked(
            lambda pair: forward_and_backward(work, *pair),
            setup=lambda: (x.detach().cuda(), y.detach().cuda()),
        )
    ]
    assert [size for size in got if abs(size) >= x.numel()] == [
        size for size in expected if abs(size) >= x.numel()
    ]
    assert held[0] is x.grad
