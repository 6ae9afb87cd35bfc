"""Commands of nbgrader accept and grade what is released for it.

The tests need nbgrader: `make test-nbgrader`, or its path in NBGRADER.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labcourse import assignment, release

from .handed_in import COURSE

LAB = "00_start_here"
FOUND = (
    os.environ.get("NBGRADER")
    or shutil.which("nbgrader", path=os.path.dirname(sys.executable))
    or shutil.which("nbgrader")
)

pytestmark = [
    pytest.mark.skipif(not FOUND, reason="nbgrader is not installed"),
    pytest.mark.timeout(900),
]
RIGHT = "def on_gpu(numbers):\n    return torch.tensor(numbers, device='cuda')"
WRONG = "def on_gpu(numbers):\n    return torch.tensor(numbers)"


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A released course of nbgrader's, and a kernel that is this Python."""
    room = tmp_path_factory.mktemp("nbgrader")
    question = '[[labs."00".written]]\nid = "00.why"\nquestion = "Why?"\npoints = 2\n'
    (room / "course.toml").write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', question))
    course = assignment.read(room / "course.toml")
    release.write(release.files(course, [course.lab("00")], "nbgrader"), room)
    kernel = room / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    return room


def run(room: Path, *command: str) -> None:
    paths = {
        "JUPYTER_PATH": str(room / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(room / "config"),
        "HOME": str(room),
        "LABKIT_VIRTUAL": "1",
    }
    # it calls alembic
    paths["PATH"] = os.pathsep.join([os.path.dirname(FOUND), os.environ["PATH"]])
    done = subprocess.run(
        [FOUND, *command], cwd=room, capture_output=True, text=True, env=os.environ | paths
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_nbgrader_hands_out_grades_and_gives_feedback(room):
    run(room, "generate_assignment", LAB)
    released = json.loads((room / "release" / LAB / f"{LAB}.ipynb").read_text())
    source = "\n".join("".join(cell["source"]) for cell in released["cells"])
    assert "SOLUTION" not in source and "HIDDEN" not in source and "device=" not in source
    assert re.search(r'labkit\.check\("00\.1", on_gpu\)', source)
    for student, answer in {"ada": RIGHT, "bob": WRONG, "cyd": None}.items():
        hand_in(room, student, released, answer)
    run(room, "autograde", LAB, "--create", "--ExecutePreprocessor.timeout=300")
    run(room, "generate_feedback", LAB)
    run(room, "export", "--to", "grades.csv")
    with (room / "grades.csv").open(newline="") as file:
        grades = {
            row["student_id"]: (float(row["score"]), float(row["max_score"]))
            for row in csv.DictReader(file)
        }
    assert grades == {"ada": (1, 3), "bob": (0, 3), "cyd": (0, 3)}
    assert (room / "feedback" / "ada" / LAB / f"{LAB}.html").exists()


def hand_in(room: Path, student: str, released: dict, answer: str | None) -> None:
    notebook = json.loads(json.dumps(released))
    for cell in notebook["cells"]:
        if answer and "exercise" in cell["metadata"].get("tags", []):
            cell["source"] = answer
    folder = room / "submitted" / student / LAB
    folder.mkdir(parents=True)
    (folder / f"{LAB}.ipynb").write_text(json.dumps(notebook))
