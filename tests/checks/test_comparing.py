"""Texts that tell an answer's value from the expected one."""

import math

import pytest
import torch

from labkit.checks.comparing import apart, first_difference, near, sizes_alike

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((2 * MIB, 20 * MIB), ["2 MiB", "20 MiB"]),
        ((2 * MIB, 0), ["2 MiB", "0 MiB"]),
        ((10 * MIB, 10 * MIB - 295), ["10,485,760 bytes", "10,485,465 bytes"]),
        ((2 * MIB, -1), ["2,097,152 bytes", "-1 bytes"]),
        ((2 * MIB, math.nan), ["2,097,152 bytes", "nan bytes"]),
    ],
)
def test_two_sizes_have_one_unit_and_all_their_digits(sizes, texts):
    assert sizes_alike(*sizes) == texts


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([torch.ones(2), torch.zeros(3)], ""),
        ([torch.ones(2)], "there are 1 tensors instead of 2"),
        ([torch.ones(2), [0, 0, 0]], "entry 1 is of type list, not a tensor"),
        (
            [torch.ones(2, dtype=torch.int64), torch.zeros(3)],
            "entry 0 has dtype torch.int64 instead of torch.float32",
        ),
        ([torch.ones(2), torch.zeros(1, 3)], "entry 1 has shape [1, 3] instead of [3]"),
        ([torch.zeros(2), torch.zeros(3)], "entry 0 has other values"),
    ],
)
def test_the_first_difference_names_what_differs(found, said):
    assert first_difference(found, [torch.ones(2), torch.zeros(3)]) == said


@pytest.mark.parametrize(
    ("found", "expected", "are_near"),
    [
        (1000.1, 1000.0, True),
        (1000.2, 1000.0, False),
        (0.00009, 0.0, True),
        (0.00011, 0.0, False),
        (2, 2.00001, True),
        (100_001, 100_000, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (math.inf, math.inf, True),
        (None, 0.0, False),
        ("0", 0.0, False),
        ([1.0, [2.0]], [1.0, [2.00001]], True),
        ([1.0], [1.0, 1.0], False),
        (1.0, [1.0], False),
        ({"loss": 1.0}, {"loss": 1.00001}, True),
        ({"loss": 1.0}, {"loss": 1.1}, False),
        ({"loss": 1.0, "step": 1}, {"loss": 1.0}, False),
        (["cuda:0", None], ["cuda:0", None], True),
    ],
)
def test_numbers_are_near_up_to_rounding(found, expected, are_near):
    assert near(found, expected) is are_near


def test_a_tolerance_may_be_smaller():
    assert near(1.00001, 1.0) and not near(1.00001, 1.0, 1e-6, 1e-6)


def test_the_elements_that_differ_are_quoted():
    text = apart([3, 1, 4, 1, 6], [3, 1, 4, 1, 5], "it is")
    assert text == "[6] from element 4 on, where it is [5]"
    text = apart([math.nan, 1, 4, 1], [3, 1, 4, 1], "it is")
    assert text == "[nan, 1, 4] from element 0 on, where it is [3, 1, 4]"
