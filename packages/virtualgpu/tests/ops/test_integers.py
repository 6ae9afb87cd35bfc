"""Integers for which CUDA's results differ from the CPU's."""

import warnings

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
    values = [1, 7, 9]
    if dtype is torch.int64:
        values = [1, -7, 2**40]
    elif dtype.is_signed:
        values = [1, -7, 9]
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


NUMBERS = [float("nan"), float("inf"), -float("inf"), 2.0**70, 3e9, -3e9, 2.0**63, 300.7, -2.5]
# CUDA clamps each number to a 32-bit or 64-bit integer and keeps the lowest bits.
CONVERTED = {
    torch.int8: [0, -1, 0, -1, -1, 0, -1, 44, -2],
    torch.uint8: [0, 255, 0, 255, 0, 0, 255, 44, 254],
    torch.int16: [0, -1, 0, -1, -1, 0, -1, 300, -2],
    torch.uint16: [0, 65535, 0, 65535, 24064, 0, 65535, 300, 0],
    torch.int32: [0, 2**31 - 1, -(2**31), 2**31 - 1, 2**31 - 1, -(2**31), 2**31 - 1, 300, -2],
    torch.uint32: [0, WIDE, 0, WIDE, 3 * 10**9, 0, WIDE, 300, 0],
    torch.int64: [
        -(2**63),
        2**63 - 1,
        -(2**63),
        2**63 - 1,
        3 * 10**9,
        -3 * 10**9,
        2**63 - 1,
        300,
        -2,
    ],
    torch.uint64: [2**63, 2**64 - 1, 0, 2**64 - 1, 3 * 10**9, 0, 2**63, 300, 0],
}


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", CONVERTED, ids=str)
def test_numbers_that_an_integer_cannot_hold(dtype, source):
    x = torch.tensor(NUMBERS, dtype=source, device="cuda")
    expected = list(CONVERTED[dtype])
    if source is torch.float64 and dtype in (torch.int32, torch.uint32):
        expected[0] = -(2**31) if dtype.is_signed else 2**31
    into = torch.empty(len(NUMBERS), dtype=dtype, device="cuda")
    assert x.to(dtype).tolist() == into.copy_(x).tolist() == expected
    pinned = torch.tensor(NUMBERS, dtype=source).pin_memory()
    assert into.copy_(pinned, non_blocking=True).tolist() == expected


@pytest.mark.parametrize(
    "source", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]
)
def test_other_types_with_infinity_become_integers_too(source):
    x = torch.tensor([float("inf"), -float("inf"), -2.0], device="cuda").to(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the imaginary part is discarded
        assert x.int().tolist() == [2**31 - 1, -(2**31), -2]


def test_empty_tensors_and_views_are_converted():
    x = torch.full((2, 3), float("inf"), device="cuda")
    assert x[:, :0].int().shape == (2, 0)
    into = torch.zeros(3, 2, dtype=torch.uint16, device="cuda")
    into.t()[:, 1:].copy_(x[:, :1])
    assert into.tolist() == [[0, 0], [65535, 65535], [65535, 65535]]


def test_whole_numbers_with_equal_distances():
    """The numbers are those of a public report (pytorch issue 170168)."""
    falling = torch.linspace(4.3, -3, 50, dtype=torch.int64, device="cuda")
    rising = torch.linspace(0, 7, 50, dtype=torch.int64, device="cuda")
    assert (falling[14].item(), falling[21].item(), rising[28].item()) == (1, 0, 3)
    out = torch.empty(0, dtype=torch.int32, device="cuda")
    assert torch.linspace(0, 10, 5, out=out).tolist() == [0, 2, 5, 7, 10]
    assert torch.linspace(0, 10, 1, dtype=torch.int32, device="cuda").tolist() == [0]
