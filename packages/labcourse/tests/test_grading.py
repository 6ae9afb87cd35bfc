"""A class is graded once, goes on where it was stopped, and gives the same bytes each time."""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from labcourse import assignment, collect, feedback, grading, marks, results

from .handed_in import COURSE, NOTEBOOKS, notebook

pytestmark = pytest.mark.slow

RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"
WRONG = "def on_gpu(numbers): return torch.tensor(numbers)"
STUB = "def on_gpu(numbers): ..."
FIGURE = "from matplotlib import pyplot as plt\nplt.plot([1, 2])\nplt.show()"
LAB = "00_start_here"
CLASS = {
    "ada": notebook(FIGURE, RIGHT),
    "bob": notebook(WRONG),
    "cyd": notebook(STUB),
    "dee": notebook("import os; os._exit(0)", RIGHT),
    "eve": b"{broken",
    "李雷": notebook(
        "<script>alert(1)</script>",
        "import random; print(random.random())\nRIGHT = object()\nraise ValueError(RIGHT)",
        RIGHT,
    ),
}
LATE = f"""
course = "GPUs"
seed = "33333333333333333333333333333333"
notebooks = "{NOTEBOOKS}"
late_days = 1
late_penalty = 0.25
[labs."00"]
due = 2026-11-20T12:00:00Z
points = {{ "00.1" = 4 }}
[[labs."00".written]]
id = "00.why"
question = "Why?"
points = 2
[extensions]
ada = {{ "00" = 2026-11-25 }}
"""


KILLED = """
import os, signal, sys
from labcourse import grading
from labkit.cli import main

def write_and_die(store, graded, write=grading.Store.write):
    write(store, graded)
    os.kill(os.getpid(), signal.SIGKILL)

grading.Store.write = write_and_die
main(sys.argv[1:])
"""


def hand_in(folder, submissions=CLASS):
    for student, data in submissions.items():
        path = folder / student / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        os.utime(path, (1_790_000_000, 1_790_000_000))
    return folder


