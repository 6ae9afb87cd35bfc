"""Autograder for Gradescope: the zip file to upload, and the program in it.

The program grades one submission and writes the results in Gradescope's format::

    python -m labcourse.gradescope LAB [FOLDER]

It runs in Gradescope's container, where FOLDER is /autograder.
"""

import base64
import configparser
import hashlib
import io
import json
import os
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import labkit
from labcourse import assignment, backends, collect, grading, marks, release
from labcourse.assignment import Assignment, Course
from labcourse.feedback import exercise_view, zipped
from labcourse.sandbox import Sandbox, SandboxError
from labkit import courses

SETUP = """#!/usr/bin/env bash
set -e
apt-get update && apt-get install -y python3 python3-venv python3-pip bubblewrap
if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python3 -m venv /autograder/venv
else  # an older image: Ubuntu 22.04 has Python 3.10
    python3 -m pip install uv
    python3 -m uv venv --seed --python 3.12 /autograder/venv
fi
/autograder/venv/bin/pip install \\
    --extra-index-url https://download.pytorch.org/whl/cpu "/autograder/source/{wheel}[course]"
"""
WHEEL = """Wheel-Version: 1.0
Generator: labcourse
Root-Is-Purelib: true
Tag: py3-none-any
"""
RUN = """#!/usr/bin/env bash
# If the container allows no sandbox, set LABKIT_SANDBOX=none. A submission could then read the seed
# and write its own results.
cd /autograder/source && exec /autograder/venv/bin/python -m labcourse.gradescope {lab}
"""


def files(course: Course, labs: list[Assignment]) -> dict[str, str | bytes]:
    """Return the files of a release, and a zip file for Gradescope for each lab."""
    zips = {f"gradescope/{lab.name}.zip": autograder(course, lab) for lab in labs}
    return release.files(course, labs, "labkit") | zips


def autograder(course: Course, lab: Assignment) -> bytes:
    """Return the zip file to upload for a lab.

    It has setup.sh, run_autograder, the course with this lab only, and the kit.

    Raises:
        ValueError: the kit is not installed as a package.
    """
    kit, content = wheel()
    texts = {
        "setup.sh": SETUP.format(wheel=kit),
        "run_autograder": RUN.format(lab=lab.name),
        "course.toml": _described(course, lab),
    }
    files = {name: text.encode() for name, text in texts.items()} | {kit: content}
    files[f"notebooks/{lab.name}.ipynb"] = (course.notebooks / f"{lab.name}.ipynb").read_bytes()
    return zipped(files, ("setup.sh", "run_autograder"))


def wheel() -> tuple[str, bytes]:
    """Return the name and the content of a wheel with the kit that runs here.

    A package index might have another version under this name.

    Raises:
        ValueError: the kit is not installed as a package, so its dependencies are not known.
    """
    try:
        installed = metadata.distribution("pytorch-gpu-lessons")
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or installed.version != labkit.__version__:
        raise ValueError(
            "cannot make a package of the kit for Gradescope, because the kit is not installed as "
            "a package here. Install it with `make lab`"
        )
    name = f"pytorch_gpu_lessons-{installed.version}"
    files = {}
    for package in backends.packages():
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                files[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    texts = {
        "WHEEL": WHEEL,
        "METADATA": installed.read_text("METADATA") or "",
        "entry_points.txt": _entry_points(installed),
    }
    files |= {f"{name}.dist-info/{file}": text.encode() for file, text in texts.items()}
    rows = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items()]
    files[f"{name}.dist-info/RECORD"] = "".join([*rows, f"{name}.dist-info/RECORD,,\n"]).encode()
    return f"{name}-py3-none-any.whl", zipped(files)


def _entry_points(installed: metadata.Distribution) -> str:
    """Return the entry points of the kit and of all courses, which the wheel also holds."""
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment]  # names keep their capitals
    points.read_string(installed.read_text("entry_points.txt") or "")
    points[courses.GROUP] = {name: name for name in courses.packages()}
    text = io.StringIO()
    points.write(text)
    return text.getvalue()


def _digest(data: bytes) -> str:
    """Return the SHA-256 of a file in the form that a wheel's RECORD needs."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _described(course: Course, lab: Assignment) -> str:
    """Write a course file with one lab. Dates are left out because Gradescope has its own."""
    points = ", ".join(f'"{task.number}" = {task.points:g}' for task in lab.exercises)
    lines = [
        f"course = {json.dumps(course.name)}",
        f"seed = {json.dumps(course.seed)}",
        f"tries = {course.tries}",
        'notebooks = "notebooks"',
    ]
    lines += [
        f"contents = {json.dumps(course.contents)}",
        f'[labs."{lab.name}"]',
        f"points = {{ {points} }}",
    ]
    for task in lab.written:
        lines += [
            f'[[labs."{lab.name}".written]]',
            f"id = {json.dumps(task.id)}",
            f"question = {json.dumps(task.question)}",
            f"points = {task.points:g}",
        ]
    lines.append("[limits]")
    lines += [f"{name} = {value}" for name, value in asdict(course.limits).items()]
    return "\n".join(lines) + "\n"


def results(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as the content of Gradescope's results.json.

    Each exercise is a test. Only the instructor sees the remarks.
    """
    tests: list[dict[str, Any]] = []
    for item in map(exercise_view, record["exercises"]):
        passed = item["status"] == "right"
        tests.append(
            {
                "name": item["number"],
                "score": item["points"] or 0,
                "max_score": item["out_of"],
                "output": item["message"] or item["status"],
                "status": "passed" if passed else "failed",
            }
        )
    if record["remarks"]:
        remarks = "\n".join(record["remarks"])
        shown = {"name": "Remarks", "output": remarks, "visibility": "hidden"}
        tests.append({**shown, "score": 0, "max_score": 0})
    return {"score": record["points"] or 0, "tests": tests, "visibility": "visible"}


def main(lab: str, folder: str = "/autograder") -> int:
    """Grade the submission in `folder`/submission and write `folder`/results/results.json.

    The results are written even if grading fails.
    """
    target = Path(folder, "results", "results.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        course = assignment.read(Path(folder, "source", "course.toml"))
        content = results(_graded(course, course.lab(lab), Path(folder, "submission")))
    except (ValueError, OSError, RuntimeError, SandboxError) as error:
        text = f"This submission could not be graded: {error}"
        content = {"score": 0, "output": text, "visibility": "visible", "tests": []}
    target.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _student(metadata: Path) -> str:
    """Return the students' ids from the file that Gradescope writes, or "" without this file.

    The name of a notebook is no evidence of who handed it in.
    """
    try:
        users = json.loads(metadata.read_text(encoding="utf-8"))["users"]
        return "-".join(sorted(str(user["id"]) for user in users))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _graded(course: Course, lab: Assignment, folder: Path) -> dict[str, Any]:
    """Grade the only submission in a folder, and return its record with marks."""
    submissions, problems = collect.collect(folder, course)
    if len(submissions) != 1:
        details = "; ".join(problem.detail for problem in problems)
        raise ValueError(details or f"expected one notebook, got {len(submissions)}")
    student = _student(folder.parent / "submission_metadata.json") or submissions[0].student
    submission = replace(submissions[0], student=student)
    wanted = os.environ.get("LABKIT_SANDBOX")
    private = grading.private_paths(course, submissions)
    backend = backends.best(course.limits.scratch, wanted, private)
    with Sandbox(backend, course.limits) as sandbox:
        handed_out = {lab.name: release.handed_out(course, lab)}
        record = grading.grade(submission, course, handed_out, sandbox).record
    return marks.add_marks(record, course, {})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
