"""Texts that tell an answer's value from the expected one."""

from collections.abc import Sequence
from typing import Any

import torch

MIB = 1 << 20


def sizes_alike(*sizes: float) -> list[str]:
    """Format sizes for a comparison.

    All have one unit and every digit, so that different sizes never look equal.

    The unit is MiB if each size is a whole number of MiB, otherwise bytes.
    """
    if all(size >= 0 and size % MIB == 0 for size in sizes):
        return [f"{size / MIB:,.0f} MiB" for size in sizes]
    return [f"{size:,} bytes" for size in sizes]


def first_difference(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> str:
    """Describe the first difference between `found` and the expected tensors. Empty if none.

    The device does not count.
    """
    if len(found) != len(expected):
        return f"there are {len(found)} tensors instead of {len(expected)}"
    for index, (part, wanted) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(part, torch.Tensor):
            return f"entry {index} is of type {type(part).__name__}, not a tensor"
        if part.dtype != wanted.dtype:
            return f"entry {index} has dtype {part.dtype} instead of {wanted.dtype}"
        if part.shape != wanted.shape:
            return f"entry {index} has shape {list(part.shape)} instead of {list(wanted.shape)}"
        if not torch.equal(part.cpu(), wanted):
            return f"entry {index} has other values"
    return ""
