"""Gradients that a program's own code returns must be on the devices that CUDA expects."""

from functools import partial

import pytest
import torch
from torch.autograd import Function

pytestmark = pytest.mark.usefixtures("machine")


class Sends(Function):
    """Function that doubles its input, and returns the gradient on a given device.

    The device is the second argument.
    """

    @staticmethod
    def forward(ctx, x, device, other=None):
        ctx.device = device
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.device), None, None


class ToHost(Function):
    """Function that copies its input to the host. It returns its gradient on the GPU."""

    @staticmethod
    def forward(ctx, x):
        return x.cpu()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cuda()


def leaf(device="cuda", shape=(3,)):
    return torch.ones(shape, device=device, requires_grad=True)


@pytest.mark.parametrize(
    ("here", "there"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")]
)
def test_a_function_must_return_gradients_on_the_devices_of_its_inputs(here, there):
    x = leaf(here)
    with pytest.raises(RuntimeError) as refused:
        Sends.apply(x * 1, there).sum().backward()
    assert str(refused.value) == (
        f"Function SendsBackward returned an invalid gradient at index 0 - expected device {here} "
        f"but got {there}"
    )


def test_the_index_counts_tensors_alone():
    class Second(Function):
        @staticmethod
        def forward(ctx, number, x, y):
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient, gradient.cpu()

    with pytest.raises(
        RuntimeError, match="gradient at index 1 - expected device cuda:0 but got cpu"
    ):
        Second.apply(7, leaf() * 1, leaf() * 1).sum().backward()
    x = leaf()
    # nobody needs the second gradient
    Second.apply(7, x, torch.ones(3, device="cuda")).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_a_function_that_moves_its_gradient_back_is_right():
    x = leaf()
    ToHost.apply(x).sum().backward()
    assert x.grad.device == x.device and x.grad.tolist() == [1, 1, 1]


def test_a_number_on_the_host_is_moved_to_its_input():
    x = leaf(shape=())
    Sends.apply(x, "cpu").backward()
    assert x.grad.device == x.device and x.grad.item() == 1


@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_hook_must_return_a_gradient_of_the_same_type(here, there):
    types = {"cuda": "torch.cuda.FloatTensor", "cpu": "torch.FloatTensor"}
    hooks = {
        "<lambda>": lambda gradient: gradient.to(there),
        "<unknown>": partial(torch.Tensor.to, device=there),
    }
    for name, hook in hooks.items():
        x = leaf(here)
        x.register_hook(hook)
        with pytest.raises(RuntimeError) as refused:
            (x * 2).sum().backward()
        assert (
            str(refused.value)
            == f"hook '{name}' has changed the type of value (was {types[here]} got {types[there]})"
        )


def test_hooks_that_change_or_only_see_a_gradient_are_right():
    x, seen = leaf(), []
    x.register_hook(lambda gradient: gradient * 2)
    handle = x.register_hook(seen.append)
    (x * 2).sum().backward()
    handle.remove()
    assert x.grad.tolist() == [4, 4, 4] and [y.tolist() for y in seen] == [[4, 4, 4]]