def graded_files(folder):
    """Return the content of all files that must be the same in each grading."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "resources" not in str(path.relative_to(folder))
    }


def grade(course, source, out, **how):
    submissions, problems = collect.collect(source, course)
    store = grading.Store(out)
    count = grading.grade_all(course, submissions, store, sandbox="bubblewrap", **how)
    results.write(course, submissions, problems, store)
    return count


@pytest.fixture(scope="module")
def one_lab(tmp_path_factory) -> assignment.Course:
    path = tmp_path_factory.mktemp("course") / "course.toml"
    path.write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', ""))
    return assignment.read(path)


@pytest.fixture(scope="module")
def graded(one_lab, borrowing, tmp_path_factory):
    """The class, graded by one worker."""
    folder = tmp_path_factory.mktemp("graded")
    with borrowing():
        assert grade(one_lab, hand_in(folder / "in"), folder / "out") == len(CLASS)
    return folder


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_submission_is_reported_as_what_it_is(graded):
    grades = {
        row["student"]: (row["status"], row["points"])
        for row in rows(graded / "out" / "grades.csv")
    }
    assert grades == {
        "ada": ("graded", "1"),
        "bob": ("graded", "0"),
        "cyd": ("graded", "0"),
        "dee": ("its process ended early", ""),
        "eve": ("cannot be read", ""),
        "李雷": ("graded", "1"),
    }


def test_the_table_has_one_row_for_a_submission(graded, one_lab, tmp_path):
    submissions, _ = collect.collect(graded / "in", one_lab)
    store = grading.Store(shutil.copytree(graded / "out", tmp_path / "out"))
    problems = [
        collect.Problem("ada", LAB, "renamed", "its name"),
        collect.Problem("zoe", LAB, "missing", "nothing was handed in"),
    ]
    results.write(one_lab, submissions, problems, store)
    table = rows(tmp_path / "out" / "grades.csv")
    assert [row["status"] for row in table if row["student"] in ("ada", "zoe")] == [
        "graded",
        "missing",
    ]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "its name" in page and "missing: nothing" not in page
    # with the day it is due, not with what needs a look
    assert re.search(r"<h2>Not handed in</h2>\n<ul><li>[^<]*: zoe</li>", page)


def test_who_is_there_no_more_is_left_out_and_other_files_stay(graded, one_lab, tmp_path):
    out = shutil.copytree(graded / "out", tmp_path / "out")
    submissions, _ = collect.collect(graded / "in", one_lab)
    anothers = [
        out / folder / name
        for folder in ("figures", "feedback", "resources")
        for name in ("ada-1.png", "ada.html", "ada.json")
    ]
    for path in anothers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("the instructor's own")
    before = graded_files(out)
    results.write(
        one_lab, [item for item in submissions if item.student != "ada"], [], grading.Store(out)
    )
    gone = before.keys() - graded_files(out).keys()
    assert {f"records/{LAB}/ada.json", f"feedback/{LAB}/ada.html"} <= gone and all(
        "ada" in name for name in gone
    )
    assert not (out / "resources" / LAB / "ada.json").exists()
    assert all(path.read_text() == "the instructor's own" for path in anothers)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "grades.csv").write_text("the instructor's own")
    with pytest.raises(ValueError, match="has other files. Choose a new folder"):
        grading.Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["grades.csv"]


def test_platforms_get_an_empty_cell_where_there_is_no_mark(graded):
    canvas = {row["SIS User ID"]: row[LAB] for row in rows(graded / "out" / "canvas.csv")}
    assert canvas == {
        "": "1",
        "ada": "1",
        "bob": "0",
        "cyd": "0",
        "dee": "",
        "eve": "",
        "李雷": "1",
    }
    moodle = {row["ID number"]: row[LAB] for row in rows(graded / "out" / "moodle.csv")}
    assert moodle["dee"] == "" and moodle["ada"] == "1"


def test_a_record_says_where_its_marks_come_from(graded):
    record = json.loads((graded / "out" / "records" / LAB / "bob.json").read_text())
    assert (
        "20261121" not in json.dumps(record)
        and record["versions"]["torch"]
        and record["sandbox"] == "bubblewrap"
    )
    exercise = record["exercises"][0]
    assert exercise["status"] == "wrong" and "on cpu" in exercise["message"]
    assert [observation["observed"]["device"] for observation in exercise["observed"]] == [
        "cpu",
        "cpu",
    ]


def test_pages_show_the_students_figures_and_run_nothing_of_theirs(graded):
    page = (graded / "out" / "feedback" / LAB / "ada.html").read_text()
    assert page.count("data:image/png;base64,iVBORw0KGgo") == 1 and "Right." in page
    page = (graded / "out" / "feedback" / LAB / "李雷.html").read_text()
    assert "<script>" not in page and "ValueError" in page and "0x…" in page
    page = (graded / "out" / "index.html").read_text()
    assert "its process ended early" in page and "cannot be read" in page


def test_grading_again_with_more_workers_gives_the_same_bytes(graded, one_lab, tmp_path):
    assert grade(one_lab, graded / "in", tmp_path / "out", workers=2) == len(CLASS)
    assert graded_files(tmp_path / "out") == graded_files(graded / "out")


@pytest.mark.usefixtures("borrowed_sandbox")
def test_nothing_is_graded_twice_and_a_changed_submission_is(one_lab, tmp_path):
    source = hand_in(tmp_path / "in", {"ada": CLASS["ada"], "bob": CLASS["bob"]})
    assert grade(one_lab, source, tmp_path / "out") == 2
    assert grade(one_lab, source, tmp_path / "out") == 0
    (source / "bob" / f"{LAB}.ipynb").write_bytes(CLASS["ada"])
    assert grade(one_lab, source, tmp_path / "out") == 1
    assert [row["points"] for row in rows(tmp_path / "out" / "grades.csv")] == ["1", "1"]


@pytest.mark.usefixtures("borrowed_sandbox")
def test_one_submission_that_cannot_be_graded_stops_no_other(one_lab, tmp_path, monkeypatch):
    source = hand_in(tmp_path / "in", {"ada": CLASS["ada"], "bob": CLASS["bob"]})
    examine = grading.examine
    monkeypatch.setattr(
        grading,
        "examine",
        lambda data, student, *more: 1 / 0 if student == "ada" else examine(data, student, *more),
    )
    assert grade(one_lab, source, tmp_path / "out") == 2
    assert [(row["status"], row["points"]) for row in rows(tmp_path / "out" / "grades.csv")] == [
        ("grading it failed", ""),
        ("graded", "0"),
    ]
    assert "ZeroDivisionError" in (tmp_path / "out" / "index.html").read_text()
    monkeypatch.undo()
    assert grade(one_lab, source, tmp_path / "out") == 1  # it is tried again
    assert grade(one_lab, source, tmp_path / "out", again=["00/bob"]) == 1
    with pytest.raises(
        ValueError, match=f"there is no such submission. Expected LAB/STUDENT, such as {LAB}/ada"
    ):
        grade(one_lab, source, tmp_path / "out", again=["bob"])
    path = tmp_path / "out" / "records" / LAB / "ada.json"
    path.write_text(path.read_text().replace('"sandbox": "bubblewrap"', '"sandbox": "unshare"'))
    assert grade(one_lab, source, tmp_path / "out") == 1  # by a stronger sandbox
    write_page = feedback.write_page
    monkeypatch.setattr(
        feedback,
        "write_page",
        lambda course, record, *more: (
            1 / 0 if record["student"] == "ada" else write_page(course, record, *more)
        ),
    )
    grade(one_lab, source, tmp_path / "out", again=["00/bob"])
    assert [row["status"] for row in rows(tmp_path / "out" / "grades.csv")] == ["graded", "graded"]
    assert (
        "its record or page could not be written" in (tmp_path / "out" / "index.html").read_text()
    )


def test_killed_half_way_it_goes_on(graded, tmp_path):
    """Kill the command after its first result, and run it again.

    No process is left, and the next run does not grade the result again.
    """
    course = tmp_path / "course.toml"
    course.write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', ""))
    options = ["course", "grade", str(graded / "in"), "--out", "out", "--course", str(course)]
    command = [sys.executable, "-m", "labkit", *options]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    killed = subprocess.run([sys.executable, "-c", KILLED, *options], cwd=tmp_path, env=environment)
    assert killed.returncode == -signal.SIGKILL
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "records").rglob("*.json")
    }
    assert len(before) == 1
    assert len(os.listdir(temporary)) == 1  # it could not tidy up
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    assert os.listdir(temporary) == []
    assert (
        "1 of 6 were graded before" in done.stderr
        and "5 graded now, 1 graded before" in done.stdout
    )
    assert graded_files(tmp_path / "out") == graded_files(graded / "out")


def test_an_interrupted_grading_leaves_no_process(graded, one_lab, tmp_path):
    submissions, _ = collect.collect(graded / "in", one_lab)
    running = grading.grade_all
    sandboxes, others = [], _servers()

    lines = []

    def interrupt(*said):
        lines.append(said[0])
        if len(lines) == 1:  # the sandbox has not started
            return
        sandboxes.extend(pid for pid in _servers() if pid not in others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running(
            one_lab,
            submissions,
            grading.Store(tmp_path),
            2,
            sandbox="bubblewrap",
            progress=interrupt,
        )
    assert "starting the sandbox" in lines[0]
    assert sandboxes
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in sandboxes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in sandboxes)


def _servers():
    import psutil

    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another test's, that has ended
            found += [child.pid] if "labcourse.sandbox_server" in child.cmdline() else []
    return found


def _alive(pid):
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("borrowed_sandbox")
def test_late_days_extensions_and_written_answers(tmp_path):
    (tmp_path / "course.toml").write_text(LATE)
    course = assignment.read(tmp_path / "course.toml")
    written = json.loads(notebook(RIGHT))
    written["cells"].append(
        {
            "cell_type": "markdown",
            "source": "=Because",
            "metadata": {"labkit": {"written": "00.why"}},
        }
    )
    for student in ("ada", "bob"):
        folder = tmp_path / "in" / f"{student}+{LAB}+2026-11-22 11:00:00 UTC+x"
        folder.mkdir(parents=True)
        (folder / f"{LAB}.ipynb").write_text(json.dumps(written))
    out = tmp_path / "out"
    assert grade(course, tmp_path / "in", out) == 2
    grades = rows(out / "grades.csv")
    # Two days begun, one of them free, and a quarter of four points off; ada has an extension.
    assert [
        (row["student"], row["points"], row["late_days"], row["to_mark"]) for row in grades
    ] == [
        ("ada", "4", "0", "1"),
        ("bob", "3", "2", "1"),
    ]
    table = (out / "written.csv").read_text()
    assert "'=Because" in table
    (out / "written.csv").write_text(table.replace("00.why,,2,,", "00.why,1.5,2,Nearly,"))
    assert grade(course, tmp_path / "in", out) == 0
    assert [
        (row["student"], row["points"], row["to_mark"]) for row in rows(out / "grades.csv")
    ] == [
        ("ada", "5.5", "0"),
        ("bob", "4.125", "0"),
    ]
    assert "Nearly" in (out / "feedback" / LAB / "ada.html").read_text()
    assert (out / "written.csv").read_text().count("1.5,2,Nearly") == 2
    (out / "written.csv").write_text(table.replace("00.why,,2,,", "00.why,3,2,,"))
    with pytest.raises(ValueError, match="expected 0 to 2 points, got 3"):
        marks.read_written(out)
