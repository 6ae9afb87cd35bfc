"""Integers where CUDA's results differ from the CPU's, as an H100 gave them."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("machine")
WIDE = 2**32 - 1


@pytest.mark.parametrize(
    ("dtype", "quotients", "remainders"),
    [
        (torch.int64, [WIDE, -2, -1], [WIDE, -1, -1]),
        (torch.int32, [-1, -2, -1], [-1, -1, -1]),
        (torch.uint8, [255, 255, 255], [255, 255, 255]),
    ],
)
def test_division_by_zero(dtype, quotients, remainders):
    values = [1, -7, 2**40] if dtype is torch.int64 else [1, -7, 9] if dtype.is_signed else [1, 7, 9]
    x = torch.tensor(values, dtype=dtype, device="cuda")
    zeros = torch.zeros(3, dtype=dtype, device="cuda")
    for y in (0, zeros):
        assert (x // y).tolist() == quotients
        assert (x % y).tolist() == torch.fmod(x, y).tolist() == remainders
        assert torch.div(x, y, rounding_mode="floor").tolist() == quotients
        assert torch.div(x, y, rounding_mode="trunc").tolist() == remainders
        assert x.clone().floor_divide_(y).tolist() == quotients
        out = torch.empty_like(x)
        assert torch.floor_divide(x, zeros, out=out).tolist() == out.tolist() == quotients


def test_only_the_elements_divided_by_zero_differ():
    x, y = torch.tensor([7, 7, -7], device="cuda"), torch.tensor([2, 0, 2], device="cuda")
    assert (x // y).tolist() == [3, WIDE, -4] and (x % y).tolist() == [1, WIDE, 1]
    assert (torch.tensor([7.0], device="cuda") // 0).item() == float("inf")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x.cpu() // 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_that_no_integer_can_hold(dtype):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0**70, -2.5], dtype=dtype, device="cuda")
    most, least = 2**31 - 1, -(2**31)
    expected = [0, most, least, most, -2]
    into = torch.empty(5, dtype=torch.int32, device="cuda")
    assert x.int().tolist() == into.copy_(x).tolist() == expected
    assert x.long().tolist() == [-(2**63), 2**63 - 1, -(2**63), 2**63 - 1, -2]
