"""Checks of lesson 00, start here."""

import random
from typing import Any

from labkit.checks.checking import Check, Plain, Verdict, describe, not_yet, right, wrong_type


def draw(generator: random.Random) -> Plain:
    """Draw the numbers of an exercise, which integers, two decimals or half precision would change.

    The largest number comes first, one number is negative, and one appears twice.
    """
    count = generator.randint(2, 6)
    some = [generator.choice([-1, 1]) * _magnitude(generator) for _ in range(count)]
    return [max(map(abs, some)) + 1, *some, -_magnitude(generator), some[0]]


def _magnitude(generator: random.Random) -> float:
    return generator.randint(4096, 2**16) + 1 / 8


def observe(on_gpu: Any, numbers: Plain) -> Plain:
    on_gpu([0.0] * len(numbers))  # Refuse an answer that returns its first result again.
    return describe(on_gpu(list(numbers)))


def judge(tensor: Plain, numbers: Plain) -> Verdict:
    if tensor["type"] != "Tensor":
        return wrong_type(tensor["type"], "a tensor")
    if not tensor["device"].startswith("cuda"):
        return not_yet(
            f"expected a tensor on a GPU, got one on {tensor['device']}. "
            "Which argument of torch.tensor chooses the device?"
        )
    if tensor["dtype"] != "torch.float32":
        return not_yet(
            f"expected dtype torch.float32, got {tensor['dtype']}. "
            "torch.tensor makes torch.float32 from Python's floats if you name no dtype."
        )
    if tensor["shape"] != [len(numbers)]:
        return not_yet(
            f"expected a tensor of shape {[len(numbers)]} for {len(numbers)} numbers, "
            f"got shape {tensor['shape']}."
        )
    if tensor["values"] != numbers:
        return not_yet(f"expected a tensor with the values {numbers}, got {tensor['values']}.")
    return right()


CHECKS = [Check("00.1", draw, observe, judge, section="When does Python wait?")]
