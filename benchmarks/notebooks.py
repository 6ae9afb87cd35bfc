"""Figures about the form of the lessons, and the seconds and the memory that a lesson takes.

    python benchmarks/notebooks.py [--run]

`--run` executes each lesson on virtual GPUs. It adds the lesson's seconds, and the peak memory of
its kernel and of all processes that it starts (Linux). The exit status is 1 if a figure is outside
its bounds.
"""

import os
import sys
from pathlib import Path
from statistics import median

import nbformat

from benchmarks.lesson_runs import lessons, run
from labkit.reading_time import (
    FURTHER_BREAK,
    exercises,
    lines,
    minutes,
    predictions,
    sittings,
    tags,
    teaching_cells,
    words,
)

Cells = list[nbformat.NotebookNode]

INTRODUCTION = "00"  # it is shorter, and has one exercise

BOUNDS = {
    "words": (0, 1400),
    "predictions": (6, 10),
    "cells": (6, 15),
    "median lines": (3, 12),
    "most lines": (1, 17),
    "exercises": (2, 6),
    "minutes": (0, 60),
    "first exercise": (0, 10),
}
INTRODUCTION_BOUNDS = BOUNDS | {"predictions": (1, 3), "cells": (1, 6), "exercises": (1, 1)}

# bytes of a kernel and its processes; with a server this is well within Binder
MEMORY_LIMIT = 1 << 30
SECONDS_LIMIT = 180  # of all lessons, one after the other
MORE = {"cells": 5, "predictions": 8, "exercises": 2}  # what a third sitting may add to a lesson


def cells(path: Path) -> Cells:
    """Return all cells of a notebook."""
    return nbformat.read(path, as_version=4).cells


def before_first_exercise(some_cells: Cells) -> Cells:
    """Return the cells before the statement of the first exercise."""
    stubs = [index for index, cell in enumerate(some_cells) if "exercise" in tags(cell)]
    if stubs:
        return some_cells[: stubs[0] - 1]
    return some_cells


def style(path: Path) -> dict[str, float]:
    """Return the figures of one lesson, named as in BOUNDS.

    The lines are the non-empty lines of each teaching cell. Cells that write a whole file do not
    count. The words and the minutes are those of the longest sitting.
    """
    lesson = cells(path)
    teaching = teaching_cells(lesson)
    sizes = [lines(cell.source) for cell in teaching if not cell.source.startswith("%%")]
    return {
        "words": max(map(words, sittings(lesson))),
        "predictions": predictions(lesson),
        "cells": len(teaching),
        "median lines": median(sizes),
        "most lines": max(sizes),
        "exercises": exercises(lesson),
        "minutes": round(max(map(minutes, sittings(lesson)))),
        "first exercise": round(minutes(before_first_exercise(lesson))),
    }


def bounds(path: Path) -> dict[str, tuple[int, int]]:
    """Return the lowest and the highest value of each figure of this lesson."""
    if path.name[:2] == INTRODUCTION:
        return INTRODUCTION_BOUNDS
    further = sum(cell.source.startswith(FURTHER_BREAK) for cell in cells(path))
    more = {
        name: (BOUNDS[name][0], BOUNDS[name][1] + number * further) for name, number in MORE.items()
    }
    return BOUNDS | more


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--run"]):
        print(f"{' '.join(arguments)}: choose --run, or nothing", file=sys.stderr)
        return 2
    os.environ["LABKIT_VIRTUAL"] = "1"  # the kernels inherit it
    running = bool(arguments)
    header = f"{'':26}" + "".join(f"{name:>15}" for name in BOUNDS)
    print(header + ("       seconds        memory" if running else ""))
    limits = "".join(f"{f'{low}–{high}':>15}" for low, high in BOUNDS.values())
    print(f"{'bounds of a lesson':26}{limits}")
    outside, total = [], 0.0
    for path in lessons():
        figures = style(path)
        for name, (low, high) in bounds(path).items():
            if not low <= figures[name] <= high:
                outside.append(f"{path.stem}: {name}")
        row = f"{path.stem:26}" + "".join(f"{figures[name]:>15g}" for name in BOUNDS)
        if running:
            seconds, memory = run(path)
            total += seconds
            if memory > MEMORY_LIMIT:
                outside.append(f"{path.stem}: memory")
            row += f"{seconds:>12.1f} s{memory / (1 << 20):>10.0f} MiB"
        print(row, flush=True)
    if running:
        print(f"all lessons, one after the other: {total:.0f} s, at most {SECONDS_LIMIT} s")
        if total > SECONDS_LIMIT:
            outside.append("all lessons: seconds")
    message = "every figure is within its bounds"
    if outside:
        message = "outside the bounds: " + ", ".join(outside)
    print(message)
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
