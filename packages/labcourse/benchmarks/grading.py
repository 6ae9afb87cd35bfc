"""Measure how long grading takes per submission, and whether the grader's memory stays flat.

    python benchmarks/grading.py [--count 200] [--workers 2] [--nbgrader PATH]
    python benchmarks/grading.py --lessons 10 11 12

The first command grades a class of mixed submissions, honest and not. With nbgrader's program it
grades the honest ones with that too, and prints the ratio of the times. The second command grades
one submission of each lesson, which has the lesson's solutions. It prints the seconds of all
processes in the sandbox, once it has started, and those that pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import psutil

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "packages" / "labcourse"))

from tests.handed_in import NOTEBOOKS, notebook, solution  # noqa: E402

from labcourse import assignment, backends, collect, examination, grading, release, results  # noqa: E402
from labcourse.sandbox import Sandbox  # noqa: E402

LAB, NUMBERS = "01_device_basics", ("01.1", "01.2", "01.3", "01.4", "01.5")
ODD = {  # every tenth submission does one of these
    "hangs": "while True: pass",
    "fills the memory": "held = []\nwhile True: held.append(bytes(256 << 20))",
    "prints without end": "while True: print('x' * 100000)",
    "ends": "import os; os._exit(0)",
    "reaches for its parent": "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    "replaces a measurement": "torch.cuda.memory_allocated = lambda *a: 0",
    "draws": "import matplotlib.pyplot as plt\nfor i in range(5):\n"
    "    plt.figure(); plt.plot(range(i + 2)); plt.show()",
    "leaves errors": "1 / 0",
    "starts processes": "import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '100'])",
    "is odd": "print('\\ud800')",
}


def course_in(folder: Path) -> assignment.Course:
    path = folder / "course.toml"
    limits = "[limits]\ncell_seconds = 5\ntrial_seconds = 5\nseconds = 20\nmemory = '1GiB'\n"
    path.write_text(
        f'course = "x"\nseed = "{"5" * 32}"\nnotebooks = "{NOTEBOOKS}"\n[labs."01"]\n{limits}'
    )
    return assignment.read(path)


def submission(number: int, answers: list[str]) -> bytes:
    odd = list(ODD.values())[number // 10 % len(ODD)] if number % 10 == 9 else f"# {number}"
    return notebook(
        odd, *answers[:-1], f"{answers[-1]}\n# {number}", number=NUMBERS[-1], name="copy_while"
    )


def memory_of_all() -> int:
    """Return the bytes of this process alone. The memory of the sandboxes ends with them."""
    return int(psutil.Process().memory_info().rss)


def graded(
    course: assignment.Course, source: Path, out: Path, workers: int
) -> tuple[float, list[int]]:
    """Return the seconds for all submissions, and this process's memory after each."""
    submissions, problems = collect.collect(source, course)
    store, used = grading.Store(out), []
    began = time.monotonic()
    grading.grade_all(
        course,
        submissions,
        store,
        workers,
        sandbox="bubblewrap",
        progress=lambda *line: used.append(memory_of_all()),
    )
    results.write(course, submissions, problems, store)
    return time.monotonic() - began, used


def with_nbgrader(
    program: str, course: assignment.Course, folder: Path, answers: list[str], count: int
) -> float:
    """Return the seconds per submission that nbgrader's autograde takes for honest notebooks."""
    release.write(release.files(course, list(course.labs), "nbgrader"), folder)
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    paths = {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "HOME": str(folder),
        "LABKIT_VIRTUAL": "1",
        "PYTHONPATH": str(ROOT),
    }
    paths["PATH"] = os.pathsep.join([os.path.dirname(program), os.environ["PATH"]])

    def run(*words: str) -> None:
        subprocess.run(
            [program, *words], cwd=folder, env=os.environ | paths, check=True, capture_output=True
        )

    run("generate_assignment", LAB)
    released = json.loads((folder / "release" / LAB / f"{LAB}.ipynb").read_text())
    for number in range(count):
        remaining = iter(answers)
        for cell in released["cells"]:
            if "exercise" in cell["metadata"].get("tags", []):
                cell["source"] = next(remaining)
        target = folder / "submitted" / f"s{number:03d}" / LAB
        target.mkdir(parents=True)
        (target / f"{LAB}.ipynb").write_text(json.dumps(released))
    began = time.monotonic()
    run("autograde", LAB, "--create", "--ExecutePreprocessor.timeout=300")
    return (time.monotonic() - began) / count


