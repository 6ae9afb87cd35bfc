"""The packages between a user's program and the virtual GPU: their lines are not the user's, and a message names the one that was imported.

`virtualgpu` cannot know who builds on it: each such package registers itself.
"""

import os

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # where this package lies
_WAIT = ("torch.distributed", "torch.multiprocessing")  # modules that wait for real processes, as the tools do
_packages: tuple[str, ...] = ()
_folders: tuple[str, ...] = ()
_name = "virtualgpu"


def register(package: str, file: str, offers_use: bool = False) -> None:
    """A package, `file` its `__init__.py`, belongs to the tools. One that offers `use` under its own name is told of in messages."""
    global _name, _packages, _folders
    if package not in _packages:
        _packages += (package,)
        _folders += (os.path.dirname(os.path.abspath(file)) + os.sep,)
    if offers_use:
        _name = package


def name() -> str:
    """What a message calls the package whose `use` the reader knows."""
    return _name


def packages() -> tuple[str, ...]:
    """The names of all packages that registered, this one first."""
    return _packages


def folders() -> tuple[str, ...]:
    """Where they lie, each with a separator at the end."""
    return _folders


def keeps_real_time(module: str) -> bool:
    """Does a module wait for real processes, whose deadlines are for things that really happen?"""
    return any(module == known or module.startswith(f"{known}.") for known in (*_packages, *_WAIT))


register("virtualgpu", __file__)
