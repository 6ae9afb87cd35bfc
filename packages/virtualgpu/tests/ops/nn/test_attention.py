"""Attention uses CUDA's backends with their memory, and its values agree with the CPU's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from virtualgpu.ops.nn.attention_backends import backend

from ..recorded import check, recorded


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", recorded(("sdpa_", "attention_")))
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def inputs(width, dtype=torch.float32, device="cuda", heads=4):
    return tuple(
        torch.randn(2, heads, 16, width, dtype=dtype, device=device, requires_grad=True)
        for _ in range(3)
    )


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
    # T5 makes its position bias like this
    by_head = torch.zeros(16, 16, 4, dtype=dtype, device="cuda").permute(2, 0, 1)
    assert backend(*inputs(64, dtype), by_head, 0.0, False, False) == "math"
    assert backend(*inputs(64, dtype), by_head.contiguous(), 0.0, False, False) != "math"


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": torch.ones(16, 16).tril() > 0}, {"scale": 0.3}],
)
@pytest.mark.parametrize("width", [8, 7])
def test_values_agree_with_the_cpu(options, width, machine):
    plain = inputs(width, device="cpu")
    moved = [x.detach().cuda().requires_grad_() for x in plain]
    expected = F.scaled_dot_product_attention(*plain, **options)
    there = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    got = F.scaled_dot_product_attention(*moved, **there)
    expected.square().sum().backward()
    got.square().sum().backward()
    same = {"rtol": 0, "atol": 0} if width == 8 else {}  # CUDA has no fused kernel for width 7
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
        F.scaled_dot_product_attention(
            *inputs(8), attn_mask=torch.zeros(16, 16, device="cuda"), is_causal=True
        )


FUSED = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION


@pytest.mark.parametrize("chosen", [*FUSED, SDPBackend.MATH])
def test_each_backend_runs_alone(chosen, machine):
    q, k, v = inputs(8, torch.float16)
    expected = F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(chosen):
        got = F.scaled_dot_product_attention(q, k, v)
        got.sum().backward()
    torch.testing.assert_close(got, expected)
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("chosen", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_backend_without_float32_says_why_it_cannot_run(chosen, machine):
    with warnings.catch_warnings(record=True) as given, sdpa_kernel(chosen):
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="^No available kernel. Aborting execution.$"):
            F.scaled_dot_product_attention(*inputs(8))
    said = [str(warning.message).split(" (Triggered")[0] for warning in given]
    assert said[:3] == [
        "Memory efficient kernel not used because:",
        "Memory Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:",
    ]
    dtypes = "Got Query dtype: float, Key dtype: float, and Value dtype: float instead."
    assert any("to all be of dtype: {Half, BFloat16}" in line and dtypes in line for line in said)
    assert all(warning.filename in (F.__file__, __file__) for warning in given)


def test_no_backend_at_all(machine):
    with (
        sdpa_kernel([SDPBackend.OVERRIDEABLE]),
        pytest.raises(RuntimeError, match="^No viable backend"),
    ):
        F.scaled_dot_product_attention(*inputs(8))


def test_the_programs_order_of_backends_is_kept(machine):
    q, k, v = inputs(8, torch.float16)
    with sdpa_kernel(
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
    ):
        assert backend(q, k, v, None, 0.0, False, False) == "efficient"
    assert torch._fused_sdp_choice(q, k, v) == SDPBackend.CUDNN_ATTENTION.value


def test_programs_may_ask_which_backend_can_run(machine):
    cuda = torch.backends.cuda
    assert cuda.is_flash_attention_available()
    for dtype, flash in ((torch.float16, True), (torch.float32, False)):
        parameters = cuda.SDPAParams(*inputs(8, dtype), None, 0.0, False, False)
        assert cuda.can_use_flash_attention(parameters) is flash
        assert cuda.can_use_cudnn_attention(parameters) is flash
        assert cuda.can_use_efficient_attention(parameters)
    on_cpu = cuda.SDPAParams(*inputs(8, device="cpu"), None, 0.0, False, False)
    with pytest.warns(
        UserWarning, match="All tensors need to be on cuda device. Got query on device: cpu"
    ):
        assert not cuda.can_use_efficient_attention(on_cpu, debug=True)


@pytest.mark.parametrize(
    ("dtype", "operator"), [(torch.float32, "efficient"), (torch.float16, "cudnn")]
)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool])
def test_a_mask_on_another_device_is_refused(dtype, operator, mask_dtype, machine):
    for device in ("cpu", "cuda:1"):
        mask = torch.ones(16, 16, dtype=mask_dtype or dtype, device=device)
        with pytest.raises(RuntimeError) as refused:
            F.scaled_dot_product_attention(*inputs(8, dtype), attn_mask=mask)
        assert str(refused.value) == (
            f"Expected all tensors to be on the same device, but got attn_bias is on {device}, "
            "different from other tensors on cuda:0 "
            "(when checking argument in method "
            f"wrapper_CUDA___scaled_dot_product_{operator}_attention)"
        )


def test_a_mask_on_a_gpu_and_queries_on_the_cpu_are_refused(machine):
    with pytest.raises(
        NotImplementedError, match="flash_attention_for_cpu' with arguments from the 'CUDA' backend"
    ):
        F.scaled_dot_product_attention(
            *inputs(8, device="cpu"), attn_mask=torch.zeros(16, 16, device="cuda")
        )


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases(bias, machine):
    q, k, v = inputs(8)
    expected = F.scaled_dot_product_attention(
        q[:, :, :2], k, v, attn_mask=bias(2, 16)._materialize("cuda")
    )
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q[:, :, :2], k, v, attn_mask=bias(2, 16)), expected
    )
