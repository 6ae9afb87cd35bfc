"""The packages that build on the virtual GPU register here: their source lines are not the user's, and messages name the one imported.

Their public names are imported when first used.
"""

import ast
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # where this package lies
CALLS_OPERATORS = os.path.join("torch", "_ops.py")  # called by our operators; on a GPU no Python runs there
_WAIT = ("torch.distributed", "torch.multiprocessing")  # modules that wait for real processes, as the tools do
_packages: tuple[str, ...] = ()
_folders: tuple[str, ...] = ()
_name = "virtualgpu"


def register(package: str, file: str, offers_use: bool = False) -> None:
    """Register a package, `file` being its `__init__.py`. Messages name the one that offers `use` under its own name."""
    global _name, _packages, _folders
    if package not in _packages:
        _packages += (package,)
        _folders += (os.path.dirname(os.path.abspath(file)) + os.sep,)
    if offers_use:
        _name = package


def name() -> str:
    """The package whose `use` messages name."""
    return _name


def packages() -> tuple[str, ...]:
    """The names of all registered packages, this one first."""
    return _packages


def folders() -> tuple[str, ...]:
    """Their folders, each with a separator at the end."""
    return _folders


def places() -> list[str]:
    """Return the folders in which Python finds the registered packages, each once."""
    return list(dict.fromkeys(os.path.dirname(folder.rstrip(os.sep)) for folder in _folders))


def is_ours(filename: str) -> bool:
    """Whether a call in this file is one of the tools' own, which on a real GPU would not be there."""
    return filename.startswith(_folders) or filename.endswith(CALLS_OPERATORS)


def is_of_the_tools(module: str) -> bool:
    return _is_in(module, _packages)


def keeps_real_time(module: str) -> bool:
    """Whether a module waits for real processes, so that its deadlines need real time."""
    return _is_in(module, (*_packages, *_WAIT))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == known or module.startswith(f"{known}.") for known in packages)


def ipython_shell() -> Any:
    """Return the shell of IPython that runs this program, in a notebook or a terminal, or None."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    return ipython.get_ipython()


def lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """A package's `__getattr__`, `__dir__` and `__all__`: its `__init__.py` imports each public name `if TYPE_CHECKING`, and so it stands
    there once."""
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    imports = (node for branch in tree.body if isinstance(branch, ast.If) for node in branch.body if isinstance(node, ast.ImportFrom))
    homes = {name.name: str(node.module) for node in imports for name in node.names}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted({*vars(module), *homes}), sorted(homes)


register("virtualgpu", __file__)
