"""The state of a GPU's memory when a request could not be served, and the cause.

The numbers of PyTorch's message are read as torch 2.10 to 2.15 word it (c10/cuda/CUDACachingAllocator.cpp, `malloc`)."""

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

# The most that is assumed for a process's own CUDA context where it is not known: on an H200 it is 0.5 GiB, and libraries add to it.
_CONTEXT_AT_MOST = 1 << 30
_ROUNDING = (1 << 30) // 100  # of a number in a message: two decimals of GiB
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Message:
    """The numbers of an error message, in bytes, to two decimals of the unit that it is printed in; None for what it does not give.

    `requested` is the size of the segment that the allocator asked the device for. `processes` are (number, bytes) of the other
    processes that the driver lists. `own` counts this process's memory with its CUDA context. `rejected`: the allocator refused by
    itself, for a limit.
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
        """The numbers of a message; none of an empty one."""

        def size(pattern: str) -> int | None:
            found = re.search(pattern, text)
            return _bytes(found[1], found[2]) if found else None

        device = re.search(r"\bGPU (\d+) has a total capacity", text)
        listed = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
        return cls(
            requested=size(rf"(?:Tried to allocate|Requested size:?) {_SIZE}"),
            device=int(device[1]) if device else None,
            total=size(rf"total capacity of {_SIZE}"),
            free=size(rf"of which {_SIZE} is free"),
            own=size(rf"this process has {_SIZE} memory in use"),
            processes=tuple((int(number), _bytes(amount, unit)) for number, amount, unit in listed),
            allowed=size(rf"{_SIZE} allowed;"),
            allocated=size(rf"{_SIZE} is allocated by PyTorch"),
            private=size(rf"{_SIZE} allocated in private pools"),
            unallocated=size(rf"{_SIZE} is reserved by PyTorch but unallocated"),
            rejected="preemptively rejected" in text,
        )


def _bytes(amount: str, unit: str) -> int:
    return round(float(amount) * _UNITS[unit])


class Cause(StrEnum):
    """Why a request could not be served."""

    TOO_LARGE = "larger than the GPU"
    TOO_MUCH_LIVE = "too much in use"
    FRAGMENTATION = "fragmentation"
    OTHER_STREAM = "cached by another stream"
    OTHER_PROCESS = "another process"
    LIMIT = "a memory limit"
    UNKNOWN = "not known"  # lost events hide it


@dataclass(frozen=True)
class Holding:
    """Live blocks of one category that one line allocated; `line` is None of those from before the recording."""

    category: str
    line: SourceLine | None
    nbytes: int
    count: int


@dataclass(frozen=True)
class Pin:
    """Live blocks of one line that keep segments with free space from being released: `free` bytes lie between them, on one stream."""

    stream: int
    line: SourceLine | None
    nbytes: int
    count: int
    free: int


@dataclass(frozen=True)
class FreeSpace:
    """The free blocks inside a stream's segments: their bytes, their number, and the largest. `waiting`: freed, but still in use by
    another stream."""

    stream: int
    small: bool
    nbytes: int
    count: int
    largest: int
    waiting: bool = False


@dataclass(frozen=True)
class Situation:
    """The facts at the moment of an out-of-memory error; sizes in bytes.

    `caught`: the program caught the error, so its message is not known. `requested` is what the program asked for (None where it is
    more than a message can give), `rounded` the block for it, `segment_size` what the allocator asks of the device. `outside` is held
    on the device outside the allocator's segments, `context` of it by this process; `context_known` is False where that is assumed.
    `live` and `reserved` are known unless lost events hide them, `segments` is None then. `limited`: a limit refused the request;
    `limit`, its size, stands in the message only. `for_parameter`: the request was, by its size and phase, for a parameter's gradient
    or its optimizer state, which no smaller batch makes smaller.
    """

    message: Message
    caught: bool
    device: int
    stream: int
    streams: dict[int, str]  # what to call the device's streams
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
    lost: int  # events
    grows: int  # bytes that each step of the loop before left behind, as far as such a loop is seen
    grown: int  # and all its steps, as far as it is still there

    @property
    def limit(self) -> int | None:
        return self.message.allowed

    @property
    def others(self) -> int:
        """Bytes that other processes hold."""
        return self.outside - self.context

    @property
    def capacity(self) -> int:
        """The most that this process's allocator could hold now."""
        room = self.total - self.outside
        if not self.limited:
            return room
        return min(room, self.reserved if self.limit is None else self.limit)

    @property
    def short(self) -> int:
        """How many bytes less would have to be reserved for the request to fit, while what is free inside segments stays there."""
        return self.segment_size - max(0, self.capacity - self.reserved)

    @cached_property
    def spaces(self) -> list[FreeSpace]:
        """The free space inside the segments, the largest first."""
        sizes: dict[tuple[int, bool, bool], list[int]] = defaultdict(list)
        for segment in self.segments or ():
            small = is_small(segment)
            for block in segment.blocks:
                if block.state != "allocated":
                    sizes[segment.stream, small, block.state == "pending"].append(block.size)
        found = [FreeSpace(stream, small, sum(s), len(s), max(s), waiting) for (stream, small, waiting), s in sizes.items()]
        return sorted(found, key=lambda space: (-space.nbytes, space.stream, space.small, space.waiting))

    @property
    def usable(self) -> FreeSpace | None:
        """The free space that the request may use: that of its stream, for its size."""
        here = [s for s in self.spaces if s.stream == self.stream and s.small == (self.rounded <= SMALL_SIZE) and not s.waiting]
        return here[0] if here else None

    @property
    def barred(self) -> list[FreeSpace]:
        """The free space of other streams, and what waits for them."""
        return [space for space in self.spaces if space.stream != self.stream or space.waiting]

    @property
    def within_reach(self) -> list[FreeSpace]:
        """The other free space."""
        return [space for space in self.spaces if space not in self.barred]

    @cached_property
    def verdict(self) -> Cause:
        """Why the request could not be served."""
        if self.requested is None or self.segment_size > self.total - self.context:
            return Cause.TOO_LARGE
        if not self.held_known:
            return Cause.UNKNOWN
        needed = self.live + self.segment_size
        small = self.rounded <= SMALL_SIZE
        if any(space.largest >= self.rounded and space.small == small for space in self.barred):
            return Cause.OTHER_STREAM
        if needed <= self.capacity and self.grown > self.reserved - self.live:  # without holes, a later step would have failed
            return Cause.TOO_MUCH_LIVE
        if self.usable is not None and self.usable.nbytes >= self.rounded:
            return Cause.FRAGMENTATION
        crumbs = 2 * (self.reserved - self.live) < self.segment_size  # less than half of the request: no allocator does without
        if needed <= self.capacity and not crumbs:  # what is free in pieces, and on the device, would suffice
            if self.segments is None:
                return Cause.UNKNOWN
            barred = sum(space.nbytes for space in self.barred)
            return Cause.OTHER_STREAM if 2 * barred > sum(space.nbytes for space in self.spaces) else Cause.FRAGMENTATION
        if self.limited and needed <= self.total - self.outside:
            return Cause.LIMIT
        return Cause.OTHER_PROCESS if needed <= self.total - self.context else Cause.TOO_MUCH_LIVE


