"""Variants of exercises of lesson 2, for exams."""

import random
from typing import Any

import torch

from gpulessons.lesson_02.gpu_seconds import cycles_in, without_race_warnings
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    during,
    not_yet,
    one_number,
    plural,
    right,
    wrong_type,
)
from labkit.checks.variants import Variant

CLOSE = 0.04  # error that a share may have, because launches take time, too

SHARE_TASK = """A training step has two parts. Write `share_of_second(first, second)`. It calls
`first()` once and then `second()` once. Both launch kernels on the current stream. It returns a
number from 0 to 1: the share of `second` in the seconds that the GPU needs for both parts. Work
that is in the stream already does not count. (Use events or `labkit.host_time()`. Python's own
clocks do not know the time of virtual GPUs.)"""
SHARE_STUB = '''def share_of_second(first, second):
    """Return the share of `second()` in the GPU's seconds for `first()` and `second()`."""
    ...'''


def draw_parts(generator: random.Random) -> Plain:
    """Draw three pairs of parts, with the milliseconds of each kernel and of earlier work.

    In two cases one part is much longer than the other, by a different factor each time.
    """
    cases = []
    for short, long in ((0.2, 0.3), (0.3, 0.4), (0.15, 0.2)):
        total, share = generator.uniform(12, 30), generator.uniform(short, long)
        kernels = generator.randint(1, 3)
        parts = [[total * share / kernels] * kernels, [total * (1 - share)]]
        generator.shuffle(parts)
        cases.append({"parts": parts, "queued": generator.uniform(15, 40)})
    return cases


def observe_parts(share_of_second: Any, cases: Plain) -> Plain:
    """Return for each case the share that the answer computes, and the parts in order of calls."""
    rate, found = cycles_in(1.0), []
    share_of_second(lambda: torch.cuda._sleep(1), lambda: torch.cuda._sleep(1))
    for case in cases:
        calls: list[int] = []

        def part(index: int, case: Plain = case, calls: list[int] = calls) -> None:
            calls.append(index)
            for milliseconds in case["parts"][index]:
                torch.cuda._sleep(round(rate * milliseconds / 1e3))

        stream = torch.cuda.Stream()
        with without_race_warnings(stream), during(_given(case)):
            torch.cuda._sleep(round(rate * case["queued"] / 1e3))
            said = share_of_second(lambda part=part: part(0), lambda part=part: part(1))
        share = one_number(said)
        found.append([type(said).__name__ if share is None else share, calls])
    return found


def _given(case: Plain) -> str:
    """Return the lengths of both parts of a case in words, for a message."""
    first, second = map(sum, case["parts"])
    return f"parts of {first:.1f} ms and {second:.1f} ms"


def judge_parts(found: Plain, cases: Plain) -> Verdict:
    """Judge the shares, and the calls of both parts."""
    for (said, calls), case in zip(found, cases, strict=True):
        if isinstance(said, str):
            return wrong_type(said, "a number from 0 to 1")
        if calls != [0, 1]:
            times = [plural(calls.count(index), "time") for index in (0, 1)]
            return not_yet(
                f"first was called {times[0]} and second {times[1]}. Call each once, first before "
                "second."
            )
        first, second = map(sum, case["parts"])
        share = second / (first + second)
        if not abs(said - share) <= CLOSE:
            return not_yet(
                f"with {_given(case)}, second takes {share:.0%} of the GPU's time. "
                f"You returned {said:.4g}. {_share_hint(said, share, case)}"
            )
    return right("Three moments on the GPU's own clock are enough.")


def _share_hint(said: float, share: float, case: Plain) -> str:
    """Return a hint that explains why the share `said` differs from the right `share`."""
    first, second = map(sum, case["parts"])
    mistakes = {
        "Is this the share of first?": 1 - share,
        "Divide by the time of both parts.": second / first,
        "Did you count work that was in the stream before?": second
        / (first + second + case["queued"]),
    }
    hints = [hint for hint, value in mistakes.items() if abs(said - value) <= CLOSE]
    if len(hints) == 1:
        return hints[0]
    return (
        "Which clock includes the GPU's time, did you wait until the GPU had finished, and which "
        "work do you count?"
    )


VARIANTS = [
    Variant(
        Check("02.101", draw_parts, observe_parts, judge_parts, section="What a clock measures"),
        SHARE_TASK,
        SHARE_STUB,
    )
]
