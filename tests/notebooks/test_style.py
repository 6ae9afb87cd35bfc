"""The form of all lessons. `test_anatomy.py` has the rules of their anatomy."""

import ast
import re
from itertools import pairwise

import pytest

from benchmarks import notebooks as figures
from benchmarks.lesson_runs import lessons
from benchmarks.notebooks import cells
from labkit.reading_time import prose, tags, teaching_cells

LESSONS = lessons()
LONGEST_NAME = (
    28  # characters, with its ending, that JupyterLab's file browser shows at its usual width
)
AVOIDED = re.compile(r"\b(simply|just|obviously)\b", re.IGNORECASE)

lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@lessons
def test_its_name_is_whole_in_the_file_browser(path):
    assert len(path.name) <= LONGEST_NAME


@lessons
def test_first_code_cell_says_what_the_lesson_runs_on(path):
    first = teaching_cells(cells(path))[0]
    assert "import torch" in first.source and "labkit.use(gpus=" in first.source
    assert any("virtual GPU" in output.get("text", "") for output in first.outputs)


@lessons
@pytest.mark.parametrize("name", figures.BOUNDS)
def test_the_figures_of_a_lesson_are_within_their_bounds(path, name):
    """Check the numbers of words, predictions, code cells, their lines, exercises and minutes."""
    low, high = figures.bounds(path)[name]
    assert low <= figures.style(path)[name] <= high


@lessons
def test_text_is_before_every_code_cell_that_shows_something(path):
    """Check that two code cells follow each other only if the first one prints nothing."""
    all_cells = cells(path)
    for before, cell in pairwise(all_cells):
        if before.cell_type == cell.cell_type == "code" and not cell.source.startswith(
            "labkit.check("
        ):
            assert before.outputs == [], cell.source


@lessons
def test_prose_avoids_belittling_words(path):
    assert AVOIDED.findall(prose(cells(path))) == []


@lessons
def test_exercises_have_a_stub_a_check_and_a_folded_solution(path):
    all_cells = cells(path)
    stubs = [index for index, cell in enumerate(all_cells) if "exercise" in tags(cell)]
    for number, index in enumerate(stubs, start=1):
        statement, stub, check, solution = all_cells[index - 1 : index + 3]
        exercise = f"{path.name[:2]}.{number}"
        name = re.match(r"def (\w+)\(", stub.source)[1]
        assert f"**{exercise}**" in statement.source and name in statement.source
        assert stub.outputs == []
        assert check.source == f'labkit.check("{exercise}", {name})'
        assert check.outputs[0]["data"]["text/plain"] == f"{exercise} not attempted"
        assert "solution" in tags(solution)
        assert solution.source.startswith("<details>") and solution.source.endswith("</details>")
        assert f"def {name}(" in solution.source


@lessons
def test_a_lesson_ends_with_what_is_done_and_what_is_open(path):
    last, number = cells(path)[-1], path.name[:2]
    assert last.source == f'labkit.progress("{number}")'
    assert last.outputs[0]["data"]["text/plain"].startswith(f"Lesson {number}: 0 of ")


@lessons
def test_cells_that_print_are_stored_with_their_output(path):
    """Comparing stored outputs proves nothing about a cell without an output."""
    for cell in teaching_cells(cells(path)):
        assert bool(cell.outputs) or not shows(cell.source), cell.source


def shows(source: str) -> bool:
    """Return whether the cell ends in a value, or prints outside its functions."""
    source = re.sub(r"^%.*$", "", source, flags=re.MULTILINE)  # IPython's magics
    statements = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef)]
    for statement in statements:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("print", "attempt"):
                return True
    if not statements or not isinstance(statements[-1], ast.Expr):
        return False
    return not isinstance(statements[-1].value, ast.Constant)


@lessons
def test_a_timeline_that_is_used_was_asked_for(path):
    """Real GPUs record a timeline only if `record` is asked for one.

    Virtual GPUs always record one, so a test on them would not notice.
    """
    source = "\n".join(
        re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE)
        for cell in teaching_cells(cells(path))
    )
    tree = ast.parse(source)
    with_timeline, without = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and ast.unparse(node.context_expr).startswith(
            "labkit.record("
        ):
            name = ast.unparse(node.optional_vars)
            if "timeline=True" in ast.unparse(node.context_expr):
                with_timeline.add(name)
            else:
                without.add(name)
    used = {
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("plot_timeline", "busy", "host_waited", "export_chrome")
    }
    assert not used & (without - with_timeline)
