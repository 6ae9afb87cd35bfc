"""Recorder for real and virtual GPUs: memory, what ran when, leaks, and why memory ran out.

This records a block and draws its memory::

    import gputrace

    with gputrace.record() as trace:
        ...                             # ordinary PyTorch
    trace.plot_memory().save("memory.png")

The names below are imported when they are first used. Only figures import matplotlib.
"""

from typing import TYPE_CHECKING

from virtualgpu import front_end

front_end.register("gputrace", __file__)

if TYPE_CHECKING:
    from gputrace import report as report
    from gputrace.figures.figure import Figure as Figure
    from gputrace.leaks import Leaks as Leaks
    from gputrace.oom.explanation import OutOfMemoryExplanation as OutOfMemoryExplanation
    from gputrace.recording import record as record
    from gputrace.tables import Table as Table
    from gputrace.trace import Trace as Trace
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)
