"""Handing out: copies of the lessons' notebooks for students, for the instructor, and for nbgrader. The same bytes each time."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from labcourse.assignment import Assignment, Course
from labcourse.reading import PLACEHOLDER, checked_name, checked_number
from labkit import checks

__all__ = ["drifted", "files", "write"]

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
FORMATS = ("labkit", "nbgrader", "gradescope")
FOLDED = re.compile(r" ?The solution is folded away below[^.]*\.")  # said in lessons, where it is
SOLVED = re.compile(r"```python\n(.*?)```", re.DOTALL)
HOW = (
    "Fill in the cells below and run the check after each: it tries your answer on fresh inputs and says what it saw. "
    "Before you hand in, restart the kernel and run all cells from the top. Marks are given on other inputs."
)
CONFIG = "nbgrader_config.py"
# The students' version keeps each stub as it is; nbgrader would put `raise NotImplementedError()` below it.
NBGRADER_CONFIG = """c = get_config()
c.CourseDirectory.course_id = {course!r}
c.ClearSolutions.code_stub = {{"python": "# Your answer goes into the function above."}}
c.ClearSolutions.text_stub = {text!r}
"""


def files(course: Course, labs: list[Assignment], kind: str) -> dict[str, str | bytes]:
    """All that a release consists of: texts by their path. (For Gradescope, `gradescope.files` adds its zip files.)

    Raises ValueError when there is no such format, and, naming it, for an exercise that was answered in the notebook.
    """
    if kind not in FORMATS:
        raise ValueError(f"there is no format {kind!r}; there are {', '.join(FORMATS)}")
    found: dict[str, str | bytes] = {}
    for lab in labs:
        if kind == "nbgrader":
            found[f"source/{lab.name}/{lab.name}.ipynb"] = _text(nbgrader_source(course, lab))
        else:
            found[f"student/{lab.name}.ipynb"] = _text(student_copy(course, lab))
            found[f"instructor/{lab.name}.ipynb"] = _text(instructor_copy(course, lab))
    if kind == "nbgrader":
        found[CONFIG] = NBGRADER_CONFIG.format(course=re.sub(r"[^\w-]+", "_", course.name), text=PLACEHOLDER)
    return found


def write(released: dict[str, str | bytes], folder: Path) -> None:
    """Write the files, over those of an earlier release; but nbgrader's settings may have more lines, and stay.

    Raises ValueError, and writes nothing, where those settings lack some of ours.
    """
    if (folder / CONFIG).exists() and drifted({name: text for name, text in released.items() if name == CONFIG}, folder):
        ours = "".join(f"\n    {line}" for line in str(released[CONFIG]).splitlines())
        raise ValueError(f"{folder / CONFIG} has settings of its own: put these lines into it, or choose another folder{ours}")
    for name, text in released.items():
        path = folder / name
        if name != CONFIG or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if isinstance(text, str) else text)


def drifted(released: dict[str, str | bytes], folder: Path) -> list[str]:
    """The files in a folder that are no longer what a release would write, each with the reason."""
    found = []
    for name, text in released.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
            continue
        there, ours = path.read_bytes(), text.encode() if isinstance(text, str) else text
        if there != ours and not (name == CONFIG and set(ours.splitlines()) <= set(there.splitlines())):
            found.append(f"{name} differs from what its lesson and the course file give now")
    return found


def student_copy(course: Course, lab: Assignment) -> NotebookNode:
    """What students get: no solution, no output. The cells that are marked say which exercise they are."""
    cells = [cell for cell in _cells(course, lab) if "solution" not in cell.metadata.get("tags", [])]
    for cell in cells:
        cell.source = FOLDED.sub("", cell.source) if cell.cell_type == "markdown" else cell.source
    return _notebook(course, lab, cells)


def questions(course: Course, lab: Assignment) -> dict[str, str]:
    """What is asked in each exercise, as the lesson says it, in Markdown."""
    texts = "\n\n".join(cell.source for cell in student_copy(course, lab).cells if cell.cell_type == "markdown")
    found = {
        item.number: re.search(rf"\*\*{re.escape(item.number)}\*\*(.*?)(?=\n\n\*\*\d|\n#|\Z)", texts, re.DOTALL) for item in lab.exercises
    }
    return {number: text[1].strip() for number, text in found.items() if text}


def stubs(course: Course, lab: Assignment) -> dict[str, str]:
    """The cell that students get for each exercise."""
    cells = _cells(course, lab)
    return {cell.metadata["labkit"]["exercise"]: cell.source for cell in cells if "exercise" in cell.metadata.get("labkit", {})}


def solutions(course: Course, lab: Assignment) -> dict[str, list[str]]:
    """The published solutions of each exercise."""
    found: dict[str, list[str]] = {}
    number = ""
    for cell in _cells(course, lab):
        number = cell.metadata.get("labkit", {}).get("exercise", number)
        if "solution" in cell.metadata.get("tags", []):
            found.setdefault(number, []).extend(SOLVED.findall(cell.source))
    return found


def instructor_copy(course: Course, lab: Assignment) -> NotebookNode:
    """The same with each solution below its exercise."""
    return _notebook(course, lab, _cells(course, lab))


def handed_out(course: Course, lab: Assignment) -> frozenset[str]:
    """The sources of the cells that students get, all but the exercises' own and the places for written answers."""
    cells = student_copy(course, lab).cells
    sources = {cell.source for cell in cells if "exercise" not in cell.metadata.get("tags", [])}
    return frozenset(sources - {PLACEHOLDER})


