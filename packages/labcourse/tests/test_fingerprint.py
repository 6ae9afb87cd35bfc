"""A submission is graded again when the code changes that its marks come from."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import gpulessons
import labkit
from labcourse import backends, collect, gradescope, grading


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A folder with copies of labkit and the course, in which a test may change things."""
    packages = [Path(package.__file__).parent for package in (labkit, gpulessons)]
    for package in packages:
        shutil.copytree(package, tmp_path / package.name)
    monkeypatch.setattr(
        backends, "packages", lambda: [tmp_path / package.name for package in packages]
    )
    grading.kit_digest.cache_clear()
    yield tmp_path
    grading.kit_digest.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        "gpulessons/lesson_01/checks.py",
        "labkit/checks/checking.py",
        "gpulessons/lesson_01/wrong_answers.txt",
    ],
)
def test_a_changed_check_or_control_changes_the_fingerprint(copied, name):
    before = grading.kit_digest()
    with (copied / name).open("a") as file:
        file.write("\n")
    grading.kit_digest.cache_clear()
    assert grading.kit_digest() != before


def test_a_changed_digest_grades_again(course, monkeypatch):
    submission = collect.Submission("ada", "00_start_here", "digest", "origin", None)
    lab = course.lab("00")
    before = grading.fingerprint(submission, lab, course)
    assert grading.fingerprint(submission, lab, course) == before
    monkeypatch.setattr(grading, "kit_digest", lambda: "another kit")
    assert grading.fingerprint(submission, lab, course) != before


def test_what_python_writes_beside_the_code_changes_nothing(copied):
    before = grading.kit_digest()
    (copied / "gpulessons" / "lesson_01" / "checks.pyc").write_bytes(b"x")
    grading.kit_digest.cache_clear()
    assert grading.kit_digest() == before


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.13"])
def test_gradescope_gets_a_python_that_the_kit_runs_on(tmp_path, version):
    """The programs that the setup calls are replaced with programs that print their arguments."""
    major, minor = version.split(".")
    programs = {
        "apt-get": "exit 0",
        "python3": f'case "$1" in -c) [ {minor} -ge 11 ]; exit;; esac\necho python3 "$@"',
    }
    for name, program in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    script = gradescope.SETUP.format(wheel="kit.whl").replace(
        "/autograder/venv/bin/pip", "echo pip"
    )
    path = os.pathsep.join([os.fspath(tmp_path), os.environ["PATH"]])
    command = ["bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0 and major == "3"
    lines = done.stdout.splitlines()
    if version == "3.10":
        assert lines[:2] == [
            "python3 -m pip install uv",
            "python3 -m uv venv --seed --python 3.12 /autograder/venv",
        ]
    else:
        assert lines[0] == "python3 -m venv /autograder/venv"
    assert "/autograder/source/kit.whl[course]" in lines[-1]
