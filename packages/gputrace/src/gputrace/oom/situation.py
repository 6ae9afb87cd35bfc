"""State of a GPU's memory when a request could not be served, and the cause.

The numbers are read from PyTorch's message, as torch 2.10 to 2.15 words it (`malloc` in
c10/cuda/CUDACachingAllocator.cpp).
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gputrace.events import CATEGORIES, OOM, MemoryEvent, SourceLine
from gputrace.phases import phase_of
from gputrace.replay import RecordedBlock, RecordedSegment
from gputrace.steps import steps_of
from virtualgpu.allocator import LARGE_SEGMENT, SMALL_SIZE, Settings, size_text

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

# The largest CUDA context of this process that is assumed if its size is not known. On an H200 it
# is 0.5 GiB, and libraries add to it.
_CONTEXT_AT_MOST = 1 << 30
_ROUNDING = (1 << 30) // 100  # bytes. A number in a message has two decimals of GiB.
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Message:
    """Numbers of an error message in bytes, or None for those that it does not have.

    They are rounded to two decimals of the unit in the message.

    Attributes:
        requested: the size of the segment that the allocator requested from the device.
        own: this process's memory, with its CUDA context.
        processes: (number, bytes) of the other processes that the driver lists.
        rejected: whether the allocator itself refused the request, because of a limit.
    """

    requested: int | None
    device: int | None
    total: int | None
    free: int | None
    own: int | None
    processes: tuple[tuple[int, int], ...]
    allowed: int | None
    allocated: int | None
    private: int | None
    unallocated: int | None
    rejected: bool

    @classmethod
    def read(cls, text: str) -> "Message":
        """Read the numbers in the text of an error message. An empty text gives no numbers."""

        def size(pattern: str) -> int | None:
            """Return the size in bytes that matches a pattern in the text, or None."""
            found = re.search(pattern, text)
            if found is None:
                return None
            return _bytes(found[1], found[2])

        device = re.search(r"\bGPU (\d+) has a total capacity", text)
        listed = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
        processes = tuple((int(number), _bytes(amount, unit)) for number, amount, unit in listed)
        return cls(
            requested=size(rf"(?:Tried to allocate|Requested size:?) {_SIZE}"),
            device=int(device[1]) if device else None,
            total=size(rf"total capacity of {_SIZE}"),
            free=size(rf"of which {_SIZE} is free"),
            own=size(rf"this process has {_SIZE} memory in use"),
            processes=processes,
            allowed=size(rf"{_SIZE} allowed;"),
            allocated=size(rf"{_SIZE} is allocated by PyTorch"),
            private=size(rf"{_SIZE} allocated in private pools"),
            unallocated=size(rf"{_SIZE} is reserved by PyTorch but unallocated"),
            rejected="preemptively rejected" in text,
        )


def _bytes(amount: str, unit: str) -> int:
    """Convert an amount and a unit in a message, such as "2.00" and "GiB", to bytes."""
    return round(float(amount) * _UNITS[unit])


class Cause(StrEnum):
    """Cause of an out-of-memory error."""

    TOO_LARGE = "larger than the GPU"
    TOO_MUCH_LIVE = "too much in use"
    FRAGMENTATION = "fragmentation"
    OTHER_STREAM = "cached by another stream"
    OTHER_PROCESS = "another process"
    LIMIT = "a memory limit"
    UNKNOWN = "not known"  # because events were lost


@dataclass(frozen=True)
class Holding:
    """Live blocks of one category that one line allocated. `line` is None before the recording."""

    category: str
    line: SourceLine | None
    nbytes: int
    count: int


@dataclass(frozen=True)
class Pin:
    """Live blocks of one line that keep segments with free space from being released.

    Attributes:
        nbytes, count: the bytes and the number of these blocks.
        free: the free bytes in their segments.
    """

    stream: int
    line: SourceLine | None
    nbytes: int
    count: int
    free: int


@dataclass(frozen=True)
class FreeSpace:
    """Free blocks inside the segments of a stream.

    Attributes:
        small: whether the segments serve small requests.
        nbytes, count, largest: the bytes and the number of the blocks, and the largest one's bytes.
        waiting: whether they are freed but still in use by another stream.
    """

    stream: int
    small: bool
    nbytes: int
    count: int
    largest: int
    waiting: bool = False


@dataclass(frozen=True)
class Situation:
    """The facts at the moment of an out-of-memory error. Sizes are in bytes.

    Attributes:
        caught: whether the program caught the error. Then its message is not known.
        streams: the names of the device's streams.
        requested: what the program asked for. None if that is more than a message can express.
        rounded: the size of the block for the request.
        segment_size: what the allocator asked the device for.
        for_parameter: whether the request was for the gradient or the optimizer state of a
            parameter, which a smaller batch does not reduce.
        live, reserved: bytes of live blocks and of segments. They are known (`held_known`) unless
            lost events hide them.
        outside: bytes on the device outside the allocator's segments.
        context: the part of `outside` that this process holds. It is assumed if not
            `context_known`.
        limited: whether a limit refused the request. The limit itself is in the message.
        segments: the segments. None if events were lost.
        lost: the number of lost events.
        grows: the bytes that each step of a loop left behind, if there is such a loop.
        grown: the bytes that all its steps left behind and that are still live.
    """

    message: Message
    caught: bool
    device: int
    stream: int
    streams: dict[int, str]
    line: SourceLine | None
    requested: int | None
    rounded: int
    segment_size: int
    for_parameter: bool
    total: int
    free: int | None
    live: int
    reserved: int
    held_known: bool
    outside: int
    context: int
    context_known: bool
    processes: tuple[tuple[int, int], ...]
    limited: bool
    segments: list[RecordedSegment] | None
    holdings: list[Holding]
    pins: list[Pin]
    settings: Settings
    lost: int
    grows: int
    grown: int

    @property
    def limit(self) -> int | None:
        """The bytes that this process may reserve, or None if the message does not say it."""
        return self.message.allowed

    @property
    def others(self) -> int:
        """Bytes that other processes hold."""
        return self.outside - self.context

    @property
    def capacity(self) -> int:
        """The most bytes that this process's allocator could hold at this moment."""
        room = self.total - self.outside
        if not self.limited:
            return room
        if self.limit is None:
            return min(room, self.reserved)
        return min(room, self.limit)

    @property
    def short(self) -> int:
        """The bytes by which reserved memory must shrink for the request's new segment to fit."""
        return self.segment_size - max(0, self.capacity - self.reserved)

    @cached_property
    def spaces(self) -> list[FreeSpace]:
        """The free blocks inside the segments, those with most bytes first."""
        sizes: dict[tuple[int, bool, bool], list[int]] = defaultdict(list)
        for segment in self.segments or ():
            small = is_small(segment)
            for block in segment.blocks:
                if block.state != "allocated":
                    sizes[segment.stream, small, block.state == "pending"].append(block.size)
        found = []
        for (stream, small, waiting), blocks in sizes.items():
            nbytes, count, largest = sum(blocks), len(blocks), max(blocks)
            found.append(FreeSpace(stream, small, nbytes, count, largest, waiting))
        found.sort(key=lambda space: (-space.nbytes, space.stream, space.small, space.waiting))
        return found

    @property
    def usable(self) -> FreeSpace | None:
        """The free blocks of the request's stream and size, which the request may use."""
        small = self.rounded <= SMALL_SIZE
        for space in self.spaces:
            if space.stream == self.stream and space.small == small and not space.waiting:
                return space
        return None

    @property
    def barred(self) -> list[FreeSpace]:
        """The free blocks of other streams, and those that wait for other streams."""
        return [space for space in self.spaces if space.stream != self.stream or space.waiting]

    @property
    def within_reach(self) -> list[FreeSpace]:
        """The free blocks of the request's stream that wait for no other stream."""
        return [space for space in self.spaces if space not in self.barred]

    @cached_property
    def verdict(self) -> Cause:
        """The cause of the out-of-memory error, which follows from the other attributes."""
        if self.requested is None or self.segment_size > self.total - self.context:
            return Cause.TOO_LARGE
        if not self.held_known:
            return Cause.UNKNOWN
        needed = self.live + self.segment_size
        small = self.rounded <= SMALL_SIZE
        if any(space.largest >= self.rounded and space.small == small for space in self.barred):
            return Cause.OTHER_STREAM
        hole = self.reserved - self.live
        if needed <= self.capacity and self.grown > hole:
            return Cause.TOO_MUCH_LIVE  # without the holes, a later step would have failed
        if self.usable is not None and self.usable.nbytes >= self.rounded:
            return Cause.FRAGMENTATION
        # Every allocator has small holes. They count if they are half of the request.
        if needed <= self.capacity and 2 * hole >= self.segment_size:
            if self.segments is None:
                return Cause.UNKNOWN
            barred = sum(space.nbytes for space in self.barred)
            if 2 * barred > sum(space.nbytes for space in self.spaces):
                return Cause.OTHER_STREAM
            return Cause.FRAGMENTATION
        if self.limited and needed <= self.total - self.outside:
            return Cause.LIMIT
        if needed <= self.total - self.context:
            return Cause.OTHER_PROCESS
        return Cause.TOO_MUCH_LIVE