def nbgrader_source(course: Course, lab: Assignment) -> NotebookNode:
    """nbgrader's source version, from which `nbgrader generate_assignment` makes the students'.

    Below each stub stands the solution, between nbgrader's marks; the cell after it checks the answer as the student can, and then once
    more with inputs drawn in that moment.
    """
    points = {task.number: task.points for task in lab.exercises} | {task.id: task.points for task in lab.written}
    names = {task.number: task.name for task in lab.exercises}
    cells: list[NotebookNode] = []
    for cell in _cells(course, lab):
        own = cell.metadata.get("labkit", {})
        if "solution" in cell.metadata.get("tags", []):
            task = next((earlier for earlier in reversed(cells) if "exercise" in earlier.metadata.get("labkit", {})), None)
            solved = SOLVED.findall(cell.source)
            if task is None or not solved:
                raise ValueError(f"{lab.name}.ipynb: a solution needs its exercise above it, and its code between ```python and ```")
            task.source += f"\n\n### BEGIN SOLUTION\n{solved[0]}### END SOLUTION"
            continue
        if "exercise" in own:
            _mark(cell, f"answer-{own['exercise']}", grade=False, solution=True, locked=False)
        elif "written" in own:
            _mark(cell, f"written-{own['written']}", grade=True, solution=True, locked=False, points=points[own["written"]])
        elif cell.cell_type == "code" and (number := checked_number(cell.source)) in names:
            cell.source += (
                f'\n### BEGIN HIDDEN TESTS\nverdict = labkit.check("{number}", {names[number]})\n'
                f'assert verdict.passed, "{number} " + verdict.message\n### END HIDDEN TESTS'
            )
            _mark(cell, f"check-{number}", grade=True, solution=False, locked=True, points=points[number])
        cells.append(cell)
    return _notebook(course, lab, cells)


def _mark(cell: NotebookNode, name: str, **what: bool | float) -> None:
    """nbgrader's metadata, version 3."""
    cell.id = re.sub(r"[^\w-]", "-", name)
    cell.metadata["nbgrader"] = {"grade_id": cell.id, "schema_version": 3, "task": False, **what}


def _notebook(course: Course, lab: Assignment, cells: list[NotebookNode]) -> NotebookNode:
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
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def _cells(course: Course, lab: Assignment) -> list[NotebookNode]:
    """The lab's cells, solutions included: the whole lesson, or its exercises after a cell that sets up what they need.

    Raises ValueError for an exercise's cell that is no stub.
    """
    source = [_clean(cell) for cell in nbformat.read(course.notebooks / f"{lab.name}.ipynb", as_version=4).cells]
    for cell, following in pairwise(source):
        if "exercise" in cell.metadata.get("tags", []):
            number, name = checked_number(following.source), checked_name(following.source)
            _require_stub(number or "", name or "", cell.source, f"{lab.name}.ipynb")
            cell.metadata["labkit"] = {"exercise": number}
    written = [cell for question in lab.written for cell in _question(question.id, question.question)]
    worth = new_markdown_cell(_worth(lab), id="labkit-points")
    tasks = _task_indices(source)
    first, end = (tasks[0], tasks[-1] + 1) if tasks else (len(source), len(source))
    if course.contents == "lesson":
        return [*source[:first], worth, *source[first:end], *written, *source[end:]]
    teaching = [cell for index, cell in enumerate(source) if index not in tasks]
    exercises = [source[index] for index in tasks]
    for cell in exercises:
        if cell.cell_type == "markdown" and not _is_solution(cell):
            cell.source = _task_text(cell.source)
    opening = [
        new_markdown_cell(f"# {lab.title}\n\n{HOW}", id="labkit-lab"),
        worth,
        new_code_cell(_set_up(lab, teaching, exercises), id="labkit-set-up"),
    ]
    return [*opening, *exercises, *written]


def _task_indices(cells: list[NotebookNode]) -> list[int]:
    """Return the indices of the cells of all exercises: the task above each stub, the stub, the check and the solution."""
    found = []
    for index, cell in enumerate(cells):
        if "exercise" not in cell.metadata.get("tags", []):
            continue
        if index and cells[index - 1].cell_type == "markdown" and not _is_solution(cells[index - 1]):
            found.append(index - 1)
        found += [index, index + 1]
        if index + 2 < len(cells) and _is_solution(cells[index + 2]):
            found.append(index + 2)
    return found


