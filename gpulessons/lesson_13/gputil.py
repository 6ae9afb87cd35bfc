"""Import of the package GPUtil, also where `distutils` is gone.

GPUtil 1.4.0 imports `distutils.spawn` for one function, which finds a program. Python 3.12 removed
distutils, and only setuptools brings it back.
"""

import contextlib
import importlib
import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any


def load() -> types.ModuleType:
    """Import GPUtil with a replacement of distutils.

    A plain `import GPUtil` finds the module from then on.
    """
    with _distutils_stand_in():
        return importlib.import_module("GPUtil")


@contextlib.contextmanager
def _distutils_stand_in() -> Iterator[None]:
    """Let `distutils.spawn.find_executable` exist in the block if no distutils is loaded."""
    if "distutils" in sys.modules:
        yield
        return
    package: Any = types.ModuleType("distutils")
    spawn: Any = types.ModuleType("distutils.spawn")
    package.__path__ = []
    package.spawn = spawn
    spawn.find_executable = shutil.which
    sys.modules.update({"distutils": package, "distutils.spawn": spawn})
    try:
        yield
    finally:
        del sys.modules["distutils"], sys.modules["distutils.spawn"]
