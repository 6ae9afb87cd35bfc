"""Each solution passes in a new kernel. What a library takes at its first call is not counted."""

import pytest

import labkit
from labkit import checks
from labkit.checks import limits

from .test_exercises import EXERCISES, IN_CHILDREN, answer

MARKS = {number: pytest.mark.slow for number in IN_CHILDREN}
EACH_EXERCISE = [pytest.param(number, marks=MARKS.get(number, ())) for number in EXERCISES]


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", EACH_EXERCISE)
def test_a_solution_passes_first_of_all(number, monkeypatch):
    monkeypatch.setattr(limits, "LIMIT", 240.0)  # a busy machine is no failure
    with labkit.use(gpus=max(2, checks.find(number).gpus), virtual=True, quiet=True):
        verdict = labkit.check(number, answer(number, EXERCISES[number][1]))
    assert verdict.passed, verdict
