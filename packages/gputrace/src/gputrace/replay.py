"""Replay of a recording, which gives the allocator's segments and blocks at any moment.

CUDA's history has the bytes that were requested, and not the bytes of the block. The bytes of the
block follow from the free block that was split, by the rules in `should_split` of
c10/cuda/CUDACachingAllocator.cpp. So a replay from the first event finds them exactly.
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
    """Block of a segment. Sizes are in bytes.

    Attributes:
        state: "allocated", "pending" (freed, but another stream may still use it) or "free".
        birth: the index of the event that allocated the block, or -1 if the block is older than
            the recording.
        stack: the number of the stack that allocated the block.
        category: the index of the block's category, which `gputrace.categories` sets.
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
    """Segment: memory that was requested from the device at once, divided into blocks."""

    device: int
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: list[RecordedBlock] = field(default_factory=list)


class Replay:
    """The memory of one device, reconstructed by applying the events of a recording."""

    def __init__(self, segments: Iterable[RecordedSegment], settings: Settings) -> None:
        self._settings = settings
        # Segments by address. Their own lists of blocks are not updated.
        self._segments: dict[int, RecordedSegment] = {}
        self._used: dict[int, RecordedBlock] = {}  # allocated or pending, by address
        self._free: dict[int, int] = {}  # sizes of free blocks by address
        self._ends: dict[int, int] = {}  # addresses of free blocks by their end
        for segment in segments:
            self._segments[segment.address] = segment
            for block in segment.blocks:
                if block.state == "free":
                    self._put(block.address, block.size)
                else:
                    # A copy, because the block changes, and the segments describe the start.
                    self._used[block.address] = replace(block)

    def apply(
        self,
        index: int,
        action: int,
        address: int,
        size: int,
        requested: int,
        stream: int,
        stack: int,
    ) -> RecordedBlock | None:
        """Apply the event with number `index`, and return its block.

        The other arguments are the attributes of the event. If `size` is 0, it is computed. Return
        None if the event has no block.
        """
        if action == ALLOC:
            size = self._cut(address, size, requested)
            born = RecordedBlock(address, size, requested, "allocated", index, stack)
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
                small = requested == SMALL_SEGMENT
                self._segments[address] = RecordedSegment(
                    -1, address, requested, stream, small, expandable
                )
            self._join(address, requested, expandable, stream)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            self._give_back(address, requested)
            self._segments.pop(address, None)
        return None

    def segments(self) -> list[RecordedSegment]:
        """Return the segments and blocks at this moment, in order of their addresses."""
        pieces = [
            (address, RecordedBlock(address, size, 0, "free"))
            for address, size in self._free.items()
        ]
        pieces += self._used.items()
        found: list[RecordedSegment] = []
        for address, block in sorted(pieces, key=lambda piece: piece[0]):
            segment = self._segments.get(address)
            if segment is not None:
                # The size grows with each further block.
                found.append(replace(segment, address=address, size=block.size, blocks=[]))
            elif not found or found[-1].address + found[-1].size != address:
                found.append(RecordedSegment(-1, address, block.size, 0, False, True))
            else:
                found[-1].size += block.size
            found[-1].blocks.append(block)
        return found

    # Free blocks

    def _put(self, address: int, size: int) -> None:
        """Add a free block at an address."""
        self._free[address] = size
        self._ends[address + size] = address

    def _take(self, address: int) -> int:
        """Remove the free block at an address, and return its size."""
        size = self._free.pop(address)
        del self._ends[address + size]
        return size

    def _cut(self, address: int, size: int, requested: int) -> int:
        """Allocate a block from the free block at `address`, and return the block's size.

        If `size` is 0, it follows from the `requested` bytes.
        """
        rounded = self._settings.round_size(requested)
        if address not in self._free:
            return size or rounded  # earlier events were lost
        whole = self._take(address)
        if not size:
            size = rounded if self._splits(whole, rounded) else whole
        if whole > size:
            self._put(address + size, whole - size)
        return size

    def _splits(self, whole: int, rounded: int) -> bool:
        """Return whether the allocator splits a free block of `whole` bytes to serve a request.

        `rounded` is the size of the request, rounded up.
        """
        rest = whole - rounded
        if rounded <= SMALL_SIZE or self._settings.expandable_segments:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and rounded < self._settings.max_split_size

    def _join(self, address: int, size: int, expandable: bool = False, stream: int = 0) -> None:
        """Add a free block, merged with its free neighbours in the same segment.

        If the block is `expandable` and starts a new segment, the segment belongs to `stream`.
        """
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
        """Begin an expandable segment, unless a block in use ends at this address."""
        if not any(block.address + block.size == address for block in self._used.values()):
            self._segments[address] = RecordedSegment(-1, address, 0, stream, False, True)

    def _give_back(self, address: int, size: int) -> None:
        """Remove `size` bytes at an address from the free block that contains them."""
        for start, whole in list(self._free.items()):
            if start <= address and address + size <= start + whole:
                self._take(start)
                if start < address:
                    self._put(start, address - start)
                if address + size < start + whole:
                    self._put(address + size, start + whole - address - size)
                return


