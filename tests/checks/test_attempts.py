"""Help grows with each try, and `labkit.progress()` says how far one is."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import labkit
from labkit import checks, progress_file


@pytest.fixture(autouse=True)
def gpu():
    progress_file.tries.clear()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


def right(numbers):
    return torch.tensor(numbers, device="cuda")


def wrong(numbers):
    return torch.tensor(numbers)


def test_each_failed_try_helps_more(monkeypatch):
    check = dataclasses.replace(checks.find("00.1"), section="Your GPU")
    monkeypatch.setattr(checks, "find", lambda number: check)
    said = [labkit.check("00.1", wrong).message for _ in range(4)]
    assert [message.count("\n") for message in said] == [0, 1, 2, 3]
    refusal = "Not yet: expected a tensor on a GPU, got one on cpu."
    assert all(message.startswith(refusal) for message in said)
    assert "Your answer was tried with [" in said[1]
    assert "in its section “Your GPU”" in said[2] and "the solution is folded away" in said[3]
    labkit.check("00.1", right)
    assert labkit.check("00.1", wrong).message.count("\n") == 0  # from the beginning


def test_each_try_has_inputs_of_its_own():
    tried = []
    for _ in range(3):
        labkit.check("00.1", tried.append)
    assert len({tuple(numbers) for numbers in tried if any(numbers)}) == 3


def test_progress_counts_tries():
    assert repr(labkit.progress()).startswith("Nothing has been checked yet")
    labkit.check("00.1", None)
    assert repr(labkit.progress("00")) == "Lesson 00: 0 of 1 right\n  00.1 not attempted"
    labkit.check("00.1", wrong)
    assert repr(labkit.progress()) == "Lesson 00: 0 of 1 right\n  00.1 not yet, 1 try"
    labkit.check("00.1", right)
    labkit.check("00.1", wrong)
    assert repr(labkit.progress()) == "Lesson 00: 1 of 1 right\n  00.1 right, at try 2"


def test_progress_outlives_the_kernel_and_two_kernels_share_it(monkeypatch, tmp_path):
    file = tmp_path / ".labkit" / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(file))
    labkit.check("00.1", wrong)
    file.write_text(json.dumps({"00.1": [False, False], "01.1": [True]}))  # by another kernel
    labkit.check("00.1", right)
    assert json.loads(file.read_text()) == {"00.1": [False, False, True], "01.1": [True]}
    progress_file.tries.clear()  # a new kernel
    assert "00.1 right, at try 3" in repr(labkit.progress()) and "Lesson 01: 1 of" in repr(
        labkit.progress()
    )
    shown = labkit.progress("01")._repr_html_()
    assert "✔ 01.1 right</span>, at try 1" in shown and "○ 01.2 not attempted" in shown
    file.write_text("[")
    with pytest.warns(UserWarning, match="your progress cannot be read, and begins anew"):
        labkit.check("00.1", right)
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "no" / "such" / "folder"))
    with pytest.warns(UserWarning, match="your progress is kept in this kernel only"):
        labkit.check("00.1", right)
    assert progress_file.path() and not list(tmp_path.glob("*.ipynb"))


def test_a_lesson_that_changes_its_folder_keeps_its_progress_beside_the_notebook(tmp_path):
    program = (
        "import os, labkit; os.chdir('/')\nfrom labkit import progress_file\n"
        "from virtualgpu import front_end\n"
    )
    program += "front_end.ipython_shell = lambda: object()\nprint(progress_file.path())"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert told == f"{tmp_path.resolve()}/.labkit/progress.json\n"


def test_an_unknown_lesson_is_named():
    with pytest.raises(
        ValueError, match="There is no lesson '99' with exercises. Choose one of these: 00, 01"
    ):
        labkit.progress("99")


@pytest.mark.parametrize("lesson", ["1", 1])
def test_a_lesson_may_be_named_without_zero(lesson):
    assert str(labkit.progress(lesson)) == str(labkit.progress("01"))
