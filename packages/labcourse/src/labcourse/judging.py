"""Judge what an answer did.

An observation comes from a student's code, so it may be anything, and judging it may never end. So
the grader calls `verdict` in a `labcourse.limited_process.LimitedProcess`.
"""

from typing import Any

from labkit import checks
from labkit.checks import checking
from labkit.checks.checking import Verdict

CHECKS = checks.with_variants()  # imported now, because the time of a call is limited


def verdict(number: str, observation: dict[str, Any], inputs: Any) -> Verdict:
    """Judge one observation of an answer to the exercise `number`.

    `inputs` are those of the try in which the answer was observed.
    """
    return checking.judge(CHECKS[number], observation, inputs)