def is_small(segment: RecordedSegment) -> bool:
    """Does the segment serve small requests? Of an expandable one only its blocks tell."""
    used = [block.size for block in segment.blocks if block.state != "free"]
    return segment.small or (segment.expandable and bool(used) and max(used) <= SMALL_SIZE)


# Read from a trace

_Live = list[
    tuple[RecordedSegment, RecordedBlock, SourceLine | None]
]  # the live blocks, each with its segment and the line that allocated it


def situation_of(trace: "TraceData") -> Situation | None:
    """The situation at the out-of-memory error that ended the block, or at the last one in it; None if there was none."""
    message, settings = Message.read(trace.error), trace.settings
    index = _event(trace, message)
    if index is None and not trace.error:
        return None
    event = None if index is None else trace.events.row(index)
    device = (message.device or 0) if event is None else event.device
    segments = None if index is None or trace.lost else trace.segments(index, device)
    blocks = [(segment, block) for segment in segments or () for block in segment.blocks]
    live = [(segment, block, trace.line(block.stack)) for segment, block in blocks if block.state == "allocated"]
    requested = message.requested if event is None else event.requested
    rounded = settings.round_size(requested or 0)
    segment_size = settings.segment_size(rounded)
    if message.requested is not None and (event is None or size_text(segment_size) != size_text(message.requested)):
        segment_size = message.requested
    total = trace.totals.get(device) or message.total or 0
    free = message.free if event is None else event.address
    in_live_blocks, reserved = sum(block.size for _, block, _ in live), sum(segment.size for segment in segments or ())
    if segments is None:
        in_live_blocks, reserved = message.allocated or 0, (message.allocated or 0) + (message.unallocated or 0)
    held_known = segments is not None or message.allocated is not None
    outside = max(0, total - (free or 0) - reserved) if held_known else 0
    context, context_known, processes = _context(message, outside, reserved if held_known else None)
    steps = steps_of(trace, device)
    step = LARGE_SEGMENT if settings.expandable_segments else 0  # expandable segments grow by whole pages
    refused = free is not None and free >= segment_size + step
    return Situation(
        message=message,
        caught=not trace.error,
        device=device,
        stream=0 if event is None else event.stream,
        streams=trace.stream_names(device),
        line=None if event is None else trace.line(event.stack),
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
        limited=refused if message.total is None else message.allowed is not None or message.rejected,
        segments=segments,
        holdings=_holdings(live),
        pins=_pins(live),
        settings=settings,
        lost=trace.lost,
        grows=steps.growth if steps is not None else 0,
        grown=min(steps.growth * steps.repeats, in_live_blocks) if steps is not None else 0,
    )


