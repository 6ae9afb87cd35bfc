"""A learner's prediction: how it is read, and what is said of it when the result is there."""

import re
from math import isfinite, nan

from gputrace.units import number_text

LARGEST_PREDICTION = 1000.0


def typed_number(text: str) -> float:
    """The number that a learner typed; nan for what is none. Raises ValueError for a decimal comma, which Python does not know."""
    if re.fullmatch(r"[-+]?\d*,\d+", text.strip()):
        raise ValueError(f"“{text.strip()}” has a comma: type a point, {text.strip().replace(',', '.')}.")
    try:
        return float(text.strip())
    except ValueError:
        return nan


def parse_prediction(
    text: str,
    zero_is_possible: bool = False,
    largest: float = LARGEST_PREDICTION,
) -> float:
    """The number that a learner typed. Raises ValueError saying what is allowed."""
    number = typed_number(text)
    if not isfinite(number) or not 0 <= number <= largest or (number == 0 and not zero_is_possible):
        raise ValueError(no_prediction(text, f"a number {_allowed(zero_is_possible, largest)}"))
    return number


def no_prediction(text: str, allowed: str) -> str:
    """Return what to say of a text that is not a prediction. `allowed` is what to type instead."""
    typed = "There is no prediction yet"
    if text.strip():
        typed = f"“{text.strip()}” is not a prediction"
    return f"{typed}: type {allowed}, such as 1.5, and press Predict."


def _allowed(zero_is_possible: bool, largest: float) -> str:
    if not isfinite(largest):
        return "that is 0 or more" if zero_is_possible else "greater than 0"
    if zero_is_possible:
        return f"from 0 to {largest:g}"
    return f"greater than 0 and up to {largest:g}"


def stays_open(why: str, prediction: float, unit: str = "") -> str:
    """Return what a lab says of a prediction that nothing was measured for."""
    predicted = number_text(prediction, 6)
    return f"{why}, so your prediction of {predicted}{unit} stays open. Press Run to try again."


def compared_as_factor(was: str, prediction: float, measured: float, good: float) -> str:
    """A sentence that ends in how many times too high or low the prediction was; within the factor `good` it is a good one."""
    off = prediction / measured
    if 1 / good <= off <= good:
        return f"{was}. A good prediction!"
    return f"{was}, which is {off:.1f} times too high." if off > 1 else f"{was}, which is {1 / off:.1f} times too low."
