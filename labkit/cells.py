"""The notebook's cells that have run, and whether an answer is still the one that its cell shows.

After a cell with a syntax error, for example, the kernel still has the answer from the cell's
previous run.
"""

import ast
import re
import symtable
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtualgpu.front_end import ipython_shell


@dataclass(frozen=True)
class RunCell:
    """A cell that has run.

    Attributes:
        identity: the cell's id in the front end. It is the same each time that the cell runs, and
            None if the front end sends no ids.
        source: the text of the cell.
        binds: the names to which the cell gave values.
        trouble: why the cell did not run to its end, "" if it did.
    """

    identity: str | None
    source: str
    binds: frozenset[str]
    trouble: str


FOLDER = Path.cwd()  # the notebook's folder, noted here because a lesson may change to another one

_cells: list[RunCell] = []
# For each exercise, the index in `_cells` of the cell that defined the answer at the last check.
_judged: dict[str, int | None] = {}


def watch() -> None:
    """Note what each cell of this notebook does from now on. Outside IPython there are no cells."""
    shell = ipython_shell()
    if shell is not None:
        shell.events.register("post_run_cell", note)


def note(result: Any) -> None:
    """Remember a cell that has run.

    IPython calls this function after each cell, with its result.
    """
    source = result.info.raw_cell
    error = result.error_before_exec or result.error_in_exec
    reached = sys.maxsize
    trouble = ""
    if isinstance(error, SyntaxError) and result.error_before_exec is not None:
        reached = 0
        trouble = f"line {error.lineno}, {error.msg}"
    elif error is not None:
        reached = _line_of(error)
        told = [type(error).__name__, *str(error).splitlines()[:1]]
        trouble = f"line {reached}, {': '.join(filter(None, told))}"
    identity = getattr(result.info, "cell_id", None)
    _cells.append(RunCell(identity, source, _bound(source, reached), trouble))


def _line_of(error: BaseException) -> int:
    """Return the number of the cell's line that raised the error, 0 if it is not known."""
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return step.tb_lineno
        step = step.tb_next
    return 0


def _bound(source: str, reached: int = sys.maxsize) -> frozenset[str]:
    """Return the names to which a cell gives values before the line number `reached`.

    Only statements that end before this line count. By default, all statements count.
    """
    while source.lstrip().startswith("%%"):
        source = "\n" + source.lstrip().partition("\n")[2]  # the lines keep their numbers
    shell = ipython_shell()
    try:
        code = source if shell is None else shell.transform_cell(source)
        module = ast.parse(code)
        module.body = [each for each in module.body if (each.end_lineno or 0) < reached]
        symbols = symtable.symtable(ast.unparse(module), "<cell>", "exec").get_symbols()
    except SyntaxError:
        return frozenset()
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    # From Python 3.14 on, a module with annotations has a name of the compiler's.
    return frozenset(bound - {"__conditional_annotations__"})


def not_on_screen(number: str) -> str:
    """Return why an exercise's answer is not the one that its cell shows, or "" if it is.

    The answer is the one that the running cell gives to `labkit.check(number, ...)`. The kernel
    does not know of text that was typed but never run, nor of text that was deleted from a cell
    that was not run again. `judged_before` helps with these.
    """
    name, made = _made(number)
    if name is None or made is None:
        return ""
    definition = re.compile(
        rf"^\s*(?:(?:async\s+)?def|class)\s+{name}\b|^{name}\s*(?::|=[^=])", re.MULTILINE
    )
    for cell in reversed(_cells[made + 1 :]):
        again = cell.identity is not None and cell.identity == _cells[made].identity
        if cell.trouble and (again or definition.search(cell.source)):
            return (
                f"your last cell did not run: {cell.trouble}. Fix that line and run the cell "
                f"again. Until then, the kernel has an older version of `{name}`."
            )
        if again:
            others = " and ".join(f"`{other}`" for other in sorted(cell.binds)) or "nothing"
            return (
                f"your last cell defines {others}, but not `{name}`. The kernel still has an older "
                f"version of `{name}`, which the cell no longer shows."
            )
    return ""


def judged_before(number: str) -> str:
    """Return a sentence if the answer's cell has not run since the exercise's last check, else "".

    It tells learners that their changes were not run. JupyterLab does not report to the kernel that
    an empty cell was run.
    """
    name, made = _made(number)
    before = _judged.get(number)
    _judged[number] = made
    if made is None or made != before:
        return ""
    return (
        f"The cell of `{name}` has not run since the last check, so this verdict is about the same "
        "version."
    )


def _made(number: str) -> tuple[str | None, int | None]:
    """Return the name of an exercise's answer, and the index of the earlier cell that made it.

    Both are None if the running cell does not check this exercise with a name. The index is None if
    the running cell itself gives the name a value, or if no cell did.
    """
    shell = ipython_shell()
    running = shell.user_ns.get("In", [""])[-1] if shell is not None else ""
    name = _answer_to(number, running)
    if name is None or name in _bound(running):
        return name, None
    for index in reversed(range(len(_cells))):
        if name in _cells[index].binds:
            return name, index
    return name, None


def _answer_to(number: str, source: str) -> str | None:
    """Return the name of the answer that a cell checks for this exercise, or None.

    `source` is the text of the cell.
    """
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:  # cells with magics are not Python
        return None
    for call in calls:
        match call:
            case ast.Call(
                func=ast.Attribute(attr="check") | ast.Name(id="check"),
                args=[ast.Constant(value=asked), ast.Name(id=name), *_],
            ):
                if asked == number:
                    return name
    return None
