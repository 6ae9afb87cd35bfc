"""Frees that wait for other streams.

A block that several streams use is free once each of them has passed an event. The events are
recorded when the program frees the block.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from .pool import PENDING, Block


class EventSource(Protocol):
    """Interface to the streams' events. None of its methods may call the allocator."""

    def record(self, stream: int) -> object:
        """Return an event that is done when all work queued so far on `stream` is done."""

    def done(self, event: Any) -> bool:
        """Return whether the work before the event is done."""

    def wait(self, event: Any) -> None:
        """Block the host until the work before the event is done."""


class NoEvents:
    """Events of streams whose work is always done."""

    def record(self, stream: int) -> None:
        """Return no event."""

    def done(self, event: object) -> bool:
        """Return True."""
        return True

    def wait(self, event: object) -> None:
        """Return at once."""


class DeferredFrees:
    """Freed blocks that other streams still use.

    `waiting` maps a stream to its queue of (event, block), oldest first.
    """

    __slots__ = ("_events", "waiting")

    def __init__(self, events: EventSource | None) -> None:
        self._events = events or NoEvents()
        self.waiting: dict[int, deque[tuple[object, Block]]] = {}

    def add(self, block: Block) -> None:
        """Queue a freed block until its other streams have done the work that they have now."""
        block.state = PENDING
        streams = sorted(block.streams or ())
        block.events = len(streams)
        for stream in streams:
            self.waiting.setdefault(stream, deque()).append((self._events.record(stream), block))
        block.streams = None

    def completed(self, wait: bool) -> Iterator[Block]:
        """Yield the blocks that no stream uses any more.

        Each stream's events are checked in order, up to the first one that is not done. With `wait`
        the host waits for every event instead.
        """
        for stream, queue in list(self.waiting.items()):
            while queue:
                event, block = queue[0]
                if wait:
                    self._events.wait(event)
                elif not self._events.done(event):
                    break
                queue.popleft()
                block.events -= 1
                if block.events == 0:
                    yield block
            if not queue:
                del self.waiting[stream]
