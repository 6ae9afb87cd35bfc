"""Estimate how many minutes a learner needs for a lesson.

Two readers estimated 100 to 150 minutes for the old form of lessons 1 to 4. This estimate gave 81
to 96 minutes for them. A cell is a dictionary as in a notebook's file.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDS_PER_MINUTE = 150
CELL_MINUTES = 2  # run it, look at the result, change it and run it again
PREDICTION_MINUTES = 1
EXERCISE_MINUTES = 4  # read the task and the verdicts
SOLUTION_LINE_MINUTES = 1
BREAK, FURTHER_BREAK = "## A break", "## Another break"

Cells = Sequence[Mapping[str, Any]]


def text(cell: Mapping[str, Any]) -> str:
    """Return the text of a cell. A file may have it as a list of lines."""
    return "".join(cell["source"])


def tags(cell: Mapping[str, Any]) -> list[str]:
    """Return the tags of a cell."""
    return cell["metadata"].get("tags", [])


def prose(cells: Cells) -> str:
    """Return the Markdown that a learner reads in the cells.

    Fenced code, addresses and solutions are left out.
    """
    readable = [
        text(cell)
        for cell in cells
        if cell["cell_type"] == "markdown" and "solution" not in tags(cell)
    ]
    without_code = re.sub(r"^```.*?^```", "", "\n".join(readable), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", without_code)


def words(cells: Cells) -> int:
    """Count the words of Markdown that a learner reads in the cells."""
    return len(re.findall(r"\w[\w'’.:_/-]*", prose(cells)))


def predictions(cells: Cells) -> int:
    """Count how often the cells ask a learner for a prediction."""
    return prose(cells).count("*Predict")


def teaching_cells(cells: Cells) -> list[Any]:
    """Return the code cells that are not a stub, a check or a progress report."""
    return [
        cell
        for cell in cells
        if cell["cell_type"] == "code"
        and "exercise" not in tags(cell)
        and not text(cell).startswith(("labkit.check(", "labkit.progress("))
    ]


def exercises(cells: Cells) -> int:
    """Count the exercises in the cells."""
    return sum("exercise" in tags(cell) for cell in cells)


def lines(source: str) -> int:
    """Count the lines of a source that are not empty."""
    return sum(bool(line.strip()) for line in source.splitlines())


def solution_lines(solution: Mapping[str, Any]) -> int:
    """Count the lines of a folded solution, without its `def` and its docstring."""
    code = re.search(r"```python\n(.*?)```", text(solution), re.DOTALL)
    if code is None:
        return 0
    return max(1, lines(code[1]) - 2)


def minutes(cells: Cells) -> float:
    """Estimate the minutes that a learner needs for the cells, with predictions and exercises."""
    solutions = [cell for cell in cells if "solution" in tags(cell)]
    return (
        words(cells) / WORDS_PER_MINUTE
        + CELL_MINUTES * len(teaching_cells(cells))
        + PREDICTION_MINUTES * predictions(cells)
        + EXERCISE_MINUTES * exercises(cells)
        + SOLUTION_LINE_MINUTES * sum(map(solution_lines, solutions))
    )


def sittings(cells: Cells) -> list[list[Any]]:
    """Split the cells of a lesson at its breaks. A lesson without a break is one sitting."""
    parts: list[list[Any]] = [[]]
    for cell in cells:
        if cell["cell_type"] == "markdown" and text(cell).startswith((BREAK, FURTHER_BREAK)):
            parts.append([])
        parts[-1].append(cell)
    return parts
