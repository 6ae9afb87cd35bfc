"""Modules of PyTorch that are changed when the program imports them, because they take long to import."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

Replacements = Iterable[tuple[Any, dict[str, Any]]]  # by module or class, the names that change
Change = Callable[[ModuleType], Replacements]


class LateModules(importlib.abc.MetaPathFinder):
    """Changes modules, by name, from `begin` to `end`."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Change the modules that are imported already, and wait for the others."""
        for name in self._changes:
            module = sys.modules.get(name)
            if module is not None:
                self._change(module)
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Undo all changes."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._originals:
            setattr(*self._originals.pop())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as Python does, and change it after it has run."""
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec

    def _change(self, module: ModuleType) -> None:
        for owner, names in self._changes[module.__name__](module):
            for name, value in names.items():
                self._originals.append((owner, name, vars(owner)[name]))
                setattr(owner, name, value)
