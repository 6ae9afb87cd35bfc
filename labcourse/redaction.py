"""The lessons' checks with the judges left out, as submissions may see them: only what observes an answer stays."""

import ast
import types
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from labcourse.scan import PARSING
from labkit import checks

FOLDER = Path(checks.__file__).parent
LEFT_OUT = "raise NotImplementedError('left out of what submissions see')"


def sources() -> dict[str, str]:
    """The texts of the files in `labkit/checks`, by name.

    Graders in several threads ask for them. Python 3.11 fails with "AST constructor recursion depth mismatch" when two threads parse at
    once and one of them loses the interpreter's lock in the middle (its depth is counted once for all threads), so one parses at a time.
    """
    with PARSING:
        return _sources()


@cache
def _sources() -> dict[str, str]:
    files = sorted(FOLDER.glob("*.py"))  # not the wrong answers, which lie deeper
    modules = {path.name: import_module(f"{checks.__name__}.{path.stem}") for path in files if path.stem.startswith("lesson_")}
    every = [check for module in modules.values() for check in module.CHECKS]
    kept = needed(function for check in every for function in (check.observe, check.script))
    stubs = {id(check.script) for check in every}
    return {path.name: _cut(path.read_text(), modules.get(path.name), kept, stubs) for path in files}


def _cut(text: str, module: types.ModuleType | None, needed: set[int], stubs: set[int]) -> str:
    """A lesson's text in which functions that are not needed do nothing, and `stubs` stay as they are; any other file's as it is."""
    if module is None:
        return text
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    kept = _called_by_importing(tree, functions)
    for name, node in functions.items():
        if id(plain(vars(module)[name])) not in needed and name not in kept:
            node.args = ast.arguments([], [], ast.arg("arguments"), [], [], ast.arg("keywords"), [])
            node.body, node.decorator_list, node.returns = ast.parse(LEFT_OUT).body, [], None
        elif ast.get_docstring(node) is not None and id(vars(module)[name]) not in stubs:  # its words are no names
            node.body = node.body[1:] or [ast.Pass()]
    _leave_out_unused(tree)
    return ast.unparse(tree) + "\n"


def _leave_out_unused(tree: ast.Module) -> None:
    """Remove what only the functions left out needed: tables of what is due, and functions of the kit that work it out."""
    while True:
        used = [name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)]
        used += [
            word for text in ast.walk(tree) if isinstance(text, ast.Constant) and isinstance(text.value, str) for word in text.value.split()
        ]
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                node.names = [item for item in node.names if (item.asname or item.name) in used] or node.names[:1]
        kept = [node for node in tree.body if not (names := _bound(node)) or names & set(used)]
        if len(kept) == len(tree.body):
            return
        tree.body = kept


def _bound(node: ast.stmt) -> set[str]:
    """The names that an import or an assignment makes; none of any other statement, which stays."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(item.asname or item.name).partition(".")[0] for item in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)} - {"CHECKS"}
    return set()


def _called_by_importing(tree: ast.Module, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The functions that run when the module is imported. A judge is only mentioned then, and handed to its check."""
    found: set[str] = set()
    remaining: list[ast.AST] = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    remaining += [decorator for node in functions.values() for decorator in node.decorator_list]
    while remaining:
        for node in ast.walk(remaining.pop()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions and node.func.id not in found:
                found.add(node.func.id)
                remaining.append(functions[node.func.id])
    return found


def needed(functions: Iterable[Any]) -> set[int]:
    """The identities of these functions and of all that they can call."""
    found: set[int] = set()
    remaining = list(functions)
    while remaining:
        function = plain(remaining.pop())
        if id(function) in found or not isinstance(function, types.FunctionType):
            continue
        found.add(id(function))
        for name in _names(function.__code__):
            remaining += _functions_in(function.__globals__.get(name))
    return found


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _functions_in(value: Any) -> Iterator[Any]:
    """The functions that whoever has `value` can call."""
    if isinstance(value, types.ModuleType | type):
        if checks.__name__ in (value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
            yield from (member for member in vars(value).values() if callable(member))
    elif isinstance(value, dict):
        for member in value.values():
            yield from _functions_in(member)
    elif isinstance(value, list | tuple | set | frozenset):
        for member in value:
            yield from _functions_in(member)
    elif callable(value):
        yield value


def plain(function: Any) -> Any:
    """The function as it was written, without what decorators and partials put around it."""
    while isinstance(function, partial | staticmethod | classmethod):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__wrapped__", function)
