"""PyTorch's CUDA caching allocator for one virtual device, in plain Python and without torch.

It follows c10/cuda/CUDACachingAllocator.cpp: best fit within a stream's pool, segments of 2 MiB, 20 MiB or more, splitting and
merging, frees that wait for other streams, and the retries before an out-of-memory error. There is no memory behind it: blocks
are addresses and sizes.
"""

import os
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol

from .address_space import AddressSpace
from .allocator_expandable import ExpandableSegments
from .allocator_history import Frames, History, snapshot
from .allocator_pool import ALLOCATED, FREE, PENDING, Block, Pool, Segment
from .allocator_settings import SMALL_SIZE, UNLIMITED, Settings
from .allocator_stats import Stats
from .oom import TOO_LARGE, OutOfMemory, oom_text

Listener = Callable[[str, Block, int], None]
_LARGEST = 1 << 60  # bytes; a request of this size or more is refused without a look
_REENTERED = "the allocator was called from a finalizer or a listener while it was at work"


class EventSource(Protocol):
    """Tells when streams are done. `wait` returns when the work is done; it must not need the allocator."""

    def record(self, stream: int) -> object: ...
    def done(self, token: object) -> bool: ...
    def wait(self, token: object) -> None: ...


class NoEvents:
    """Streams whose work is always done."""

    def record(self, stream: int) -> None:
        return None

    def done(self, token: None) -> bool:
        return True

    def wait(self, token: None) -> None:
        return None


