"""Attention takes CUDA's backends, with their memory, and their values agree with the CPU's."""

import pytest
import torch
import torch.nn.functional as F
from recorded import check, recorded

from virtualgpu.ops.nn.attention import backend


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", recorded(("sdpa_", "attention_")))
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def inputs(width, dtype=torch.float32, device="cuda", heads=4):
    return tuple(torch.randn(2, heads, 16, width, dtype=dtype, device=device, requires_grad=True) for _ in range(3))


@pytest.mark.parametrize(
    ("width", "dtype", "masked", "expected"),
    [
        (64, torch.float32, False, "efficient"),
        (7, torch.float32, False, "math"),
        (64, torch.float64, False, "math"),
        (64, torch.float16, False, "cudnn"),
        (20, torch.bfloat16, False, "flash"),
        (20, torch.bfloat16, True, "math"),
    ],
)
def test_backend(width, dtype, masked, expected, machine):
    mask = torch.zeros(16, 16, dtype=dtype, device="cuda") if masked else None
    assert backend(*inputs(width, dtype), mask, 0.0, False, False) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_whose_last_dimension_does_not_lie_dense_leaves_the_math_backend(dtype, machine):
    by_head = torch.zeros(16, 16, 4, dtype=dtype, device="cuda").permute(2, 0, 1)  # as T5 makes the bias of its positions
    assert backend(*inputs(64, dtype), by_head, 0.0, False, False) == "math"
    assert backend(*inputs(64, dtype), by_head.contiguous(), 0.0, False, False) != "math"


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(16, 16).tril() > 0}, {"scale": 0.3}])
@pytest.mark.parametrize("width", [8, 7])
def test_values_agree_with_the_cpu(options, width, machine):
    plain = inputs(width, device="cpu")
    moved = [x.detach().cuda().requires_grad_() for x in plain]
    expected = F.scaled_dot_product_attention(*plain, **options)
    there = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    got = F.scaled_dot_product_attention(*moved, **there)
    expected.square().sum().backward()
    got.square().sum().backward()
    same = {"rtol": 0, "atol": 0} if width == 8 else {}  # of width 7 CUDA takes no fused kernel
    torch.testing.assert_close(got.cpu(), expected, **same)
    for a, b in zip(moved, plain, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, **same)


def test_dropout_keeps_the_mean(machine):
    q, k, _ = inputs(8)
    out = F.scaled_dot_product_attention(q, k, torch.ones_like(q), dropout_p=0.5)
    assert abs(out.mean().item() - 1) < 0.1 and out.std().item() > 0.05


def test_fully_masked_rows_are_zero(machine):
    mask = torch.zeros(16, 16, dtype=torch.bool, device="cuda")
    assert not F.scaled_dot_product_attention(*inputs(8), attn_mask=mask).any()


def test_mask_beside_causal_is_refused(machine):
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        F.scaled_dot_product_attention(*inputs(8), attn_mask=torch.zeros(16, 16, device="cuda"), is_causal=True)