def is_small(segment: RecordedSegment) -> bool:
    """Return whether a segment serves small requests.

    For an expandable segment, this follows from its blocks.
    """
    used = [block.size for block in segment.blocks if block.state != "free"]
    return segment.small or (segment.expandable and bool(used) and max(used) <= SMALL_SIZE)


# Read the situation from a trace.

# The live blocks, each with its segment and the line that allocated it.
_Live = list[tuple[RecordedSegment, RecordedBlock, SourceLine | None]]


def situation_of(trace: "TraceData") -> Situation | None:
    """Return the situation at the out-of-memory error that ended the block, or at the last one.

    Return None if memory did not run out.
    """
    message, settings = Message.read(trace.error), trace.settings
    index = _event(trace, message)
    if index is None and not trace.error:
        return None
    event: MemoryEvent | None = None
    device, free, requested, line = message.device or 0, message.free, message.requested, None
    if index is not None:
        event = trace.events.row(index)
        device, free, requested = event.device, event.address, event.requested
        line = trace.line(event.stack)
    segments = None
    if index is not None and not trace.lost:
        segments = trace.segments(index, device)
    live = _live_blocks(trace, segments or [])
    rounded = settings.round_size(requested or 0)
    segment_size = settings.segment_size(rounded)
    if message.requested is not None:
        agrees = event is not None and size_text(segment_size) == size_text(message.requested)
        if not agrees:
            segment_size = message.requested
    total = trace.totals.get(device) or message.total or 0
    in_live_blocks = sum(block.size for _, block, _ in live)
    reserved = sum(segment.size for segment in segments or ())
    if segments is None:
        in_live_blocks = message.allocated or 0
        reserved = in_live_blocks + (message.unallocated or 0)
    held_known = segments is not None or message.allocated is not None
    outside = 0
    if held_known:
        outside = max(0, total - (free or 0) - reserved)
    context, context_known, processes = _context(message, outside, reserved if held_known else None)
    grows = grown = 0
    steps = steps_of(trace, device)
    if steps is not None:
        grows, grown = steps.growth, min(steps.growth * steps.repeats, in_live_blocks)
    return Situation(
        message=message,
        caught=not trace.error,
        device=device,
        stream=0 if event is None else event.stream,
        streams=trace.stream_names(device),
        line=line,
        requested=requested,
        rounded=rounded,
        segment_size=segment_size,
        for_parameter=event is not None and _for_parameter(trace, event, live),
        total=total,
        free=free,
        live=in_live_blocks,
        reserved=reserved,
        held_known=held_known,
        outside=outside,
        context=context,
        context_known=context_known,
        processes=processes,
        limited=_is_limited(message, settings, free, segment_size),
        segments=segments,
        holdings=_holdings(live),
        pins=_pins(live),
        settings=settings,
        lost=trace.lost,
        grows=grows,
        grown=grown,
    )


