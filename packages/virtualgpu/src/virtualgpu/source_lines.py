"""Lines of source code: where they are, and whether they are the user's or a library's."""

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
_CELL = ("<ipython-input", "<python-input", "<stdin>", "<string>")  # code that was typed, not read from a file


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python: `filename`, `line` (from 1), the `function` it is in, and its `text`, known only of the user's own lines."""

    filename: str
    line: int
    function: str
    text: str = field(default="", compare=False)

    @classmethod
    def read(cls, filename: str, line: int, function: str) -> "SourceLine":
        """The line with its text, empty where the file cannot be read."""
        text = linecache.getline(filename, line).strip() if is_users(filename) else ""
        return cls(filename, line, function, text)

    @property
    def location(self) -> str:
        """ "train.py:12"; in a notebook, where nobody knows a cell's file, "line 3", or "line 3 of cell [2]" if another cell runs."""
        cell = self.filename.startswith("<") or f"{os.sep}ipykernel_" in self.filename
        return f"line {self.line}{_other_cell(self.filename)}" if cell else f"{os.path.basename(self.filename)}:{self.line}"


def _other_cell(filename: str) -> str:
    """Which cell it is, if not the one that runs; IPython 7 does not tell."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    told = shell.compile.format_code_name(filename) if hasattr(getattr(shell, "compile", None), "format_code_name") else None
    cell = told[1].removeprefix("In") if told is not None else ""
    return f" of cell {cell}" if cell and cell != f"[{len(shell.user_ns['In']) - 1}]" else ""


def is_users(filename: str) -> bool:
    """Whether this source is neither PyTorch's, nor the kit's, nor of any other library."""
    return _is_users(filename, front_end.folders())


@lru_cache(maxsize=4096)
def _is_users(filename: str, tools: tuple[str, ...]) -> bool:
    if filename.startswith("<"):
        return filename.startswith(_CELL)
    path = os.path.realpath(filename)
    if {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    torch = importlib.util.find_spec("torch")
    roots = [_STANDARD_LIBRARY, *(os.path.realpath(folder) + os.sep for folder in tools)]
    roots += [os.path.realpath(folder) + os.sep for folder in (torch and torch.submodule_search_locations) or ()]
    return not path.startswith(tuple(roots))


def caller() -> SourceLine | None:
    """Return the user's line that calls this, without its text; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def caller_line() -> str:
    """Return the location of the user's line that calls this, such as "train.py:12"; "" if there is none."""
    line = caller()
    return "" if line is None else line.location


def warn_as_cpp(message: str) -> None:
    """Warn as PyTorch's C++ does: at the innermost line of Python that is not the kit's own."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame.f_back is not None and front_end.is_ours(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
