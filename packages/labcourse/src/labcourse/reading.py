"""Read what a student handed in, without trusting any of it.

Call `parse` in a `labcourse.limited_process.LimitedProcess`, because reading may never end.
"""

import ast
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

LARGEST = 64 << 20  # bytes of a notebook file
MOST_CELLS = 5000
PLACEHOLDER = "*Write your answer here.*"  # the text of a cell that waits for a written answer


class UnreadableError(Exception):
    """Error for a file that cannot be graded. The message says why."""


@dataclass(frozen=True)
class Cell:
    """Cell of a notebook.

    Attributes:
        kind: "code", "markdown" or "raw".
        source: the text.
        written: the id of the written question that the cell's metadata names, or "".
    """

    kind: str
    source: str
    written: str = ""


@dataclass(frozen=True)
class Notebook:
    """The parts of a notebook that grading reads.

    Attributes:
        code: the sources of the code cells, in order.
        tagged: the exercises that have a tagged cell for their answer.
        checked: the exercises that have a cell with their check.
        cells: all cells, in order.
        lab: the lab that the notebook's metadata names, or "".
        places: the number of the code cell, from 1, that answers each exercise. It is the last one
            that defines the answer's name, or the tagged cell, or the one before the check. The
            cell of a puzzle is the last one that calls `labkit.puzzle` with its name.
        puzzles: the names of the puzzles that the notebook calls `labkit.puzzle` with.
        answers: the source of each cell in `places`, by exercise. The cells that define functions
            which it uses are above it.
    """

    code: tuple[str, ...]
    tagged: frozenset[str]
    checked: frozenset[str]
    cells: tuple[Cell, ...] = ()
    lab: str = ""
    places: dict[str, int] = field(default_factory=dict)
    puzzles: frozenset[str] = frozenset()
    answers: dict[str, str] = field(default_factory=dict)


