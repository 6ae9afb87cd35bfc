"""The style of the lessons in figures, beside the form that a lesson keeps to; and what running them takes.

    python benchmarks/notebooks.py [--run]

`--run` executes each lesson on virtual GPUs and adds its seconds and the peak of the memory of its kernel and all that it starts (Linux).
Exits 1 when a figure is outside its bounds.
"""

import os
import re
import sys
import time
from pathlib import Path
from statistics import median

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
INTRODUCTION = "00"  # it is shorter, and has one exercise
BOUNDS = {
    "words": (1200, 1400),
    "predictions": (6, 10),
    "cells": (8, 15),
    "median lines": (3, 10),
    "most lines": (1, 17),
    "exercises": (5, 6),
}
INTRODUCTION_BOUNDS = BOUNDS | {"words": (400, 700), "predictions": (1, 3), "cells": (1, 6), "exercises": (1, 1)}
MEMORY_LIMIT = 1 << 30  # bytes of a kernel and of the processes that it starts: with a server, well within what Binder gives
SECONDS_LIMIT = 180  # of all lessons, one after the other


def lessons() -> list[Path]:
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def cells(path: Path) -> list[nbformat.NotebookNode]:
    return nbformat.read(path, as_version=4).cells


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def prose(path: Path) -> str:
    """What a learner reads: the Markdown, without code in fences, addresses of links, and the folded solutions."""
    text = "\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown" and "solution" not in tags(cell))
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(path: Path) -> int:
    return len(re.findall(r"\w[\w'’.:_/-]*", prose(path)))


def predictions(path: Path) -> int:
    """How often a learner is asked to predict, in whatever words the sentence goes on."""
    return prose(path).count("*Predict")


def teaching_cells(path: Path) -> list[nbformat.NotebookNode]:
    """The code cells besides those of exercises, their checks and what is open."""
    code = [cell for cell in cells(path) if cell.cell_type == "code"]
    return [cell for cell in code if "exercise" not in tags(cell) and not cell.source.startswith(("labkit.check(", "labkit.progress("))]


def exercises(path: Path) -> int:
    return sum("exercise" in tags(cell) for cell in cells(path))


def lines(cell: nbformat.NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def style(path: Path) -> dict[str, float]:
    """The figures of one lesson, named as in BOUNDS; lines are the non-empty ones of its teaching cells but those that are a whole file."""
    teaching = teaching_cells(path)
    sizes = [lines(cell) for cell in teaching if not cell.source.startswith("%%")]
    return {
        "words": words(path),
        "predictions": predictions(path),
        "cells": len(teaching),
        "median lines": median(sizes),
        "most lines": max(sizes),
        "exercises": exercises(path),
    }


def bounds(path: Path) -> dict[str, tuple[int, int]]:
    return INTRODUCTION_BOUNDS if path.name[:2] == INTRODUCTION else BOUNDS


def run(path: Path, folder: Path = FOLDER, kernel: str = "python3") -> tuple[float, int]:
    """Seconds that the whole lesson takes, with the kernel's start, and the peak of the memory of all its processes, in bytes.

    It runs in `folder`, in the kernel of that name. Raises nbclient's CellExecutionError where a cell fails.
    """
    from nbclient import NotebookClient

    from benchmarks.process_memory import watched

    client = NotebookClient(nbformat.read(path, as_version=4), kernel_name=kernel, resources={"metadata": {"path": str(folder)}})
    start = time.perf_counter()
    with client.setup_kernel(), watched(client.km.provisioner.pid) as memory:
        for index, cell in enumerate(client.nb.cells):
            client.execute_cell(cell, index)
        seconds = time.perf_counter() - start
    return seconds, memory.peak


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--run"]):
        print(f"{' '.join(arguments)}: choose --run, or nothing", file=sys.stderr)
        return 2
    os.environ["LABKIT_VIRTUAL"] = "1"  # the kernels inherit it
    running = bool(arguments)
    print(f"{'':26}" + "".join(f"{name:>14}" for name in BOUNDS) + ("       seconds        memory" if running else ""))
    print(f"{'a lesson':26}" + "".join(f"{f'{low}–{high}':>14}" for low, high in BOUNDS.values()))
    outside, total = [], 0.0
    for path in lessons():
        figures = style(path)
        outside += [f"{path.stem}: {name}" for name, (low, high) in bounds(path).items() if not low <= figures[name] <= high]
        told = f"{path.stem:26}" + "".join(f"{figures[name]:>14g}" for name in BOUNDS)
        if running:
            seconds, memory = run(path)
            total += seconds
            outside += [f"{path.stem}: memory"] * (memory > MEMORY_LIMIT)
            told += f"{seconds:>12.1f} s{memory / (1 << 20):>10.0f} MiB"
        print(told, flush=True)
    if running:
        print(f"all lessons, one after the other: {total:.0f} s, at most {SECONDS_LIMIT} s")
        outside += ["all lessons: seconds"] * (total > SECONDS_LIMIT)
    print("outside the bounds: " + ", ".join(outside) if outside else "every figure is within its bounds")
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
