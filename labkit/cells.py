"""Which cells the kernel has run, and whether an answer is the one that its cell shows: after a syntax error it is the one before."""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtualgpu.front_end import ipython_shell


@dataclass(frozen=True)
class RunCell:
    """A cell that has run. `identity` is the front end's, the same when the cell runs again; `trouble` is why it did not run to its end."""

    identity: str | None
    source: str
    binds: frozenset[str]
    trouble: str


FOLDER = Path.cwd()  # that of the notebook: a lesson may change to another one

_cells: list[RunCell] = []
_judged: dict[str, int | None] = {}  # which of them made the answer that was checked last, by exercise


def watch() -> None:
    """Note from now on what each cell of this notebook did. Outside IPython nothing is to be noted."""
    shell = ipython_shell()
    if shell is not None:
        shell.events.register("post_run_cell", note)


def note(result: Any) -> None:
    """IPython calls this after each cell, with its result."""
    source, error = result.info.raw_cell, result.error_before_exec or result.error_in_exec
    reached = sys.maxsize
    trouble = ""
    if isinstance(error, SyntaxError) and result.error_before_exec is not None:
        reached, trouble = 0, f"line {error.lineno}, {error.msg}"
    elif error is not None:
        reached = _line_of(error)
        trouble = f"line {reached}, {': '.join(filter(None, [type(error).__name__, *str(error).splitlines()[:1]]))}"
    _cells.append(RunCell(getattr(result.info, "cell_id", None), source, _bound(source, reached), trouble))


def _line_of(error: BaseException) -> int:
    """The line of the cell that raised, or called what raised."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "<module>" and step.tb_frame.f_globals.get("__name__") == "__main__":
            return step.tb_lineno
        step = step.tb_next
    return 0


def _bound(source: str, reached: int = sys.maxsize) -> frozenset[str]:
    """The names to which the statements of a cell that end before this line give values."""
    while source.lstrip().startswith("%%"):
        source = "\n" + source.lstrip().partition("\n")[2]  # the lines keep their numbers
    shell = ipython_shell()
    try:
        statements = ast.parse(shell.transform_cell(source) if shell is not None else source).body
    except SyntaxError:
        return frozenset()
    names: set[str] = set()
    for statement in statements:
        if (statement.end_lineno or 0) < reached:
            _collect(statement, names)
    return frozenset(names)


def _collect(node: ast.AST, names: set[str]) -> None:
    """Not what a function or a class binds in its own body."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names.add(node.name)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.add(node.id)
    elif isinstance(node, ast.alias):
        names.add(node.asname or node.name.partition(".")[0])
    for child in ast.iter_child_nodes(node):
        _collect(child, names)


def not_on_screen(number: str) -> str:
    """Why the answer that the running cell gives to `labkit.check(number, …)` is not what its own cell shows; "" where it is.

    What was typed and never run, or taken out of a cell that was not run again, no kernel can know. See `judged_before`.
    """
    name, made = _made(number)
    if name is None or made is None:
        return ""
    means = re.compile(rf"^\s*(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*(?::|=[^=])", re.MULTILINE)
    for cell in reversed(_cells[made + 1 :]):
        again = cell.identity is not None and cell.identity == _cells[made].identity
        if cell.trouble and (again or means.search(cell.source)):
            return f"your last cell did not run: {cell.trouble}. Mend that line and run the cell; what ran before is an older version."
        if again:
            others = " and ".join(f"`{other}`" for other in sorted(cell.binds)) or "nothing"
            return f"your last cell defines {others}, no `{name}`. What ran before is an older version, which the cell no longer shows."
    return ""


def judged_before(number: str) -> str:
    """What to say of an answer whose cell has not run since the exercise was checked last; "" of any other.

    JupyterLab tells the kernel nothing of an empty cell that is run.
    """
    name, made = _made(number)
    before, _judged[number] = _judged.get(number), made
    if made is None or made != before:
        return ""
    return f"The cell of `{name}` has not run since the last check: this is about the same version."


def _made(number: str) -> tuple[str | None, int | None]:
    """The name that the running cell gives to the check of this exercise, and which of the cells before gave it its value last."""
    shell = ipython_shell()
    running = shell.user_ns.get("In", [""])[-1] if shell is not None else ""
    name = _answer_to(number, running)
    if name is None or name in _bound(running):
        return name, None
    return name, next((index for index in reversed(range(len(_cells))) if name in _cells[index].binds), None)


def _answer_to(number: str, source: str) -> str | None:
    """The name that a cell gives to the check of this exercise."""
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:  # a magic's
        return None
    for call in calls:
        match call:
            case ast.Call(func=ast.Attribute(attr="check") | ast.Name(id="check"), args=[ast.Constant(value=asked), ast.Name(id=name), *_]):
                if asked == number:
                    return name
    return None
