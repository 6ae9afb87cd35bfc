"""The public names of the kit.

Each name is imported when it is first used, so `import labkit` loads neither torch nor matplotlib.
"""

import sys
from typing import TYPE_CHECKING, Any

from labkit import cells
from labkit.version import __version__ as __version__
from virtualgpu import front_end

if sys.platform == "win32":
    raise ImportError(
        "labkit runs on Linux and macOS, not on Windows. Install WSL with `wsl --install` and run "
        "labkit there, or open the lessons on Binder or Colab, where nothing needs to be installed "
        "(docs/platforms.md)."
    )

front_end.register("labkit", __file__, offers_use=True)
cells.watch()

if TYPE_CHECKING:
    from gputrace import Trace as Trace
    from gputrace import record as record
    from labkit import labs as labs
    from labkit.checks import check as check
    from labkit.checks import progress as progress
    from labkit.experiments.lab import Lab as Lab
    from labkit.experiments.measuring import measure as measure
    from labkit.experiments.measuring import seconds as seconds
    from labkit.experiments.result import Result as Result
    from labkit.isolation import Isolated as Isolated
    from labkit.isolation import IsolatedError as IsolatedError
    from labkit.isolation import isolated as isolated
    from labkit.lesson_copies import lessons as lessons
    from labkit.machine import current as current
    from labkit.machine import gpus as gpus
    from labkit.machine import host_time as host_time
    from labkit.machine import races as races
    from labkit.machine import use as use
    from labkit.puzzles import puzzle as puzzle
    from labkit.ranks import TorchrunError as TorchrunError
    from labkit.ranks import torchrun as torchrun
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magics `%%gpu_memory`, `%%gpu_timeline` and `%%torchrun` to IPython.

    IPython calls this function for `%load_ext labkit`. From then on, the child processes of
    `multiprocessing` also end when their cell is interrupted.
    """
    from gputrace.magics import GpuMagics
    from labkit import ipython

    shell.register_magics(GpuMagics)
    ipython.load(shell)
