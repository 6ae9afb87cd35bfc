"""Fingerprints of code: which version of a function, and of all that it uses, made a result.

A recording has the fingerprint of the function that was measured. The fingerprint changes if the
function changes, or a function, a class or a constant of the same notebook that the function uses.
Arguments that a partial function binds and variables of an enclosing function count, too. Comments
and blank lines do not count. There is no fingerprint if something that is used has neither a source
in the notebook nor a plain value, such as a tensor.
"""

import ast
import hashlib
import inspect
import linecache
import symtable
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch

FINGERPRINT_LENGTH = 16
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
)


class UnknownError(Exception):
    """Error for a value that a function uses and that has no text for the fingerprint."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Return the fingerprint of a function, or "" if it cannot be known.

    It is not known if the source of the function is not known, or if the function uses a value that
    is neither plain nor made of code whose source is known.
    """
    bound: list[tuple[str, Any]] = []
    inner: Any = function
    while isinstance(inner, partial):
        bound += _bound_arguments("bound", inner)
        inner = inner.func
    if not isinstance(inspect.unwrap(inner), FunctionType):
        return ""
    name = inner.__name__ if inner.__name__.isidentifier() else "function"  # a lambda has none
    try:
        found = _texts_used([(name, inner), *bound])
    except UnknownError:
        return ""
    if name not in found:
        return ""
    return _hashed(found)


def _hashed(found: dict[str, str]) -> str:
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


def _texts_used(waiting: list[tuple[str, Any]]) -> dict[str, str]:
    """Return the texts of these values, and of all that they use, directly or not.

    `waiting` has a (name, value) for each. Raises UnknownError if one of them has no text.
    """
    found: dict[str, str] = {}
    names: dict[int, str] = {}  # of definitions, which may use each other in a circle
    while waiting:
        name, value = waiting.pop()
        if name in found:
            continue
        if id(value) in names:
            found[name] = f"{name} = {names[id(value)]}"
            continue
        if isinstance(value, partial):
            names[id(value)] = name
            found[name] = f"{name} = a partial function"
            waiting += [(f"{name}.function", value.func), *_bound_arguments(name, value)]
            continue
        text = _text(value, name)
        if not text:
            continue
        found[name] = text
        if _is_of_the_user(getattr(value, "__module__", None)):
            names[id(value)] = name
            waiting += _names_in_reach(name, value, text)
    return found


def _bound_arguments(name: str, value: "partial[Any]") -> list[tuple[str, Any]]:
    """Return (name, value) for each argument that a partial function binds.

    `name` is the name of the partial function, with which the names begin.
    """
    places = [*enumerate(value.args), *value.keywords.items()]
    return [(f"{name}.argument_{place}", argument) for place, argument in places]


def _names_in_reach(name: str, value: Any, text: str) -> list[tuple[str, Any]]:
    """Return (name, value) for each global and each enclosing variable that a function uses.

    `name` is the name of the function `value`, and `text` is its source.
    """
    functions = [value] if not isinstance(value, type) else list(vars(value).values())
    functions = [inspect.unwrap(each) for each in functions if callable(each)]
    names: dict[str, tuple[str, Any]] = {}
    for function in functions:
        if not isinstance(function, FunctionType):
            continue
        for used, each in function.__globals__.items():
            names.setdefault(used, (used, each))
    for function in functions:
        if isinstance(function, FunctionType):
            names.update(_cells(name, function))
    return [names[used] for used in sorted(_globals_used(text)) if used in names]


def _cells(name: str, function: FunctionType) -> dict[str, tuple[str, Any]]:
    """Return (name, value) for each variable of enclosing functions that a function uses.

    `name` is the name of the function, with which the names begin.
    """
    cells = {}
    for used, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
        if used != "__class__":
            cells[used] = (f"{name}.{used}", value)
    return cells


def _text(value: Any, name: str) -> str:
    """Return the source text of a function, a class or a constant.

    The text is "" for what a package defines. `name` is the name of the value in its module. Raises
    UnknownError if the value has no text.
    """
    if _is_plain(value):
        return f"{name} = {value!r}"
    if isinstance(value, ModuleType):
        return ""
    if isinstance(value, type) or callable(value):
        if not isinstance(getattr(value, "__name__", None), str):
            raise UnknownError(name)  # an object that can be called, such as a network
        if not _is_of_the_user(value.__module__):
            # An imported name is in the text that uses it. Other names could have any value.
            return "" if value.__name__ == name else f"{name} = {_qualified(value)}"
        if isinstance(value, type):
            text = _text_of_class(value)
        else:
            text = _text_of_function(value, name)
        if text:
            return text
    raise UnknownError(name)


def _qualified(value: Any) -> str:
    """Return the full name of what a package defines. A method is of an object, so it has none."""
    if not isinstance(getattr(value, "__self__", None), ModuleType | type | None):
        raise UnknownError(value.__name__)
    return f"{value.__module__}.{getattr(value, '__qualname__', value.__name__)}"


def _text_of_function(value: Any, name: str) -> str:
    """Return the source text of a function, which is called `name` where it is used.

    A function with a wrapper has a text only if a decorator added the wrapper.
    """
    function = inspect.unwrap(value)
    if not isinstance(function, FunctionType):
        return ""
    first = function.__code__.co_firstlineno
    lambdas = []
    for node in ast.walk(_tree(function.__code__.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if first in lines:
                decorated = value is function or node.decorator_list
                return ast.unparse(node) if decorated else ""
        elif isinstance(node, ast.Lambda) and node.lineno == first:
            lambdas.append(node)
    if function.__name__ == "<lambda>" and value is function and len(lambdas) == 1:
        return f"{name} = {ast.unparse(lambdas[0])}"
    return ""


def _text_of_class(made: type) -> str:
    for method in vars(made).values():
        if isinstance(method, FunctionType):
            line = method.__code__.co_firstlineno
            for node in ast.walk(_tree(method.__code__.co_filename)):
                if _is_class_with_line(node, made.__name__, line):
                    return ast.unparse(node)
    return ""


def _is_class_with_line(node: ast.AST, name: str, line: int) -> bool:
    """Return whether a node is the definition of the class `name`, and contains this line."""
    if not isinstance(node, ast.ClassDef) or node.name != name:
        return False
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_of_the_user(module: str | None) -> bool:
    """Return whether a module belongs to the notebook or script, and not to a package."""
    return module == "__main__"


def _tree(filename: str) -> ast.AST:
    """Return the syntax tree of a file or a cell. It is empty if the source is not known."""
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
