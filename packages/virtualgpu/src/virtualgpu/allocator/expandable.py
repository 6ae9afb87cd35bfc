"""Expandable segments: one long range of addresses a pool and stream, with memory mapped behind it page by page."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from .address_space import AddressSpace
from .pool import FREE, UNMAPPED, Block, Pool, Segment, Shelf
from .settings import SMALL_SEGMENT, Settings
from .stats import Stats

_FIRST_ADDRESS = 1 << 50  # out of the way of ordinary segments, which lie below 2**48
_STRIDE = 1 << 44  # between devices


class Allocator(Protocol):
    """What expandable segments use of their allocator (`rules.AllocatorRules`)."""

    index: int
    total: int
    settings: Settings
    _stats: Stats
    _segments: dict[int, Segment]
    _driver: Callable[[str, int], None]
    _watched: bool

    def free_bytes(self) -> int: ...
    def _count_reserved(self, pool: Pool, nbytes: int) -> None: ...
    def _notify(self, action: str, block: Block, address: int, size: int) -> None: ...


class ExpandableSegments:
    """The expandable segments of one allocator."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._addresses = AddressSpace(_FIRST_ADDRESS + allocator.index * _STRIDE)

    def choose(self, free: list[tuple[int, int, Block]], i: int) -> int:
        """The index of the best fit among the sorted free blocks, all of which suffice from `i` on; len(free) if there is none.

        A block at the growing end of its range counts as large as it can become, so a larger block may fit better. Where
        expandable segments were switched off again, their blocks are passed over.
        """
        if not free[i][2].segment.page:
            return i
        if not self._allocator.settings.expandable_segments:
            while i < len(free) and free[i][2].segment.page:
                i += 1
            return i
        while i + 1 < len(free) and free[i][2].segment.page and _growable(free[i + 1][2]) < _growable(free[i][2]):
            i += 1
        return i

    def obtain(self, shelf: Shelf, size: int, stream: int) -> Block | None:
        """A free block of at least `size` bytes, out of its shelf, with memory mapped as needed; None where the device has no more.

        What was mapped before the device ran out stays, as free blocks.
        """
        block: Block | None = self._room(shelf, size, stream)
        assert block is not None
        if block.state == UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.next
            assert following is not None  # `_room` has found enough
            block = self._map(following, min(size - block.size, following.size))
        if block is not None:
            shelf.remove(block)
        return block

    def release(self, shelves: list[Shelf]) -> None:
        """Unmaps every page that lies wholly in a free block, and gives back ranges that are then empty."""
        for shelf in shelves:
            for stream in sorted(shelf.free):
                for _, _, block in list(shelf.free[stream]):
                    if block.segment.page:
                        self._unmap(block)

    def _room(self, shelf: Shelf, size: int, stream: int) -> Block:
        """The first of a run of unused neighbours, mapped or not, with room for `size` bytes; the lowest that ends a mapped part."""
        for _, block in shelf.unmapped.get(stream, ()):
            start = block.previous if block.previous is not None and block.previous.state == FREE else block
            run: Block | None = start
            room = 0
            while run is not None and run.state in (FREE, UNMAPPED) and room < size:
                room += run.size
                run = run.next
            if room >= size:
                return start
        return self._new_range(shelf, stream)

    def _new_range(self, shelf: Shelf, stream: int) -> Block:
        """Reserves addresses for 1 1/8 of the device's memory, with nothing behind them yet."""
        page = SMALL_SEGMENT if shelf.pool.small else self._allocator.settings.large_segment_size
        size = -(-(self._allocator.total + self._allocator.total // 8) // page) * page
        segment = Segment(self._addresses.take(size), size, stream, shelf, page)
        self._allocator._segments[segment.address] = segment
        _add_unmapped(segment.first)
        return segment.first

    def _map(self, block: Block, size: int) -> Block | None:
        """Puts memory behind the first `size` bytes of an unmapped block, rounded up to pages, and returns the free block it is in."""
        allocator, segment, pool = self._allocator, block.segment, block.segment.pool
        size = -(-size // segment.page) * segment.page
        if size > allocator.free_bytes():
            return None
        _remove_unmapped(block)
        address = block.address
        if size < block.size:
            _add_unmapped(block.split(size))
        block.state = FREE
        allocator._count_reserved(pool, size)
        allocator._driver("segment_map", block.stream)
        if allocator._watched:  # before it is merged with its neighbours: listeners get what was mapped
            allocator._notify("segment_map", block, address, size)
        block = _merge(block)
        segment.shelf.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Takes the memory from the whole pages of a free block; what sticks out at its ends stays free."""
        allocator, segment, pool = self._allocator, block.segment, block.segment.pool
        start = -(-(block.address - segment.address) // segment.page) * segment.page + segment.address
        end = (block.address + block.size - segment.address) // segment.page * segment.page + segment.address
        if start >= end:
            return
        segment.shelf.remove(block)
        if start > block.address:
            tail = block.split(start - block.address)
            segment.shelf.add(block)
            block = tail
        if end < block.address + block.size:
            segment.shelf.add(block.split(end - block.address))
        block.state = UNMAPPED
        pool.released_bytes += end - start
        allocator._stats.num_device_free += 1
        allocator._driver("segment_unmap", block.stream)
        if allocator._watched:
            allocator._notify("segment_unmap", block, start, end - start)
        block = _merge(block)
        _add_unmapped(block)
        if block.size == segment.size:
            _remove_unmapped(block)
            del allocator._segments[segment.address]
            self._addresses.give_back(segment.address, segment.size)


def _growable(block: Block) -> int:
    """The size of a block together with the unmapped addresses after it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def _merge(block: Block) -> Block:
    """Makes the block one with its neighbours of the same state, which leave their lists; returns the whole."""
    take_out = _remove_unmapped if block.state == UNMAPPED else block.segment.shelf.remove
    previous, following = block.previous, block.next
    if previous is not None and previous.state == block.state:
        take_out(previous)
        previous.absorb_next()
        block = previous
    if following is not None and following.state == block.state:
        take_out(following)
        block.absorb_next()
    return block


def _add_unmapped(block: Block) -> None:
    insort(block.segment.shelf.unmapped.setdefault(block.stream, []), (block.address, block))


def _remove_unmapped(block: Block) -> None:
    unmapped = block.segment.shelf.unmapped[block.stream]
    del unmapped[bisect_left(unmapped, (block.address,))]