class CachingAllocator:
    """The memory of device `index`, of `total` bytes. May be called from any thread.

    `others()` gives the bytes of the device that are held outside this allocator. `events` tells when streams are done;
    without it they always are. `processes()` lists (pid, bytes) of the processes on the device, for the text of an
    out-of-memory error, which is worded as PyTorch `version` words it.
    """

    def __init__(
        self,
        index: int,
        total: int,
        *,
        settings: Settings | None = None,
        others: Callable[[], int] = lambda: 0,
        events: EventSource | None = None,
        processes: Callable[[], list[tuple[int, int]]] = list,
        version: str = "2.13",
        first_address: int | None = None,
    ) -> None:
        self.index = index
        self.total = total
        self.version = version
        self._others = others
        self._events = events or NoEvents()
        self._processes = processes
        self._small = Pool(small=True)
        self._large = Pool(small=False)
        self._stats = Stats(self._small, self._large)
        self._segments: dict[int, Segment] = {}  # by address
        self._addresses = AddressSpace(0x7F0000000000 + index * (1 << 40) if first_address is None else first_address)
        self._expandable: ExpandableSegments | None = None  # made when they are first switched on
        self._deferred: dict[int, deque[tuple[object, Block]]] = {}  # frees that wait, by the stream they wait for, oldest first
        self._lock = RLock()
        self._busy = False  # a call is under way
        self._late: list[Block] = []  # freed by a finalizer that ran during a call
        self._risen = False  # a peak may have been passed since peaks were last noted
        self._listener: Listener | None = None
        self._history: History | None = None
        self._watched = False  # there is a listener or a history
        self.memory_fraction = 1.0
        self.allowed: int | None = None  # the most bytes that may be reserved
        self.configure(settings or Settings())
        self.set_memory_fraction(self.settings.per_process_memory_fraction)

    # What a program asks for

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least `nbytes` bytes (more than 0), to be used on `stream`. Raises OutOfMemory."""
        if nbytes <= 0:
            raise ValueError(f"an allocation needs at least 1 byte, got {nbytes}")
        with self._lock:
            if self._busy:
                raise RuntimeError(_REENTERED)
            self._busy = True
            try:
                if self._deferred:
                    self._complete_deferred()
                size = (nbytes + 511) & -512 if self._rounds_to_512 else self.settings.round_size(nbytes)
                pool = self._small if size <= SMALL_SIZE else self._large
                block = self._best_fit(pool, size, stream)
                if block is None:
                    block = self._obtain(pool, size, stream, nbytes)
                self._hand_out(block, pool, size, nbytes)
                return block
            finally:
                self._busy = False
                if self._late:
                    self._free_late()

    def free(self, block: Block) -> None:
        """Gives a block back. It is free at once, or when the other streams that use it have done what they were asked so far."""
        with self._lock:
            if self._busy:  # a finalizer ran in the midst of a call: its block waits until the call is over
                self._late.append(block)
                return
            if block.state != ALLOCATED:
                raise ValueError(f"only an allocated block can be freed, got {block}")
            self._busy = True
            try:
                self._free(block)
            finally:
                self._busy = False
                if self._late:
                    self._free_late()

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that `stream` uses the block too: once freed, the block waits for the work that the stream then has."""
        with self._lock:
            if block.state != ALLOCATED:
                raise ValueError(f"record_stream needs an allocated block, got {block}")
            if stream != block.stream:
                block.streams = {*(block.streams or ()), stream}

    def empty_cache(self) -> None:
        """Waits for the frees under way and returns every wholly free segment to the device."""
        with self._alone():
            self._release_cached()

    # Limits and settings

    def configure(self, settings: Settings) -> None:
        """Takes new settings for all later requests. The memory fraction stays as it is."""
        with self._lock:
            self.settings = settings
            self._rounds_to_512 = not any(settings.divisions)
            self._max_split = settings.max_split_size
            self._small.configure(settings)
            self._large.configure(settings)
            if settings.expandable_segments and self._expandable is None:
                self._expandable = ExpandableSegments(self)

    def set_memory_fraction(self, fraction: float) -> None:
        """Lets this allocator reserve at most that share of the device's memory; 1 removes the limit."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"the memory fraction must lie between 0 and 1, got {fraction}")
        self.memory_fraction = fraction
        self.allowed = None if fraction == 1 else round(fraction * self.total)

    def free_bytes(self) -> int:
        """Bytes of the device that nobody holds."""
        return max(self.total - self.reserved - self._others(), 0)

    # Figures

    @property
    def allocated(self) -> int:
        """Bytes in blocks that tensors hold."""
        return self._stats.allocated

    @property
    def reserved(self) -> int:
        """Bytes held from the device."""
        return self._stats.reserved

    @property
    def peak_allocated(self) -> int:
        return self._stats.peak("allocated_bytes")

    @property
    def peak_reserved(self) -> int:
        return self._stats.peak("reserved_bytes")

    def stats(self) -> dict:
        """All statistics, nested as torch.cuda.memory_stats_as_nested_dict returns them; sizes in bytes."""
        with self._lock:
            return self._stats.nested(-1 if self._max_split == UNLIMITED else self._max_split)

    def reset_peak_stats(self) -> None:
        with self._lock:
            self._stats.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        with self._lock:
            self._stats.reset_accumulated()

    def segments(self) -> list[dict]:
        """The segments and their blocks, by address, as in `torch.cuda.memory_snapshot()`."""
        with self._lock:
            listed = snapshot(self.index, self._segments.values())
            if self._history is not None:
                self._history.add("snapshot", 0, sum(segment["active_size"] for segment in listed), 0)
            return listed

    # Watching

    def listen(self, listener: Listener | None) -> None:
        """Calls `listener(action, block, size)` at every `alloc`, `free_requested`, `free_completed` and `segment_*`; None ends it.

        The listener runs in the midst of the call: it must not allocate, and what it frees is freed when the call is over.
        """
        with self._lock:
            self._listener = listener
            self._watched = listener is not None or self._history is not None

    def record_history(
        self,
        enabled: str | None = "all",
        max_entries: int = sys.maxsize,
        frames: Frames | None = None,
        *,
        context: str | None = "all",
        clock: Callable[[], int] = lambda: 0,
        clear: bool = False,
    ) -> None:
        """Starts or (None) ends a history, as `torch.cuda.memory._record_memory_history` asks for it.

        `enabled` "all" keeps the last `max_entries` events, "state" only where the blocks in use were allocated. `frames()`
        gives the stack of the caller, `context` ("state", "alloc", "all" or None) what it is kept for; `clock()` gives
        microseconds.
        """
        with self._lock:
            entries = () if self._history is None or clear or enabled is None else self._history.entries
            self._history = enabled and History(enabled, max_entries, frames, context, clock, entries)
            self._watched = self._listener is not None or self._history is not None

    def history(self) -> list[dict]:
        """The events kept so far, oldest first, as in a snapshot's `device_traces`."""
        with self._lock:
            return [] if self._history is None else list(self._history.entries)

    # A request: search, split, hand out

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The smallest free block of the stream that suffices, the lowest address among equals, out of its pool."""
        free = pool.free.get(stream)
        if not free:
            return None
        i = bisect_left(free, (size,))
        if i < len(free) and self._expandable is not None:
            i = self._expandable.choose(free, i)
        if i == len(free):
            return None
        block = free[i][2]
        if block.size >= self._max_split and (
            size < self._max_split or block.size >= size + self.settings.max_non_split_rounding
        ):  # an oversize block serves no small request, and no large one that would waste too much of it
            return None
        del free[i]
        return block

    def _obtain(self, pool: Pool, size: int, stream: int, nbytes: int) -> Block:
        """A block from the device, if need be after giving it back what is cached. The pool is not searched again."""
        if nbytes >= _LARGEST:
            raise self._out_of_memory(TOO_LARGE, nbytes, nbytes)
        wanted = self.settings.segment_size(size)
        block = self._grow(pool, size, wanted, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._grow(pool, size, wanted, stream)
        if block is None:
            self._release_cached()
            self._stats.num_alloc_retries += 1
            block = self._grow(pool, size, wanted, stream)
        if block is None:
            self._stats.num_ooms += 1
            free = self.free_bytes()
            if self._history is not None:
                self._history.add("oom", free, size, stream)
            raise self._out_of_memory(None, nbytes, wanted)
        return block

    def _grow(self, pool: Pool, size: int, wanted: int, stream: int) -> Block | None:
        """A block of at least `size` bytes in memory got from the device, or None where the device or the limit has no room."""
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self._expandable.obtain(pool, size, stream)
        if wanted > self.free_bytes():
            return None
        segment = Segment(self._addresses.take(wanted), wanted, stream, pool)
        self._segments[segment.address] = segment
        pool.segments += 1
        self._count_reserved(pool, wanted)
        if wanted >= self._max_split:
            self._stats.oversize_segments.change(1)
        if self._watched:
            self._tell("segment_alloc", segment.first, segment.address, wanted)
        return segment.first

    def _hand_out(self, block: Block, pool: Pool, size: int, nbytes: int) -> None:
        """Cuts the block to size if the rest is worth keeping, and counts it as allocated."""
        counted = block.segment.page == 0  # inactive_split leaves expandable segments out
        was_split = block.previous is not None or block.next is not None
        if block.size - size >= pool.least_tail and size < pool.split_below:
            tail = block.split(size)
            pool.add(tail)
            if counted and was_split:
                pool.unsplit_bytes += size
            elif counted:
                pool.split_blocks += 1
                pool.split_bytes += tail.size
                self._stats.note_split()
        elif was_split and counted:
            pool.unsplit_blocks += 1
            pool.unsplit_bytes += block.size
        block.state = ALLOCATED
        block.requested = nbytes
        pool.mallocs += 1
        pool.malloc_bytes += block.size
        pool.malloc_requested += nbytes
        self._risen = True
        if block.size >= self._max_split:
            self._stats.oversize_allocations.change(1)
        if self._watched:
            self._tell("alloc", block, block.address, nbytes)

    # A free

    def _free(self, block: Block) -> None:
        if self._risen:
            self._stats.note_use()
            self._risen = False
        if self._watched:
            self._tell("free_requested", block, block.address, block.requested)
        if block.size >= self._max_split:
            self._stats.oversize_allocations.change(-1)
        if block.streams:
            self._defer(block)
        else:
            self._complete_free(block)

    def _complete_free(self, block: Block) -> None:
        """Puts the block back into its pool, as one with its free neighbours."""
        if self._watched:
            self._tell("free_completed", block, block.address, block.requested)
        pool = block.segment.pool
        pool.completed += 1
        pool.completed_bytes += block.size
        pool.completed_requested += block.requested
        block.state = FREE
        block.requested = 0
        block.frames = None
        blocks = nbytes = 0  # by how much inactive_split changes
        previous = block.previous
        if previous is not None and previous.state == FREE:
            pool.remove(previous)
            blocks, nbytes = -1, -previous.size
            previous.absorb_next()
            block = previous
        following = block.next
        if following is not None and following.state == FREE:
            pool.remove(following)
            blocks -= 1
            nbytes -= following.size
            block.absorb_next()
        pool.add(block)
        if block.segment.page:
            return
        if block.previous is not None or block.next is not None:
            blocks += 1
            nbytes += block.size
        pool.split_blocks += max(blocks, 0)
        pool.unsplit_blocks += max(-blocks, 0)
        if nbytes > 0:
            pool.split_bytes += nbytes
            self._stats.note_split()
        else:
            pool.unsplit_bytes -= nbytes

    def _free_late(self) -> None:
        """Frees what finalizers gave back in the midst of the call that now ends."""
        while self._late:
            self._busy = True
            try:
                self._free(self._late.pop(0))
            finally:
                self._busy = False

    # Frees that wait for other streams

    def _defer(self, block: Block) -> None:
        """Lets the block wait for all that the other streams have to do by now."""
        self._stats.note_deferred()
        pool = block.segment.pool
        pool.pending += 1
        pool.pending_bytes += block.size
        block.state = PENDING
        block.events = len(block.streams)
        for stream in sorted(block.streams):
            self._deferred.setdefault(stream, deque()).append((self._events.record(stream), block))
        block.streams = None

    def _complete_deferred(self, wait: bool = False) -> None:
        """Completes frees whose streams are done, each stream's in order; with `wait` it waits for all of them."""
        for stream, queue in list(self._deferred.items()):
            while queue:
                token, block = queue[0]
                if wait:
                    self._events.wait(token)
                elif not self._events.done(token):
                    break
                queue.popleft()
                block.events -= 1
                if block.events == 0:
                    pool = block.segment.pool
                    pool.pending -= 1
                    pool.pending_bytes -= block.size
                    self._complete_free(block)
            if not queue:
                del self._deferred[stream]

    # Giving memory back to the device

    def _release_cached(self) -> None:
        """Returns every wholly free segment, after waiting for all deferred frees."""
        self._stats.num_sync_all_streams += 1
        self._complete_deferred(wait=True)
        for pool in (self._large, self._small):
            for stream in sorted(pool.free):
                for _, _, block in list(pool.free[stream]):
                    if not block.segment.page and block.size == block.segment.size:
                        self._release(block)
        if self._expandable is not None:
            self._expandable.release()

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """With a max_split_size: returns one sufficient free oversize block of the stream, or the largest until they suffice."""
        if self._max_split == UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        oversize = [block for _, _, block in pool.free.get(stream, ()) if block.size >= self._max_split and not block.segment.page]
        for block in oversize:
            if block.size >= wanted:
                self._release(block)
                return True
        released = 0
        while oversize and released < wanted:
            released += oversize[-1].size
            self._release(oversize.pop())
        return released >= wanted

    def _release(self, block: Block) -> None:
        """Returns the segment that the free block fills."""
        segment = block.segment
        pool = segment.pool
        pool.remove(block)
        del self._segments[segment.address]
        self._addresses.give_back(segment.address, segment.size)
        pool.released_segments += 1
        pool.released_bytes += segment.size
        self._stats.num_device_free += 1
        if segment.size >= self._max_split:
            self._stats.oversize_segments.change(-1)
        if self._watched:
            self._tell("segment_free", block, segment.address, segment.size)

    # Small parts

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if self._busy:
                raise RuntimeError(_REENTERED)
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                self._free_late()

    def _count_reserved(self, pool: Pool, nbytes: int) -> None:
        pool.reserved_bytes += nbytes
        self._stats.num_device_alloc += 1
        self._stats.note_reserved()

    def _tell(self, action: str, block: Block, address: int, size: int) -> None:
        """Tells listener and history of an event."""
        if self._history is not None:
            frames = self._history.stack(action)
            if action == "alloc":
                block.frames = frames
            elif action == "segment_alloc":
                block.segment.frames = frames
            self._history.add(action, address, size, block.stream, frames)
        if self._listener is not None:
            self._listener(action, block, size)

    def _out_of_memory(self, message: str | None, nbytes: int, wanted: int) -> OutOfMemory:
        figures = {
            "segment_size": wanted,
            "total": self.total,
            "free": self.free_bytes(),
            "allowed": self.allowed,
            "allocated": self.allocated,
            "reserved": self.reserved,
        }
        if message is None:
            message = oom_text(index=self.index, processes=self._processes(), version=self.version, own_pid=os.getpid(), **figures)
        return OutOfMemory(message, requested=nbytes, **figures)
