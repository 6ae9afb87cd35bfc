"""Variants of exercises for exams: right answers pass, wrong ones fail, no lesson solves them."""

from pathlib import Path

import nbformat
import pytest
import torch

import labkit
from labcourse.controls import control
from labkit import checks
from labkit.checks import checking

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VARIANTS = checks.variants()
RIGHT = {
    "01.101": """
def phrase_mask(starts, ends, size):
    positions = torch.arange(size, device=starts.device)
    return (positions >= starts[:, None]) & (positions < ends[:, None])
""",
    "05.104": """
def last_columns(outputs, count):
    return {name: table[:, -count:].clone() for name, table in outputs.items()}
""",
}
WRONG = [
    (
        "01.101",
        "some values are wrong",
        """
def phrase_mask(starts, ends, size):
    positions = torch.arange(size, device=starts.device)
    return (positions >= starts[:, None]) & (positions <= ends[:, None])
""",
    ),
    (
        "01.101",
        "dtype torch.bool",
        """
def phrase_mask(starts, ends, size):
    positions = torch.arange(size, device=starts.device)
    return ((positions >= starts[:, None]) & (positions < ends[:, None])).float()
""",
    ),
    (
        "01.101",
        "changed the starts",
        """
def phrase_mask(starts, ends, size):
    positions = torch.arange(size, device=starts.device)
    mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    starts.zero_()
    return mask
""",
    ),
    (
        "05.104",
        "a dict of tensors",
        """
def last_columns(outputs, count):
    return [table[:, -count:].clone() for table in outputs.values()]
""",
    ),
    (
        "05.104",
        "expected the last",
        """
def last_columns(outputs, count):
    return {name: table[:, :count].clone() for name, table in outputs.items()}
""",
    ),
    (
        "05.104",
        "expected the last",
        """
def last_columns(outputs, count):
    return {name: table[-count:].clone() for name, table in outputs.items()}
""",
    ),
    (
        "05.104",
        "stay on the GPU",
        """
def last_columns(outputs, count):
    return {name: table[:, -count:].cpu() for name, table in outputs.items()}
""",
    ),
    (
        "05.104",
        "keys",
        """
def last_columns(outputs, count):
    return dict(enumerate(table[:, -count:].clone() for table in outputs.values()))
""",
    ),
]


def verdict(number, source, seed):
    names = {"torch": torch}
    exec(source, names)
    check = checks.find(number)
    [answer] = [value for name, value in names.items() if callable(value) and name != "torch"]
    with labkit.use(gpus=2, virtual=True, quiet=True):
        return checking.run(check, answer, seed)


def numbers():
    return [variant.check.number for variant in VARIANTS.values()]


def test_each_variant_has_a_right_answer_here():
    assert sorted(RIGHT) == sorted(numbers())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", RIGHT)
def test_a_right_answer_passes(number, seed):
    assert verdict(number, RIGHT[number], seed).passed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("number", "said", "source"), WRONG)
def test_a_wrong_answer_is_told_what_is_wrong(number, said, source, seed):
    found = verdict(number, source, seed)
    assert not found.passed and said in found.message


@pytest.mark.parametrize("number", numbers())
def test_the_control_fails_as_it_says(number):
    pattern, source = control(number)
    found = verdict(number, source, 3)
    assert not found.passed and pattern in found.message


@pytest.mark.parametrize("number", numbers())
def test_the_stub_is_not_attempted_and_no_lesson_names_the_function(number):
    [variant] = [each for each in VARIANTS.values() if each.check.number == number]
    assert verdict(number, variant.stub, 3).message == "not attempted"
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(variant.name in cell.source for cell in cells)


def test_a_variant_replaces_an_exercise_of_its_lesson():
    assert VARIANTS["01.1"].check.number == "01.101"
    assert set(VARIANTS) <= set(checks.exercises())
    sections = {check.number: check.section for check in checks.exercises().values()}
    for number, variant in VARIANTS.items():
        assert variant.check.section == sections[number]
