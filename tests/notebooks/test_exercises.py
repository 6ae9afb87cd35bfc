"""Every solution passes its check, wrong answers fail, and a stub counts as not attempted."""

import gc
import json
import math
import os
import random
import re
from collections.abc import Iterator
from itertools import groupby
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import numpy
import pytest
import torch

import labkit
from labcourse.controls import control, wrong_answers
from labcourse.session import answer_in
from labkit import checks
from labkit.checks import checking, limits

# On real GPUs, of a model and its copy on another: PyTorch says it once in a process.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The AccumulateGrad node's stream does not match:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:Using -1 to represent CPU tensor is deprecated:FutureWarning"
    ),
]
FOLDER = Path(__file__).parents[2] / "notebooks"
# How often each answer is tried. Inputs are drawn again for each try, so 60 tries show a fault in
# one draw of fifty.
TRIES = int(os.environ.get("LABKIT_TRIES", 1))

# The files *answers.txt of each lesson have answers that a learner may give, in the form of the
# controls. Each answer has a pattern of what the check says to it. The pattern of a right answer is
# "Right.".
ANSWERS = Path(__file__).parents[1] / "lessons"
Answers = dict[str, dict[str, tuple[str, str]]]  # by exercise and name: source and hint


def given() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    for file in sorted(ANSWERS.glob("lesson_*/*answers.txt")):
        for number, answers in groupby(
            wrong_answers(file.read_text()), key=lambda answer: answer[0]
        ):
            yield number, {name: (source, hint) for _, name, hint, source in answers}


def chosen(right: bool) -> Answers:
    found: Answers = {number: {} for number in EXERCISES}
    for number, answers in given():
        found[number] |= {
            name: told for name, told in answers.items() if told[1].startswith("Right.") == right
        }
    return found


def exercise_cells() -> dict[str, tuple[str, str]]:
    """Return the source of the stub and of the solution of each exercise, by number."""
    found = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for index, cell in enumerate(cells):
            if "exercise" in cell.metadata.get("tags", []):
                number = re.search(r'labkit\.check\("([\d.]+)"', cells[index + 1].source)[1]
                found[number] = (
                    cell.source,
                    re.search(r"```python\n(.*?)```", cells[index + 2].source, re.DOTALL)[1],
                )
    return found


EXERCISES = exercise_cells()
# The observation of these exercises starts processes, of which some wait in vain.
IN_CHILDREN = {number for number in EXERCISES if checks.find(number).children}
# One try of each answer is enough for these exercises, because they train or start processes.
ONE_TRY = {"09.3", *IN_CHILDREN}
WRONG = chosen(right=False)
RIGHT = chosen(right=True)


def answer(number: str, source: str) -> Any:
    """Return what `source` defines under the exercise's name, as a notebook would define it."""
    names: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "dist": torch.distributed,
        "os": os,
        "labkit": labkit,
    }
    exec(source, names)
    return names[re.match(r"def (\w+)", EXERCISES[number][0])[1]]