def solved(course: assignment.Course, lab: assignment.Assignment) -> bytes:
    """Return the notebook of a lab as it is handed out, with the lesson's solutions as answers."""
    handed_out = release.student_copy(course, lab)
    numbers = iter(lab.exercises)
    for cell in handed_out.cells:
        if "exercise" in cell.metadata.get("tags", []):
            cell.source = solution(next(numbers).number)
    return nbformat.writes(handed_out).encode()


def one_of_each(folder: Path, lessons: list[str]) -> None:
    """Grade one submission of each lesson, and print its seconds."""
    path = folder / "course.toml"
    labs = "".join(f'[labs."{lesson}"]\n' for lesson in lessons)
    path.write_text(f'seed = "{"5" * 32}"\nnotebooks = "{NOTEBOOKS}"\n{labs}')
    course = assignment.read(path)
    backend = backends.best(course.limits.scratch, "bubblewrap")
    with Sandbox(backend, course.limits) as sandbox:
        sandbox.reader.call(len, "", about="nothing")  # so that it has started
        sandbox.start()
        for lab in course.labs:
            data, given = solved(course, lab), release.handed_out(course, lab)
            used, began = processor_seconds(sandbox), time.monotonic()
            examined = examination.examine(data, "ada", lab, course, given, sandbox)
            passed, used = time.monotonic() - began, processor_seconds(sandbox) - used
            times = f"{used:.1f} s of processors, {passed:.1f} s"
            print(f"{lab.name}: {examined.points:g} points, {times}")


def processor_seconds(sandbox: Sandbox) -> float:
    """Return the processor seconds of the sandbox's processes, including those that have ended."""
    [server] = psutil.Process(sandbox._server.pid).children()
    return sum(server.cpu_times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nbgrader", metavar="PATH")
    parser.add_argument("--lessons", nargs="+", metavar="NN")
    options = parser.parse_args()
    if options.lessons:
        with tempfile.TemporaryDirectory() as temporary:
            one_of_each(Path(temporary), options.lessons)
        return
    answers = [solution(number) for number in NUMBERS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        course = course_in(folder)
        for number in range(options.count):
            path = folder / "in" / f"s{number:03d}" / f"{LAB}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_bytes(submission(number, answers))
        seconds, used = graded(course, folder / "in", folder / "out", options.workers)
        table = (folder / "out" / "grades.csv").read_text().splitlines()
        marked = sum(",5,5," in line for line in table)
        each = f"{seconds / options.count:.2f} s each"
        print(
            f"{options.count} submissions, {options.workers} workers: {seconds:.0f} s, {each}; "
            f"{marked} full marks"
        )
        quarter = len(used) // 4
        print(
            f"the grader's memory: {max(used[:quarter]) >> 20} MiB in the first quarter, "
            f"{max(used[-quarter:]) >> 20} MiB in the last"
        )
        if options.nbgrader:
            honest, few = folder / "honest", 8
            for number in range(few):
                path = honest / f"s{number:03d}" / f"{LAB}.ipynb"
                path.parent.mkdir(parents=True)
                path.write_bytes(submission(10 * number, answers))
            ours = graded(course, honest, folder / "honest_out", 1)[0] / few
            theirs = with_nbgrader(options.nbgrader, course, folder / "nbgrader", answers, few)
            print(
                f"an honest submission, one worker: {ours:.2f} s; with nbgrader {theirs:.2f} "
                f"s; ratio {ours / theirs:.2f}"
            )


if __name__ == "__main__":
    assert threading.active_count() == 1
    main()
