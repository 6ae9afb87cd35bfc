"""Variants of exercises of lesson 4, for exams."""

import random
from typing import Any

from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    during,
    not_yet,
    one_number,
    right,
    wrong_type,
)
from labkit.checks.variants import Variant

COPIES_TASK = """In this pipeline, the copies take time, too. Write
`seconds_with_copies(stage_seconds, copy_seconds, micro_batches)`. Stage `i` needs
`stage_seconds[i]` seconds for each micro-batch. The copy from stage `i` to stage `i + 1` takes
`copy_seconds[i]` seconds for each micro-batch. Between two stages there is one copy at a time. A
copy runs beside the work of all stages and beside the copies between other stages. Return the
seconds of the forward pass of all micro-batches, until the last stage has finished."""
COPIES_STUB = '''def seconds_with_copies(stage_seconds, copy_seconds, micro_batches):
    """Return the seconds from the start of the first stage to the end of the last one."""
    ...'''


def draw_pipelines(generator: random.Random) -> Plain:
    """Draw pipelines whose slowest part is a stage or a copy, short ones, and a single stage."""
    cases = []
    for slow_copy in (True, True, False, False):
        stages = [generator.randint(4, 20) / 4 for _ in range(generator.randint(2, 5))]
        most = 40 if slow_copy else 8
        copies = [generator.randint(1, 8) / 4 for _ in stages[1:]]
        copies[generator.randrange(len(copies))] = most / 4
        cases.append([stages, copies, generator.randint(2, 12)])
    cases.append([[generator.randint(1, 9)], [], generator.randint(2, 9)])
    cases.append([[3.0, 1.5, 2.0], [4.25, 0.5], 1])
    generator.shuffle(cases)
    return cases


def observe_seconds(seconds_with_copies: Any, cases: Plain) -> Plain:
    """Return the answer's number for each pipeline."""
    found = []
    for stages, copies, count in cases:
        with during(_given(stages, copies, count)):
            said = seconds_with_copies(list(map(float, stages)), list(map(float, copies)), count)
        seconds = one_number(said)
        found.append(type(said).__name__ if seconds is None else seconds)
    return found


def _given(stages: Plain, copies: Plain, count: int) -> str:
    """Return the arguments of a call in words, for a message.

    `stages` and `copies` are times, and `count` is the number of micro-batches.
    """
    return f"stage_seconds={stages}, copy_seconds={copies} and micro_batches={count}"


def judge_seconds(found: Plain, cases: Plain) -> Verdict:
    """Judge the seconds. They are right if copies count as stages, too."""
    for said, (stages, copies, count) in zip(found, cases, strict=True):
        if isinstance(said, str):
            return wrong_type(said, "a number")
        parts = [*stages, *copies]
        seconds = sum(parts) + (count - 1) * max(parts)
        if not abs(said - seconds) <= 1e-6 * seconds:  # so that nan fails
            return not_yet(
                f"with {_given(stages, copies, count)}, the forward pass takes {seconds:g} s. "
                f"You say {said:g} s. Draw it."
            )
    return right("A slow link holds up a pipeline as a slow stage does.")


VARIANTS = [
    Variant(
        Check(
            "04.102",
            draw_pipelines,
            observe_seconds,
            judge_seconds,
            section="Micro-batches on paper",
        ),
        COPIES_TASK,
        COPIES_STUB,
    )
]
