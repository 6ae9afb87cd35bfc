"""What the allocator's memory looked like at any moment: its segments and blocks, replayed from the events of a recording.

CUDA's history has the bytes requested, not those that the block took. They follow from the free block that was split,
by the rules of c10/cuda/CUDACachingAllocator.cpp (`should_split`), so a replay from the first event on finds it to the byte.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gputrace.events import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
)
from virtualgpu.allocator import MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, Settings


@dataclass(slots=True)
class RecordedBlock:
    """A stretch of a segment, in bytes. `state` is "allocated", "pending" (freed, but another stream may use it) or "free".

    `birth` is the index of the event that allocated it, -1 if it was there before the recording. The trace adds `category` and
    `line`, the number of the stack that allocated it.
    """

    address: int
    size: int
    requested: int
    state: str
    birth: int = -1
    stack: int = 0
    category: int = 0


@dataclass(slots=True)
class RecordedSegment:
    """Memory got from the device at once, cut into blocks that lie side by side."""

    device: int
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: list[RecordedBlock] = field(default_factory=list)


class Replay:
    """The memory of one device, event by event."""

    def __init__(self, segments: Iterable[RecordedSegment], settings: Settings) -> None:
        self._settings = settings
        self._segments: dict[int, RecordedSegment] = {}  # by address; their own lists of blocks are not kept up
        self._used: dict[int, RecordedBlock] = {}  # allocated or pending, by address
        self._free: dict[int, int] = {}  # sizes of free blocks by address
        self._ends: dict[int, int] = {}  # addresses of free blocks by their end
        for segment in segments:
            self._segments[segment.address] = segment
            for block in segment.blocks:
                if block.state == "free":
                    self._put(block.address, block.size)
                else:
                    self._used[block.address] = replace(block)  # it changes, and the start stays as it was

    def apply(self, index: int, action: int, address: int, size: int, requested: int, stream: int, stack: int) -> RecordedBlock | None:
        """Apply event `index`; returns its block. A `size` of 0 is worked out."""
        if action == ALLOC:
            born = RecordedBlock(address, self._cut(address, size, requested), requested, "allocated", index, stack)
            self._used[address] = born
            return born
        if action == FREE_REQUESTED:
            block = self._used.get(address)
            if block is not None:
                block.state = "pending"
            return block
        if action == FREE_COMPLETED:
            block = self._used.pop(address, None)
            if block is not None:
                self._join(address, block.size)
            return block
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            expandable = action == SEGMENT_MAP
            if not expandable:
                self._segments[address] = RecordedSegment(-1, address, requested, stream, requested == SMALL_SEGMENT, expandable)
            self._join(address, requested, expandable, stream)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            self._give_back(address, requested)
            self._segments.pop(address, None)
        return None

    def segments(self) -> list[RecordedSegment]:
        """Segments and blocks as they are now, by address."""
        pieces = [(address, RecordedBlock(address, size, 0, "free")) for address, size in self._free.items()]
        pieces += self._used.items()
        found: list[RecordedSegment] = []
        for address, block in sorted(pieces, key=lambda piece: piece[0]):
            segment = self._segments.get(address)
            last = found[-1] if found else None
            if segment is not None:
                found.append(RecordedSegment(segment.device, address, block.size, segment.stream, segment.small, segment.expandable))
            elif last is None or last.address + last.size != address:
                found.append(RecordedSegment(-1, address, block.size, 0, False, True))
            else:
                last.size += block.size
            found[-1].blocks.append(block)
        return found

    # Free blocks

    def _put(self, address: int, size: int) -> None:
        self._free[address] = size
        self._ends[address + size] = address

    def _take(self, address: int) -> int:
        size = self._free.pop(address)
        del self._ends[address + size]
        return size

    def _cut(self, address: int, size: int, requested: int) -> int:
        """Take a block from the free one at `address`, and return its bytes."""
        rounded = self._settings.round_size(requested)
        if address not in self._free:
            return size or rounded  # events before it were lost
        whole = self._take(address)
        if not size:
            small = rounded <= SMALL_SIZE or self._settings.expandable_segments
            rest = whole - rounded
            splits = rest >= MIN_BLOCK if small else rest > SMALL_SIZE and rounded < self._settings.max_split_size
            size = rounded if splits else whole
        if whole > size:
            self._put(address + size, whole - size)
        return size

    def _join(self, address: int, size: int, expandable: bool = False, stream: int = 0) -> None:
        """Put a free block back, as one with its free neighbours in the same segment."""
        before = self._ends.get(address)
        if before is not None and address not in self._segments:
            size += self._take(before)
            address = before
        after = address + size
        if after in self._free and after not in self._segments:
            size += self._take(after)
        self._put(address, size)
        if expandable and address not in self._segments and before is None:
            self._begin_expandable(address, stream)

    def _begin_expandable(self, address: int, stream: int) -> None:
        """A stretch of an expandable segment begins here unless a block that is in use reaches up to it."""
        if not any(block.address + block.size == address for block in self._used.values()):
            self._segments[address] = RecordedSegment(-1, address, 0, stream, False, True)

    def _give_back(self, address: int, size: int) -> None:
        """Take bytes from the free block that they lie in."""
        for start, whole in list(self._free.items()):
            if start <= address and address + size <= start + whole:
                self._take(start)
                if start < address:
                    self._put(start, address - start)
                if address + size < start + whole:
                    self._put(address + size, start + whole - address - size)
                return


def complete(events: Events, segments: Iterable[RecordedSegment], settings: Settings) -> Events:
    """The same events with the size of every block and the event of its birth; `segments` were there at the start."""
    replays = replays_of(segments, settings, set(events.device.tolist()))
    size, birth = events.size.copy(), events.birth.copy()
    columns = (events.device, events.action, events.address, events.size, events.requested, events.stream, events.stack)
    for index, (device, *row) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        block = replays[device].apply(index, *row)
        if block is not None:
            size[index] = block.size
            birth[index] = block.birth
    return replace(events, size=size, birth=birth)


def complete_without_start(events: Events, settings: Settings) -> Events:
    """The same events, of which the first were lost, with the births that are among them. A missing size is the requested one, rounded up;
    the block may have been larger."""
    size, birth = events.size.copy(), events.birth.copy()
    born: dict[tuple[int, int], int] = {}  # by device and address
    columns = (events.device, events.address, events.action, events.requested)
    for index, (device, address, action, requested) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if action not in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
            continue
        if action == ALLOC:
            born[device, address] = index
        birth[index] = born.get((device, address), -1)
        if not size[index]:
            size[index] = settings.round_size(requested)
    return replace(events, size=size, birth=birth)


def segments_at(events: Events, segments: Iterable[RecordedSegment], settings: Settings, count: int, device: int) -> list[RecordedSegment]:
    """The device's segments after the first `count` events."""
    replay = replays_of(segments, settings, {device})[device]
    chosen = np.flatnonzero(events.device[:count] == device)
    columns = (events.action, events.address, events.size, events.requested, events.stream, events.stack)
    for index, *row in zip(chosen.tolist(), *(column[chosen].tolist() for column in columns), strict=True):
        replay.apply(index, *row)
    found = replay.segments()
    for segment in found:
        segment.device = device
    return found


def replays_of(segments: Iterable[RecordedSegment], settings: Settings, devices: set[int]) -> dict[int, Replay]:
    """A replay for each device."""
    listed = list(segments)
    return {device: Replay([s for s in listed if s.device == device], settings) for device in devices | {s.device for s in listed}}


def from_snapshot(segments: Iterable[dict], stack_of: Callable[[list[dict]], int]) -> list[RecordedSegment]:
    """Segments as `torch.cuda.memory_snapshot()` lists them."""
    states = {"active_allocated": "allocated", "active_pending_free": "pending", "active_awaiting_free": "pending"}
    found = []
    for segment in segments:
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            state = states.get(block["state"], "free")
            stack = stack_of(block.get("frames") or []) if state != "free" else 0
            blocks.append(RecordedBlock(block.get("address", address), block["size"], block["requested_size"], state, stack=stack))
            address += block["size"]
        small, expandable = segment["segment_type"] == "small", segment.get("is_expandable", False)
        found.append(
            RecordedSegment(segment["device"], segment["address"], segment["total_size"], segment["stream"], small, expandable, blocks)
        )
    return found
