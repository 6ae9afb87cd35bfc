"""Judge what an answer did.

A student's code can make an observation of anything, and a judge may take for ever on it. So the
grader calls `verdict` in a `labcourse.limited_process.LimitedProcess`.
"""

from typing import Any

from labkit import checks
from labkit.checks import checking
from labkit.checks.checking import Verdict

CHECKS = checks.exercises()  # imported here, before the time of a call begins


def verdict(number: str, observation: dict[str, Any], inputs: Any) -> Verdict:
    """Judge one observation of an answer to the exercise `number`."""
    return checking.judge(CHECKS[number], observation, inputs)
