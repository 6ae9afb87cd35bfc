"""Lines of source code: where they are, and whether they belong to the user or to a library."""

import importlib.util
import linecache
import os
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from virtualgpu import front_end

_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
# The commands that packages install, such as `labkit` or `torchrun`.
_COMMANDS = os.path.realpath(sysconfig.get_path("scripts")) + os.sep
# In this package: what runs operators of the host, and what waits as Python's own functions do.
_HOST_OPERATORS = (
    os.path.join("host", "cpu_operators.py"),
    os.path.join("host", "python_costs.py"),
)
_WAITS = (os.path.join("host", ""), os.path.join("threads", ""))
_LOADERS = (os.path.join("utils", "data", ""), os.path.join("multiprocessing", ""))  # of torch
_CELL = ("<ipython-input", "<python-input", "<stdin>", "<string>")  # code without a file


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python code.

    `line` counts from 1, and `function` contains the line. `text` is known only for the user's
    own lines.
    """

    filename: str
    line: int
    function: str
    text: str = field(default="", compare=False)

    @classmethod
    def read(cls, filename: str, line: int, function: str) -> "SourceLine":
        """Return the line with its text, which is empty if the file cannot be read."""
        text = ""
        if is_users(filename):
            text = linecache.getline(filename, line).strip()
        return cls(filename, line, function, text)

    @property
    def location(self) -> str:
        """The location of the line, such as "train.py:12".

        In a notebook it is "line 3", or "line 3 of cell [2]" if another cell is running.
        """
        if self.filename.startswith("<") or f"{os.sep}ipykernel_" in self.filename:
            return f"line {self.line}{_other_cell(self.filename)}"
        return f"{os.path.basename(self.filename)}:{self.line}"


def _other_cell(filename: str) -> str:
    """Return the end of a line's location if it is in another notebook cell, else "".

    An example is " of cell [2]". `filename` is the file of the line. IPython 7 does not know the
    cell.
    """
    shell = front_end.ipython_shell()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if format_name is None:
        return ""
    described = format_name(filename)
    if described is None:
        return ""
    cell = described[1].removeprefix("In")
    running = f"[{len(shell.user_ns['In']) - 1}]"
    if cell in ("", running):
        return ""
    return f" of cell {cell}"


def is_users(filename: str) -> bool:
    """Return whether this file belongs neither to PyTorch, nor to the kit, nor to a library."""
    return _is_users(filename, front_end.folders())


@lru_cache(maxsize=4096)
def _is_users(filename: str, tools: tuple[str, ...]) -> bool:
    """Return whether this file belongs to the user. `tools` are the folders of the kit.

    A user's file is in none of the folders of Python, of PyTorch, of installed packages and of the
    kit.
    """
    if filename.startswith("<"):
        return filename.startswith(_CELL)
    path = os.path.realpath(filename)
    if {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    torch = importlib.util.find_spec("torch")
    folders = list(tools)
    if torch is not None:
        folders += torch.submodule_search_locations or []
    roots = [
        _STANDARD_LIBRARY,
        _COMMANDS,
        *(os.path.realpath(folder) + os.sep for folder in folders),
    ]
    return not path.startswith(tuple(roots))


def role(filename: str) -> str:
    """Return the role of a file's code in a script, for measurements of the host's time.

    "loading" is a DataLoader, "torch" the rest of PyTorch, and "kit" a virtual GPU or a tool.
    "host" runs operators on CPU tensors for the kit. "" is everything else. This includes the
    kit's sleep, locks and queues, because they wait as Python's own do.
    """
    return _role(filename, front_end.folders())


@lru_cache(maxsize=4096)
def _role(filename: str, tools: tuple[str, ...]) -> str:
    """Return the role of a file's code (see `role`). `tools` are the folders of the kit."""
    path = os.path.realpath(filename)
    if path.startswith(tuple(os.path.realpath(folder) + os.sep for folder in tools)):
        part = path.removeprefix(os.path.realpath(front_end.HERE) + os.sep)
        if part in _HOST_OPERATORS:
            return "host"
        return "" if part.startswith(_WAITS) else "kit"
    torch = importlib.util.find_spec("torch")
    if torch is None:
        return ""
    for folder in torch.submodule_search_locations or ():
        root = os.path.realpath(folder) + os.sep
        if path.startswith(tuple(root + part for part in _LOADERS)):
            return "loading"
        if path.startswith(root):
            return "torch"
    return ""


def caller() -> SourceLine | None:
    """Return the line of the user's code from which the present call comes, or None.

    The line has no text.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def caller_line() -> str:
    """Return the location of the user's line from which the present call comes, or "".

    An example is "train.py:12".
    """
    line = caller()
    if line is None:
        return ""
    return line.location


def warn_as_cpp(message: str) -> None:
    """Emit a warning, as PyTorch's C++ does, at the innermost line of Python outside the kit."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame.f_back is not None and front_end.is_ours(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
