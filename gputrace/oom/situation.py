"""What a GPU's memory looked like when a request could not be served, and which of a few reasons that was."""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gputrace.events import CATEGORIES, OOM, SourceLine
from gputrace.oom.message import Message
from gputrace.phases import phase_of
from gputrace.replay import Segment
from virtualgpu.allocator import LARGE_SEGMENT, SMALL_SIZE, size_text

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

# The most that is taken for a process's own CUDA context where nobody tells: on an H200 it is 0.5 GiB, and libraries add to it.
_CONTEXT_AT_MOST = 1 << 30
_ROUNDING = (1 << 30) // 100  # of a number in a message: two decimals of GiB


class Cause(StrEnum):
    """Why a request could not be served."""

    TOO_LARGE = "larger than the GPU"
    TOO_MUCH_LIVE = "too much live"
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
    """Live blocks of one line that keep segments with free space in place: `free` bytes lie between them, on one stream."""

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

    `requested` is what the program asked for, `rounded` the block that it needs, `segment_size` what the allocator asks of the device
    for it. `outside` is what is held on the device beside the allocator's segments, of which `context` is this process's own; where
    nobody tells, `context_known` is False. `live`, `reserved` and `segments` are None where lost events hide them. `limited` tells
    that a limit refused the request, `limit` its size, which is None where only the message would have told it. `for_parameter`: the
    request was, by its size and phase, for a parameter's gradient or its optimizer state, which no smaller batch makes smaller.
    """

    message: Message | None
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
    live: int | None
    reserved: int | None
    outside: int
    context: int
    context_known: bool
    processes: tuple[tuple[int, int], ...]
    limited: bool
    limit: int | None
    segments: list[Segment] | None
    holdings: list[Holding]
    pins: list[Pin]
    expandable: bool
    max_split: int

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
        return min(room, self.reserved or 0 if self.limit is None else self.limit)

    @property
    def short(self) -> int:
        """How many bytes less would have to be reserved for the request to fit, while what is free inside segments stays there."""
        return self.segment_size - max(0, self.capacity - (self.reserved or 0))

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

    @cached_property
    def verdict(self) -> Cause:
        """Which reason it was."""
        if self.requested is None or self.segment_size > self.total - self.context:
            return Cause.TOO_LARGE
        if self.live is None or self.reserved is None:
            return Cause.UNKNOWN
        needed = self.live + self.segment_size
        small = self.rounded <= SMALL_SIZE
        if any(space.largest >= self.rounded and space.small == small for space in self.barred):
            return Cause.OTHER_STREAM
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


def is_small(segment: Segment) -> bool:
    """Does the segment serve small requests? Of an expandable one only its blocks tell."""
    used = [block.size for block in segment.blocks if block.state != "free"]
    return segment.small or (segment.expandable and bool(used) and max(used) <= SMALL_SIZE)


def situation_of(trace: "TraceData") -> Situation | None:
    """The situation at the out-of-memory error that ended the block, or at the last one in it; None if there was none."""
    message = Message.read(trace.error) if trace.error else None
    index = _event(trace, message)
    if index is None and message is None:
        return None
    return _Facts(trace, index, message).situation()


def _event(trace: "TraceData", message: Message | None) -> int | None:
    """The index of the event: the last that the message can be about. Without a message it is the last, as the error was caught."""
    indices = np.flatnonzero(trace.events.action == OOM).tolist()
    if message is None:
        return indices[-1] if indices else None
    on_device = [index for index in indices if message.device in (None, int(trace.events.device[index]))]
    exact = [index for index in on_device if size_text(_segment_size(trace, index)) == size_text(message.requested or 0)]
    return (exact or on_device or [None])[-1]


def _segment_size(trace: "TraceData", index: int) -> int:
    return trace.settings.segment_size(trace.settings.round_size(int(trace.events.requested[index])))


class _Facts:
    """Reads a trace, one event of it (None if it was lost), and the message (None if the error was caught)."""

    def __init__(self, trace: "TraceData", index: int | None, message: Message | None) -> None:
        self.trace, self.index, self.message = trace, index, message
        self.device = int(trace.events.device[index]) if index is not None else message.device or 0
        self.segments = trace.segments(index, self.device) if index is not None and not trace.lost else None

    def situation(self) -> Situation:
        trace, index, message = self.trace, self.index, self.message
        requested = int(trace.events.requested[index]) if index is not None else message.requested
        rounded = trace.settings.round_size(requested or 0)
        segment_size = (message.requested if message else None) or trace.settings.segment_size(rounded)
        if index is not None and size_text(own := _segment_size(trace, index)) == size_text(segment_size):
            segment_size = own  # to the byte
        total = trace.totals.get(self.device) or message.total or 0
        free = int(trace.events.address[index]) if index is not None else message.free
        live, reserved = self._held()
        outside = max(0, total - (free or 0) - reserved) if reserved is not None else 0
        context, known, processes = self._context(outside, reserved)
        told = message is not None and message.total is not None
        step = LARGE_SEGMENT if trace.settings.expandable_segments else 0  # expandable segments grow by whole pages
        refused = free is not None and free >= segment_size + step
        return Situation(
            message=message,
            device=self.device,
            stream=int(trace.events.stream[index]) if index is not None else 0,
            streams=trace.stream_names(self.device),
            line=trace.line(int(trace.events.stack[index])) if index is not None else None,
            requested=requested,
            rounded=rounded,
            segment_size=segment_size,
            for_parameter=self._for_parameter(),
            total=total,
            free=free,
            live=live,
            reserved=reserved,
            outside=outside,
            context=context,
            context_known=known,
            processes=processes,
            limited=(message.allowed is not None or message.rejected) if told else refused,
            limit=message.allowed if message else None,
            segments=self.segments,
            holdings=self._holdings(),
            pins=self._pins(),
            expandable=trace.settings.expandable_segments,
            max_split=trace.settings.max_split_size,
        )

    def _for_parameter(self) -> bool:
        if self.index is None or self.segments is None:
            return False
        events, phases = self.trace.events, self.trace.phases
        (phase,) = phase_of(phases, events.time[[self.index]]).tolist()
        blocks = [block for segment in self.segments for block in segment.blocks if block.state == "allocated"]
        sizes = {block.requested for block in blocks if CATEGORIES[block.category] == "parameters"}
        outside_forward = phase < 0 or phases[phase].name != "forward"
        return outside_forward and int(events.requested[self.index]) in sizes

    def _held(self) -> tuple[int | None, int | None]:
        """Bytes in live blocks, and in segments."""
        if self.segments is not None:
            blocks = [block for segment in self.segments for block in segment.blocks]
            return sum(block.size for block in blocks if block.state == "allocated"), sum(segment.size for segment in self.segments)
        if self.message is None or self.message.allocated is None:
            return None, None
        return self.message.allocated, self.message.allocated + (self.message.unallocated or 0)

    def _context(self, outside: int, reserved: int | None) -> tuple[int, bool, tuple[tuple[int, int], ...]]:
        """What this process holds beside its segments, whether the message tells it, and the other processes."""
        listed = self.message.processes if self.message else ()
        own = self.message.own if self.message else None
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

    def _holdings(self) -> list[Holding]:
        """The live blocks by category and line, the largest first."""
        sizes: dict[tuple[int, SourceLine | None], list[int]] = defaultdict(list)
        for segment in self.segments or ():
            for block in segment.blocks:
                if block.state == "allocated":
                    sizes[block.category, self.trace.line(block.stack)].append(block.size)
        found = [Holding(CATEGORIES[category], line, sum(blocks), len(blocks)) for (category, line), blocks in sizes.items()]
        return sorted(found, key=lambda holding: (-holding.nbytes, holding.category, holding.line.place if holding.line else ""))

    def _pins(self) -> list[Pin]:
        """What keeps segments in place, by stream and line; that which lies beside most free space first."""
        found: dict[tuple[int, SourceLine | None], list[int]] = {}
        for segment in self.segments or ():
            free = sum(block.size for block in segment.blocks if block.state == "free")
            live = [block for block in segment.blocks if block.state == "allocated"] if free else []
            for line in {self.trace.line(block.stack) for block in live}:
                pinned = found.setdefault((segment.stream, line), [0, 0, 0])
                sizes = [block.size for block in live if self.trace.line(block.stack) == line]
                pinned[:] = pinned[0] + sum(sizes), pinned[1] + len(sizes), pinned[2] + free
        pins = [Pin(stream, line, *numbers) for (stream, line), numbers in found.items()]
        return sorted(pins, key=lambda pin: (-pin.free, pin.nbytes, pin.stream, pin.line.place if pin.line else ""))
