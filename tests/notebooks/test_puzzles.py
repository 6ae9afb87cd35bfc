"""The form of the puzzles' notebook. Each puzzle has its task, its cell and three hints."""

import inspect
import re

import pytest

from benchmarks.lesson_runs import FOLDER
from benchmarks.notebooks import cells
from gpulessons.puzzles import PUZZLES
from labkit.puzzles.definitions import COPIES_TO_HOST

NOTEBOOK = cells(FOLDER / "puzzles.ipynb")
LONGEST = 15  # lines of a function below its `def`
HINT = r"<details><summary>Hint {}.*?</summary>\n\n"


def of(puzzle):
    """Return the cells of a puzzle: its task, its code and its hints."""
    ending = f'labkit.puzzle("{puzzle.name}", {puzzle.function.__name__})'
    [index] = [i for i, cell in enumerate(NOTEBOOK) if cell.source.endswith(ending)]
    return NOTEBOOK[index - 1 : index + 2]


each_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)


def test_the_notebook_begins_with_its_gpu_and_has_all_puzzles_in_order():
    codes = [cell for cell in NOTEBOOK if cell.cell_type == "code"]
    assert codes[0].source.endswith("labkit.use(gpus=1)")
    called = [re.search(r'labkit\.puzzle\("(.+?)"', cell.source)[1] for cell in codes[1:]]
    assert called == [puzzle.name for puzzle in PUZZLES]
    assert len(set(called)) == len(called)


@each_puzzle
def test_the_cell_has_the_original_function_and_is_stored_unsolved(puzzle):
    _, code, _ = of(puzzle)
    source = inspect.getsource(puzzle.function).strip()
    assert code.source == (
        f'{source}\n\n\nlabkit.puzzle("{puzzle.name}", {puzzle.function.__name__})'
    )
    assert 3 <= len(source.splitlines()) - 1 <= LONGEST
    shown, figure, _ = code.outputs
    assert shown["data"]["text/plain"].startswith(f"{puzzle.name} Not yet: the values are right")
    assert "image/png" in figure["data"]


@each_puzzle
def test_the_text_has_the_task_the_budget_and_the_lesson(puzzle):
    number = PUZZLES.index(puzzle) + 1
    text = of(puzzle)[0].source
    assert text.startswith(f"## {number}. {puzzle.name[0].upper()}{puzzle.name[1:]}\n")
    assert puzzle.task in text
    assert f"{puzzle.score.name}, at most {puzzle.score.text(puzzle.budget)}" in text
    for measure, most in puzzle.limits.items():
        if measure is not COPIES_TO_HOST:  # the rules have this limit
            assert f"{measure.name}, at most {measure.text(most)}" in text
    [link] = re.findall(r"\*\*Lesson:\*\* \[\d+\]\((.+?)\)", text)
    assert link.startswith(f"{puzzle.lesson}_") and (FOLDER / link).is_file()


@each_puzzle
def test_three_hints_open_one_after_the_other_and_none_is_code(puzzle):
    hints = of(puzzle)[2].source
    within = "".join(HINT.format(number) + r".+?" for number in (1, 2, 3))
    assert re.fullmatch(within + r"\n\n</details>\n\n</details>\n\n</details>", hints, re.DOTALL)
    assert "```" not in hints and "def " not in hints
