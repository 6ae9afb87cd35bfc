"""Registration of the packages that build on the virtual GPU.

The lines of registered packages do not count as the user's lines, and messages name the package
that the user imported. The public names of these packages are imported when first used.
"""

import ast
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # the folder of this package
# Our operators call this file of PyTorch. On a real GPU no Python code runs there.
CALLS_OPERATORS = os.path.join("torch", "_ops.py")
_WAIT = ("torch.distributed", "torch.multiprocessing")  # modules that wait for real processes
_packages: tuple[str, ...] = ()
_folders: tuple[str, ...] = ()
_name = "virtualgpu"


def register(package: str, file: str, offers_use: bool = False) -> None:
    """Register a package, whose `__init__.py` is `file`.

    With `offers_use`, the package has a function `use` of its own, and messages name this package.
    """
    global _name, _packages, _folders
    if package not in _packages:
        _packages += (package,)
        _folders += (os.path.dirname(os.path.abspath(file)) + os.sep,)
    if offers_use:
        _name = package


def name() -> str:
    """Return the name of the package whose function `use` messages recommend."""
    return _name


def packages() -> tuple[str, ...]:
    """Return the names of all registered packages, with virtualgpu as the first."""
    return _packages


def folders() -> tuple[str, ...]:
    """Return the folders of all registered packages, each with a separator at the end."""
    return _folders


def import_folders() -> list[str]:
    """Return the folders from which Python imports the registered packages, without repetitions."""
    return list(dict.fromkeys(os.path.dirname(folder.rstrip(os.sep)) for folder in _folders))


def is_ours(filename: str) -> bool:
    """Return whether a file is part of the registered packages.

    Calls in such files would not exist on a real GPU.
    """
    return filename.startswith(_folders) or filename.endswith(CALLS_OPERATORS)


def is_of_the_tools(module: str) -> bool:
    """Return whether the module of this name belongs to a registered package."""
    return _is_in(module, _packages)


def keeps_real_time(module: str) -> bool:
    """Return whether the module of this name waits for real processes.

    The deadlines of such a module need real time.
    """
    return _is_in(module, (*_packages, *_WAIT))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    """Return whether the module of this name belongs to one of these packages."""
    return any(module == known or module.startswith(f"{known}.") for known in packages)


def ipython_shell() -> Any:
    """Return the IPython shell in which this program runs, or None."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    return ipython.get_ipython()


def lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    The package's `__init__.py` imports each public name under `if TYPE_CHECKING`. The names are
    read from there, so that each name is written only once.
    """
    module = sys.modules[package]
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    homes = {}  # the module of each public name
    for branch in tree.body:
        if isinstance(branch, ast.If):
            for node in branch.body:
                if isinstance(node, ast.ImportFrom):
                    homes.update({name.name: str(node.module) for name in node.names})

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted({*vars(module), *homes}), sorted(homes)


register("virtualgpu", __file__)
