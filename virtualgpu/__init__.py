"""`torch.cuda` on a computer without a GPU: real numbers, computed on the CPU; CUDA's allocator, errors and order.

Times are those of a model, the same on each run.

    import virtualgpu

    with virtualgpu.use(2, like="H200"):
        ...                             # ordinary PyTorch: torch.ones(3, device="cuda:1")

`python -m virtualgpu run script.py` does the same for a script. The names below are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = ["Race", "RaceWarning", "VirtualGPUs", "current", "host_time", "profiles", "races", "use"]

if TYPE_CHECKING:  # what a type checker reads in place of the table below
    from virtualgpu import profiles
    from virtualgpu.machines import VirtualGPUs, current, host_time, races, use
    from virtualgpu.streams.race_reports import Race, RaceWarning

# Where each public name lives.
_HOMES = {
    **dict.fromkeys(("VirtualGPUs", "current", "host_time", "races", "use"), "virtualgpu.machines"),
    **dict.fromkeys(("Race", "RaceWarning"), "virtualgpu.streams.race_reports"),
}

if not TYPE_CHECKING:  # it would take any name for a public one

    def __getattr__(name: str) -> object:
        """Import what `virtualgpu.<name>` stands for; called only for names that are not here yet."""
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name == "profiles":
            return importlib.import_module("virtualgpu.profiles")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
