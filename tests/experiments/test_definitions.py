"""Fingerprints: the same from the running notebook and from its cells, and new whenever the code is."""

import linecache

import pytest

from labkit.experiments.definitions import fingerprint, fingerprints

CELLS = [
    "import math\nWIDTH = 64\nSIZES = [2 ** n for n in range(3)]\nunused = 1\n",
    "class Net:\n    def forward(self):\n        return WIDTH\n",
    "def helper(n):\n    return math.sqrt(n) + len(SIZES)\n",
    "def step(n):\n    local = helper(n)\n    return local + Net().forward()\n",
    "def other(n):\n    return n\n",
]


def run(cells):
    """Run the cells as a notebook does, and return its names."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        filename = f"<cell {number} of {id(cells)}>"
        linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
        exec(compile(cell, filename, "exec"), names)
    return names


def changed(number, before, after):
    assert before in CELLS[number]
    return [cell.replace(before, after) if index == number else cell for index, cell in enumerate(CELLS)]


def test_a_running_notebook_and_its_cells_give_the_same():
    names = run(CELLS)
    expected = fingerprints(CELLS)
    assert {name: fingerprint(names[name]) for name in ("helper", "step", "other")} == expected
    assert len(set(expected.values())) == 3


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (0, "WIDTH = 64", "WIDTH = 128"),
        (0, "range(3)", "range(4)"),
        (1, "return WIDTH", "return 2 * WIDTH"),
        (2, "math.sqrt(n)", "math.log(n)"),
        (3, "local +", "local -"),
    ],
)
def test_a_change_of_anything_that_is_used_gives_another(number, before, after):
    cells = changed(number, before, after)
    assert fingerprints(cells)["step"] != fingerprints(CELLS)["step"]
    assert fingerprint(run(cells)["step"]) == fingerprints(cells)["step"]
    assert fingerprints(cells)["other"] == fingerprints(CELLS)["other"]


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (0, "unused = 1", "unused = 2"),
        (3, "    local =", "    # A comment.\n\n    local ="),
        (4, "return n", "return 2 * n"),
    ],
)
def test_a_change_of_anything_else_does_not(number, before, after):
    cells = changed(number, before, after)
    assert fingerprints(cells)["step"] == fingerprints(CELLS)["step"]
    assert fingerprint(run(cells)["step"]) == fingerprints(CELLS)["step"]


def test_magics_are_left_out_and_the_last_definition_counts():
    cells = ["%%gpu_memory\nnot Python", "%load_ext labkit\ndef step():\n    return 1", CELLS[4]]
    assert set(fingerprints(cells)) == {"step", "other"}
    again = [*cells, "def step():\n    return 2"]
    assert fingerprints(again)["step"] == fingerprints(again[3:])["step"]


def test_what_has_no_source_in_a_notebook_has_no_fingerprint():
    assert fingerprint(print) == "" and fingerprint(run) == ""
    assert fingerprint(eval("lambda: 1", {"__name__": "__main__"})) == ""


def test_a_decorated_function_is_found():
    cells = ["import functools\n\n\n@functools.cache\ndef helper(n):\n    return n\n", "def step(n):\n    return n\n"]
    assert fingerprint(run(cells)["helper"].__wrapped__) == fingerprints(cells)["helper"]