def file_bytes(path: Path) -> bytes:
    """Read a regular file. Raise UnreadableError for links, devices, folders and large files."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror
        if path.is_symlink():
            reason = "it is a symbolic link"
        raise UnreadableError(f"the file cannot be opened: {reason}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("it is not a regular file")
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UnreadableError(f"it is larger than {LARGEST >> 20} MiB")
    return data


def parse(
    data: bytes,
    names: Mapping[str, str] = MappingProxyType({}),
    handed_out: Collection[str] = (),
) -> Notebook:
    """Read the content of a notebook file. Raise UnreadableError if it is not a notebook.

    Args:
        names: the name of each exercise's answer, by the exercise's number.
        handed_out: the sources of the cells that students were given.
    """
    if not data.strip():
        raise UnreadableError("the file is empty")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise UnreadableError("it is not a notebook, because it is not JSON") from None
    if isinstance(content, dict) and "worksheets" in content and "cells" not in content:
        raise UnreadableError("it has an old format. Open it in JupyterLab and save it")
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise UnreadableError("it is not a notebook, because it has no cells")
    if len(content["cells"]) > MOST_CELLS:
        raise UnreadableError(f"it has more than {MOST_CELLS} cells")
    cells = [_cell(cell) for cell in content["cells"]]
    code = [cell for cell in cells if cell["type"] == "code"]
    if not any(cell["source"].strip() for cell in code):
        raise UnreadableError("it has no code cells")
    following: list[dict[str, Any] | None] = [*code[1:], None]
    exercises = [_exercise(cell, after) for cell, after in zip(code, following, strict=True)]
    checked = [checked_number(cell["source"]) for cell in code]
    places = _places(exercises, checked)
    for number, answer in names.items():
        defined = re.compile(rf"^((async )?def|class) {answer}\b|^{answer} *[:=][^=]", re.MULTILINE)
        for place, cell in enumerate(code, 1):
            if defined.search(cell["source"]):
                places[number] = place
    puzzles = {}
    for place, cell in enumerate(code, 1):
        name = puzzle_name(cell["source"])
        if name is not None:
            puzzles[name] = place
    return Notebook(
        code=tuple(cell["source"] for cell in code),
        tagged=frozenset(number for number in exercises if number),
        checked=frozenset(number for number in checked if number),
        cells=tuple(
            Cell(str(cell["type"]), cell["source"], _written(cell["own"])) for cell in cells
        ),
        lab=_lab(content.get("metadata")),
        places=places | puzzles,
        puzzles=frozenset(puzzles),
        answers=_with_helpers(
            [cell["source"] for cell in code],
            places | puzzles,
            {*handed_out},
            {*names.values()},
        ),
    )


def described(data: bytes) -> tuple[str, list[str]]:
    """Return the lab that a notebook names, and the lessons whose exercises it checks.

    Raise UnreadableError if the content is not a notebook.
    """
    notebook = parse(data)
    return notebook.lab[:200], sorted({number[:2] for number in notebook.checked})


def _places(exercises: list[str | None], checked: list[str | None]) -> dict[str, int]:
    """Return for each exercise the number of the code cell with the answer, counted from 1.

    This is the cell with the exercise's tag. Without a tag, it is the cell before the check.

    Args:
        exercises: for each code cell, the exercise in its tag, or None.
        checked: for each code cell, the exercise that it checks, or None.
    """
    places = {}
    for index, number in enumerate(checked):
        if number and index:
            places[number] = index  # the cell before the check, because numbers begin at 1
    for index, number in enumerate(exercises):
        if number:
            places[number] = index + 1
    return places


def _with_helpers(
    code: list[str],
    places: dict[str, int],
    handed_out: set[str],
    names: set[str],
) -> dict[str, str]:
    """Return the source of each answer, with the student's cells that define what it uses.

    Cells that were handed out, and other answers, are left out. `names` are those of the answers.
    """
    helpers: dict[str, set[int]] = {}  # the indices of the cells that define a function or class
    answered = {place - 1 for place in places.values()}
    for index, source in enumerate(code):
        if source not in handed_out and index not in answered:
            found = re.findall(r"^(?:async +)?(?:def|class) +(\w+)", source, re.MULTILINE)
            for name in set(found) - names:
                helpers.setdefault(name, set()).add(index)
    answers = {}
    for number, place in places.items():
        used, waiting = {place - 1}, [place - 1]
        while waiting:
            for word in set(re.findall(r"\w+", code[waiting.pop()])):
                new = helpers.get(word, set()) - used
                used |= new
                waiting += new
        above = sorted(used - {place - 1})
        answers[number] = "\n\n".join(code[index] for index in [*above, place - 1])
    return answers


def _written(own: dict[str, Any]) -> str:
    """Return the id of the written question that a cell answers, or "".

    `own` is the kit's metadata of the cell.
    """
    name = own.get("written")
    return name if isinstance(name, str) else ""


def _lab(metadata: Any) -> str:
    """Return the name of the lab in the metadata of a notebook, or ""."""
    match metadata:
        case {"labkit": {"lab": str(lab)}}:
            return lab
    return ""


def _cell(cell: Any) -> dict[str, Any]:
    """Return the type, the text, the tags and the kit's metadata of a cell.

    Raise UnreadableError if the cell has no text.
    """
    if not isinstance(cell, dict):
        raise UnreadableError("it is not a notebook, because a cell is not a table")
    source, metadata = cell.get("source"), cell.get("metadata")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise UnreadableError("it is not a notebook, because a cell has no source")
    if not isinstance(metadata, dict):
        metadata = {}
    tags, own = metadata.get("tags"), metadata.get("labkit")
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    return {
        "type": cell.get("cell_type"),
        "source": source.encode(errors="replace").decode(),  # without halves of surrogate pairs
        "tags": tags if isinstance(tags, list) else [],
        "own": own if isinstance(own, dict) else {},
    }


def _exercise(cell: dict[str, Any], following: dict[str, Any] | None) -> str | None:
    """Return the number of the exercise that a tagged cell answers, or None.

    The metadata of the cell or the check in the next code cell (`following`) names the exercise.
    """
    if "exercise" not in cell["tags"]:
        return None
    number = cell["own"].get("exercise")
    if isinstance(number, str):
        return number
    if following is None:
        return None
    return checked_number(following["source"])


def checked_number(source: str) -> str | None:
    """Return the number of the exercise that a cell checks, or None.

    It is "02.3" for `labkit.check("02.3", run_on)`.
    """
    found = re.search(r"\bcheck\(\s*[\"'](\d\d\.\d+)[\"']", source)
    if found is None:
        return None
    return found[1]


def puzzle_name(source: str) -> str | None:
    """Return the name of the puzzle that a cell answers, or None.

    It is "x" for `labkit.puzzle("x", function)`.
    """
    found = re.search(r"\bpuzzle\(\s*([\"'])(.{1,60}?)\1", source)
    if found is None:
        return None
    return found[2]


def checked_name(source: str) -> str | None:
    """Return the name of the answer that a cell checks.

    This is "run_on" for `labkit.check("02.3", run_on)`, and None if the cell has no such call.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a magic, for example
        return None
    for node in nodes:
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        answer = node.args[1]
        if ast.unparse(node.func) == "labkit.check" and isinstance(answer, ast.Name):
            return answer.id
    return None
