"""Comparisons of an answer's values with the expected ones, and texts about the differences."""

from collections.abc import Sequence
from typing import Any

import torch

MIB = 1 << 20


def sizes_alike(*sizes: float) -> list[str]:
    """Return sizes in bytes as texts that a reader can compare.

    `sizes_alike(1 << 20, 3 << 20)` returns `["1 MiB", "3 MiB"]`. All texts have the same unit and
    every digit, so different sizes never look equal. The unit is MiB if each size is a whole number
    of MiB, and bytes otherwise.
    """
    if all(size >= 0 and size % MIB == 0 for size in sizes):
        return [f"{size / MIB:,.0f} MiB" for size in sizes]
    return [f"{size:,} bytes" for size in sizes]


def near(found: Any, expected: Any, relative: float = 1e-4, absolute: float = 1e-4) -> bool:
    """Return whether two values are equal, apart from the rounding of numbers.

    A number may differ by `absolute` plus `relative` times the expected number. Lists and dicts are
    compared entry by entry. Whole numbers must be equal, and so must values that are not numbers.
    """
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return False
        return all(near(*pair, relative, absolute) for pair in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return False
        return all(near(found[key], expected[key], relative, absolute) for key in expected)
    if found == expected:
        return True
    numbers = isinstance(found, int | float) and isinstance(expected, int | float)
    if not numbers or (isinstance(found, int) and isinstance(expected, int)):
        return False
    return abs(found - expected) <= absolute + relative * abs(expected)


def apart(found: list[float], expected: list[float], whose: str) -> str:
    """Return a text about the first element of `found` that is not `near` the expected one.

    The text has at most three elements from there on, and the expected ones after `whose`. For
    example, `apart([1.0, 5.0], [1.0, 2.0], "PyTorch has")` returns "[5] from element 1 on, where
    PyTorch has [2]".

    Raises StopIteration if all elements are near.
    """
    places = range(len(expected))
    first = next(i for i in places if not near(found[i : i + 1], expected[i : i + 1]))
    here = slice(first, first + 3)
    return f"{shown(found[here])} from element {first} on, where {whose} {shown(expected[here])}"


def shown(values: list[float] | None) -> str:
    """Return a list of numbers as text, or "none" for None."""
    if values is None:
        return "none"
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def first_difference(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> str:
    """Return a text about the first of the found tensors that differs from the expected one.

    The text is "" if all are equal. Tensors may be on different devices.
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
