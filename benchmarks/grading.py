"""Seconds a submission takes: the kit's grader in its sandbox, and nbgrader's autograde, side by side on the same notebooks.

    python benchmarks/grading.py [--count 40] [--workers 2] [--lesson 00] [--nbgrader PATH] [--memory 1000]

The lab imports torch, matplotlib and ipywidgets. nbgrader runs in as many processes, each with its share of the students and a gradebook
of its own. Without nbgrader its half is left out. `--memory N` grades N submissions more and prints the grader's own memory on the way.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from labcourse import assignment, collect, grading, release, wall

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "import matplotlib.pyplot as plt\nimport ipywidgets\n"
SOLVED = re.compile(r"```python\n(.*?)```", re.DOTALL)
MOST_OF_NBGRADER = 0.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lesson", default="00")
    parser.add_argument("--nbgrader", default=shutil.which("nbgrader"))
    parser.add_argument("--memory", type=int, default=0, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="labkit-grading-") as folder:
        place = Path(folder)
        (place / "course.toml").write_text(f'notebooks = "{ROOT / "notebooks"}"\n[labs."{options.lesson}"]\n')
        course = assignment.read(place / "course.toml")
        print(f"{options.count} submissions of {course.labs[0].name}, {options.workers} workers, {os.cpu_count()} cores")
        ours = kit_seconds(course, place, options.count, options.workers)
        print(f"labkit    {ours:6.2f} s a submission, sandbox: {wall.best(course.limits.scratch).name}")
        if options.memory:
            print_memory(course, place, options.memory, options.workers)
        if not options.nbgrader:
            print("nbgrader  is not installed: --nbgrader names it")
            return 0
        theirs = nbgrader_seconds(options.nbgrader, course, place, options.count, options.workers)
        print(f"nbgrader  {theirs:6.2f} s a submission")
        print(f"ratio     {ours / theirs:6.2f} (at most {MOST_OF_NBGRADER})")
        return int(ours > MOST_OF_NBGRADER * theirs)


def solved(course: assignment.Course, released: dict) -> dict:
    """The released notebook with every other solution in it."""
    notebook = json.loads(json.dumps(released))
    cells = release.instructor_copy(course, course.labs[0]).cells
    solutions = [SOLVED.search(cell.source)[1] for cell in cells if "solution" in cell.metadata.get("tags", [])]
    tasks = [cell for cell in notebook["cells"] if "exercise" in cell["metadata"].get("tags", [])]
    for task, solution in list(zip(tasks, solutions, strict=True))[::2]:
        task["source"] = solution
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    first["source"] = IMPORTS + "".join(first["source"])
    return notebook


def hand_in(notebook: dict, folder: Path, lab: str, count: int) -> None:
    for number in range(count):
        path = folder / f"s{number:04d}" / lab / f"{lab}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(notebook))


def kit_seconds(course: assignment.Course, place: Path, count: int, workers: int) -> float:
    lab = course.labs[0]
    hand_in(solved(course, release.student_copy(course, lab)), place / "in", lab.name, count)
    began = time.monotonic()
    command = [sys.executable, "-m", "labkit", "course", "grade", place / "in", "--out", place / "out", "--workers", str(workers)]
    done = subprocess.run([*command, "--course", place / "course.toml"], capture_output=True, text=True)
    if done.returncode or f"{count} graded" not in done.stdout:
        sys.exit(done.stderr[-2000:])
    return (time.monotonic() - began) / count


def print_memory(course: assignment.Course, place: Path, count: int, workers: int) -> None:
    """Of the process that grades; the sandboxes' own come and go."""
    lab = course.labs[0]
    hand_in(solved(course, release.student_copy(course, lab)), place / "many", lab.name, count)
    submissions, _ = collect.collect(place / "many", course)
    seen = []

    def look(line: str, done: float | None = None) -> None:
        if done is not None:
            seen.append(psutil.Process().memory_info().rss)
            if len(seen) % max(1, count // 10) == 0:
                print(f"memory    {seen[-1] / (1 << 20):6.0f} MiB after {len(seen)} submissions")

    grading.grade_all(course, submissions, grading.Store(place / "many-out"), workers, progress=look)
    print(f"memory    {(seen[-1] - seen[len(seen) // 10]) / (1 << 20):+6.1f} MiB from the first tenth to the last")


def nbgrader_seconds(nbgrader: str, course: assignment.Course, place: Path, count: int, workers: int) -> float:
    lab, room = course.labs[0], place / "nbgrader"
    release.write(release.files(course, [lab], "nbgrader"), room)
    kernel = room / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    paths = {"JUPYTER_PATH": str(room / "jupyter"), "LABKIT_VIRTUAL": "1", "PYTHONPATH": str(ROOT), "HOME": str(room)}
    environment = os.environ | paths | {"PATH": os.pathsep.join([os.path.dirname(nbgrader), os.environ["PATH"]])}

    def run(*words: str) -> subprocess.Popen:
        return subprocess.Popen([nbgrader, *words], cwd=room, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    wait(run("generate_assignment", lab.name))
    released = json.loads((room / "release" / lab.name / f"{lab.name}.ipynb").read_text())
    hand_in(solved(course, released), room / "submitted", lab.name, count)
    students = [f"s{number:04d}" for number in range(count)]
    shares = [[name for name in students if int(name[1:]) % workers != share] for share in range(workers)]
    for share in range(workers):
        shutil.copy(room / "gradebook.db", room / f"gradebook{share}.db")
    began = time.monotonic()
    started = [
        run(
            "autograde", lab.name, "--create", f"--CourseDirectory.student_id_exclude={','.join(others)}",
            f"--CourseDirectory.db_url=sqlite:///{room}/gradebook{share}.db", "--ExecutePreprocessor.timeout=300",
        )
        for share, others in enumerate(shares)
    ]  # fmt: skip
    for process in started:
        wait(process)
    seconds = (time.monotonic() - began) / count
    graded = len(list((room / "autograded").glob(f"*/{lab.name}/{lab.name}.ipynb")))
    if graded != count:
        sys.exit(f"nbgrader graded {graded} of {count}")
    return seconds


def wait(process: subprocess.Popen) -> None:
    _, said = process.communicate()
    if process.returncode:
        sys.exit(said[-2000:])


if __name__ == "__main__":
    sys.exit(main())
