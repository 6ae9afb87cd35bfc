"""Frees that wait for other streams.

A block that several streams use is free once each of them has passed an event. The events are
recorded when the program frees the block.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from .pool import PENDING, Block


class EventSource(Protocol):
    """Interface through which the allocator asks whether streams have finished their work.

    None of its methods may call the allocator.
    """

    def record(self, stream: int) -> object:
        """Return an event that is done when all work queued so far on `stream` is done."""

    def done(self, event: Any) -> bool:
        """Return whether the stream has done all work that was queued before `event`."""

    def wait(self, event: Any) -> None:
        """Block the host until the stream has done all work that was queued before `event`."""


class NoEvents:
    """Event source for streams whose work is always done. Its events are None."""

    def record(self, stream: int) -> None:
        """Return None as the event, because there is nothing to wait for."""

    def done(self, event: object) -> bool:
        """Return True, because the work of every stream is always done."""
        return True

    def wait(self, event: object) -> None:
        """Return at once, because the work of every stream is always done."""


class DeferredFrees:
    """Freed blocks that other streams still use.

    `waiting` maps a stream to its queue of (event, block), oldest first.
    """

    __slots__ = ("_events", "waiting")

    def __init__(self, events: EventSource | None) -> None:
        self._events = events or NoEvents()
        self.waiting: dict[int, deque[tuple[object, Block]]] = {}

    def add(self, block: Block) -> None:
        """Queue a freed block until the other streams that use it have done their present work."""
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
