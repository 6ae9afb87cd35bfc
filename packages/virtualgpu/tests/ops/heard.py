"""What the clock tells of a piece of work."""

from collections.abc import Callable

from virtualgpu import hardware
from virtualgpu.clock.machine_clock import Span, Wait


def spans(work: Callable[[], object]) -> list[Span]:
    """What ran on the GPUs for some work."""
    heard: list[Span | Wait] = []
    clock, listener = hardware.machine().clock, heard.append
    clock.listen(listener)
    try:
        work()
    finally:
        clock.unlisten(listener)
    return [span for span in heard if isinstance(span, Span)]
