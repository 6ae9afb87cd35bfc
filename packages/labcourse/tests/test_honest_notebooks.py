"""Notebooks that work on a student's computer lose no point where they are graded.

The grader's computer lacks modules, magics, files, a network and a keyboard. It runs the cells in
order, and tries the answers after the last one.
"""

import dataclasses
import json

import pytest

from labcourse import collect, examination

from .handed_in import SETUP, solution

pytestmark = pytest.mark.slow

RIGHT = "def on_gpu(numbers):\n    return torch.tensor(numbers, device='cuda')"
STUB = 'def on_gpu(numbers):\n    """Return a tensor."""\n    ...'
CHECK = 'labkit.check("00.1", on_gpu)'
# Lines above the imports in one cell. Each fails where it is graded.
LINES = r"""
from google.colab import drive
drive.mount('/content/drive')
import pandas, unheard_of as kit
from helpers import *
%load_ext nb_black
%tensorflow_version 2.x
%matplotlib widget
%matplotlib qt
%run helpers.py
%cd /content/drive
import matplotlib, os, json, urllib.request, getpass
matplotlib.use('TkAgg')
os.chdir(r'C:\Users\Ada')
config = json.load(open('config.json'))
urllib.request.urlretrieve('https://example.com/x.png', 'x.png')
name = input('Your name? ')
count = int(input('How many? '))
token = getpass.getpass()
print('Hello', name)
assert 'T4' in str(config)
"""
# The code cells of notebooks. The cell at index 1 has the exercise's tag.
NOTEBOOKS = {
    "lines that fail here": [LINES + SETUP, RIGHT, CHECK],
    "an unknown magic on the answer": [SETUP, "%%memit -r 1\n" + RIGHT, CHECK],
    "another name": [SETUP, RIGHT.replace("on_gpu", "mine"), 'labkit.check("00.1", mine)'],
    "a second version": [
        SETUP,
        "def on_gpu(numbers): return torch.tensor(numbers)",
        RIGHT.replace("on_gpu", "on_gpu_2") + '\nlabkit.check("00.1", on_gpu_2)',
    ],
    "no name": [
        SETUP,
        STUB,
        "labkit.check('00.1', lambda numbers: torch.tensor(numbers, device='cuda'))",
    ],
    "a method": [
        SETUP,
        "class Lab:\n    def on_gpu(self, numbers): return torch.tensor(numbers, device='cuda')",
        'labkit.check("00.1", Lab().on_gpu)',
    ],
    "tidied up": [SETUP, RIGHT, CHECK, "del on_gpu", "%reset -f"],
    "a name that means something else later": [
        SETUP,
        "where = 'cuda'\nsizes = [1]\ndef make(n): return torch.tensor(n, device=where)\n"
        "def on_gpu(numbers): return make(numbers) * sizes[0]",
        CHECK,
        "where = 'cpu'\nsizes = []\nmake = None\nlabkit = torch = sum = 3",
    ],
    "corrected below the check": [SETUP, STUB, CHECK, RIGHT],
    "wrong, checked, and corrected": [SETUP, RIGHT.replace("cuda", "cpu"), CHECK, RIGHT],
    "a check that is asserted": [
        SETUP,
        "# below",
        "while not labkit.check('00.1', lambda n: n): pass\n"
        "assert labkit.check(number='00.1', answer=None).passed\n" + RIGHT,
    ],
    "the imports last": [
        "labkit.check('00.1', on_gpu)",
        "class Base(torch.nn.Module): pass\n"
        + RIGHT.replace("):", ": list) -> torch.Tensor:")
        + "\nstep = Base()",
        SETUP,
    ],
    "an old version below a raise": [
        SETUP,
        RIGHT + "\nraise StopIteration\ndef on_gpu(numbers): return None",
    ],
    "an old version that lacks a name": [
        SETUP,
        "def on_gpu(numbers=old): return None",
        RIGHT,
    ],
    "other ends of lines": [SETUP.replace("\n", "\r\n"), RIGHT.replace("\n", "\r"), CHECK],
    "large outputs": [SETUP, RIGHT, CHECK, "for _ in range(20): print('x' * 1_000_000)"],
}


def file_of(cells):
    built = [{"cell_type": "code", "source": cell, "metadata": {}} for cell in cells]
    built[1]["metadata"] = {"tags": ["exercise"], "labkit": {"exercise": "00.1"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 2, "metadata": {}, "cells": built}).encode()


def test_notebooks_that_work_for_their_students_lose_nothing(course, sandbox, monkeypatch):
    limits = dataclasses.replace(sandbox.limits, output=course.limits.output)
    monkeypatch.setattr(sandbox, "limits", limits)
    lost = {}
    for name, cells in NOTEBOOKS.items():
        lab = course.lab("00")
        done = examination.examine(file_of(cells), "ada", lab, course, frozenset(), sandbox)
        if (done.status, done.points, done.remarks) != ("graded", 1, []):
            lost[name] = done.status, done.exercises, done.remarks, done.cell_errors
    assert not lost


def test_an_error_in_a_cell_is_reported_once(course, sandbox):
    cells = [LINES + SETUP, STUB, CHECK]
    examined = examination.examine(
        file_of(cells), "ada", course.lab("00"), course, frozenset(), sandbox
    )
    assert [error[:2] for error in examined.cell_errors] == [[1, "ModuleNotFoundError"]]
    assert (examined.points, examined.exercises[0]["status"]) == (0, "not attempted")


def test_exercises_that_use_one_name_in_two_ways_are_tried_as_they_were_checked(course, sandbox):
    lab = course.lab("01")
    lab = dataclasses.replace(lab, exercises=lab.exercises[:2])
    cells = [
        SETUP,
        "def helper(lengths, size):\n    return torch.arange(size, device=lengths.device) < "
        "lengths[:, None]\ndef padding_mask(lengths, size): return helper(lengths, size)",
        'labkit.check("01.1", padding_mask)',
        "def helper(index): return torch.cuda.device(index)\n"
        + solution("01.2").replace("torch.cuda.device(", "helper("),
        'labkit.check("01.2", on_device)',
    ]
    examined = examination.examine(file_of(cells), "ada", lab, course, frozenset(), sandbox)
    assert (examined.points, examined.remarks) == (2, [])


def test_the_source_of_an_answer_is_the_cell_that_defines_it(course, sandbox):
    cells = [SETUP, STUB, CHECK, RIGHT, "print(on_gpu)"]
    examined = examination.examine(
        file_of(cells), "ada", course.lab("00"), course, frozenset(), sandbox
    )
    assert examined.sources == {"00.1": RIGHT}


@pytest.mark.parametrize(
    "name",
    ["00_start_here.ipynb.json", "00_start_here.ipynb.txt", "00_START_HERE.IPYNB", "mine.Ipynb"],
)
def test_a_notebook_with_another_suffix_is_a_notebook(name, course, tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / name).write_bytes(file_of([SETUP, RIGHT, CHECK]))
    [found], problems = collect.collect(tmp_path, course)
    assert (found.student, found.lab) == ("ada", "00_start_here")
    assert {problem.kind for problem in problems} <= {"renamed", "missing"}


def test_a_notebook_with_large_outputs_is_read(course, tmp_path):
    content = json.loads(file_of([SETUP, RIGHT, CHECK]))
    content["cells"][1]["outputs"] = [{"output_type": "stream", "text": "x" * (40 << 20)}]
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "00_start_here.ipynb").write_text(json.dumps(content))
    found, _ = collect.collect(tmp_path, course)
    assert [item.lab for item in found] == ["00_start_here"]
