"""The work that the clock reports."""

from collections.abc import Callable

from virtualgpu import hardware
from virtualgpu.clock.machine_clock import Span, Wait


def spans(work: Callable[[], object]) -> list[Span]:
    """Return the launches on the GPUs that the clock reports while `work` runs."""
    heard: list[Span | Wait] = []
    clock, listener = hardware.machine().clock, heard.append
    clock.listen(listener)
    try:
        work()
    finally:
        clock.unlisten(listener)
    return [span for span in heard if isinstance(span, Span)]
