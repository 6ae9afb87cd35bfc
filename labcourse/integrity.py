"""Notices what a submission has replaced: the names of Python, PyTorch and the kit that its answers are observed with."""

import os
import sys
import types
from functools import partial
from typing import Any

WATCHED = (
    *("builtins", "json", "json.encoder", "json.decoder", "math", "random", "time"),
    *("torch", "torch.cuda", "torch.cuda.memory", "torch.cuda.streams", "torch.functional", "torch.nn.functional", "torch.testing"),
)
OWN = ("virtualgpu", "gputrace", "labkit", "labcourse")
MAY_REPLACE = (*OWN, "torch")  # whose functions may take each other's place: a machine of the kit changes torch


class Attempts:
    """Records what no exercise needs: the network, notebooks on disk, signals to processes above. A person judges what it means."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if len(self.seen) > 20 or not arguments:
            return
        first = arguments[0]
        if event == "socket.connect" and isinstance(arguments[1], tuple):  # not a socket in the file system, as processes use
            first = arguments[1][0]
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname") and isinstance(first, str | bytes):
            if not str(first).startswith(("127.", "localhost", "::1")):  # ranks meet there
                self.seen.add("it tried to use the network")
        elif event in ("os.kill", "os.killpg") and (first <= 1 or first == os.getppid()):
            self.seen.add("it tried to end other processes")
        elif event == "open" and isinstance(first, str) and first.endswith(".ipynb"):
            self.seen.add(f"it tried to open {first[-200:]}")


class Originals:
    """What the watched names stood for when this was made."""

    def __init__(self) -> None:
        self._held = [(path, owner, {name: (value, _code(value)) for name, value in _callables(owner)}) for path, owner in _watched()]

    def changed(self) -> list[str]:
        """The names that stand for something else now, in order. Replacements that are the kit's or PyTorch's own do not count.

        To a class nothing may be added either: it would stand in front of what the class inherits.
        """
        found = []
        for path, owner, held in self._held:
            now = vars(owner)
            new = [name for name, value in _callables(owner) if name not in held] if isinstance(owner, type) else []
            for name in (*held, *new):
                value, code = held.get(name, (None, None))
                if (now.get(name) is not value and not _is_own(now.get(name))) or (now.get(name) is value and _code(value) is not code):
                    found.append(f"{path}.{name}")
        return sorted(found)


def _watched() -> list[tuple[str, Any]]:
    """Modules, the kit's classes and PyTorch's tensors, by name."""
    found: list[tuple[str, Any]] = []
    for name, module in list(sys.modules.items()):
        own = name.partition(".")[0] in OWN
        if not isinstance(module, types.ModuleType) or not (own or name in WATCHED):
            continue
        found.append((name, module))
        for attribute, value in vars(module).items():
            if own and isinstance(value, type) and value.__module__ == name:
                found.append((f"{name}.{attribute}", value))
    torch = sys.modules["torch"]
    return [*found, ("torch.Tensor", torch.Tensor), ("torch.nn.Module", torch.nn.Module), ("torch._C.TensorBase", torch._C.TensorBase)]


def _callables(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(vars(owner).items()) if callable(value) or isinstance(value, property | staticmethod)]


def _code(value: Any) -> Any:
    return getattr(_inner(value), "__code__", None)


def _is_own(value: Any) -> bool:
    module, code = getattr(_inner(value), "__module__", None), _code(value)
    if code is not None:
        return any(f"/{package}/" in code.co_filename for package in MAY_REPLACE)
    module = module or type(value).__module__
    return isinstance(module, str) and module.partition(".")[0] in MAY_REPLACE


def _inner(value: Any) -> Any:
    """The function in a partial, a method or a property."""
    while isinstance(value, partial | staticmethod | classmethod | property):
        names = {partial: "func", property: "fget"}
        value = getattr(value, next((names[kind] for kind in names if isinstance(value, kind)), "__func__"))
    return value
