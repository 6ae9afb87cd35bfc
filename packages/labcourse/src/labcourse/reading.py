"""Read what a student handed in, without trusting any of it.

Call `parse` in a `labcourse.limited_process.LimitedProcess`: reading a file can take for ever.
"""

import ast
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LARGEST = 20 << 20  # bytes of a notebook file
MOST_CELLS = 5000
PLACEHOLDER = "*Write your answer here.*"  # what stands where a written answer goes


class UnreadableError(Exception):
    """A file that cannot be graded; the message says why."""


@dataclass(frozen=True)
class Cell:
    """A cell's kind ("code", "markdown", "raw"), its text, and the written question that its metadata names."""

    kind: str
    source: str
    written: str = ""


@dataclass(frozen=True)
class Notebook:
    """The parts of a notebook that grading looks at.

    Attributes:
        code: the sources of its code cells, in order.
        tagged: the exercises whose cell is still marked as theirs.
        checked: the exercises that a cell still checks.
        cells: all cells, in order.
        lab: the lab that it says it is, or "".
        places: of each exercise, which of the code cells answers it: the one that is tagged, or the one before its check; 1 is the first.
    """

    code: tuple[str, ...]
    tagged: frozenset[str]
    checked: frozenset[str]
    cells: tuple[Cell, ...] = ()
    lab: str = ""
    places: dict[str, int] = field(default_factory=dict)


def file_bytes(path: Path) -> bytes:
    """A regular file's content. Raises UnreadableError for links, devices, folders and what is too large."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        kind = "a symbolic link" if path.is_symlink() else error.strerror
        raise UnreadableError(f"the file cannot be opened: {kind}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError("it is no regular file")
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UnreadableError(f"it is larger than {LARGEST >> 20} MiB")
    return data


def parse(data: bytes) -> Notebook:
    """The notebook in a file. Raises UnreadableError when it is none."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise UnreadableError("it is no notebook: not JSON" if data.strip() else "the file is empty") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        old = isinstance(content, dict) and "worksheets" in content
        raise UnreadableError("it is a notebook of an old format: open and save it in JupyterLab" if old else "it is no notebook: no cells")
    if len(content["cells"]) > MOST_CELLS:
        raise UnreadableError(f"it has more than {MOST_CELLS} cells")
    cells = [_cell(cell) for cell in content["cells"]]
    code = [cell for cell in cells if cell["type"] == "code"]
    if not any(cell["source"].strip() for cell in code):
        raise UnreadableError("it has no code cells")
    return Notebook(
        tuple(cell["source"] for cell in code),
        frozenset(filter(None, map(_exercise, code, [*code[1:], None]))),
        frozenset(number for cell in code if (number := checked_number(cell["source"]))),
        tuple(Cell(str(cell["type"]), cell["source"], _written(cell["own"])) for cell in cells),
        _lab(content.get("metadata")),
        _places(code),
    )


def described(data: bytes) -> tuple[str, list[str]]:
    """The lab that a notebook says it is, and the lessons whose exercises it checks. Raises UnreadableError."""
    notebook = parse(data)
    return notebook.lab[:200], sorted({number[:2] for number in notebook.checked})


def _places(code: list[dict[str, Any]]) -> dict[str, int]:
    before = {number: index for index, cell in enumerate(code) if index and (number := checked_number(cell["source"]))}
    pairs = zip(code, [*code[1:], None], strict=True)
    return before | {number: index for index, pair in enumerate(pairs, 1) if (number := _exercise(*pair))}


def _written(own: dict[str, Any]) -> str:
    name = own.get("written")
    return name if isinstance(name, str) else ""


def _lab(metadata: Any) -> str:
    own = metadata.get("labkit") if isinstance(metadata, dict) else None
    lab = own.get("lab") if isinstance(own, dict) else None
    return lab if isinstance(lab, str) else ""


def _cell(cell: Any) -> dict[str, Any]:
    if not isinstance(cell, dict):
        raise UnreadableError("it is no notebook: a cell is no cell")
    source, metadata = cell.get("source"), cell.get("metadata")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise UnreadableError("it is no notebook: a cell has no source")
    metadata = metadata if isinstance(metadata, dict) else {}
    tags, own = metadata.get("tags"), metadata.get("labkit")
    return {
        "type": cell.get("cell_type"),
        "source": source.encode(errors="replace").decode(),  # half a surrogate pair is no text
        "tags": tags if isinstance(tags, list) else [],
        "own": own if isinstance(own, dict) else {},
    }


def _exercise(cell: dict[str, Any], following: dict[str, Any] | None) -> str | None:
    """The exercise that a cell is tagged as the place for: by its metadata, or by the check after it."""
    if "exercise" not in cell["tags"]:
        return None
    number = cell["own"].get("exercise")
    return number if isinstance(number, str) else checked_number(following["source"]) if following else None


def checked_number(source: str) -> str | None:
    """The exercise that a cell checks: of `labkit.check("02.3", run_on)`, "02.3"."""
    found = re.search(r"\bcheck\(\s*[\"'](\d\d\.\d+)[\"']", source)
    return found[1] if found else None


def checked_name(source: str) -> str | None:
    """The name of the answer in a check cell: of `labkit.check("02.3", run_on)`, "run_on"; None where no such call is."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a magic, for example
        return None
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "labkit.check" and len(node.args) > 1:
            answer = node.args[1]
            if isinstance(answer, ast.Name):
                return answer.id
    return None