def _live_blocks(trace: "TraceData", segments: list[RecordedSegment]) -> _Live:
    """Return the allocated blocks of the segments."""
    live = []
    for segment in segments:
        for block in segment.blocks:
            if block.state == "allocated":
                live.append((segment, block, trace.line(block.stack)))
    return live


def _is_limited(message: Message, settings: Settings, free: int | None, segment_size: int) -> bool:
    """Return whether a limit of memory, and not the device, refused the request.

    Without a message, this follows from the device's `free` bytes, which would have been enough for
    a segment of `segment_size` bytes.
    """
    if message.total is not None:
        return message.allowed is not None or message.rejected
    # There was enough free memory. Expandable segments grow by whole pages.
    page = LARGE_SEGMENT if settings.expandable_segments else 0
    return free is not None and free >= segment_size + page


def _event(trace: "TraceData", message: Message) -> int | None:
    """Return the index of the last event that the message may be about.

    If the program caught the error, return that of the last out-of-memory event.
    """
    indices = np.flatnonzero(trace.events.action == OOM).tolist()
    candidates = indices
    if trace.error:
        on_device, exact = [], []
        for index in indices:
            if message.device in (None, int(trace.events.device[index])):
                on_device.append(index)
                requested = int(trace.events.requested[index])
                size = trace.settings.segment_size(trace.settings.round_size(requested))
                if size_text(size) == size_text(message.requested or 0):
                    exact.append(index)
        candidates = exact or on_device
    if not candidates:
        return None
    return candidates[-1]


