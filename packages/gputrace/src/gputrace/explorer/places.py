"""Offsets at which the explorer draws the blocks of a device.

Blocks of a segment are drawn next to each other. The offsets do not depend on the addresses that a
run happened to get.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gputrace.events import ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData


class Places:
    """Offsets of the blocks of a device, in bytes from 0.

    A segment takes the offset of a freed segment of its size, or comes after all others. An
    expandable segment keeps its offset, and has space for all that it ever contains.

    Attributes:
        bytes: the number of bytes that are drawn.
        at_start: the offset of each block at the start of the recording, by its address.
        of_event: the offset of each block that was allocated later, by the index of its event.
    """

    def __init__(self, trace: "TraceData", device: int) -> None:
        self.bytes = 0
        self._growing = _joined(trace, device)
        self._live: dict[int, tuple[int, int]] = {}  # (size, offset) of segments by address
        self._freed: dict[int, list[int]] = {}  # offsets of freed segments by size
        self._addresses: list[int] = []  # sorted addresses of the segments in `_live`
        segments = [segment for segment in trace.start if segment.device == device]
        for segment in segments:
            self._add(segment.address, segment.size)
        blocks = [block for segment in segments for block in segment.blocks]
        self.at_start = {block.address: self._of(block.address, block.size) for block in blocks}
        self.of_event = dict(self._follow(trace, device))

    def _follow(self, trace: "TraceData", device: int) -> Iterator[tuple[int, int]]:
        """Yield the index of each allocation and the offset of its block."""
        events = trace.events
        kinds = (ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP)
        chosen = (events.device == device) & np.isin(events.action, kinds)
        for index in np.flatnonzero(chosen).tolist():
            event = events.row(index)
            if event.action == ALLOC:
                yield index, self._of(event.address, event.size)
            elif event.action == SEGMENT_FREE:
                self._remove(event.address)
            else:
                self._add(event.address, event.requested)

    def _add(self, address: int, size: int) -> None:
        """Give an offset to a new segment, or to the whole expandable segment that contains it."""
        start, length = address, size
        for first, end in self._growing:
            if first <= address < end:
                start, length = first, end - first
                break
        if start in self._live:
            return
        place = self.bytes
        if self._freed.get(length):
            place = self._freed[length].pop(0)
        self.bytes = max(self.bytes, place + length)
        self._live[start] = length, place
        self._addresses = sorted(self._live)

    def _remove(self, address: int) -> None:
        """Make the offset of a freed segment available."""
        if address in self._live:
            length, place = self._live.pop(address)
            self._freed[length] = sorted([*self._freed.get(length, []), place])
            self._addresses = sorted(self._live)

    def _of(self, address: int, size: int) -> int:
        """Return the offset of a block. A block without a known segment counts as a segment."""
        before = bisect_right(self._addresses, address) - 1
        if (
            before < 0
            or address >= self._addresses[before] + self._live[self._addresses[before]][0]
        ):
            self._add(address, size)
            return self._of(address, size)
        start = self._addresses[before]
        return self._live[start][1] + address - start


def _joined(trace: "TraceData", device: int) -> list[tuple[int, int]]:
    """Return the (start, end) addresses of all memory that each expandable segment ever has."""
    events = trace.events
    found: list[tuple[int, int]] = []
    mapped = np.flatnonzero((events.device == device) & (events.action == SEGMENT_MAP))
    pieces = []
    for segment in trace.start:
        if segment.device == device and segment.expandable:
            pieces.append((segment.address, segment.address + segment.size))
    for index in mapped:
        start = int(events.address[index])
        pieces.append((start, start + int(events.requested[index])))
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
