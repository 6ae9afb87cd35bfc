"""Honest habits: none costs a point or raises a remark. They are in habits.txt."""

import pytest

from .cells import cells
from .handed_in import solution

pytestmark = pytest.mark.slow

HABITS = cells("habits.txt")


@pytest.mark.parametrize("name", HABITS)
def test_an_honest_habit_costs_nothing(name, tried):
    examined = tried("00.1", HABITS[name], "def on_gpu(numbers): ANSWER")
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])


def test_what_follows_a_magic_in_its_cell_runs(tried):
    cell = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nwhere = 'cuda'"
    examined = tried("00.1", cell, "def on_gpu(numbers): return torch.tensor(numbers, device=where)")
    assert (examined.status, examined.points, examined.remarks, examined.cell_errors) == ("graded", 1, [], [])
    assert len(examined.figures) == 1


@pytest.mark.parametrize("number", ["01.3", "06.1", "07.5", "09.3"])
def test_settings_change_no_verdict(number, tried):
    honest = "torch.set_default_device('cuda')\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)"
    examined = tried(number, honest, solution(number))
    assert (examined.status, examined.points, examined.remarks) == ("graded", 1, [])