def _for_parameter(trace: "TraceData", event: MemoryEvent, live: _Live) -> bool:
    """Return whether a request has the size of a parameter, and was made outside a forward pass."""
    (phase,) = phase_of(trace.phases, np.array([event.time])).tolist()
    sizes = set()
    for _, block, _ in live:
        if CATEGORIES[block.category] == "parameters":
            sizes.add(block.requested)
    return event.requested in sizes and (phase < 0 or trace.phases[phase].name != "forward")


def _context(
    message: Message, outside: int, reserved: int | None
) -> tuple[int, bool, tuple[tuple[int, int], ...]]:
    """Return (bytes, known, others) for the memory outside this process's segments.

    bytes: what this process holds outside its segments, such as its CUDA context
    known: whether these bytes follow from the message. If not, they are an assumption.
    others: (process id, bytes) of the other processes
    """
    listed, own = message.processes, message.own
    if own is None and reserved is not None and listed:
        # In a container, the driver's number of this process differs from the number inside. This
        # process is the one that holds about as much as is reserved here.
        rest = [
            (nbytes - reserved, number) for number, nbytes in listed if nbytes >= reserved * 0.99
        ]
        if rest and min(rest)[0] <= _CONTEXT_AT_MOST:
            number = min(rest)[1]
            own = dict(listed)[number]
            listed = tuple(process for process in listed if process[0] != number)
    if own is None or reserved is None:
        return min(outside, _CONTEXT_AT_MOST), False, listed
    exact = max(0, outside - sum(nbytes for _, nbytes in listed))
    rounding = (len(listed) + 1) * _ROUNDING
    if abs(exact - (own - reserved)) > rounding:
        # The driver hides a process, so the message's own figure is the better one.
        exact = min(max(0, own - reserved), outside)
    return exact, True, listed


def _holdings(live: _Live) -> list[Holding]:
    """Return the live blocks by category and line, those with most bytes first."""
    sizes: dict[tuple[int, SourceLine | None], list[int]] = defaultdict(list)
    for _, block, line in live:
        sizes[block.category, line].append(block.size)
    found = []
    for (category, line), blocks in sizes.items():
        found.append(Holding(CATEGORIES[category], line, sum(blocks), len(blocks)))
    found.sort(key=lambda holding: (-holding.nbytes, holding.category, _place(holding.line)))
    return found


def _pins(live: _Live) -> list[Pin]:
    """Return the live blocks in segments with free space, by stream and line.

    Those next to most free space come first.
    """
    free = {}
    for segment, _, _ in live:
        blocks = [block for block in segment.blocks if block.state == "free"]
        free[segment.address] = sum(block.size for block in blocks)
    # For each stream and line, the (segment, bytes) of its blocks.
    found: dict[tuple[int, SourceLine | None], list[tuple[int, int]]] = defaultdict(list)
    for segment, block, line in live:
        if free[segment.address]:
            found[segment.stream, line].append((segment.address, block.size))
    pins = []
    for (stream, line), pinning in found.items():
        nbytes = sum(size for _, size in pinning)
        beside = sum(free[address] for address in {address for address, _ in pinning})
        pins.append(Pin(stream, line, nbytes, len(pinning), beside))
    pins.sort(key=lambda pin: (-pin.free, pin.nbytes, pin.stream, _place(pin.line)))
    return pins


def _place(line: SourceLine | None) -> str:
    """Return the location of a line, or "" for blocks from before the recording."""
    return "" if line is None else line.location
