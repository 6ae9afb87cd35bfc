"""Texts that tell an answer's value from the expected one."""

import math

import pytest
import torch

from labkit.checks.comparing import first_difference, sizes_alike

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
        ([torch.ones(2, dtype=torch.int64), torch.zeros(3)], "entry 0 has dtype torch.int64 instead of torch.float32"),
        ([torch.ones(2), torch.zeros(1, 3)], "entry 1 has shape [1, 3] instead of [3]"),
        ([torch.zeros(2), torch.zeros(3)], "entry 0 has other values"),
    ],
)
def test_the_first_difference_names_what_differs(found, said):
    assert first_difference(found, [torch.ones(2), torch.zeros(3)]) == said
