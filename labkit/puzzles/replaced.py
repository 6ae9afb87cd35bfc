"""Find the functions of Python, PyTorch and the kit that a puzzle's function has replaced."""

import dataclasses
import inspect
import os
import sys
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from labkit.puzzles.definitions import Measure, Puzzle
from virtualgpu import front_end

_FUNCTIONS = {
    *(FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType),
    *(property, staticmethod, classmethod),
    ModuleType,
}
# The dispatch keys at which an operator computes values. PyTorch itself adds others, as for `vmap`.
_COMPUTING = {
    *("CPU", "Autograd", "AutogradCPU"),
    *("CompositeExplicitAutograd", "CompositeImplicitAutograd"),
}


class Replaced:
    """The functions of PyTorch and of the kit as they are when this object is made.

    They are the functions and classes in PyTorch's own main modules, in all modules of the kit and
    among Python's built-in ones, and the methods of the classes. They are also the kit's constants,
    the fields of the puzzles, and PyTorch's operators.
    """

    def __init__(self) -> None:
        self._own = {"gpulessons", *front_end.packages()}
        self._packages = {"torch", "builtins", *self._own}
        self._operators = set(torch.library._impls)
        self._known: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        self._code: dict[str, tuple[FunctionType, Any]] = {}  # of the kit's functions
        self._fields: list[tuple[str, Any, dict[str, Any]]] = []  # of the puzzles and measures
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            inner = package == "torch" and name.count(".") > 1
            if inspect.ismodule(module) and package in self._packages and not inner:
                self._note(name, module)

    def _note(self, name: str, holder: Any) -> None:
        """Remember the functions and classes in a module or class, which is called `name`."""
        found: dict[str, Any] = {}
        self._known[id(holder)] = name, holder, found
        constants = name.partition(".")[0] in self._own
        for key, value in list(vars(holder).items()):
            if type(value) in _FUNCTIONS or (constants and key.strip("_").isupper()):
                found[key] = value
                if type(value) is FunctionType and constants:
                    self._code[f"{name}.{key}"] = value, value.__code__
            elif issubclass(type(value), type):
                found[key] = value
                own = value.__module__.partition(".")[0] in self._packages
                if own and id(value) not in self._known:
                    self._note(f"{name}.{key}", value)
            if type(value) in (Puzzle, Measure):
                fields = {
                    each.name: getattr(value, each.name) for each in dataclasses.fields(value)
                }
                self._fields.append((f"{name}.{key}", value, fields))

    def sentence(self) -> str:
        """Return a sentence about the first function that was replaced, "" if none was."""
        name = self._first()
        if not name:
            return ""
        return f"your function replaced {name}. Leave PyTorch and the kit as they are."

    def _first(self) -> str:
        """Return the name of the first function, field or operator that was replaced, or ""."""
        for known in torch.library._impls - self._operators:
            space, operator, key = known.split("/")
            if space == "aten" and key in _COMPUTING:
                return f"the operator {operator!r}"
        for name, (function, code) in self._code.items():
            if function.__code__ is not code:
                return name
        for name, holder, fields in self._fields:
            for key, value in fields.items():
                if getattr(holder, key) is not value:
                    return f"{name}.{key}"
        for name, holder, found in self._known.values():
            now = dict(vars(holder))
            if not isinstance(holder, type):  # a module that is imported later adds its name
                now = {key: now.get(key) for key in found}
            for key, after in now.items():
                before = found.get(key)
                if after is before or (before is None and type(after) not in _FUNCTIONS):
                    continue
                if not _is_of_the_tools(after):
                    return f"{name}.{key}"
        return ""


def _is_of_the_tools(function: Any) -> bool:
    """Return whether PyTorch or the kit defines a function.

    Such a function may replace another one without trouble, as when PyTorch wraps its own.
    """
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "__func__", function)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(os.path.dirname(torch.__file__)) or front_end.is_ours(file)
