"""Fingerprints of code: which version of a function, and of all that it uses, made a result.

A recording has the fingerprint of the function that was measured. The fingerprint changes if the
function changes, or a function, a class or a constant of the same notebook that the function uses.
Comments and blank lines do not count.
"""

import ast
import hashlib
import linecache
import symtable
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any

FINGERPRINT_LENGTH = 16
PLAIN = (bool, int, float, complex, str, bytes, type(None))
ALLOWED = {
    function.__name__: function
    for function in (dict, float, int, len, list, max, min, range, round, set, sorted, sum, tuple)
}  # what the value of a constant may be computed with


def fingerprint(function: Callable[..., Any]) -> str:
    """Return the fingerprint of a function, or "" if its source is not known."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType) or not _text(function):
        return ""
    names = function.__globals__

    def text_of(name: str) -> str:
        if name == function.__name__:
            return _text(function)
        if name in names:
            return _text(names[name], name)
        return ""

    return _combined(function.__name__, text_of)


def fingerprints(cells: Iterable[str]) -> dict[str, str]:
    """Return the fingerprints of all functions in the cells of a notebook. The cells do not run.

    A name that several cells define has the last definition.
    """
    texts: dict[str, str] = {}
    constants: dict[str, Any] = {}
    functions = []
    for cell in cells:
        for statement in ast.parse(without_magics(cell)).body:
            if isinstance(statement, ast.FunctionDef):
                functions.append(statement.name)
                texts[statement.name] = ast.unparse(statement)
            elif isinstance(statement, ast.ClassDef):
                texts[statement.name] = ast.unparse(statement) if _methods(statement) else ""
            elif isinstance(statement, ast.Assign):
                _note_constants(statement, constants, texts)
    return {name: _combined(name, lambda used: texts.get(used, "")) for name in functions}


def without_magics(cell: str) -> str:
    """Return the Python code of a cell. IPython's magics and shell commands are left out."""
    if cell.lstrip().startswith("%%"):
        return ""
    lines = cell.splitlines()
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines)


def _combined(function: str, text_of: Callable[[str], str]) -> str:
    """Return the fingerprint of the function and of all that it uses, directly or not."""
    found: dict[str, str] = {}
    waiting = [function]
    while waiting:
        name = waiting.pop()
        text = text_of(name)
        if text and name not in found:
            found[name] = text
            waiting += _globals_used(text)
    whole = "\n\n".join(found[name] for name in sorted(found))
    return hashlib.sha256(whole.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def _globals_used(text: str) -> set[str]:
    """Return the global names that a definition reads."""
    used: set[str] = set()
    tables = [symtable.symtable(text, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        at_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                used.add(symbol.get_name())
        tables += table.get_children()
    return used


# Names of a running notebook


def _text(value: Any, name: str = "") -> str:
    """Return the text of a function, a class or a constant, and "" for everything else."""
    if isinstance(value, FunctionType):
        return _text_of_function(value)
    if isinstance(value, type):
        return _text_of_class(value)
    if _is_plain(value):
        return f"{name} = {value!r}" if name else ""
    return ""


def _text_of_function(function: FunctionType) -> str:
    if not _is_of_the_user(function.__module__):
        return ""
    first = function.__code__.co_firstlineno
    for node in ast.walk(_tree(function.__code__.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if first in lines:
                return ast.unparse(node)
    return ""


def _text_of_class(made: type) -> str:
    if not _is_of_the_user(made.__module__):
        return ""
    for method in vars(made).values():
        if isinstance(method, FunctionType):
            line = method.__code__.co_firstlineno
            for node in ast.walk(_tree(method.__code__.co_filename)):
                if _is_class_with_line(node, made.__name__, line):
                    return ast.unparse(node)
    return ""


def _is_class_with_line(node: ast.AST, name: str, line: int) -> bool:
    """Whether the node is the class of this name that has the line."""
    if not isinstance(node, ast.ClassDef) or node.name != name:
        return False
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_of_the_user(module: str | None) -> bool:
    """Whether a definition is of the notebook or script, and not of a package."""
    return module == "__main__"


def _tree(filename: str) -> ast.AST:
    """Return the code of a file or a cell. Return an empty module if there is none."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return isinstance(value, PLAIN)


# Names of a notebook that does not run


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _note_constants(
    statement: ast.Assign, constants: dict[str, Any], texts: dict[str, str]
) -> None:
    """Note the names that the statement gives to plain values."""
    try:
        code = compile(ast.Expression(statement.value), "<constant>", "eval")
        value = eval(code, {"__builtins__": ALLOWED}, dict(constants))
    except Exception:  # it needs more than constants
        return
    for name, each in _names_and_values(statement.targets, value):
        if _is_plain(each):
            constants[name] = each
            texts[name] = f"{name} = {each!r}"


def _names_and_values(targets: list[ast.expr], value: Any) -> Iterable[tuple[str, Any]]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, tuple | list)
            and len(value) == len(target.elts)
        ):
            for part, each in zip(target.elts, value, strict=True):
                yield from _names_and_values([part], each)
