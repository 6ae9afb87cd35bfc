"""Half precision that CUDA computes and the CPU does not, such as products with `out_dtype`."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from ...benchmarks.fidelity.mixed_dtypes import cases, outcome

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"

RECORDED = json.loads((FIDELITY / "h200/mixed_dtypes.json").read_text(encoding="utf-8"))["outcomes"]

HAS = hasattr(torch.ops.aten.mm, "dtype")
needs_out_dtype = pytest.mark.skipif(not HAS, reason="this torch's products have no out_dtype")

PRODUCTS = {"mm": 2, "bmm": 3, "addmm": 2, "baddbmm": 3}  # dimensions of the factors


@pytest.fixture(autouse=True)
def used(shared_machine):
    return shared_machine


def factors(name: str, dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
    """Return two factors, after a summand if there is one."""
    shapes = [(5, 4), (5, 6), (6, 4)][not name.startswith(("addmm", "baddbmm")) :]
    batch = (2,) * (PRODUCTS[name] - 2)
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*batch, *shape, generator=generator).to(device, dtype) for shape in shapes]


LAYERS = {
    "avg_pool3d": lambda x: F.avg_pool3d(x.reshape(1, 2, 4, 4, 4), 2),
    "multi_margin_loss": lambda x: F.multi_margin_loss(
        x.reshape(16, 8), torch.arange(16, device=x.device) % 8
    ),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
        x.reshape(16, 8), torch.arange(128, device=x.device).reshape(16, 8) % 8
    ),
    "interpolate": lambda x: F.interpolate(
        x.reshape(1, 2, 8, 8), 4, mode="bilinear", antialias=True
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_cpu_has_no_kernel_for_is_computed_in_float32_and_rounded(machine, name, dtype):
    """Run each call twice, because the second one uses what the first one has found out."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = x.float().requires_grad_()
    expected = LAYERS[name](whole)
    expected.sum().backward()
    for _ in range(2):
        given = x.cuda().requires_grad_()
        y = LAYERS[name](given)
        y.sum().backward()
        assert_close(y.detach().cpu(), expected.detach().to(dtype))
        assert_close(given.grad.cpu(), whole.grad.to(dtype), rtol=1e-2, atol=1e-3)
    del given, y


