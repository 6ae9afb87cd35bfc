"""Operators give the CPU's results on a virtual GPU, on the right device and without leaks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from .operator_cases import CASES, Inputs

pytestmark = pytest.mark.usefixtures("without_tf32")
# Errors of operators without a derivative, or without a Fourier transform of an expanded gradient.
CANNOT = "derivative|MKL FFT error"
# Not the current device, so that tensors on cuda:0 by mistake are noticed.
DEVICE = torch.device("cuda", 1)


@pytest.fixture(scope="module", autouse=True)
def machine(shared_machine):
    return shared_machine


def leaves(value: Any) -> list[Any]:
    return (
        [leaf for part in value for leaf in leaves(part)]
        if isinstance(value, (tuple, list))
        else [value]
    )


def moved(inputs: tuple) -> tuple:
    """Return the same inputs as leaves on the virtual GPU."""
    return tuple(x.detach().to(DEVICE).requires_grad_(x.requires_grad) for x in inputs)


def gradients(outputs: list[Any], inputs: tuple) -> list[torch.Tensor | None]:
    total = sum(
        (out.abs() if out.is_complex() else out).float().sum()
        for out in outputs
        if differentiable(out)
    )
    wanted = [x for x in inputs if x.requires_grad]
    return (
        list(torch.autograd.grad(total, wanted, allow_unused=True))
        if isinstance(total, torch.Tensor)
        else []
    )


def differentiable(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def agree(got: Any, expected: Any, **tolerance: float) -> None:
    if not isinstance(expected, torch.Tensor):
        assert got == expected
    else:
        assert got.device == DEVICE
        assert (got.shape, got.dtype, got.requires_grad) == (
            expected.shape,
            expected.dtype,
            expected.requires_grad,
        )
        assert_close(got.detach().cpu(), expected.detach(), equal_nan=True, **tolerance)


def compare(
    function: Callable[..., Any],
    inputs: tuple,
    on_cpu: Callable[..., Any] | None = None,
    **tolerance: float,
) -> None:
    theirs = moved(inputs)
    expected, got = leaves((on_cpu or function)(*inputs)), leaves(function(*theirs))
    for a, b in zip(got, expected, strict=True):
        agree(a, b, **tolerance)
    try:
        wanted = gradients(expected, inputs)
    except (
        RuntimeError,
        NotImplementedError,
    ) as error:  # what this torch cannot do on the CPU cannot be tested
        assert re.search(CANNOT, str(error))
        with pytest.raises(type(error), match=CANNOT):
            gradients(got, theirs)
        return
    for a, b in zip(gradients(got, theirs), wanted, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            agree(a, b, **tolerance)


@pytest.mark.sample(120)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    function, draw = CASES[name]
    before = torch.cuda.memory_allocated(DEVICE)
    compare(function, draw(Inputs()), rtol=1e-5, atol=1e-5)
    assert torch.cuda.memory_allocated(DEVICE) <= before
    assert torch.cuda.memory_allocated(0) == 0


HALF = [
    "exp", "tanh", "F.gelu", "F.silu", "add", "mul", "div", "maximum", "sum", "mean", "amax",
    "softmax", "log_softmax", "sort", "cat", "index", "gather", "scatter_add", "where",
    "masked_fill", "mm", "bmm", "addmm", "F.linear", "einsum", "conv2d", "max_pool2d", "avg_pool2d",
    "batch_norm", "layer_norm", "group_norm", "attention", "mse_loss", "cross_entropy",
    "bce_with_logits", "embedding", "conversions", "clamp", "topk", "pad",
]  # fmt: skip


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in float32 with rounded results and gradients.

    The half-precision kernels of some processors are less exact than a GPU's.
    """

    def in_float32(*inputs: Any) -> list[Any]:
        wide = (x.float() if x.is_floating_point() else x for x in inputs)
        results = zip(leaves(function(*wide)), leaves(function(*inputs)), strict=True)
        return [
            value.to(like.dtype) if isinstance(value, torch.Tensor) else value
            for value, like in results
        ]

    return in_float32


@pytest.mark.sample(40)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALF)
def test_values_and_gradients_in_half_precision(name, dtype):
    function, draw = CASES[name]
    compare(function, draw(Inputs(dtype)), rounded(function), rtol=1e-2, atol=1e-2)
