"""The commands say in one line what is wrong, and release tells drift by its exit status."""

from pathlib import Path

import pytest

from labcourse import collect
from labkit import cli

from .handed_in import COURSE


@pytest.fixture
def course_file(tmp_path):
    path = tmp_path / "course.toml"
    path.write_text(COURSE)
    return str(path)


def run(*arguments):
    return cli.main(["course", *map(str, arguments)])


def test_release_and_its_check(course_file, tmp_path, capsys):
    assert run("release", "00", "--to", tmp_path / "labs", "--course", course_file) == 0
    assert "student/00_start_here.ipynb" in capsys.readouterr().out
    assert run("release", "00", "--to", tmp_path / "labs", "--course", course_file, "--check") == 0
    (tmp_path / "labs" / "student" / "00_start_here.ipynb").write_text("{}")
    assert run("release", "00", "--to", tmp_path / "labs", "--course", course_file, "--check") == 1
    assert "student/00_start_here.ipynb differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("release", "77", "--to", "x"), "there is no lab '77'"),
        (
            ("release", "--to", "x", "--format", "otter"),
            "there is no format 'otter'. Choose one of labkit, nbgrader",
        ),
        (("collect", "nowhere", "--to", "x"), "nowhere: expected a folder or a zip file"),
        (("grade", "nowhere", "--out", "x", "--workers", "0"), "expected 1 or more"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments, said, course_file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments, "--course", course_file) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("labkit course: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file course.toml. Describe the course in a file"),
        ("course =", "labkit course: course.toml: Invalid value"),
    ],
)
def test_a_course_file_that_cannot_be_read(content, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "course.toml").write_text(content)
    assert run("release", "--to", "x") == 2
    assert said in capsys.readouterr().err


def test_a_command_that_is_interrupted_says_so(course_file, capsys, tmp_path, monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "collect", interrupted)
    assert run("collect", tmp_path, "--to", tmp_path / "x", "--course", course_file) == 130
    assert "interrupted. Finished results are kept" in capsys.readouterr().err


def test_an_unknown_sandbox(course_file, capsys, tmp_path):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "00_start_here.ipynb").write_text("{}")
    assert (
        run(
            "grade",
            tmp_path / "in",
            "--out",
            tmp_path / "out",
            "--course",
            course_file,
            "--sandbox",
            "docker",
        )
        == 2
    )
    assert (
        "there is no sandbox 'docker'. Choose one of bubblewrap, unshare, none"
        in capsys.readouterr().err
    )


def test_collecting_says_what_it_found(course_file, capsys, tmp_path):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "notes.txt").write_text("hello")
    (tmp_path / "students.csv").write_text("student,ID\nada,1\nbob,2\n")
    students, course = tmp_path / "students.csv", Path(course_file)
    course.write_text(
        COURSE.replace('[labs."01"]', '[labs."01"]\ndue = 2020-01-01') + "due = 2999-01-01"
    )
    assert (
        run(
            "collect",
            tmp_path / "in",
            "--to",
            tmp_path / "to",
            "--course",
            course_file,
            "--students",
            students,
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "not a notebook: ada" in said and "missing: 01_device_basics of bob" in said
    assert "06_memory_leaks" not in said  # is not due yet
    assert (tmp_path / "to" / "collected.json").exists()


def test_a_table_of_students_is_read_as_spreadsheets_and_people_write_it(
    course_file, capsys, tmp_path
):
    (tmp_path / "in" / "Zo\u00eb").mkdir(parents=True)
    (tmp_path / "in" / "Zo\u00eb" / "00_start_here.ipynb").write_text("{}")
    students = tmp_path / "students.csv"
    students.write_text("student;ID\n Zoe\u0308 ;1\n", encoding="utf-8-sig")
    assert (
        run(
            "collect",
            tmp_path / "in",
            "--to",
            tmp_path / "to",
            "--course",
            course_file,
            "--students",
            students,
        )
        == 0
    )
    assert "unlisted" not in capsys.readouterr().out
    students.write_text("student\n" + "x" * 200_000 + "\n")
    assert (
        run(
            "collect",
            tmp_path / "in",
            "--to",
            tmp_path / "to",
            "--course",
            course_file,
            "--students",
            students,
        )
        == 2
    )
    assert "students.csv cannot be read as a table" in capsys.readouterr().err


def test_nothing_that_moves_the_cursor_is_printed(course_file, capsys, tmp_path):
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "\x1b[2Jnotes\u202e.txt").write_text("hello")
    (tmp_path / "in" / "ada" / "\x1b[2J.ipynb").write_text("{}")
    assert run("collect", tmp_path / "in", "--to", tmp_path / "to", "--course", course_file) == 0
    said = capsys.readouterr().out
    assert "\\x1b[2Jnotes\\u202e.txt" in said and "\x1b" not in said and "\u202e" not in said


def test_a_folder_is_not_collected_into_itself(course_file, capsys, tmp_path):
    (tmp_path / "in" / "to").mkdir(parents=True)
    assert (
        run("collect", tmp_path / "in", "--to", tmp_path / "in" / "to", "--course", course_file)
        == 2
    )
    assert "would be collected too" in capsys.readouterr().err


def test_a_table_of_dates_that_is_not_there_is_refused(course_file, capsys, tmp_path):
    (tmp_path / "in").mkdir()
    dates, given = tmp_path / "dates.csv", ["--out", tmp_path / "out", "--course", course_file]
    assert run("grade", tmp_path / "in", *given, "--dates", dates) == 2
    assert f"--dates {dates}: there is no such file" in capsys.readouterr().err
