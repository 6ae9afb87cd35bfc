"""The course of docs/your-own-course.md is found, checked and graded beside the kit's own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit import checks, courses, lesson_copies

COURSE = Path(__file__).with_name("second_course")
LESSON = COURSE / "notebooks" / "50_rows.ipynb"
PAGE = Path(__file__).parents[1] / "docs" / "your-own-course.md"
RIGHT = "def row_means(table):\n    return table.mean(1)"
WRONG = "def row_means(table):\n    return table.mean(1).cpu()"
CHECKED = f"""
import labkit
labkit.use(gpus=1, virtual=True, quiet=True)
{RIGHT}
print(labkit.check("50.1", row_means))
{WRONG}
print(labkit.check("50.1", row_means))
print(labkit.check("50.1", None))
print(labkit.progress("50"))
"""


@pytest.fixture
def on_path(monkeypatch):
    """Put the course on Python's path, without installing it."""
    monkeypatch.setenv("PYTHONPATH", str(COURSE))
    monkeypatch.syspath_prepend(str(COURSE))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "rowlessons"]:
        del sys.modules[name]


def labkit(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "labkit", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_the_course_as_it_is():
    shown = re.findall(
        r"^```[a-z]*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for name in (
        "pyproject.toml",
        "rowlessons/__init__.py",
        "rowlessons/lesson_50/__init__.py",
        "rowlessons/lesson_50/checks.py",
        "rowlessons/lesson_50/wrong_answers.txt",
    ):
        assert (COURSE / name).read_text(encoding="utf-8") in shown
    sources = [
        cell.source + "\n"
        for cell in nbformat.read(LESSON, as_version=4).cells
        if cell.cell_type == "code"
    ]
    assert sources[2] in shown and sources[3] in shown


def test_a_course_on_the_path_is_found_beside_the_kits_own(on_path):
    assert list(courses.packages()) == ["gpulessons", "rowlessons"]
    assert "50.1" in checks.exercises() and "01.1" in checks.exercises()
    assert courses.lessons()["50"] == ("rowlessons.lesson_50", COURSE / "rowlessons" / "lesson_50")


def test_the_table_of_lessons_shows_what_one_learns_in_it(on_path):
    learnt = {row[0]: row[1] for row in lesson_copies.lessons().rows}
    [of_rows] = [text for title, text in learnt.items() if title.startswith("50 ")]
    assert of_rows == "How to reduce one dimension of a table on the GPU."


def test_its_lessons_are_copied_after_those_of_the_kit(on_path, tmp_path):
    labkit("lessons", "--to", str(tmp_path))
    assert (tmp_path / "50_rows.ipynb").is_file() and (
        tmp_path / "01_device_basics.ipynb"
    ).is_file()
    assert "(50_rows.ipynb)" in (tmp_path / "13_articles_on_trial.ipynb").read_text(
        encoding="utf-8"
    )


def test_without_it_only_the_kits_own_course_is_there():
    assert list(courses.packages()) == ["gpulessons"]
    with pytest.raises(ValueError, match=r"There is no exercise '50\.1'"):
        checks.find("50.1")


def test_two_courses_with_a_lesson_of_the_same_number_are_refused(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        '[project.entry-points."labkit.lessons"]\nother = "otherlessons"\n'
    )
    (tmp_path / "otherlessons" / "lesson_01").mkdir(parents=True)
    (tmp_path / "otherlessons" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"Both gpulessons.lesson_01 and otherlessons.lesson_01 are lesson 01\. "
        r"Give one of them another number",
    ):
        checks.exercises()
    sys.modules.pop("otherlessons")


def test_a_project_that_is_no_course_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "labkit.lessons"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert courses.projects() == [Path(__file__).parents[1] / "pyproject.toml"]


@pytest.mark.slow
def test_its_answers_are_checked_where_it_is_not_installed(on_path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHECKED], capture_output=True, text=True, cwd=tmp_path
    )
    right, wrong, untried, *progress = done.stdout.splitlines()
    assert right == "50.1 Right. `mean(1)` reduces dimension 1, the columns."
    assert wrong == "50.1 Not yet: the means are on cpu. Leave them on the GPU."
    assert (untried, progress) == (
        "50.1 not attempted",
        ["Lesson 50: 1 of 1 right", "  50.1 right, at try 1"],
    )


@pytest.mark.slow
def test_a_class_is_graded(on_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("course.toml").write_text(
        f'course = "Rows"\nnotebooks = "{COURSE / "notebooks"}"\n\n[labs."50"]\n'
    )
    labkit("course", "release", "50", "--to", "labs")
    released = nbformat.read("labs/student/50_rows.ipynb", as_version=4)
    assert "mean(1)" not in json.dumps(released)
    for student, answer in (("ada", RIGHT), ("bob", WRONG)):
        [stub] = [cell for cell in released.cells if "exercise" in cell.metadata.get("tags", [])]
        stub.source = answer
        Path("submitted", student).mkdir(parents=True)
        nbformat.write(released, f"submitted/{student}/50_rows.ipynb")
    labkit(
        "course",
        "grade",
        "submitted",
        "--out",
        "results",
        *(() if bubblewrap_works() else ("--sandbox", "unshare")),
    )
    points = {
        path.stem: json.loads(path.read_text())["points"]
        for path in Path("results/records/50_rows").glob("*.json")
    }
    assert points == {"ada": 1.0, "bob": 0.0}


def bubblewrap_works() -> bool:
    from labcourse import backends

    try:
        backends.best(1 << 20)
    except RuntimeError:
        return False
    return True
