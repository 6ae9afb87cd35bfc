"""The rules of PyTorch's caching allocator: how it finds, splits, merges and releases blocks.

The rules follow c10/cuda/CUDACachingAllocator.cpp. They cover the best fit within a stream's pool,
segments of 2 MiB, 20 MiB or more, frees that wait for other streams, and the retries before an
out-of-memory error. Blocks are only addresses and sizes. No memory is behind them.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import floor
from typing import Any

from .address_space import AddressSpace
from .events import DeferredFrees, EventSource
from .expandable import ExpandableSegments
from .history import History
from .oom import TOO_LARGE, OutOfMemory, minor_version, oom_text
from .pool import ALLOCATED, FREE, Block, FreeBlocks, Pool, PrivatePool, Segment
from .settings import SMALL_SIZE, UNLIMITED, Settings
from .stats import Stats

BlockListener = Callable[[str, Block | None, int], None]
_LARGEST = 1 << 60  # bytes; PyTorch refuses a request of this size or more without a search


class AllocatorRules:
    """State and rules of one device's allocator, for one call at a time.

    `CachingAllocator` is the public class. It adds the lock and the public methods.
    """

    def __init__(
        self,
        index: int,
        total: int,
        settings: Settings,
        others: Callable[[], int],
        events: EventSource | None,
        processes: Callable[[], list[tuple[int, int]]],
        version: str,
        first_address: int,
        driver: Callable[[str, int], None],
        claiming: Callable[[], AbstractContextManager],
    ) -> None:
        self.index = index
        self.total = total
        self.version = version
        self._others = others
        self._processes = processes
        self._driver = driver
        self._claiming = claiming
        self._small = Pool(small=True)
        self._large = Pool(small=False)
        self._stats = Stats(self._small, self._large)
        self._segments: dict[int, Segment] = {}  # by address
        self._private: dict[tuple[int, int], PrivatePool] = {}
        # Pools that serve requests now, each with a test of the streams that it serves.
        self._routes: list[tuple[PrivatePool, Callable[[int], bool]]] = []
        self._addresses = AddressSpace(first_address)
        self._expandable: ExpandableSegments | None = None  # created when first switched on
        self._deferred = DeferredFrees(events)
        self._risen = False  # a peak may have risen since the peaks were last noted
        self._listeners: tuple[BlockListener, ...] = ()
        self._history: History | None = None
        self._watched = False  # there are listeners or a history
        self._configure(settings)
        self._limit(settings.per_process_memory_fraction)

    # Limits

    @property
    def allocated(self) -> int:
        """Bytes in blocks that tensors hold."""
        return self._stats.allocated

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds from the device."""
        return self._stats.reserved

    def free_bytes(self) -> int:
        """Return the bytes of the device that no process holds."""
        return max(self.total - self.reserved - self._others(), 0)

    def _configure(self, settings: Settings) -> None:
        """Use these settings for all later requests."""
        self.settings = settings
        self._rounds_to_512 = not any(settings.divisions)
        self._max_split = settings.max_split_size
        self._small.configure(settings)
        self._large.configure(settings)
        self._collects = settings.garbage_collection_threshold > 0
        if settings.expandable_segments and self._expandable is None:
            self._expandable = ExpandableSegments(self)

    def _limit(self, fraction: float) -> None:
        """Limit the reserved memory to this fraction of the device's memory. 1 removes the limit.

        PyTorch rounds the limit to the nearest byte from version 2.12 on, and down before.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"the memory fraction must be between 0 and 1, got {fraction}")
        self.memory_fraction = fraction
        self.allowed = None
        if fraction < 1:
            limit = fraction * self.total
            if minor_version(self.version) >= (2, 12):
                limit += 0.5
            self.allowed = floor(limit)

    # Allocate

    def _malloc(self, nbytes: int, stream: int) -> Block:
        """Return a block for a request of `nbytes` bytes on `stream`."""
        if self._deferred.waiting and not self._routes:  # CUDA forbids event queries in a capture
            self._complete_deferred(wait=False)
        size = (nbytes + 511) & -512 if self._rounds_to_512 else self.settings.round_size(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        free_blocks = self._free_blocks(pool, stream) if self._routes else pool.free_blocks
        if self._collects:
            free_blocks.searches += 1
        block = self._best_fit(free_blocks, size, stream)
        if block is None and self._reclaim():
            block = self._best_fit(free_blocks, size, stream)
        if block is None:
            block = self._obtain(free_blocks, size, stream, nbytes)
        self._mark_allocated(block, pool, size, nbytes)
        return block

    def _free_blocks(self, pool: Pool, stream: int) -> FreeBlocks:
        """Return the list of free blocks that serves requests of `stream` now.

        It is the list of a private pool if such a pool takes the stream's requests. Otherwise it is
        that of `pool`, the small or the large one.
        """
        for private, takes in reversed(self._routes):
            if takes(stream):
                return private.small if pool.small else private.large
        return pool.free_blocks

    def _best_fit(self, free_blocks: FreeBlocks, size: int, stream: int) -> Block | None:
        """Take the smallest free block of `stream` that has at least `size` bytes, or return None.

        Of several equally large blocks, the one at the lowest address is taken.
        """
        free = free_blocks.by_stream.get(stream)
        if not free:
            return None
        i = bisect_left(free, (size,))
        if i < len(free) and self._expandable is not None:
            i = self._expandable.choose(free, i)
        if i == len(free):
            return None
        block = free[i][2]
        # An oversize block serves no small request, and no large request that would waste more
        # than max_non_split_rounding.
        if block.size >= self._max_split and (
            size < self._max_split or block.size >= size + self.settings.max_non_split_rounding
        ):
            return None
        del free[i]
        return block

    def _obtain(self, free_blocks: FreeBlocks, size: int, stream: int, nbytes: int) -> Block:
        """Return a block of at least `size` bytes of new memory for a request of `nbytes` bytes.

        If the device is full, cached memory is released first. Raises OutOfMemory if that is not
        enough. PyTorch does not search the free blocks again after a release.
        """
        if nbytes >= _LARGEST:
            raise self._out_of_memory(TOO_LARGE, nbytes, nbytes)
        wanted = self.settings.segment_size(size)
        if self._collects and self.allowed is not None:
            self._collect_garbage(self.settings.garbage_collection_threshold * self.allowed)
        block = self._grow(free_blocks, size, wanted, stream)
        if block is None and self._release_oversize(free_blocks, size, stream):
            block = self._grow(free_blocks, size, wanted, stream)
        if block is None:
            if not self._routes:
                self._release_cached()
            self._stats.num_alloc_retries += 1
            block = self._grow(free_blocks, size, wanted, stream)
        if block is None:
            block = self._best_fit_of_oom_pools(free_blocks, size, stream)
        if block is None:
            self._stats.num_ooms += 1
            if self._history is not None:
                frames = self._history.stack("oom")
                self._history.add("oom", self.free_bytes(), size, stream, frames)
            for listener in self._listeners:
                listener("oom", None, nbytes)
            raise self._out_of_memory(None, nbytes, wanted)
        return block

    def _grow(self, free_blocks: FreeBlocks, size: int, wanted: int, stream: int) -> Block | None:
        """Return a block of at least `size` bytes of new memory, in the pool `free_blocks`.

        `wanted` is the size of the segment to reserve. Returns None if it exceeds the memory limit
        or the device's free memory.
        """
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        with self._claiming():
            if self.settings.expandable_segments and self._expandable is not None:
                return self._expandable.obtain(free_blocks, size, stream)
            if wanted > self.free_bytes():
                return None
            return self._new_segment(free_blocks, wanted, stream)

    def _new_segment(self, free_blocks: FreeBlocks, wanted: int, stream: int) -> Block:
        """Reserve a segment of `wanted` bytes and return its only block."""
        pool = free_blocks.pool
        segment = Segment(self._addresses.take(wanted), wanted, stream, free_blocks)
        self._segments[segment.address] = segment
        pool.segments += 1
        self._count_reserved(pool, wanted)
        if wanted >= self._max_split:
            self._stats.oversize_segments.change(1)
        self._driver("segment_alloc", stream)
        if self._watched:
            self._notify("segment_alloc", segment.first, segment.address, wanted)
        return segment.first

    def _mark_allocated(self, block: Block, pool: Pool, size: int, nbytes: int) -> None:
        """Count a block of `pool` as allocated for a request of `nbytes` bytes.

        The block is cut to `size` bytes first if the rest is large enough to be kept.
        """
        counted = block.segment.page == 0  # inactive_split does not count expandable segments
        was_split = block.previous is not None or block.next is not None
        remaining = block.size - size
        free_blocks = block.segment.free_blocks
        if remaining >= pool.least_tail and size < pool.split_below and free_blocks.splits:
            tail = block.split(size)
            free_blocks.add(tail)
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
            self._notify("alloc", block, block.address, nbytes)

    # Free

    def _free(self, block: Block) -> None:
        """Free a block now, or after the other streams that use it have finished."""
        if self._risen:
            self._stats.note_use()
            self._risen = False
        if self._watched:
            self._notify("free_requested", block, block.address, block.requested)
        if block.size >= self._max_split:
            self._stats.oversize_allocations.change(-1)
        if block.streams:
            self._defer(block)
        else:
            self._complete_free(block)

    def _complete_free(self, block: Block) -> None:
        """Mark the block as free and merge it with its free neighbours."""
        if self._watched:
            self._notify("free_completed", block, block.address, block.requested)
        pool, free_blocks = block.segment.pool, block.segment.free_blocks
        pool.completed += 1
        pool.completed_bytes += block.size
        pool.completed_requested += block.requested
        block.state = FREE
        block.requested = 0
        block.frames = None
        blocks = nbytes = 0  # changes of inactive_split
        previous = block.previous
        if previous is not None and previous.state == FREE:
            free_blocks.remove(previous)
            blocks, nbytes = -1, -previous.size
            previous.absorb_next()
            block = previous
        following = block.next
        if following is not None and following.state == FREE:
            free_blocks.remove(following)
            blocks -= 1
            nbytes -= following.size
            block.absorb_next()
        free_blocks.add(block)
        if block.segment.page:
            return
        if block.previous is not None or block.next is not None:
            blocks += 1
            nbytes += block.size
        if blocks > 0:
            pool.split_blocks += blocks
        else:
            pool.unsplit_blocks -= blocks
        if nbytes > 0:
            pool.split_bytes += nbytes
            self._stats.note_split()
        else:
            pool.unsplit_bytes -= nbytes

    def _defer(self, block: Block) -> None:
        """Keep a freed block until the other streams that use it have done their present work."""
        self._stats.note_deferred()
        pool = block.segment.pool
        pool.pending += 1
        pool.pending_bytes += block.size
        self._deferred.add(block)

    def _complete_deferred(self, wait: bool) -> None:
        """Complete the frees whose streams have finished. With `wait`, wait for all of them."""
        if self._risen:
            self._stats.note_use()
            self._risen = False
        for block in self._deferred.completed(wait):
            pool = block.segment.pool
            pool.pending -= 1
            pool.pending_bytes -= block.size
            self._complete_free(block)

    # Release memory to the device

    def _releasable(self) -> Iterator[FreeBlocks]:
        """Yield the pools whose free segments may be released.

        Private pools in use keep their segments. During a capture, the shared pools do, too.
        """
        if not self._routes:
            yield from (self._large.free_blocks, self._small.free_blocks)
        for private in self._private.values():
            if not private.users:
                yield from (private.small, private.large)

    def _release_cached(self) -> None:
        """Release every completely free segment, after waiting for all deferred frees."""
        if not self._routes:
            self._stats.num_sync_all_streams += 1
            self._complete_deferred(wait=True)
        self._release_free(list(self._releasable()))

    def _release_free(self, pools: list[FreeBlocks]) -> None:
        """Release the completely free segments of `pools`.

        Private pools without segments and users are deleted.
        """
        for free_blocks in pools:
            for stream in sorted(free_blocks.by_stream):
                for _, _, block in list(free_blocks.by_stream[stream]):
                    if not block.segment.page and block.size == block.segment.size:
                        self._release(block)
        if self._expandable is not None:
            self._expandable.release(pools)
        if self._private:
            held = {segment.free_blocks.pool_id for segment in self._segments.values()}
            for pool_id, private in list(self._private.items()):
                if not private.users and pool_id not in held:
                    del self._private[pool_id]

    def _release_oversize(self, free_blocks: FreeBlocks, size: int, stream: int) -> bool:
        """Release free oversize blocks of `stream`, and return whether they are large enough.

        Blocks are oversize if max_split_size is set and they have at least this size. One block
        is released if it alone is large enough. Otherwise the largest blocks are released.
        """
        if self._max_split == UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        oversize = []
        for _, _, block in free_blocks.by_stream.get(stream, ()):
            if block.size >= self._max_split and not block.segment.page:
                oversize.append(block)
        for block in oversize:
            if block.size >= wanted:
                self._release(block)
                return True
        released = 0
        while oversize and released < wanted:
            released += oversize[-1].size
            self._release(oversize.pop())
        return released >= wanted

    def _collect_garbage(self, threshold: float) -> None:
        """Release the large segments that were free for longest, until `threshold` bytes are left.

        The age of a free segment is the number of searches since it became free.
        """
        excess = self.reserved - int(threshold)
        free_blocks = self._large.free_blocks
        free = []
        for blocks in free_blocks.by_stream.values():
            for _, _, block in blocks:
                if block.size == block.segment.size and not block.segment.page:
                    free.append(block)
        while excess > 0 and free:
            average = sum(free_blocks.searches - block.freed_at for block in free) / len(free)
            old = [block for block in free if free_blocks.searches - block.freed_at >= average]
            for block in old:
                self._release(block)
                excess -= block.size
                free.remove(block)

    def _release(self, block: Block) -> None:
        """Release the segment that consists only of this free block."""
        segment = block.segment
        pool = segment.pool
        segment.free_blocks.remove(block)
        del self._segments[segment.address]
        self._addresses.give_back(segment.address, segment.size)
        pool.released_segments += 1
        pool.released_bytes += segment.size
        self._stats.num_device_free += 1
        if segment.size >= self._max_split:
            self._stats.oversize_segments.change(-1)
        self._driver("segment_free", block.stream)
        if self._watched:
            self._notify("segment_free", block, segment.address, segment.size)

    # Steps that several of the above use

    def _reclaim(self) -> bool:
        """Free exported blocks that other processes have released.

        Returns whether there were any.
        """
        return False

    def _best_fit_of_oom_pools(
        self, free_blocks: FreeBlocks, size: int, stream: int
    ) -> Block | None:
        """Take the best fit in a private pool that serves all requests when memory runs out.

        Returns None if no such pool has a large enough free block.
        """
        pool = free_blocks.pool
        if free_blocks is not pool.free_blocks:  # the request belongs to a private pool itself
            return None
        for private in self._private.values():
            if private.on_oom:
                others = private.small if pool.small else private.large
                block = self._best_fit(others, size, stream)
                if block is not None:
                    return block
        return None

    def _count_reserved(self, pool: Pool, nbytes: int) -> None:
        """Count `nbytes` bytes of new memory as reserved."""
        pool.reserved_bytes += nbytes
        self._stats.num_device_alloc += 1
        self._stats.note_reserved()

    def _notify(self, action: str, block: Block, address: int, size: int) -> None:
        """Record an event in the history and call the listeners.

        `action` is the kind of event, and `address` and `size` say which bytes of `block` it is
        about.
        """
        if self._history is not None:
            frames = self._history.stack(action)
            if action == "alloc":
                block.frames = frames
            elif action == "segment_alloc":
                block.segment.frames = frames
            self._history.add(
                action, address, size, block.stream, frames, block.segment.free_blocks.pool_id
            )
        for listener in self._listeners:
            listener(action, block, size)

    def _out_of_memory(self, message: str | None, nbytes: int, wanted: int) -> OutOfMemory:
        """Return the error for a request of `nbytes` that needed a segment of `wanted` bytes.

        Without a `message`, the error has the usual text.
        """
        figures: dict[str, Any] = {
            "segment_size": wanted,
            "total": self.total,
            "free": self.free_bytes(),
            "allowed": self.allowed,
            "allocated": self.allocated,
            "reserved": self.reserved,
        }
        if message is None:
            message = oom_text(
                index=self.index,
                processes=self._processes(),
                version=self.version,
                own_pid=os.getpid(),
                **figures,
            )
        return OutOfMemory(message=message, requested=nbytes, **figures)
