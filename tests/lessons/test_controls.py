"""Every exercise has a control: an answer that is wrong, and that its check calls wrong for the reason that is written beside it."""

import random
import re

import pytest
import torch

import labkit
from labkit import lessons
from labkit.lessons import checks
from labkit.lessons.controls import CONTROLS

TRIES = 3


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


def test_every_exercise_has_a_control():
    assert list(CONTROLS) == list(lessons.exercises())


@pytest.mark.parametrize("number", CONTROLS)
def test_a_control_looks_wrong_in_its_own_way(number):
    pattern, source = CONTROLS[number]
    names = {"torch": torch, "nn": torch.nn, "labkit": labkit}
    known = {*names, "__builtins__"}
    exec(source, names)
    control = next(value for name, value in names.items() if name not in known)
    for seed in range(TRIES):
        check = lessons.find(number)
        inputs = check.draw(random.Random(seed))
        verdict = checks.judge(check, checks.observe(check, control, inputs), inputs)
        assert not verdict.passed
        assert re.search(pattern, verdict.message), verdict
