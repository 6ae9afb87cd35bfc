"""Records a block of code, or a script, on real or virtual GPUs: memory, what ran when, leaks, and why memory ran out.

    import gputrace

    with gputrace.record() as trace:
        ...                             # ordinary PyTorch
    trace.plot_memory().save("memory.png")

The names below are imported when first used; matplotlib is loaded by a figure.
"""

import importlib
from typing import TYPE_CHECKING

from virtualgpu import front_end

front_end.register("gputrace", __file__)

__all__ = ["Figure", "Leaks", "OutOfMemoryExplanation", "Table", "Trace", "record", "report"]

if TYPE_CHECKING:  # what a type checker reads in place of the table below
    from gputrace import report
    from gputrace.figures.figure import Figure
    from gputrace.leaks import Leaks
    from gputrace.oom.explanation import OutOfMemoryExplanation
    from gputrace.recording import record
    from gputrace.tables import Table
    from gputrace.trace import Trace

# Where each public name lives.
_HOMES = {
    "Figure": "gputrace.figures.figure",
    "Leaks": "gputrace.leaks",
    "OutOfMemoryExplanation": "gputrace.oom.explanation",
    "Table": "gputrace.tables",
    "Trace": "gputrace.trace",
    "record": "gputrace.recording",
}

if not TYPE_CHECKING:  # it would take any name for a public one

    def __getattr__(name: str) -> object:
        """Import what `gputrace.<name>` stands for; called only for names that are not here yet."""
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name == "report":
            return importlib.import_module("gputrace.report")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
