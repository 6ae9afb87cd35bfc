"""Every exercise has a control: an answer that is wrong, and that its check calls wrong for the reason that is written beside it."""

import random
import re

import pytest

import labkit
from labkit import lessons
from labkit.course.session import answer_in
from labkit.lessons import checks
from labkit.lessons.controls import control

TRIES = 3


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def test_an_exercise_without_a_control_is_not_graded():
    with pytest.raises(ValueError, match="exercise 99.1 has no control"):
        control("99.1")


@pytest.mark.parametrize("number", lessons.exercises())
def test_a_control_looks_wrong_in_its_own_way(number):
    pattern, source = control(number)
    wrong = answer_in(source)
    for seed in range(TRIES):
        check = lessons.find(number)
        inputs = check.draw(random.Random(seed))
        verdict = checks.judge(check, checks.observe(check, wrong, inputs), inputs)
        assert not verdict.passed
        assert re.search(pattern, verdict.message), verdict
