"""Notebooks that are made to be hard to read: each costs its own student, and nobody else."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from .handed_in import COURSE, LIMITS, notebook

pytestmark = pytest.mark.slow

LAB = "00_start_here"
RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"
MAGICS = "%pwd\n" * 400 + "x = 1\n" * 60_000  # IPython reads the whole cell once for each magic

# A cell before the right answer, and the status of the submission.
CELLS = {
    "many magics": (MAGICS, "time"),
    "ten thousand brackets": ("x = " + "(" * 10_000 + ")" * 10_000, "graded"),
    "brackets that never close": ("[" * 200_000, "graded"),
    "a long chain of names": ("x" + ".y" * 100_000, "graded"),
    "a million signs": ("x = " + "-" * 1_000_000 + "1", "memory"),
    "one string of 15 MB": ("x = '" + "y" * 15_000_000 + "'", "graded"),
    "a string that never ends": ("'''" + "\\\n" * 300_000, "graded"),
    "a hundred thousand blocks": ("".join(" " * n + "if 1:\n" for n in range(2000)), "graded"),
    "a number of a million digits": ("x = " + "9" * 1_000_000, "graded"),
    "null characters": ("x = 1\0" * 1000, "graded"),
}
FILES = {
    "deep JSON": b'{"cells": ' + b"[" * 10_000_000,
    "deep metadata": b'{"metadata": ' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_001,
    "millions of lists": b'{"cells": [' + b"[]," * 6_000_000 + b"[]]}",
    "millions of cells": b'{"cells": [' + b"{}," * 6_000_000 + b"{}]}",
    "a number without end": b'{"cells": ' + b"9" * 15_000_000 + b"}",
    "escapes without end": b'{"cells": ["' + b"\\ud800" * 2_000_000 + b'"]}',
}


def handed_in(folder, submissions):
    course = COURSE.replace('[labs."01"]\n[labs."06"]\n', "")
    (folder / "course.toml").write_text(course + "[limits]\ncell_seconds = 1000\nseconds = 1000\n")
    for student, data in submissions.items():
        path = folder / "in" / student / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)


def grade(folder, *options):
    return [sys.executable, "-m", "labkit", "course", "grade", "in", "--out", "out", *options]


def records(folder):
    paths = (folder / "out" / "records" / LAB).glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in paths}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_that_is_hard_to_read(name, tried, sandbox, monkeypatch):
    cell, status = CELLS[name]
    monkeypatch.setattr(sandbox, "limits", replace(LIMITS, cell_seconds=12))
    examined = tried("00.1", cell, RIGHT)
    assert examined.points == 1 and examined.status in (status, "time"), examined.remarks


def test_a_class_with_files_that_are_hard_to_read(bubblewrap, tmp_path):
    """The command grades these files, and other students' submissions are not affected."""
    strange = {f"s{number}": data for number, data in enumerate(FILES.values())}
    handed_in(tmp_path, strange | {"ada": notebook(RIGHT), "zoe": notebook(RIGHT)})
    done = subprocess.run(grade(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    graded = records(tmp_path)
    found = {name: (record["status"], record["points"]) for name, record in graded.items()}
    assert {found.pop("ada"), found.pop("zoe")} == {("graded", 1)}
    assert set(found) == set(strange) and set(found.values()) == {("unreadable", None)}


def test_ctrl_c_ends_a_grading_that_reads_for_long(bubblewrap, tmp_path):
    handed_in(tmp_path, {"ada": notebook(RIGHT), "bob": notebook(MAGICS, RIGHT)})
    command = grade(tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as grading:
        assert grading.stderr.readline().startswith("starting the sandbox")
        line = grading.stderr.readline()
        assert line.startswith("1 of 2") and "ada: graded" in line
        grading.send_signal(signal.SIGINT)
        _, error = grading.communicate(timeout=280)
    assert grading.returncode == 130 and "interrupted" in error
    assert set(records(tmp_path)) == {"ada"}
