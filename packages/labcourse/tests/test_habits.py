"""Honest habits: none costs a point or raises a remark. They are in habits.txt."""

import pytest

from labcourse import examination

from .cells import cells
from .handed_in import solution

pytestmark = pytest.mark.slow

HABITS = cells("habits.txt")


@pytest.mark.parametrize("name", HABITS)
def test_an_honest_habit_costs_nothing(name, tried):
    examined = tried("00.1", HABITS[name], "def on_gpu(numbers): ANSWER")
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


def test_what_follows_a_magic_in_its_cell_runs(tried):
    cell = (
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
        "where = 'cuda'"
    )
    examined = tried(
        "00.1", cell, "def on_gpu(numbers): return torch.tensor(numbers, device=where)"
    )
    assert (examined.status, examined.points, examined.remarks, examined.cell_errors) == (
        "graded",
        1,
        [],
        [],
    )
    assert len(examined.figures) == 1


@pytest.mark.parametrize("number", ["01.3", "06.1", "07.5", "09.3"])
def test_settings_change_no_verdict(number, tried):
    honest = (
        "torch.set_default_device('cuda')\ntorch.set_grad_enabled(False)\n"
        "torch.set_default_dtype(torch.float64)"
    )
    examined = tried(number, honest, solution(number))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


@pytest.mark.parametrize(
    "cells",
    [
        (
            "def on_gpu(numbers):\n    import unheard_of.part\n"
            "    return torch.tensor(numbers, device='cuda')",
        ),
        ("import unheard_of as kit", "def on_gpu(numbers): return kit.tensor(numbers)"),
    ],
)
def test_a_module_that_the_grader_lacks_is_not_the_students_fault(cells, tried):
    examined = tried("00.1", *cells)
    assert (examined.status, examined.points) == ("missing", None)
    assert f"{examination.KINDS['missing']}: 00.1 imports unheard_of" in examined.remarks
    assert examined.exercises[0]["status"] == "missing"


@pytest.mark.parametrize("call", ["exit()", "quit()"])
def test_a_call_that_would_end_a_kernel_is_explained(call, tried):
    examined = tried("00.1", call, f"def on_gpu(numbers): {call}")
    said = "exit() and quit() end the kernel. Leave them out."
    assert (examined.status, examined.points) == ("errors", 0)
    assert examined.cell_errors[0][1:] == ["SystemExit", f"SystemExit: {said}"]
    assert f"raised SystemExit: {said}" in examined.exercises[0]["message"]


@pytest.mark.parametrize("said", ["json", "torch", "labkit"])
def test_an_answer_that_names_a_module_that_is_there_is_wrong(said, tried):
    examined = tried(
        "00.1", f"def on_gpu(numbers): raise ModuleNotFoundError(\"No module named '{said}'\")"
    )
    assert (examined.status, examined.points, examined.exercises[0]["status"]) == (
        "graded",
        0,
        "wrong",
    )
