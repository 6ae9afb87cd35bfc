"""The names that a submission's answers are observed with: which of them it has replaced."""

import json
import sys
import types
from functools import partial
from operator import is_not
from typing import Any

import torch

from labcourse.watching import OWN

RELIED_ON = ("torch", "torch.functional", "torch.nn.functional", "torch.testing", "builtins", "math", "random", "time")  # in part
WATCHED = ("json", "json.encoder", "json.decoder", "torch._C", "torch.cuda", "torch.cuda.memory", "torch.cuda.streams", "torch.cuda.random")
COSMETIC = {"__repr__", "__str__", "__format__", "__doc__", "print", "load", "save", "__torch_function__"}  # what no observation rests on
BUILT_IN = (torch.Tensor, int, float, complex, str, bytes, list, tuple, dict)


class Originals:
    """What the watched names stood for when this was made: those that a check relies on, by the names that the checks' own code has.

    `kinds` are the classes that there were then of values that a check takes for what they seem.
    `learn` is told, while a machine of the kit is in use, what this puts in their place.
    """

    def __init__(self) -> None:
        relied_on = {name for code in _codes("labkit.checks", "labkit.machine", "virtualgpu") for name in code.co_names}
        made = [(path, owner, *_callables(owner, relied_on if path in RELIED_ON else None)) for path, owner in _watched()]
        self._held = [entry for entry in made if entry[2]]
        self._there = [vars(owner) for _, owner, _, _ in self._held]
        self._first = [there.keys() | COSMETIC for there in self._there]
        self._known: dict[tuple[str, str], set[Any]] = {}
        self._of_machines = _codes("virtualgpu")
        self.kinds, new = set[type](), set[type](BUILT_IN)
        while new := {below for kind in new for below in (kind, *type.__subclasses__(kind))} - self.kinds:
            self.kinds |= new
        self.learn()

    def learn(self) -> None:
        for path, owner, names, _ in self._held:
            for name in {*names, *vars(owner)} if isinstance(owner, type) else names:
                self._known.setdefault((path, name), set()).add(_identity(vars(owner).get(name)))

    def changed(self) -> list[str]:
        """The names that stand for something else now, in order.

        To a class nothing may be added either that would stand in front of what it inherits.
        """
        found = []
        for index, ((path, owner, names, values), there, first) in enumerate(zip(self._held, self._there, self._first, strict=True)):
            if any(map(is_not, map(there.get, names), values)):
                now = tuple(map(there.get, names))
                odd = {name for name, a, b in zip(names, now, values, strict=True) if a is not b and not self._knows(path, name, a)}
                found += [f"{path}.{name}" for name in odd]
                kept = tuple(b if name in odd else a for name, a, b in zip(names, now, values, strict=True))
                self._held[index] = path, owner, names, kept
            if type(there) is types.MappingProxyType and not there.keys() <= first:  # a class
                new = [name for name in there.keys() - first if callable(there[name]) and not self._knows(path, name, there[name])]
                found += [f"{path}.{name}" for name in new if _inherited(owner, name)]
        return sorted(found)

    def _knows(self, path: str, name: str, value: Any) -> bool:
        return _identity(value) in self._known.get((path, name), ()) or _code(value) in self._of_machines


def _inherited(owner: type, name: str) -> bool:
    return any(name in vars(base) for base in owner.__mro__[1:])


def _identity(value: Any) -> Any:
    """The code of a function, whatever it encloses; its functions' of a class, some of which are made anew; else which object it is."""
    if isinstance(value, type):
        return value.__name__, *map(_code, vars(value).values())
    code = _code(value)
    return id(value) if code is None else code


def _codes(*packages: str) -> set[types.CodeType]:
    """Of all functions in these packages and modules, those within functions too."""
    found: set[types.CodeType] = set()
    remaining = [code for name, module in list(sys.modules.items()) if name.startswith(packages) for code in _codes_in(module)]
    while remaining:
        code = remaining.pop()
        if code not in found:
            found.add(code)
            remaining += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _codes_in(module: types.ModuleType) -> list[types.CodeType]:
    """Of a module's functions, and of its classes' own."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)]
    functions = [_inner(value) for owner in owners for value in list(vars(owner).values())]
    return [function.__code__ for function in functions if isinstance(function, types.FunctionType)]


def _watched() -> list[tuple[str, Any]]:
    """Modules, the kit's classes and PyTorch's tensors, by name."""
    found: list[tuple[str, Any]] = []
    for name, module in list(sys.modules.items()):
        own = name.partition(".")[0] in OWN
        if not isinstance(module, types.ModuleType) or not (own or name in WATCHED or name in RELIED_ON):
            continue
        found.append((name, module))
        for attribute, value in vars(module).items():
            if own and isinstance(value, type) and value.__module__ == name:
                found.append((f"{name}.{attribute}", value))
    found += [("torch.Tensor", torch.Tensor), ("torch.nn.Module", torch.nn.Module), ("torch._C.TensorBase", torch._C.TensorBase)]
    return [*found, ("json.JSONEncoder", json.JSONEncoder), ("json.JSONDecoder", json.JSONDecoder)]


def _callables(owner: Any, only: set[str] | None) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    found = {
        name: value
        for name, value in list(vars(owner).items())
        if (callable(value) or isinstance(value, property | staticmethod | classmethod | types.GetSetDescriptorType))
        and name not in COSMETIC
        and (only is None or name in only)
    }
    return tuple(found), tuple(found.values())


def _code(value: Any) -> Any:
    return getattr(_inner(value), "__code__", None)


def _inner(value: Any) -> Any:
    """The function in a partial, a method or a property."""
    while isinstance(value, partial | staticmethod | classmethod | property):
        names = {partial: "func", property: "fget"}
        value = getattr(value, next((names[kind] for kind in names if isinstance(value, kind)), "__func__"))
    return value
