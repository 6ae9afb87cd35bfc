"""The rules by which PyTorch's caching allocator finds, splits, merges and releases blocks.

They follow c10/cuda/CUDACachingAllocator.cpp: best fit within a stream's pool, segments of 2 MiB, 20 MiB or more, frees that wait
for other streams, and the retries before an out-of-memory error. There is no memory behind it: blocks are addresses and sizes.
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
from .pool import ALLOCATED, FREE, Block, Pool, PrivatePool, Segment, Shelf
from .settings import SMALL_SIZE, UNLIMITED, Settings
from .stats import Stats

BlockListener = Callable[[str, Block | None, int], None]
_LARGEST = 1 << 60  # bytes; a request of this size or more is refused without a look


class AllocatorRules:
    """What one device's allocator holds and how it changes, one call at a time. `CachingAllocator` is the public class."""

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
        self._routes: list[tuple[PrivatePool, Callable[[int], bool]]] = []  # pools that requests of certain streams go to now
        self._addresses = AddressSpace(first_address)
        self._expandable: ExpandableSegments | None = None  # made when they are first switched on
        self._deferred = DeferredFrees(events)
        self._risen = False  # a peak may have been passed since peaks were last noted
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
        """Bytes held from the device."""
        return self._stats.reserved

    def free_bytes(self) -> int:
        """Bytes of the device that no process holds."""
        return max(self.total - self.reserved - self._others(), 0)

    def _configure(self, settings: Settings) -> None:
        self.settings = settings
        self._rounds_to_512 = not any(settings.divisions)
        self._max_split = settings.max_split_size
        self._small.configure(settings)
        self._large.configure(settings)
        self._collects = settings.garbage_collection_threshold > 0
        if settings.expandable_segments and self._expandable is None:
            self._expandable = ExpandableSegments(self)

    def _limit(self, fraction: float) -> None:
        """PyTorch rounds the limit to whole bytes from 2.12 on; before, it cut it off."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"the memory fraction must lie between 0 and 1, got {fraction}")
        self.memory_fraction = fraction
        self.allowed = None if fraction == 1 else floor(fraction * self.total + (0.5 if minor_version(self.version) >= (2, 12) else 0))

    # A request: search, split, hand out

    def _malloc(self, nbytes: int, stream: int) -> Block:
        if self._deferred.waiting and not self._routes:  # CUDA admits no question about events during a capture
            self._complete_deferred(wait=False)
        size = (nbytes + 511) & -512 if self._rounds_to_512 else self.settings.round_size(nbytes)
        pool = self._small if size <= SMALL_SIZE else self._large
        shelf = self._shelf(pool, stream) if self._routes else pool.shelf
        if self._collects:
            shelf.searches += 1
        block = self._best_fit(shelf, size, stream)
        if block is None and self._reclaim():
            block = self._best_fit(shelf, size, stream)
        if block is None:
            block = self._obtain(shelf, size, stream, nbytes)
        self._hand_out(block, pool, size, nbytes)
        return block

    def _shelf(self, pool: Pool, stream: int) -> Shelf:
        for private, takes in reversed(self._routes):
            if takes(stream):
                return private.small if pool.small else private.large
        return pool.shelf

    def _best_fit(self, shelf: Shelf, size: int, stream: int) -> Block | None:
        """The smallest free block of the stream that suffices, the lowest address among equals, off its shelf."""
        free = shelf.free.get(stream)
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

    def _obtain(self, shelf: Shelf, size: int, stream: int, nbytes: int) -> Block:
        """A block from the device, if need be after giving it back what is cached. The shelf is not searched again."""
        if nbytes >= _LARGEST:
            raise self._out_of_memory(TOO_LARGE, nbytes, nbytes)
        wanted = self.settings.segment_size(size)
        if self._collects and self.allowed is not None:
            self._collect_garbage(self.settings.garbage_collection_threshold * self.allowed)
        block = self._grow(shelf, size, wanted, stream)
        if block is None and self._release_oversize(shelf, size, stream):
            block = self._grow(shelf, size, wanted, stream)
        if block is None:
            if not self._routes:
                self._release_cached()
            self._stats.num_alloc_retries += 1
            block = self._grow(shelf, size, wanted, stream) or self._last_resort(shelf, size, stream)
        if block is None:
            self._stats.num_ooms += 1
            if self._history is not None:
                self._history.add("oom", self.free_bytes(), size, stream, self._history.stack("oom"))
            for listener in self._listeners:
                listener("oom", None, nbytes)
            raise self._out_of_memory(None, nbytes, wanted)
        return block

    def _grow(self, shelf: Shelf, size: int, wanted: int, stream: int) -> Block | None:
        """A block of at least `size` bytes in memory got from the device, or None where the device or the limit has no room."""
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        with self._claiming():
            if self.settings.expandable_segments and self._expandable is not None:
                return self._expandable.obtain(shelf, size, stream)
            return None if wanted > self.free_bytes() else self._new_segment(shelf, wanted, stream)

    def _new_segment(self, shelf: Shelf, wanted: int, stream: int) -> Block:
        pool = shelf.pool
        segment = Segment(self._addresses.take(wanted), wanted, stream, shelf)
        self._segments[segment.address] = segment
        pool.segments += 1
        self._count_reserved(pool, wanted)
        if wanted >= self._max_split:
            self._stats.oversize_segments.change(1)
        self._driver("segment_alloc", stream)
        if self._watched:
            self._notify("segment_alloc", segment.first, segment.address, wanted)
        return segment.first

    def _hand_out(self, block: Block, pool: Pool, size: int, nbytes: int) -> None:
        """Cuts the block to size if the rest is worth keeping, and counts it as allocated."""
        counted = block.segment.page == 0  # inactive_split leaves expandable segments out
        was_split = block.previous is not None or block.next is not None
        if block.size - size >= pool.least_tail and size < pool.split_below and block.segment.shelf.splits:
            tail = block.split(size)
            block.segment.shelf.add(tail)
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

    # A free

    def _free(self, block: Block) -> None:
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
        """Puts the block back into its pool, as one with its free neighbours."""
        if self._watched:
            self._notify("free_completed", block, block.address, block.requested)
        pool, shelf = block.segment.pool, block.segment.shelf
        pool.completed += 1
        pool.completed_bytes += block.size
        pool.completed_requested += block.requested
        block.state = FREE
        block.requested = 0
        block.frames = None
        blocks = nbytes = 0  # by how much inactive_split changes
        previous = block.previous
        if previous is not None and previous.state == FREE:
            shelf.remove(previous)
            blocks, nbytes = -1, -previous.size
            previous.absorb_next()
            block = previous
        following = block.next
        if following is not None and following.state == FREE:
            shelf.remove(following)
            blocks -= 1
            nbytes -= following.size
            block.absorb_next()
        shelf.add(block)
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
        """Lets the block wait for all that the other streams have to do by now."""
        self._stats.note_deferred()
        pool = block.segment.pool
        pool.pending += 1
        pool.pending_bytes += block.size
        self._deferred.add(block)

    def _complete_deferred(self, wait: bool) -> None:
        """Completes the deferred frees whose streams are done, or with `wait` all of them."""
        if self._risen:
            self._stats.note_use()
            self._risen = False
        for block in self._deferred.completed(wait):
            pool = block.segment.pool
            pool.pending -= 1
            pool.pending_bytes -= block.size
            self._complete_free(block)

    # Giving memory back to the device

    def _releasable(self) -> Iterator[Shelf]:
        """Where free segments may go back to the device: not those of private pools in use, and during a capture no others."""
        if not self._routes:
            yield from (self._large.shelf, self._small.shelf)
        for private in self._private.values():
            if not private.users:
                yield from (private.small, private.large)

    def _release_cached(self) -> None:
        """Returns every wholly free segment, after waiting for all deferred frees."""
        if not self._routes:
            self._stats.num_sync_all_streams += 1
            self._complete_deferred(wait=True)
        self._release_free(list(self._releasable()))

    def _release_free(self, shelves: list[Shelf]) -> None:
        """Returns the wholly free segments of these. Private pools without segments and users end."""
        for shelf in shelves:
            for stream in sorted(shelf.free):
                for _, _, block in list(shelf.free[stream]):
                    if not block.segment.page and block.size == block.segment.size:
                        self._release(block)
        if self._expandable is not None:
            self._expandable.release(shelves)
        held = {segment.shelf.pool_id for segment in self._segments.values()} if self._private else ()
        self._private = {key: private for key, private in self._private.items() if private.users or key in held}

    def _release_oversize(self, shelf: Shelf, size: int, stream: int) -> bool:
        """With a max_split_size: returns one sufficient free oversize block of the stream, or the largest until they suffice."""
        if self._max_split == UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        oversize = [block for _, _, block in shelf.free.get(stream, ()) if block.size >= self._max_split and not block.segment.page]
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
        """Returns large segments that were free for longest, in searches of their shelf, until at most `threshold` bytes are held."""
        excess = self.reserved - int(threshold)
        shelf = self._large.shelf
        free = [x for blocks in shelf.free.values() for _, _, x in blocks if x.size == x.segment.size and not x.segment.page]
        while excess > 0 and free:
            average = sum(shelf.searches - block.shelved for block in free) / len(free)
            for block in [block for block in free if shelf.searches - block.shelved >= average]:
                self._release(block)
                excess -= block.size
                free.remove(block)

    def _release(self, block: Block) -> None:
        """Returns the segment that the free block fills."""
        segment = block.segment
        pool = segment.pool
        segment.shelf.remove(block)
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

    # Small parts

    def _reclaim(self) -> bool:
        """Frees exported blocks that other processes have released. Returns whether there was one."""
        return False

    def _last_resort(self, shelf: Shelf, size: int, stream: int) -> Block | None:
        """A free block of a private pool that serves all where memory runs out."""
        others = [x.small if shelf.pool.small else x.large for x in self._private.values() if x.on_oom and shelf is shelf.pool.shelf]
        return next(filter(None, (self._best_fit(other, size, stream) for other in others)), None)

    def _count_reserved(self, pool: Pool, nbytes: int) -> None:
        pool.reserved_bytes += nbytes
        self._stats.num_device_alloc += 1
        self._stats.note_reserved()

    def _notify(self, action: str, block: Block, address: int, size: int) -> None:
        """Records an event in the history and calls the listeners."""
        if self._history is not None:
            frames = self._history.stack(action)
            if action == "alloc":
                block.frames = frames
            elif action == "segment_alloc":
                block.segment.frames = frames
            self._history.add(action, address, size, block.stream, frames, block.segment.shelf.pool_id)
        for listener in self._listeners:
            listener(action, block, size)

    def _out_of_memory(self, message: str | None, nbytes: int, wanted: int) -> OutOfMemory:
        figures: dict[str, Any] = {
            "segment_size": wanted,
            "total": self.total,
            "free": self.free_bytes(),
            "allowed": self.allowed,
            "allocated": self.allocated,
            "reserved": self.reserved,
        }
        if message is None:
            message = oom_text(index=self.index, processes=self._processes(), version=self.version, own_pid=os.getpid(), **figures)
        return OutOfMemory(message=message, requested=nbytes, **figures)
