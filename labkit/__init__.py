"""The public names of the kit, imported when first used: `import labkit` loads neither torch nor matplotlib."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from labkit import cells
from labkit.version import __version__ as __version__
from virtualgpu import front_end

if sys.platform == "win32":
    raise ImportError(
        "labkit runs on Linux and macOS: on Windows install WSL with `wsl --install` and run it there, or open the lessons on Binder or "
        "Colab, with nothing to install (docs/platforms.md)"
    )

front_end.register("labkit", __file__, offers_use=True)
cells.watch()

__all__ = [
    "Isolated",
    "IsolatedError",
    "TorchrunError",
    "Trace",
    "check",
    "current",
    "gpus",
    "host_time",
    "isolated",
    "labs",
    "progress",
    "races",
    "record",
    "torchrun",
    "use",
]

if TYPE_CHECKING:  # what a type checker reads in place of the tables below
    from gputrace import Trace, record
    from labkit import labs
    from labkit.checks import check, progress
    from labkit.isolation import Isolated, IsolatedError, isolated
    from labkit.machine import current, gpus, host_time, races, use
    from labkit.ranks import TorchrunError, torchrun

# Where each public function lives.
_FUNCTIONS = {
    "use": "labkit.machine",
    "gpus": "labkit.machine",
    "host_time": "labkit.machine",
    "races": "labkit.machine",
    "current": "labkit.machine",
    "check": "labkit.checks",
    "progress": "labkit.checks",
    "isolated": "labkit.isolation",
    "Isolated": "labkit.isolation",
    "IsolatedError": "labkit.isolation",
    "torchrun": "labkit.ranks",
    "TorchrunError": "labkit.ranks",
    "record": "gputrace",
    "Trace": "gputrace",
}
_MODULES = ("labs",)


if not TYPE_CHECKING:  # it would take any name for a public one

    def __getattr__(name: str) -> object:
        """Import what `labkit.<name>` stands for; called only for names that are not here yet."""
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(_FUNCTIONS[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"labkit.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: the cell magics `%%gpu_memory`, `%%gpu_timeline` and `%%torchrun`; interrupted cells leave no child process."""
    from gputrace.magics import GpuMagics
    from labkit import ipython

    shell.register_magics(GpuMagics)
    ipython.load(shell)
