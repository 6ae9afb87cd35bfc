"""Products with `out_dtype`, as CUDA's libraries compute them and as the CPU cannot."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

FIDELITY = Path(__file__).parents[3] / "benchmarks" / "fidelity"
sys.path.insert(0, str(FIDELITY))
from mixed_dtypes import cases, outcome  # noqa: E402  (a program, not a package)

RECORDED = json.loads((FIDELITY / "h200/mixed_dtypes.json").read_text(encoding="utf-8"))["outcomes"]

HAS = hasattr(torch.ops.aten.mm, "dtype")
pytestmark = pytest.mark.skipif(not HAS, reason="this torch's products have no out_dtype")

PRODUCTS = {"mm": 2, "bmm": 3, "addmm": 2, "baddbmm": 3}  # dimensions of the factors


@pytest.fixture(autouse=True)
def used(shared_machine):
    return shared_machine


def factors(name: str, dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
    """A summand, where there is one, and two factors."""
    shapes = [(5, 4), (5, 6), (6, 4)][not name.startswith(("addmm", "baddbmm")) :]
    batch = (2,) * (PRODUCTS[name] - 2)
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*batch, *shape, generator=generator).to(device, dtype) for shape in shapes]


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


def test_a_float32_summand_of_half_factors():
    summand, left, right = factors("addmm", torch.bfloat16)
    got = torch.addmm(summand.float(), left, right, out_dtype=torch.float32, beta=0.5, alpha=2)
    assert_close(got.cpu(), 0.5 * summand.cpu().float() + 2 * left.cpu().float() @ right.cpu().float())


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "out", "message"),
    [
        ((torch.float32, torch.float32), torch.float16, None, "must be the same as input dtype or fp32 for fp16/bf16 inputs"),
        ((torch.bfloat16, torch.bfloat16), torch.float16, None, "must be the same as input dtype or fp32 for fp16/bf16 inputs"),
        ((torch.bfloat16, torch.float16), torch.float32, None, "input dtypes must be the same"),
        ((torch.float16, torch.float16), torch.float32, torch.float16, "the same as the dtype of the provided out tensor"),
    ],
)
def test_formats_that_do_not_go_together(dtypes, out_dtype, out, message):
    left, right = (x.to(dtype) for x, dtype in zip(factors("mm", torch.float32), dtypes, strict=True))
    given = {} if out is None else {"out": torch.empty(5, 4, device="cuda", dtype=out)}
    with pytest.raises(RuntimeError, match=message):
        torch.mm(left, right, out_dtype=out_dtype, **given)


def test_a_summand_of_another_format():
    summand, left, right = factors("baddbmm", torch.float16)
    with pytest.raises(RuntimeError, match="self dtype must match either out_dtype or batch1 dtype"):
        torch.baddbmm(summand.double(), left, right, out_dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("low", "name"), [(low, name) for low, names in RECORDED.items() for name in names])
def test_two_dtypes_give_what_they_gave_on_an_h200(machine, low, name):
    assert outcome(cases(getattr(torch, low))[name]) == RECORDED[low][name]
