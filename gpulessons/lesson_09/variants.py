"""Variants of exercises of lesson 9, for exams."""

import numbers
import random
from typing import Any

import torch

from labkit.checks.checking import Check, Plain, Verdict, during, not_yet, number, right, wrong_type
from labkit.checks.variants import Variant

CALLS = 14  # how often the step may run: the largest batch needs 13 calls
BROKEN = "the loss is not a number"  # an error that has nothing to do with memory

PARTS_TASK = """Write `fewest_parts(step, rows)`. `step(parts)` trains one step on a batch of `rows`
rows, cut into `parts` micro-batches. If there are too few parts, it raises
`torch.OutOfMemoryError`. Return the smallest number of parts that fits, or `None` if not even
`rows` parts of one row each fit. Call `step` at most 14 times, with 1 to `rows` parts. There are at
most 4096 rows. Do not catch other errors."""
PARTS_STUB = '''def fewest_parts(step, rows):
    """Return the smallest number of micro-batches for which `step(parts)` fits, or None."""
    ...'''


def draw_batches(generator: random.Random) -> Plain:
    """Draw the rows of each batch, the number of parts that fit, and the call with another error.

    In one case one part fits, in another only single rows fit, and in one nothing fits.
    """
    rows = [generator.randint(1000, 4096) for _ in range(3)]
    needed = [generator.randint(3, 60), generator.randint(500, 900), rows[2] - 1]
    cases: Plain = [[count, parts, 0] for count, parts in zip(rows, needed, strict=True)]
    cases += [[4096, 1, 0], [4096, 4096, 0], [generator.randint(5, 90), None, 0], [1, 1, 0]]
    generator.shuffle(cases)
    return [*cases, [generator.randint(1000, 4096), 40, 1]]


class Step:
    """Training step that fits if it has at least `needed` parts. `asked` lists its arguments."""

    def __init__(self, rows: int, needed: int | None, breaks_at: int) -> None:
        self._rows, self._needed, self._breaks_at = rows, needed, breaks_at
        self.asked: list[int | str] = []

    def __call__(self, parts: Any) -> None:
        whole = isinstance(parts, numbers.Integral) and not isinstance(parts, bool)
        self.asked.append(int(parts) if whole else type(parts).__name__)
        if len(self.asked) > 3 * self._rows + CALLS:  # an endless loop
            raise ValueError(f"step was called {len(self.asked)} times")
        if len(self.asked) == self._breaks_at:
            raise RuntimeError(BROKEN)
        if not whole or not 1 <= parts <= self._rows:
            raise ValueError(f"step({parts!r}): give a whole number from 1 to {self._rows}")
        if self._needed is None or parts < self._needed:
            raise torch.OutOfMemoryError(f"CUDA out of memory, with {parts} parts")


def observe_parts(fewest_parts: Any, cases: Plain) -> Plain:
    """Return the number of parts that the answer finds for each batch, and its calls of the step.

    If the answer raised an error, return the error's text.
    """
    found: Plain = []
    for rows, needed, breaks_at in cases:
        step = Step(rows, needed, breaks_at)
        if breaks_at:
            found.append({"raised": _raised(fewest_parts, step, rows), "asked": step.asked})
            continue
        with during(f"a batch of {rows} rows"):
            said = fewest_parts(step, rows)
        plain: Plain = number(said)
        if plain is None and said is not None:
            plain = type(said).__name__
        found.append({"said": plain, "asked": step.asked})
    return found


def _raised(fewest_parts: Any, step: Step, rows: int) -> str:
    """Return the text of the error that the answer raises, or ""."""
    try:
        fewest_parts(step, rows)
    except Exception as error:
        return str(error)
    return ""


def judge_parts(found: Plain, cases: Plain) -> Verdict:
    """Judge the number of parts that the answer finds, and how often it calls the step."""
    for got, (rows, needed, breaks_at) in zip(found, cases, strict=True):
        if breaks_at:
            if got["raised"] != BROKEN:
                return not_yet(
                    "step raised a RuntimeError that has nothing to do with memory, and your "
                    "function caught it. Which errors should it catch?"
                )
            continue
        if isinstance(got["said"], str):
            return wrong_type(got["said"], "a number of parts")
        if len(got["asked"]) > CALLS:
            return not_yet(
                f"with {rows} rows you called step {len(got['asked'])} times. {CALLS} times are "
                "allowed. How can one call halve what is left to search?"
            )
        if got["said"] != needed:
            fits = f"{needed} parts are the fewest that fit"
            if needed is None:
                fits = "nothing fits, so expected None"
            tried = ", ".join(map(str, got["asked"])) or "nothing"
            return not_yet(
                f"with {rows} rows, {fits}. You returned {got['said']}. You tried {tried}."
            )
    return right("No part more than needed.")


VARIANTS = [
    Variant(
        Check("09.102", draw_batches, observe_parts, judge_parts, section="Fewer rows"),
        PARTS_TASK,
        PARTS_STUB,
    )
]