def _is_solution(cell: NotebookNode) -> bool:
    return "solution" in cell.metadata.get("tags", [])


def _task_text(text: str) -> str:
    """Return the text from the exercise's number on, which is bold. Before it a lesson may say something else."""
    number = re.search(r"(?<!\S)\*\*\d\d\.\d+\*\*", text)
    return text[number.start() :] if number else text


def moment(time: datetime) -> str:
    """A time as a person reads it."""
    return f"{time:%d %B %Y, %H:%M} ({time.tzname()})"


def _worth(lab: Assignment) -> str:
    """When the lab is due, and what its exercises and questions earn."""
    tasks = [*((task.number, task.points) for task in lab.exercises), *((task.id, task.points) for task in lab.written)]
    due = f"Due {moment(lab.due)}. " if lab.due else ""
    listed = ", ".join(f"{name}: {points:g}" for name, points in tasks)
    return f"{due}{lab.points:g} point{'s' * (lab.points != 1)} in all: {listed}."


def _clean(cell: NotebookNode) -> NotebookNode:
    """Without outputs, and without what belongs to the kit's own tests."""
    tags = [tag for tag in cell.metadata.get("tags", []) if not tag.startswith("nbval")]
    cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
    cell.pop("attachments", None)
    return cell


def _question(name: str, question: str) -> list[NotebookNode]:
    identity = re.sub(r"[^\w-]", "-", name)
    answer = new_markdown_cell(PLACEHOLDER, id=f"written-{identity}")
    answer.metadata = nbformat.from_dict({"labkit": {"written": name}})
    return [new_markdown_cell(f"**{name}** {question}", id=f"question-{identity}"), answer]


def _set_up(lab: Assignment, teaching: list[NotebookNode], tasks: list[NotebookNode]) -> str:
    """Import what the lesson imports and its exercises use, and take as many GPUs as their checks need."""
    used = set(re.findall(r"\w+", "\n".join(cell.source for cell in tasks)))
    imports = dict.fromkeys(["import torch", "import labkit", "from torch import nn"])
    for cell in teaching:
        imports |= dict.fromkeys(line for name, line in _imports(cell) if name in used)
    lines = sorted(imports, key=lambda line: (line.startswith("from "), "labkit" in line, line))
    gpus = max((checks.find(exercise.number).gpus for exercise in lab.exercises), default=1)
    return "\n".join([*lines, "", f"labkit.use(gpus={gpus})"])


def _imports(cell: NotebookNode) -> Iterator[tuple[str, str]]:
    """The names that a cell imports, each with a statement that does it."""
    lines = cell.source.splitlines() if cell.cell_type == "code" else []
    try:
        statements = ast.parse("\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))).body
    except SyntaxError:  # a cell that shows what does not work
        return
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for name in statement.names:
                single = (
                    ast.Import([name]) if isinstance(statement, ast.Import) else ast.ImportFrom(statement.module, [name], statement.level)
                )
                yield (name.asname or name.name).partition(".")[0], ast.unparse(single)


def _require_stub(number: str, name: str, source: str, notebook: str) -> None:
    """Raises ValueError, naming the exercise, unless the cell defines `name` and gives nothing of an answer to it away.

    That is one function with a docstring and `...`, or, where the exercise is to mend a function, the one that the check knows. A comment
    could hold an answer too: no stub has one.
    """
    if number not in checks.exercises():
        raise ValueError(
            f"{notebook}: the kit has no check for an exercise {number}. Take the number of an exercise of the kit, or install the "
            "course that has this one"
        )
    script = checks.find(number).script
    expected = ast.parse(inspect.getsource(script)).body[0] if script else None
    try:
        [function] = ast.parse(source).body
        commented = any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        function, commented = None, False
    if not isinstance(function, ast.FunctionDef) or function.name != name or commented or not _is_stub(function, expected):
        raise ValueError(
            f"exercise {number}: its cell in {notebook} is not the stub that the check expects: it may hold an answer. Nothing was "
            f"written. Put back the function {name} as the kit hands it out, or release from the kit's own lessons "
            "(no `notebooks` in the course file)"
        )


def _is_stub(function: ast.FunctionDef, expected: ast.stmt | None) -> bool:
    if isinstance(expected, ast.FunctionDef):
        return _content(function) == _content(expected)
    return _content(function)[1] in ([], [ast.dump(ast.Expr(ast.Constant(...)))], [ast.dump(ast.Pass())])


def _content(function: ast.FunctionDef) -> tuple[str, list[str]]:
    """Its parameters and statements, without types, which notebooks leave out, and the docstring, which may be in any language."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(function.args), [ast.dump(statement) for statement in function.body[ast.get_docstring(function) is not None :]]
