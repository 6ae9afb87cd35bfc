"""Gradescope: a zip file that its autograder runs, and the program in it, which grades one submission and writes the results it wants.

python -m labcourse.gradescope LAB [FOLDER]        (in the container; FOLDER is /autograder)
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
/autograder/venv/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu "/autograder/source/{wheel}[course]"
"""
RUN = """#!/usr/bin/env bash
# LABKIT_SANDBOX=none where the container allows no sandbox: a submission could then read the seed, and write its own results.
cd /autograder/source && exec /autograder/venv/bin/python -m labcourse.gradescope {lab}
"""


def files(course: Course, labs: list[Assignment]) -> dict[str, str | bytes]:
    """All that a release consists of: students' and instructor's notebooks, and a zip file for each lab."""
    return release.files(course, labs, "labkit") | {f"gradescope/{lab.name}.zip": autograder(course, lab) for lab in labs}


def autograder(course: Course, lab: Assignment) -> bytes:
    """The zip file to upload: setup.sh, run_autograder, the course with this lab alone, and the kit. Raises ValueError as `wheel`."""
    kit, content = wheel()
    texts = {"setup.sh": SETUP.format(wheel=kit), "run_autograder": RUN.format(lab=lab.name), "course.toml": _described(course, lab)}
    files = {name: text.encode() for name, text in texts.items()} | {kit: content}
    files[f"notebooks/{lab.name}.ipynb"] = (course.notebooks / f"{lab.name}.ipynb").read_bytes()
    return zipped(files, ("setup.sh", "run_autograder"))


def wheel() -> tuple[str, bytes]:
    """The kit that runs here, as a wheel: under its name, a package index may have something else.

    Raises ValueError where the kit is not installed as a package, for only that says what else it needs.
    """
    try:
        installed = metadata.distribution("pytorch-gpu-lessons")
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or installed.version != labkit.__version__:
        raise ValueError("the kit is not installed as a package here, so none can be made for Gradescope: `make lab` installs it")
    name = f"pytorch_gpu_lessons-{installed.version}"
    found = ((package, path) for package in backends.packages() for path in package.rglob("*") if path.is_file())
    files = {path.relative_to(package.parent).as_posix(): path.read_bytes() for package, path in found if path.suffix != ".pyc"}
    texts = {"WHEEL": "Wheel-Version: 1.0\nGenerator: labcourse\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    texts |= {"METADATA": installed.read_text("METADATA") or "", "entry_points.txt": _entry_points(installed)}
    files |= {f"{name}.dist-info/{file}": text.encode() for file, text in texts.items()}
    rows = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items()]
    files[f"{name}.dist-info/RECORD"] = "".join([*rows, f"{name}.dist-info/RECORD,,\n"]).encode()
    return f"{name}-py3-none-any.whl", zipped(files)


def _entry_points(installed: metadata.Distribution) -> str:
    """The kit's entry points, and those of all courses, whose packages the wheel holds too."""
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment]  # names keep their capitals
    points.read_string(installed.read_text("entry_points.txt") or "")
    points[courses.GROUP] = {name: name for name in courses.packages()}
    text = io.StringIO()
    points.write(text)
    return text.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _described(course: Course, lab: Assignment) -> str:
    """The course as a file again; Gradescope itself knows what is late."""
    points = ", ".join(f'"{task.number}" = {task.points:g}' for task in lab.exercises)
    lines = [
        f"course = {json.dumps(course.name)}",
        f"seed = {json.dumps(course.seed)}",
        f"tries = {course.tries}",
        'notebooks = "notebooks"',
    ]
    lines += [f"contents = {json.dumps(course.contents)}", f'[labs."{lab.name}"]', f"points = {{ {points} }}"]
    for task in lab.written:
        lines += [f'[[labs."{lab.name}".written]]', f"id = {json.dumps(task.id)}", f"question = {json.dumps(task.question)}"]
        lines += [f"points = {task.points:g}"]
    lines += ["[limits]", *(f"{name} = {value}" for name, value in asdict(course.limits).items())]
    return "\n".join(lines) + "\n"


def results(record: dict[str, Any]) -> dict[str, Any]:
    """A record as Gradescope's results.json: a test an exercise; the remarks only for those who teach."""
    tests = [
        {
            "name": item["number"],
            "score": item["points"] or 0,
            "max_score": item["out_of"],
            "output": item["message"] or item["status"],
            "status": "passed" if item["status"] == "right" else "failed",
        }
        for item in map(exercise_view, record["exercises"])
    ]
    if record["remarks"]:
        tests.append({"name": "Remarks", "output": "\n".join(record["remarks"]), "visibility": "hidden", "score": 0, "max_score": 0})
    return {"score": record["points"] or 0, "tests": tests, "visibility": "visible"}


def main(lab: str, folder: str = "/autograder") -> int:
    """Grade what lies in `folder`/submission and write `folder`/results/results.json, whatever happens."""
    target = Path(folder, "results", "results.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        course = assignment.read(Path(folder, "source", "course.toml"))
        content = results(_graded(course, course.lab(lab), Path(folder, "submission")))
    except (ValueError, OSError, RuntimeError, SandboxError) as error:
        content = {"score": 0, "output": f"This could not be graded: {error}", "visibility": "visible", "tests": []}
    target.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _student(metadata: Path) -> str:
    """Who handed in, by the file that Gradescope writes; "" where there is none. A notebook's name says nothing."""
    try:
        users = json.loads(metadata.read_text(encoding="utf-8"))["users"]
        return "-".join(sorted(str(user["id"]) for user in users))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _graded(course: Course, lab: Assignment, folder: Path) -> dict[str, Any]:
    submissions, problems = collect.collect(folder, course)
    if len(submissions) != 1:
        raise ValueError("; ".join(problem.detail for problem in problems) or f"expected one notebook, got {len(submissions)}")
    submission = replace(submissions[0], student=_student(folder.parent / "submission_metadata.json") or submissions[0].student)
    wanted = os.environ.get("LABKIT_SANDBOX")
    private = grading.private_paths(course, submissions)
    backend = backends.best(course.limits.scratch, wanted, private)
    with Sandbox(backend, course.limits) as sandbox:
        record = grading.grade(submission, course, {lab.name: release.handed_out(course, lab)}, sandbox).record
    return marks.add_marks(record, course, {})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
