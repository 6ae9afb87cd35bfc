"""Write the notebooks that a course hands out: for students, for the instructor, and for nbgrader.

A release of the same course is the same bytes each time.
"""

import ast
import contextlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from labcourse.assignment import Assignment, Course
from labcourse.reading import PLACEHOLDER, checked_name, checked_number, puzzle_name
from labkit import checks
from labkit.puzzles import definitions

__all__ = ["drifted", "files", "write"]

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
FORMATS = ("labkit", "nbgrader", "gradescope")
FOLDED = re.compile(r" ?The solution is folded away below[^.]*\.")  # not true without solutions
SOLVED = re.compile(r"```python\n(.*?)```", re.DOTALL)
HOW = (
    "These are the exercises of the lesson `{lesson}`, which explains what they need. Fill in the "
    "cells below and run the check after each. It tries your answer on fresh inputs and says what "
    "it saw. Before you hand in, restart the kernel and run all cells from the top. Marks are "
    "given on other inputs."
)
CONTEST = (
    "The puzzles are a contest. After you have handed in, your functions are scored again, and the "
    "class sees all scores under pseudonyms. Your feedback page shows yours."
)
CONFIG = "nbgrader_config.py"
# Students' notebooks keep each stub. nbgrader would append `raise NotImplementedError()` to it.
NBGRADER_CONFIG = """c = get_config()
c.CourseDirectory.course_id = {course!r}
c.ClearSolutions.code_stub = {{"python": "# Your answer goes into the function above."}}
c.ClearSolutions.text_stub = {text!r}
"""


def files(course: Course, labs: list[Assignment], kind: str) -> dict[str, str | bytes]:
    """Return the files of a release: the content of each by its path.

    For Gradescope, `gradescope.files` adds zip files to them.

    Raises:
        ValueError: `kind` is no format, or the notebook holds an answer to an exercise.
    """
    if kind not in FORMATS:
        raise ValueError(f"there is no format {kind!r}. Choose one of {', '.join(FORMATS)}")
    found: dict[str, str | bytes] = {}
    for lab in labs:
        if kind == "nbgrader":
            if lab.puzzles:
                raise ValueError(
                    f"{lab.name}: nbgrader cannot score puzzles. Release them in another format, "
                    "and score them with `labkit course grade`"
                )
            if lab.variant:
                raise ValueError(
                    f"{lab.name}: variants have no solution, which nbgrader's source version "
                    "needs. Release them in another format"
                )
            found[f"source/{lab.name}/{lab.name}.ipynb"] = _text(nbgrader_source(course, lab))
        else:
            found[f"student/{lab.name}.ipynb"] = _text(student_copy(course, lab))
            found[f"instructor/{lab.name}.ipynb"] = _text(instructor_copy(course, lab))
    if kind == "nbgrader":
        name = re.sub(r"[^\w-]+", "_", course.name)
        found[CONFIG] = NBGRADER_CONFIG.format(course=name, text=PLACEHOLDER)
    return found


def write(released: dict[str, str | bytes], folder: Path) -> None:
    """Write the files of a release, and replace those of an earlier release.

    nbgrader's settings are kept if they have all lines of ours, and may have more.

    Raises:
        ValueError: nbgrader's settings lack some of our lines. Then nothing is written.
    """
    config = {name: text for name, text in released.items() if name == CONFIG}
    if (folder / CONFIG).exists() and drifted(config, folder):
        ours = "".join(f"\n    {line}" for line in str(released[CONFIG]).splitlines())
        raise ValueError(
            f"{folder / CONFIG} exists and lacks some of the settings for this course. Add these "
            f"lines to it, or choose another folder:{ours}"
        )
    for name, text in released.items():
        path = folder / name
        if name != CONFIG or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_encoded(text))


def drifted(released: dict[str, str | bytes], folder: Path) -> list[str]:
    """List the files in a folder that differ from a release, each with the reason.

    An instructor may have edited such a file, or the kit has changed since.
    """
    found = []
    for name, text in released.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
            continue
        there, ours = path.read_bytes(), _encoded(text)
        has_our_settings = name == CONFIG and set(ours.splitlines()) <= set(there.splitlines())
        if there != ours and not has_our_settings:
            found.append(f"{name} differs from what its lesson and the course file give now")
    return found