@pytest.fixture(scope="module", autouse=True)
def gpus():
    """Two GPUs. They are real if the computer has two, as for a learner."""
    with labkit.use(gpus=2, quiet=True):
        yield


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Give checks more time, so that a busy machine causes no failure."""
    monkeypatch.setattr(limits, "LIMIT", 240.0)


@pytest.fixture(autouse=True)
def undisturbed(gpus):
    """Fail a test after which the current device or the memory of the GPUs is not as before.

    A check must restore them, whatever the answer does.
    """
    torch.zeros(1, device="cuda:1")
    torch.cuda.set_device(1)
    allocated, reserved = memory()
    yield
    assert torch.cuda.current_device() == 1
    if memory()[0] != allocated:
        gc.collect()  # an answer's function and the names that it was defined among keep each other
        torch.cuda.empty_cache()  # what the answer itself kept until now is still reserved
    if labkit.current().virtual:
        assert memory()[0] == allocated
    allocated_now, reserved_now = memory()
    before = allocated + reserved
    assert all(now <= held for now, held in zip(allocated_now + reserved_now, before, strict=True))


def memory() -> tuple[list[int], list[int]]:
    """Return the bytes allocated and reserved on each GPU."""
    return [torch.cuda.memory_allocated(index) for index in range(2)], [
        torch.cuda.memory_reserved(index) for index in range(2)
    ]


def random_state() -> list[Any]:
    """Return the state of every random generator that a notebook shares with the checks."""
    numpy_state = numpy.random.get_state(legacy=False)["state"]
    on_gpus = [torch.cuda.get_rng_state(index).tolist() for index in range(2)]
    return [
        random.getstate(),
        numpy_state["key"].tolist(),
        numpy_state["pos"],
        torch.get_rng_state().tolist(),
        *on_gpus,
    ]


def test_notebooks_and_checks_have_the_same_exercises():
    assert list(EXERCISES) == list(checks.exercises())
    assert list(WRONG) == list(EXERCISES)
    assert all(len(answers) >= 4 for answers in WRONG.values())  # three, and the control


@pytest.mark.parametrize("number", EXERCISES)
def test_a_check_names_a_section_of_its_lesson(number):
    """A learner whose answer is refused is sent to this section."""
    [path] = FOLDER.glob(f"{number.partition('.')[0]}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    lines = [
        line for cell in cells if cell.cell_type == "markdown" for line in cell.source.splitlines()
    ]
    assert f"## {checks.find(number).section}" in lines


@pytest.mark.parametrize("number", EXERCISES)
def test_the_stub_is_not_attempted(number):
    verdict = labkit.check(number, answer(number, EXERCISES[number][0]))
    assert (verdict.passed, repr(verdict), verdict.points) == (False, f"{number} not attempted", 0)


def marks(number: str) -> Any:
    """Return the pytest marks of a test of this exercise."""
    return pytest.mark.slow if number in IN_CHILDREN else ()


EACH_EXERCISE = [pytest.param(number, marks=marks(number)) for number in EXERCISES]


@pytest.mark.parametrize("number", EACH_EXERCISE)
def test_the_solution_passes_and_its_check_leaves_the_random_state(number, monkeypatch):
    """A seeded experiment must give the same numbers after a check as without it."""
    forked, fork = [], forkserver.connect_to_new_process
    monkeypatch.setattr(
        forkserver, "connect_to_new_process", lambda fds: forked.append(number) or fork(fds)
    )
    before = random_state()
    for _ in range(TRIES):
        verdict = labkit.check(number, answer(number, EXERCISES[number][1]))
        assert verdict.passed and verdict.points == 1, verdict
        assert repr(verdict).startswith(f"{number} Right.")
    assert random_state() == before
    assert number in IN_CHILDREN or not forked  # or the server would start in the answer's time


def with_nan(observed: Any) -> Any:
    """Return the observation with nan for every number that is not a count."""
    if isinstance(observed, dict):
        return {key: with_nan(value) for key, value in observed.items()}
    if isinstance(observed, list):
        return [with_nan(value) for value in observed]
    return math.nan if isinstance(observed, float) else observed


@pytest.mark.sample(15)
@pytest.mark.parametrize("number", EACH_EXERCISE)
def test_observations_are_plain_data_that_can_be_judged_elsewhere(number):
    check = checks.find(number)
    inputs = check.draw(random.Random(1))
    observation = checking.observe(check, answer(number, EXERCISES[number][1]), inputs)
    carried = json.loads(json.dumps(observation))
    assert json.dumps(carried) == json.dumps(observation)  # as text, for a number may be nan
    assert checking.judge(check, carried, inputs).passed
    without_numbers = with_nan(observation)
    if json.dumps(without_numbers) != json.dumps(observation):
        assert not checking.judge(check, without_numbers, inputs).passed


@pytest.fixture(autouse=True)
def own_environment():
    """Undo the answer's changes to the environment, which in a lesson is the learner's own."""
    with patch.dict(os.environ):
        yield


def each(answers: Answers) -> pytest.MarkDecorator:
    cases = [(number, name) for number, named in answers.items() for name in named]
    return pytest.mark.parametrize(
        ("number", "name"), [pytest.param(*case, marks=marks(case[0])) for case in cases]
    )


@pytest.mark.sample(40)
@each(RIGHT)
def test_an_unusual_right_answer_passes(number, name):
    for _ in range(1 if number in ONE_TRY else TRIES):
        verdict = labkit.check(number, answer(number, RIGHT[number][name][0]))
        assert verdict.passed, verdict


@pytest.mark.sample(60)
@each(WRONG)
def test_a_wrong_answer_fails_and_is_told_why(number, name):
    source, hint = WRONG[number][name]
    for _ in range(1 if number in ONE_TRY else TRIES):
        verdict = labkit.check(number, answer(number, source))
        assert not verdict.passed and verdict.points == 0, verdict
        assert repr(verdict).startswith(f"{number} Not yet: ")
        assert re.search(hint, verdict.message), verdict


@pytest.mark.parametrize("number", EACH_EXERCISE)
def test_the_control_of_an_exercise_fails_and_is_told_why(number):
    """Try the wrong answer of grading. If its message differed, grading would judge no answer."""
    hint, source = control(number)
    verdict = labkit.check(number, answer_in(source))
    assert not verdict.passed and re.search(hint, verdict.message), verdict


def test_an_exercise_without_a_control_is_not_graded():
    with pytest.raises(ValueError, match="exercise 99.1 has no control"):
        control("99.1")
