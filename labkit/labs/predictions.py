"""Read a learner's prediction, and compare it with the result."""

import re
from math import isfinite, nan

from gputrace.units import number_text

LARGEST_PREDICTION = 1000.0


def typed_number(text: str) -> float:
    """Return the number that a learner typed, or nan if the text is not a number.

    Raises ValueError for a decimal comma, which Python does not read.
    """
    typed = text.strip()
    if re.fullmatch(r"[-+]?\d*,\d+", typed):
        raise ValueError(f"“{typed}” has a comma: type a point, {typed.replace(',', '.')}.")
    try:
        return float(typed)
    except ValueError:
        return nan


def parse_prediction(
    text: str,
    zero_is_possible: bool = False,
    largest: float = LARGEST_PREDICTION,
) -> float:
    """Return the predicted number, from 0 to `largest`.

    Raises ValueError for other texts. The message says what to type. 0 is a prediction only if
    `zero_is_possible`.
    """
    number = typed_number(text)
    is_allowed = isfinite(number) and 0 <= number <= largest
    if number == 0 and not zero_is_possible:
        is_allowed = False
    if not is_allowed:
        raise ValueError(no_prediction(text, f"a number {_allowed(zero_is_possible, largest)}"))
    return number


def no_prediction(text: str, allowed: str) -> str:
    """Return the message about a text that is not a prediction. `allowed` is what to type."""
    typed = "There is no prediction yet"
    if text.strip():
        typed = f"“{text.strip()}” is not a prediction"
    return f"{typed}: type {allowed}, such as 1.5, and press Predict."


def _allowed(zero_is_possible: bool, largest: float) -> str:
    """Return which numbers are allowed, in words such as "greater than 0 and up to 100"."""
    if zero_is_possible:
        return f"from 0 to {largest:g}" if isfinite(largest) else "that is 0 or more"
    if not isfinite(largest):
        return "greater than 0"
    return f"greater than 0 and up to {largest:g}"


def stays_open(why: str, prediction: float, unit: str = "") -> str:
    """Return the message about a prediction for which nothing was measured, because of `why`."""
    predicted = number_text(prediction, 6)
    return f"{why}, so your prediction of {predicted}{unit} stays open. Press Run to try again."


def compared_as_factor(was: str, prediction: float, measured: float, good: float) -> str:
    """Return a sentence that says by which factor a prediction was too high or too low.

    `was` is the beginning of the sentence. A prediction within the factor `good` is a good one.
    """
    off = prediction / measured
    if 1 / good <= off <= good:
        return f"{was}. A good prediction!"
    if off > 1:
        return f"{was}, which is {off:.1f} times too high."
    return f"{was}, which is {1 / off:.1f} times too low."