def _encoded(content: str | bytes) -> bytes:
    """Return the bytes of a file's content, in UTF-8."""
    return content.encode() if isinstance(content, str) else content


def student_copy(course: Course, lab: Assignment) -> NotebookNode:
    """Return the notebook for students, without solutions and outputs.

    The metadata of each cell that is marked names the exercise.
    """
    cells = [cell for cell in _cells(course, lab) if not _is_solution(cell)]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = FOLDED.sub("", cell.source)
    return _notebook(course, lab, cells)


def questions(course: Course, lab: Assignment) -> dict[str, str]:
    """Return the task of each exercise, as the lesson words it, in Markdown."""
    cells = student_copy(course, lab).cells
    texts = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = {item.number: definitions.find(item.number).task for item in lab.puzzles}
    for item in lab.exercises:
        # From the bold number to the next exercise, the next heading or the end.
        start = rf"\*\*{re.escape(item.number)}\*\*"
        text = re.search(rf"{start}(.*?)(?=\n\n\*\*\d|\n#|\Z)", texts, re.DOTALL)
        if text:
            found[item.number] = text[1].strip()
    return found


def stubs(course: Course, lab: Assignment) -> dict[str, str]:
    """Return the source of the cell that students get for each exercise."""
    found = {}
    for cell in _cells(course, lab):
        own = cell.metadata.get("labkit", {})
        if "exercise" in own:
            found[own["exercise"]] = cell.source
    return found


def solutions(course: Course, lab: Assignment) -> dict[str, list[str]]:
    """Return the published solutions of each exercise."""
    found: dict[str, list[str]] = {}
    number = ""
    for cell in _cells(course, lab):
        number = cell.metadata.get("labkit", {}).get("exercise", number)
        if _is_solution(cell):
            found.setdefault(number, []).extend(SOLVED.findall(cell.source))
    return found


def instructor_copy(course: Course, lab: Assignment) -> NotebookNode:
    """Return the notebook for the instructor, with each solution below its exercise."""
    return _notebook(course, lab, _cells(course, lab))


def handed_out(course: Course, lab: Assignment) -> frozenset[str]:
    """Return the sources of all cells that students get.

    Cells with these sources are not the students' own work.
    """
    cells = student_copy(course, lab).cells
    sources = {cell.source for cell in cells if "exercise" not in cell.metadata.get("tags", [])}
    return frozenset(sources - {PLACEHOLDER})


def nbgrader_source(course: Course, lab: Assignment) -> NotebookNode:
    """Return nbgrader's source version of a lab.

    `nbgrader generate_assignment` makes the students' version from it. Below each stub is the
    solution, between nbgrader's marks. The next cell checks the answer twice: once as students can,
    and once in hidden tests, with inputs that are drawn when the cell runs.

    Raises:
        ValueError: a solution has no exercise above it, or no code.
    """
    points = {task.number: task.points for task in lab.exercises}
    points |= {task.id: task.points for task in lab.written}
    names = {task.number: task.name for task in lab.exercises}
    cells: list[NotebookNode] = []
    stub: NotebookNode | None = None
    for cell in _cells(course, lab):
        own = cell.metadata.get("labkit", {})
        if _is_solution(cell):
            solved = SOLVED.findall(cell.source)
            if stub is None or not solved:
                raise ValueError(
                    f"{lab.name}.ipynb: a solution needs its exercise above it, and its code "
                    "between ```python and ```"
                )
            stub.source += f"\n\n### BEGIN SOLUTION\n{solved[0]}### END SOLUTION"
            continue
        if "exercise" in own:
            stub = cell
            name = f"answer-{own['exercise']}"
            _mark(cell, name, grade=False, solution=True, locked=False)
        elif "written" in own:
            name, worth = f"written-{own['written']}", points[own["written"]]
            _mark(cell, name, grade=True, solution=True, locked=False, points=worth)
        elif cell.cell_type == "code":
            number = checked_number(cell.source)
            if number in names:
                cell.source += (
                    "\n### BEGIN HIDDEN TESTS"
                    f'\nverdict = labkit.check("{number}", {names[number]})'
                    f'\nassert verdict.passed, "{number} " + verdict.message'
                    "\n### END HIDDEN TESTS"
                )
                name, worth = f"check-{number}", points[number]
                _mark(cell, name, grade=True, solution=False, locked=True, points=worth)
        cells.append(cell)
    return _notebook(course, lab, cells)


