"""Changes to slow modules of PyTorch, which are made when the program imports the modules."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

Replacements = Iterable[tuple[Any, dict[str, Any]]]  # pairs (module or class, replaced names)
Change = Callable[[ModuleType], Replacements]


class LateModules(importlib.abc.MetaPathFinder):
    """Finder that changes modules, given by name, from `begin` to `end`."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Change the modules that are already imported, and start to watch imports."""
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
        """Find a module for Python's import system, and change it after it has run."""
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
        """Replace the names in an imported module, and remember the originals."""
        for owner, names in self._changes[module.__name__](module):
            for name, value in names.items():
                self._originals.append((owner, name, vars(owner)[name]))
                setattr(owner, name, value)
