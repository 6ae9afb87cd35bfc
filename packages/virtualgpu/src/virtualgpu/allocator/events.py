"""Frees of blocks that other streams still use: each waits for one event per stream, recorded when it was freed."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from .pool import PENDING, Block


class EventSource(Protocol):
    """Says when streams are done. `wait` returns when the work is done; none of the three may need the allocator."""

    def record(self, stream: int) -> object: ...
    def done(self, event: Any) -> bool: ...
    def wait(self, event: Any) -> None: ...


class NoEvents:
    """For streams whose work is always done."""

    def record(self, stream: int) -> None:
        return None

    def done(self, event: object) -> bool:
        return True

    def wait(self, event: object) -> None:
        return None


class DeferredFrees:
    """`waiting` holds (event, block) by the stream that a block waits for, oldest first."""

    __slots__ = ("_events", "waiting")

    def __init__(self, events: EventSource | None) -> None:
        self._events = events or NoEvents()
        self.waiting: dict[int, deque[tuple[object, Block]]] = {}

    def add(self, block: Block) -> None:
        """Lets a freed block wait for what its other streams have to do by now."""
        block.state = PENDING
        streams = sorted(block.streams or ())
        block.events = len(streams)
        for stream in streams:
            self.waiting.setdefault(stream, deque()).append((self._events.record(stream), block))
        block.streams = None

    def completed(self, wait: bool) -> Iterator[Block]:
        """Blocks that wait for nothing any more. Each stream is asked in order, up to its first event that is not done; with
        `wait` the host waits for it instead."""
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
