"""Where the blocks of a device are drawn: beside one another as in their segments, whatever the addresses that a run happened to get."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gputrace.events import ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData


class Places:
    """Gives each stretch of addresses a place from 0 on. A segment takes that of a freed one of its size; else it lies behind all others.

    A segment that can grow keeps its place from its first piece on, and has room for all that it ever gets.
    """

    def __init__(self, trace: "TraceData", device: int) -> None:
        self.bytes = 0
        self._growing = _joined(trace, device)
        self._live: dict[int, tuple[int, int]] = {}  # address: (size, place)
        self._freed: dict[int, list[int]] = {}  # size: places
        self._addresses: list[int] = []  # of what is live, in order
        for segment in trace.start:
            if segment.device == device:
                self._add(segment.address, segment.size)
        self.at_start = {
            block.address: self._of(block.address, block.size)
            for segment in trace.start
            if segment.device == device
            for block in segment.blocks
        }
        self.of_event = dict(self._follow(trace, device))

    def _follow(self, trace: "TraceData", device: int) -> Iterator[tuple[int, int]]:
        """Every allocation by its index, with its place."""
        events = trace.events
        kinds = (ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP)
        for index in np.flatnonzero((events.device == device) & np.isin(events.action, kinds)).tolist():
            event = events.row(index)
            if event.action == ALLOC:
                yield index, self._of(event.address, event.size)
            elif event.action == SEGMENT_FREE:
                self._remove(event.address)
            else:
                self._add(event.address, event.requested)

    def _add(self, address: int, size: int) -> None:
        start, length = next(((start, end - start) for start, end in self._growing if start <= address < end), (address, size))
        if start in self._live:
            return
        place = self._freed[length].pop(0) if self._freed.get(length) else self.bytes
        self.bytes = max(self.bytes, place + length)
        self._live[start] = length, place
        self._addresses = sorted(self._live)

    def _remove(self, address: int) -> None:
        if address in self._live:
            length, place = self._live.pop(address)
            self._freed[length] = sorted([*self._freed.get(length, []), place])
            self._addresses = sorted(self._live)

    def _of(self, address: int, size: int) -> int:
        """The place of a block; where the events that reserved its segment were lost, it counts as one."""
        before = bisect_right(self._addresses, address) - 1
        if before < 0 or address >= self._addresses[before] + self._live[self._addresses[before]][0]:
            self._add(address, size)
            return self._of(address, size)
        start = self._addresses[before]
        return self._live[start][1] + address - start


def _joined(trace: "TraceData", device: int) -> list[tuple[int, int]]:
    """From where to where the segments that grow ever reach."""
    events = trace.events
    found: list[tuple[int, int]] = []
    mapped = np.flatnonzero((events.device == device) & (events.action == SEGMENT_MAP))
    pieces = [
        (segment.address, segment.address + segment.size) for segment in trace.start if segment.device == device and segment.expandable
    ]
    pieces += [(int(events.address[index]), int(events.address[index]) + int(events.requested[index])) for index in mapped]
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