def complete(events: Events, segments: Iterable[RecordedSegment], settings: Settings) -> Events:
    """Return the events with the size of every block and the index of its allocation.

    `segments` are the segments at the start of the recording.
    """
    replays = replays_of(segments, settings, set(events.device.tolist()))
    size, birth = events.size.copy(), events.birth.copy()
    columns = (
        events.device,
        events.action,
        events.address,
        events.size,
        events.requested,
        events.stream,
        events.stack,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, (device, *row) in enumerate(rows):
        block = replays[device].apply(index, *row)
        if block is not None:
            size[index] = block.size
            birth[index] = block.birth
    return replace(events, size=size, birth=birth)


def complete_without_start(events: Events, settings: Settings) -> Events:
    """Return events whose beginning was lost, with the indices of allocations that are known.

    If a size is missing, it is the requested size, rounded up. The block may have been larger.
    """
    size, birth = events.size.copy(), events.birth.copy()
    born: dict[tuple[int, int], int] = {}  # by device and address
    columns = (events.device, events.address, events.action, events.requested)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, (device, address, action, requested) in enumerate(rows):
        if action not in (ALLOC, FREE_REQUESTED, FREE_COMPLETED):
            continue
        if action == ALLOC:
            born[device, address] = index
        birth[index] = born.get((device, address), -1)
        if not size[index]:
            size[index] = settings.round_size(requested)
    return replace(events, size=size, birth=birth)


def segments_at(
    events: Events,
    segments: Iterable[RecordedSegment],
    settings: Settings,
    count: int,
    device: int,
) -> list[RecordedSegment]:
    """Return a device's segments after the first `count` events.

    `segments` are the segments at the start of the recording.
    """
    replay = replays_of(segments, settings, {device})[device]
    chosen = np.flatnonzero(events.device[:count] == device)
    columns = (
        events.action,
        events.address,
        events.size,
        events.requested,
        events.stream,
        events.stack,
    )
    rows = zip(chosen.tolist(), *(column[chosen].tolist() for column in columns), strict=True)
    for index, *row in rows:
        replay.apply(index, *row)
    found = replay.segments()
    for segment in found:
        segment.device = device
    return found


def replays_of(
    segments: Iterable[RecordedSegment], settings: Settings, devices: set[int]
) -> dict[int, Replay]:
    """Return a replay for each of these devices, and for each device that has a segment."""
    of_device: dict[int, list[RecordedSegment]] = {device: [] for device in devices}
    for segment in segments:
        of_device.setdefault(segment.device, []).append(segment)
    return {device: Replay(own, settings) for device, own in of_device.items()}


def from_snapshot(
    segments: Iterable[dict], stack_of: Callable[[list[dict]], int]
) -> list[RecordedSegment]:
    """Convert the segments of `torch.cuda.memory_snapshot()`.

    `stack_of` returns the number of a stack, given its frames.
    """
    states = {
        "active_allocated": "allocated",
        "active_pending_free": "pending",
        "active_awaiting_free": "pending",
    }
    found = []
    for segment in segments:
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            state = states.get(block["state"], "free")
            stack = 0
            if state != "free":
                stack = stack_of(block.get("frames") or [])
            start = block.get("address", address)
            size, requested = block["size"], block["requested_size"]
            blocks.append(RecordedBlock(start, size, requested, state, stack=stack))
            address += size
        found.append(
            RecordedSegment(
                device=segment["device"],
                address=segment["address"],
                size=segment["total_size"],
                stream=segment["stream"],
                small=segment["segment_type"] == "small",
                expandable=segment.get("is_expandable", False),
                blocks=blocks,
            )
        )
    return found