COMPLEX_HALF = {
    "sqrt": torch.sqrt,
    "sqrt_": lambda x: x.clone().sqrt_(),
    "sqrt, out": lambda x: torch.sqrt(x, out=torch.empty_like(x)),
    "angle": torch.angle,
    "tanh": torch.tanh,
    "div": lambda x: x / (2 * x + 1),
    "div by a number": lambda x: x / 3,
    "pow": lambda x: 2**x + x**2,
    "lerp": lambda x: torch.lerp(x, x.roll(1), 0.25),
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(),
    "sum in complex64": lambda x: x.sum(0, dtype=torch.complex64),
    "sum in complex32": lambda x: x.sum(
        0, dtype=torch.complex32 if x.dtype is torch.complex32 else None
    ),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", COMPLEX_HALF)
def test_complex_numbers_of_two_halves_are_computed_in_complex64_and_rounded(machine, name):
    """Run each call twice, because the second one uses what the first one has found out."""
    x = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).to(
        torch.complex32
    )
    given, expected = x.cuda(), COMPLEX_HALF[name](x.to(torch.complex64))
    kept = name == "sum in complex64"
    for _ in range(2):
        found = COMPLEX_HALF[name](given)
        assert found.dtype is (
            expected.dtype
            if kept
            else {torch.complex64: torch.complex32, torch.float32: torch.float16}[expected.dtype]
        )
        assert_close(found.cpu().to(expected.dtype), expected, rtol=4e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_root_of_complex_halves_takes_the_gpu_memory_of_its_result_alone(machine):
    x = torch.ones(1 << 20, dtype=torch.complex32, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = torch.sqrt(x)
    assert torch.cuda.max_memory_allocated() - before == y.nbytes == 4 << 20


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_cuda_has_no_expm1_for_complex_halves_either(machine):
    with pytest.raises(RuntimeError, match="not implemented for 'ComplexHalf'"):
        torch.expm1(torch.ones(2, dtype=torch.complex32, device="cuda"))


def test_histc_refuses_half_precision(machine):
    for dtype, words in (
        (torch.float16, "HalfTensor is not supported"),
        (torch.bfloat16, "\"histc\" not implemented for 'BFloat16'"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.histc(torch.ones(4, device="cuda", dtype=dtype), 4)


def test_integers_are_counted_by_histc(machine):
    assert torch.histc(torch.tensor([1, 2, 2, 7], device="cuda"), 4, 0, 8).tolist() == [1, 2, 0, 1]


def test_cuda_has_no_solver_for_half_precision_either(machine):
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.linalg.qr(torch.ones(2, 2, dtype=torch.half, device="cuda"))


@needs_out_dtype
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_half_precision_can_stay_float32(name, dtype):
    given = factors(name, dtype)
    product = getattr(torch, name)
    expected = product(*(x.cpu().float() for x in given))
    got = product(*given, out_dtype=torch.float32)
    assert got.dtype is torch.float32 and got.is_cuda
    assert_close(got.cpu(), expected)
    out = torch.empty(expected.shape, device="cuda")
    assert product(*given, out_dtype=torch.float32, out=out) is out
    assert_close(out.cpu(), expected)
    assert torch.equal(product(*given, out_dtype=dtype), product(*given))


@needs_out_dtype
def test_a_float32_summand_of_half_factors():
    summand, left, right = factors("addmm", torch.bfloat16)
    got = torch.addmm(summand.float(), left, right, out_dtype=torch.float32, beta=0.5, alpha=2)
    assert_close(
        got.cpu(), 0.5 * summand.cpu().float() + 2 * left.cpu().float() @ right.cpu().float()
    )


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "out", "message"),
    [
        (
            (torch.float32, torch.float32),
            torch.float16,
            None,
            "must be the same as input dtype or fp32 for fp16/bf16 inputs",
        ),
        (
            (torch.bfloat16, torch.bfloat16),
            torch.float16,
            None,
            "must be the same as input dtype or fp32 for fp16/bf16 inputs",
        ),
        ((torch.bfloat16, torch.float16), torch.float32, None, "input dtypes must be the same"),
        (
            (torch.float16, torch.float16),
            torch.float32,
            torch.float16,
            "the same as the dtype of the provided out tensor",
        ),
    ],
)
def test_formats_that_do_not_go_together(dtypes, out_dtype, out, message):
    left, right = (
        x.to(dtype) for x, dtype in zip(factors("mm", torch.float32), dtypes, strict=True)
    )
    given = {} if out is None else {"out": torch.empty(5, 4, device="cuda", dtype=out)}
    with pytest.raises(RuntimeError, match=message):
        torch.mm(left, right, out_dtype=out_dtype, **given)


@needs_out_dtype
def test_a_summand_of_another_format():
    summand, left, right = factors("baddbmm", torch.float16)
    with pytest.raises(
        RuntimeError, match="self dtype must match either out_dtype or batch1 dtype"
    ):
        torch.baddbmm(summand.double(), left, right, out_dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("low", "name"), [(low, name) for low, names in RECORDED.items() for name in names]
)
def test_two_dtypes_give_what_they_gave_on_an_h200(machine, low, name):
    assert outcome(cases(getattr(torch, low))[name]) == RECORDED[low][name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_grid_is_sampled_in_float32_and_rounded_once(machine, dtype):
    generator = torch.Generator().manual_seed(3)
    image, grid = (
        torch.randn(1, 2, 16, 16, generator=generator).to(dtype),
        torch.rand(1, 4, 4, 2, generator=generator).to(dtype),
    )
    found = F.grid_sample(image.cuda(), grid.cuda(), align_corners=False).cpu()
    assert torch.equal(
        found, F.grid_sample(image.float(), grid.float(), align_corners=False).to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "compute"),
    [
        ("igamma_cuda", lambda x: torch.igamma(x, x)),
        ("igammac_cuda", lambda x: x.igammac_(x)),
        ("angle_cuda", torch.angle),
    ],
)
def test_what_cuda_has_no_half_precision_for_is_refused_though_the_cpu_computes_it(
    kernel, compute, dtype
):
    name = {torch.float16: "Half", torch.bfloat16: "BFloat16"}[dtype]
    with pytest.raises(RuntimeError, match=f"\"{kernel}\" not implemented for '{name}'"):
        compute(torch.ones(3, device="cuda", dtype=dtype))
    compute(torch.ones(3, device="cuda"))