def _mark(cell: NotebookNode, name: str, **what: bool | float) -> None:
    """Add nbgrader's metadata, version 3, to a cell with the id `name`.

    `what` are the metadata's fields for this cell.
    """
    cell.id = re.sub(r"[^\w-]", "-", name)
    cell.metadata["nbgrader"] = {"grade_id": cell.id, "schema_version": 3, "task": False, **what}


def _notebook(course: Course, lab: Assignment, cells: list[NotebookNode]) -> NotebookNode:
    """Build a notebook that names the course and the lab in its metadata."""
    own = {"course": course.name, "lab": lab.name}
    return nbformat.from_dict(
        {
            "cells": cells,
            "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}, "labkit": own},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def _text(notebook: NotebookNode) -> str:
    """Validate a notebook, and return it as JSON."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def _cells(course: Course, lab: Assignment) -> list[NotebookNode]:
    """Return the lab's cells, with the solutions.

    They are the whole lesson, or its exercises after a cell that sets up what the exercises need.
    A notebook with puzzles is handed out whole, because its text has the rules and the hints.

    Raises:
        ValueError: the cell of an exercise is not a stub, or the cell of a puzzle does not have
            the wasteful function.
    """
    lesson = nbformat.read(course.notebooks / f"{lab.name}.ipynb", as_version=4)
    source = [_clean(cell) for cell in lesson.cells]
    if lab.variant:
        source = _with_variants(source)
    for cell, following in pairwise(source):
        if "exercise" in cell.metadata.get("tags", []):
            number, name = checked_number(following.source), checked_name(following.source)
            _require_stub(number or "", name or "", cell.source, f"{lab.name}.ipynb")
            cell.metadata["labkit"] = {"exercise": number}
        puzzle = puzzle_name(cell.source) if cell.cell_type == "code" else None
        if puzzle is not None:
            _require_original(definitions.find(puzzle), cell.source, f"{lab.name}.ipynb")
    written: list[NotebookNode] = []
    for question in lab.written:
        written += _question(question.id, question.question)
    worth = new_markdown_cell(f"{_worth(course, lab)}\n\n{_install(course)}", id="labkit-points")
    tasks = _task_indices(source)
    first = end = len(source)
    if tasks:
        first, end = tasks[0], tasks[-1] + 1
    if course.contents == "lesson" or lab.puzzles:
        return [*source[:first], worth, *source[first:end], *written, *source[end:]]
    exercises = [source[index] for index in tasks]
    for cell in exercises:
        if cell.cell_type == "markdown" and not _is_solution(cell):
            cell.source = _task_text(cell.source)
    opening = [
        new_markdown_cell(f"# {lab.title}\n\n{HOW.format(lesson=lab.name)}", id="labkit-lab"),
        worth,
        new_code_cell(_set_up(lab, source, tasks), id="labkit-set-up"),
    ]
    return [*opening, *exercises, *written]


def _with_variants(cells: list[NotebookNode]) -> list[NotebookNode]:
    """Put variants in the place of exercises. A variant has no solution."""
    variants = checks.variants()
    found: list[NotebookNode] = []
    is_replaced = False
    for cell, following in pairwise([*cells, new_markdown_cell("")]):
        is_stub = "exercise" in cell.metadata.get("tags", [])
        if is_stub:
            variant = variants.get(checked_number(following.source) or "")
            is_replaced = variant is not None
            if variant is not None:
                number = variant.check.number
                task = _task_text(found[-1].source)
                before = found[-1].source.removesuffix(task)
                found[-1].source = f"{before}**{number}** {variant.task}"
                cell.source = variant.stub
                following.source = f'labkit.check("{number}", {variant.name})'
        if not (is_replaced and _is_solution(cell)):
            found.append(cell)
    return found


def _task_indices(cells: list[NotebookNode]) -> list[int]:
    """Return the indices of the cells of all exercises.

    An exercise has the text above the stub, the stub, the check and the solution.
    """
    found = []
    for index, cell in enumerate(cells):
        if cell.cell_type == "code" and puzzle_name(cell.source) is not None:
            found += [index - 1, index]
        if "exercise" not in cell.metadata.get("tags", []):
            continue
        if (
            index
            and cells[index - 1].cell_type == "markdown"
            and not _is_solution(cells[index - 1])
        ):
            found.append(index - 1)
        found += [index, index + 1]
        if index + 2 < len(cells) and _is_solution(cells[index + 2]):
            found.append(index + 2)
    return found


def _is_solution(cell: NotebookNode) -> bool:
    """Return whether a cell has the tag `solution`."""
    return "solution" in cell.metadata.get("tags", [])


def _task_text(text: str) -> str:
    """Remove from a text everything before the bold number of its exercise."""
    number = re.search(r"(?<!\S)\*\*\d\d\.\d+\*\*", text)
    if number is None:
        return text
    return text[number.start() :]


def moment(time: datetime) -> str:
    """Write a time for a person to read, with its time zone."""
    return f"{time.day} {time:%B %Y, %H:%M} ({time.tzname()})"


def _late(course: Course) -> str:
    """Return a text that says what a late submission costs."""
    share = min(1.0, course.late_penalty)
    said = []
    if course.late_days == 1:
        said.append("The first late day costs nothing.")
    elif course.late_days:
        said.append(f"The first {course.late_days} late days cost nothing.")
    day = "further" if course.late_days else "late"
    if share == 1:
        said.append(f"A {day} day costs all points.")
    elif share:
        said.append(f"Each {day} day costs {100 * share:g}% of your points.")
    return " ".join(said) or "Nothing is deducted for lateness."


def _worth(course: Course, lab: Assignment) -> str:
    """Return a text with the due date of the lab and the points of its exercises and questions."""
    tasks = [(task.number, task.points) for task in lab.exercises if not task.is_puzzle]
    tasks += [(task.number, task.points) for task in lab.puzzles if task.points]
    tasks += [(task.id, task.points) for task in lab.written]
    said = [f"Due {moment(lab.due)}. {_late(course)}"] if lab.due else []
    if tasks:
        listed = ", ".join(f"{name}: {points:g}" for name, points in tasks)
        plural = "" if lab.points == 1 else "s"
        said.append(f"{lab.points:g} point{plural} in total: {listed}.")
    if lab.puzzles:
        said.append(CONTEST)
        if not any(task.points for task in lab.puzzles):
            said.append("The puzzles do not count toward your mark.")
    return " ".join(said)


def _install(course: Course) -> str:
    """Return a text that says what the notebook needs, and how to install it."""
    if course.install:
        cure = f"run `%pip install -q {course.install}` in a new cell, and restart the kernel"
    else:
        cure = "install the kit as your course describes it, and restart the kernel"
    return f"The notebook needs the package `labkit`. If the import fails, {cure}."


def _clean(cell: NotebookNode) -> NotebookNode:
    """Remove a cell's outputs, and metadata that only the kit's own tests need."""
    tags = [tag for tag in cell.metadata.get("tags", []) if not tag.startswith("nbval")]
    cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
    cell.pop("attachments", None)
    return cell


def _question(name: str, question: str) -> list[NotebookNode]:
    """Return a cell with the text of a written question, and a cell for its answer.

    `name` is the id of the question.
    """
    identity = re.sub(r"[^\w-]", "-", name)
    answer = new_markdown_cell(PLACEHOLDER, id=f"written-{identity}")
    answer.metadata = nbformat.from_dict({"labkit": {"written": name}})
    return [new_markdown_cell(f"**{name}** {question}", id=f"question-{identity}"), answer]


def _set_up(lab: Assignment, cells: list[NotebookNode], tasks: list[int]) -> str:
    """Write the cell that imports what the exercises use, and takes the GPUs that checks need.

    If the lesson gives a name several meanings, an exercise gets the one that the name has there.

    Args:
        cells: the cells of the lesson.
        tasks: the indices of the exercises' cells.
    """
    imports = {
        "torch": "import torch",
        "labkit": "import labkit",
        "nn": "from torch import nn",
    }
    known: dict[str, str] = {}
    for index, cell in enumerate(cells):
        if index in tasks:
            used = set(re.findall(r"\w+", _code(cell)))
            imports |= {name: line for name, line in known.items() if name in used}
        else:
            known |= _imports(cell)
    lines = sorted(
        imports.values(), key=lambda line: (line.startswith("from "), "labkit" in line, line)
    )
    gpus = max((checks.find(exercise.number).gpus for exercise in lab.exercises), default=1)
    return "\n".join([*lines, "", f"labkit.use(gpus={gpus})"])


def _code(cell: NotebookNode) -> str:
    """Return the code in a cell. In a Markdown cell, this is the code between backticks."""
    if cell.cell_type == "code":
        return str(cell.source)
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", cell.source, re.DOTALL))


def _imports(cell: NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield the names that a cell imports, each with a statement that imports only this name."""
    if cell.cell_type != "code":
        return
    lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        statements = ast.parse("\n".join(lines)).body
    except SyntaxError:  # the cell shows an error on purpose
        return
    for statement in statements:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for name in statement.names:
            single: ast.stmt = ast.Import([name])
            if isinstance(statement, ast.ImportFrom):
                single = ast.ImportFrom(statement.module, [name], statement.level)
            yield (name.asname or name.name).partition(".")[0], ast.unparse(single)


def _require_stub(number: str, name: str, source: str, notebook: str) -> None:
    """Raise ValueError unless the cell defines only the function `name` and holds no answer.

    A stub is a function with a docstring and `...`. Where the exercise is to repair a function, the
    stub is the function that the check expects. A comment could hold an answer, so a stub has none.
    `notebook` names the file in the message.
    """
    if number not in checks.with_variants():
        raise ValueError(
            f"{notebook}: there is no check for exercise {number}. Use the number of an exercise "
            "of the kit, or install the course that has this exercise"
        )
    script = checks.find(number).script
    expected = None
    if script:
        expected = ast.parse(inspect.getsource(script)).body[0]
    is_stub = False
    with contextlib.suppress(SyntaxError, ValueError, tokenize.TokenError):
        [function] = ast.parse(source).body
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        commented = any(token.type == tokenize.COMMENT for token in tokens)
        if isinstance(function, ast.FunctionDef) and function.name == name and not commented:
            is_stub = _is_stub(function, expected)
    if not is_stub:
        raise ValueError(
            f"exercise {number}: its cell in {notebook} is not the stub that the check expects, so "
            f"it may hold an answer. Nothing was written. Restore the function {name} as the kit "
            "hands it out, or release the kit's own lessons (no `notebooks` in the course file)"
        )


def _require_original(puzzle: definitions.Puzzle, source: str, notebook: str) -> None:
    """Raise ValueError unless the cell has only the wasteful function and the puzzle's call.

    A comment could hold an answer, so the cell has none. `notebook` names the file in the message.
    """
    expected: Any = ast.parse(inspect.getsource(puzzle.function)).body[0]
    is_original = False
    with contextlib.suppress(SyntaxError, ValueError, tokenize.TokenError):
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        commented = any(token.type == tokenize.COMMENT for token in tokens)
        [function, call] = ast.parse(source).body
        if isinstance(function, ast.FunctionDef) and isinstance(call, ast.Expr) and not commented:
            is_original = _content(function) == _content(expected)
    if not is_original:
        raise ValueError(
            f"puzzle {puzzle.name!r}: its cell in {notebook} is not the one of the kit, so it may "
            "hold an answer. Nothing was written. Restore the wasteful function, or release the "
            "kit's own notebook (no `notebooks` in the course file)"
        )


def _is_stub(function: ast.FunctionDef, expected: ast.stmt | None) -> bool:
    """Return whether a function equals the expected one, or has no statement but `...`."""
    if isinstance(expected, ast.FunctionDef):
        return _content(function) == _content(expected)
    return _content(function)[1] in (
        [],
        [ast.dump(ast.Expr(ast.Constant(...)))],
        [ast.dump(ast.Pass())],
    )


def _content(function: ast.FunctionDef) -> tuple[str, list[str]]:
    """Return the parameters and the statements of a function, to compare it with another.

    Notebooks leave out the types, and the docstring may be in any language, so both are ignored.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    has_docstring = ast.get_docstring(function) is not None
    statements = function.body[1:] if has_docstring else function.body
    return ast.dump(function.args), [ast.dump(statement) for statement in statements]
