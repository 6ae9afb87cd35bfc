"""Checks of lesson 00, start here."""

import random
from typing import Any

from labkit.checks.checking import Check, Plain, Verdict, describe, not_yet, right, wrong_type


def draw(generator: random.Random) -> Plain:
    """Floats that neither integers, two decimals nor half precision can hold: one below zero, one above, one twice, in no order."""
    some = [
        generator.choice([-1, 1]) * (generator.randint(4096, 2**16) + 1 / 8)
        for _ in range(generator.randint(2, 6))
    ]
    return [max(map(abs, some)) + 1, *some, -generator.randint(4096, 2**16) - 1 / 8, some[0]]


def observe(on_gpu: Any, numbers: Plain) -> Plain:
    on_gpu([0.0] * len(numbers))  # what comes second is not what came first
    return describe(on_gpu(list(numbers)))


def judge(tensor: Plain, numbers: Plain) -> Verdict:
    if tensor["type"] != "Tensor":
        return wrong_type(tensor["type"], "a tensor")
    if not tensor["device"].startswith("cuda"):
        return not_yet(
            f"your tensor is on {tensor['device']}. Which argument of torch.tensor says where?"
        )
    if tensor["dtype"] != "torch.float32":
        return not_yet(
            f"your tensor holds {tensor['dtype']}; PyTorch makes torch.float32 of Python's floats by itself."
        )
    if tensor["shape"] != [len(numbers)]:
        return not_yet(
            f"for {len(numbers)} numbers, expected a tensor of shape {[len(numbers)]}. Yours has shape {tensor['shape']}."
        )
    if tensor["values"] != numbers:
        return not_yet(f"for {numbers} your tensor holds {tensor['values']}.")
    return right()


CHECKS = [Check("00.1", draw, observe, judge, section="When does Python wait?")]
