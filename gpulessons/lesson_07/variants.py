"""Variants of exercises of lesson 7, for exams."""

import math
import random
from typing import Any

import torch

from gpulessons.lesson_07.checks import DEVICE
from labkit.checks.checking import Check, Plain, Verdict, during, not_yet, number, right, wrong_type
from labkit.checks.variants import Variant

ROUNDED_TO_ZERO = 2.0**-25  # numbers up to this size become 0 in float16

SCALE_TASK = """Write `least_scale(gradients)`. It takes a list of float32 tensors, of which at
least one number is not 0. It returns the smallest power of two by which all of them can be
multiplied so that no number except 0 becomes 0 in float16. Numbers of up to 2 to the power −25 are
rounded to 0 there. Infinite numbers do not matter here. Do not change the gradients."""
SCALE_STUB = '''def least_scale(gradients):
    """Return the smallest power of two, a float, that makes no gradient 0 in float16."""
    ...'''


def draw_gradients(generator: random.Random) -> Plain:
    """Draw lists of tensors with one and with two dimensions, and with zeros.

    The smallest number has either sign and is in any tensor. In one case it is just small enough to
    become 0, and in another just large enough not to.
    """
    cases: list[Any] = []
    places = generator.sample(range(3), k=3)
    for place, exponent, sign in zip(places, (-45, -30, 6), (1, -1, 1), strict=True):
        least = sign * 2.0 ** (exponent + generator.randint(0, 9)) * generator.uniform(1.1, 1.9)
        tensors = [[abs(least) * generator.uniform(3, 90) for _ in range(3)] for _ in range(3)]
        tensors[place][generator.randrange(3)] = least
        tensors[(place + 1) % 3][0] *= -1
        cases.append([tensors[0], [tensors[1], [0.0, 0.0, 0.0]], tensors[2]])
    power = 2.0 ** generator.randint(-40, -20)
    cases.append([[power, -8 * power], [[0.0, 4 * power]]])
    cases.append([[power * (1 + 2.0**-10), 8 * power], [0.0]])
    generator.shuffle(cases)
    return cases


def observe_gradients(least_scale: Any, cases: Plain) -> Plain:
    """Return the scale that the answer finds for each case.

    Also return whether the gradients kept their values.
    """
    found = []
    for case in cases:
        gradients = [torch.tensor(values, device=DEVICE) for values in case]
        before = [gradient.clone() for gradient in gradients]
        with during(f"{len(case)} tensors"):
            said = least_scale(list(gradients))
        scale = number(said)
        plain: float | str = type(said).__name__
        if scale is not None:
            plain = float(scale)
        found.append([plain, all(map(torch.equal, gradients, before))])
    return found


def judge_gradients(found: Plain, cases: Plain) -> Verdict:
    """Judge each scale, which must be the smallest power of two that keeps all numbers."""
    for (scale, same), case in zip(found, cases, strict=True):
        if isinstance(scale, str):
            return wrong_type(scale, "a number")
        if not same:
            return not_yet("the gradients have other values than before.")
        if not (math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
            return not_yet(f"{scale:.9g} is not a power of two.")
        least = min(abs(value) for value in _flat(case) if value)
        known = f"the smallest gradient except 0 has the size {least:.9g}"
        if least * scale <= ROUNDED_TO_ZERO:
            return not_yet(
                f"{known}. Times {scale:g}, this is {least * scale:.4g}, which becomes 0 "
                "in float16. Look at all tensors and both signs."
            )
        if least * scale / 2 > ROUNDED_TO_ZERO:
            return not_yet(
                f"{known}. {scale:g} is not the smallest scale. Times {scale / 2:g}, this is "
                f"{least * scale / 2:.4g}, which does not become 0 in float16."
            )
    return right("No gradient is lost.")


def _flat(values: Plain) -> list[float]:
    """Return the numbers in nested lists as one flat list."""
    if not isinstance(values, list):
        return [values]
    return [value for row in values for value in _flat(row)]


VARIANTS = [
    Variant(
        Check(
            "07.104", draw_gradients, observe_gradients, judge_gradients, section="Small gradients"
        ),
        SCALE_TASK,
        SCALE_STUB,
    )
]