def _event(trace: "TraceData", message: Message) -> int | None:
    """The index of the last event that the message can be about; of the last at all if the error was caught."""
    indices = np.flatnonzero(trace.events.action == OOM).tolist()
    if not trace.error:
        return indices[-1] if indices else None
    settings, requested = trace.settings, trace.events.requested
    on_device = [index for index in indices if message.device in (None, int(trace.events.device[index]))]
    sizes = {index: settings.segment_size(settings.round_size(int(requested[index]))) for index in on_device}
    exact = [index for index in on_device if size_text(sizes[index]) == size_text(message.requested or 0)]
    return next(reversed(exact or on_device), None)


def _for_parameter(trace: "TraceData", event: MemoryEvent, live: _Live) -> bool:
    (phase,) = phase_of(trace.phases, np.array([event.time])).tolist()
    sizes = {block.requested for _, block, _ in live if CATEGORIES[block.category] == "parameters"}
    return event.requested in sizes and (phase < 0 or trace.phases[phase].name != "forward")


def _context(message: Message, outside: int, reserved: int | None) -> tuple[int, bool, tuple[tuple[int, int], ...]]:
    """What this process holds outside its segments, whether the message gives it, and the other processes."""
    listed, own = message.processes, message.own
    if own is None and reserved is not None and listed:
        # In a container the driver knows this process by another number than it has inside: it is the one that holds so much.
        rest = [(nbytes - reserved, number) for number, nbytes in listed if nbytes >= reserved * 0.99]
        if rest and min(rest)[0] <= _CONTEXT_AT_MOST:
            number = min(rest)[1]
            own = dict(listed)[number]
            listed = tuple(process for process in listed if process[0] != number)
    if own is None or reserved is None:
        return min(outside, _CONTEXT_AT_MOST), False, listed
    exact = max(0, outside - sum(nbytes for _, nbytes in listed))
    rounding = (len(listed) + 1) * _ROUNDING
    # Where the two ways to know it differ, the driver hides a process.
    return exact if abs(exact - (own - reserved)) <= rounding else min(max(0, own - reserved), outside), True, listed


def _holdings(live: _Live) -> list[Holding]:
    """The live blocks by category and line, the largest first."""
    sizes: dict[tuple[int, SourceLine | None], list[int]] = defaultdict(list)
    for _, block, line in live:
        sizes[block.category, line].append(block.size)
    found = [Holding(CATEGORIES[category], line, sum(blocks), len(blocks)) for (category, line), blocks in sizes.items()]
    return sorted(found, key=lambda holding: (-holding.nbytes, holding.category, holding.line.location if holding.line else ""))


def _pins(live: _Live) -> list[Pin]:
    """The live blocks in segments with free space, by stream and line; those next to most free space first."""
    segments = {segment.address: segment for segment, _, _ in live}
    free = {address: sum(block.size for block in segment.blocks if block.state == "free") for address, segment in segments.items()}
    found: dict[tuple[int, SourceLine | None], list[tuple[int, int]]] = defaultdict(list)  # (segment, bytes of a block)
    for segment, block, line in live:
        if free[segment.address]:
            found[segment.stream, line].append((segment.address, block.size))
    pins = [
        Pin(*key, sum(size for _, size in blocks), len(blocks), sum(free[address] for address in {address for address, _ in blocks}))
        for key, blocks in found.items()
    ]
    return sorted(pins, key=lambda pin: (-pin.free, pin.nbytes, pin.stream, pin.line.location if pin.line else ""))
