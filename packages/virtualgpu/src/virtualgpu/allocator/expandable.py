"""Expandable segments: one long address range per pool and stream.

Memory is mapped into the range page by page, as requests need it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol

from .address_space import AddressSpace
from .pool import FREE, UNMAPPED, Block, FreeBlocks, Pool, Segment
from .settings import SMALL_SEGMENT, Settings
from .stats import Stats

_FIRST_ADDRESS = 1 << 50  # ordinary segments lie below 2**48
_STRIDE = 1 << 44  # address distance between two devices


class Allocator(Protocol):
    """Protocol of the allocator that expandable segments belong to (`rules.AllocatorRules`)."""

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
        """Return the index of the best fit in `free`, or len(free) if no block fits.

        `free` is sorted by size, and the blocks from index `i` on are large enough. A block at the
        growing end of its range counts with the size that it can grow to, so a block that is larger
        now can be the better fit. Blocks of expandable segments are skipped if the setting has been
        switched off since.
        """
        if not free[i][2].segment.page:
            return i
        if not self._allocator.settings.expandable_segments:
            while i < len(free) and free[i][2].segment.page:
                i += 1
            return i
        while i + 1 < len(free) and free[i][2].segment.page:
            if _growable(free[i + 1][2]) >= _growable(free[i][2]):
                break
            i += 1
        return i

    def obtain(self, free_blocks: FreeBlocks, size: int, stream: int) -> Block | None:
        """Take a free block of at least `size` bytes and map memory into it as needed.

        Returns None if the device runs out of memory. Memory that was mapped until then stays
        mapped, as free blocks.
        """
        block: Block | None = self._find_run(free_blocks, size, stream)
        assert block is not None
        if block.state == UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.next
            assert following is not None  # `_find_run` found enough addresses
            block = self._map(following, min(size - block.size, following.size))
        if block is not None:
            free_blocks.remove(block)
        return block

    def release(self, pools: list[FreeBlocks]) -> None:
        """Unmap all pages that lie completely in a free block, and give back empty ranges."""
        for free_blocks in pools:
            for stream in sorted(free_blocks.by_stream):
                for _, _, block in list(free_blocks.by_stream[stream]):
                    if block.segment.page:
                        self._unmap(block)

    def _find_run(self, free_blocks: FreeBlocks, size: int, stream: int) -> Block:
        """Return the first of several adjacent unused blocks that have `size` bytes together.

        The blocks belong to `stream` and may be mapped or not. Of several such groups, the one with
        the lowest unmapped block is taken. If there is none, a new address range is reserved in the
        pool `free_blocks`.
        """
        for _, block in free_blocks.unmapped.get(stream, ()):
            start = block
            if block.previous is not None and block.previous.state == FREE:
                start = block.previous
            run: Block | None = start
            available = 0
            while run is not None and run.state in (FREE, UNMAPPED) and available < size:
                available += run.size
                run = run.next
            if available >= size:
                return start
        return self._new_range(free_blocks, stream)

    def _new_range(self, free_blocks: FreeBlocks, stream: int) -> Block:
        """Reserve a new address range for `stream`, and return its only block, which is not mapped.

        The range belongs to the pool `free_blocks`. It is as long as 1 1/8 of the device's memory.
        """
        page = self._allocator.settings.large_segment_size
        if free_blocks.pool.small:
            page = SMALL_SEGMENT
        size = -(-(self._allocator.total + self._allocator.total // 8) // page) * page
        segment = Segment(self._addresses.take(size), size, stream, free_blocks, page)
        self._allocator._segments[segment.address] = segment
        _add_unmapped(segment.first)
        return segment.first

    def _map(self, block: Block, size: int) -> Block | None:
        """Map memory into the first `size` bytes of an unmapped block, rounded up to pages.

        Returns the free block that contains this memory, or None if the device has too little.
        """
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
        if allocator._watched:  # before the merge, so that listeners get only the new memory
            allocator._notify("segment_map", block, address, size)
        block = _merge(block)
        segment.free_blocks.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block. Its incomplete pages at both ends stay free."""
        allocator, segment, pool = self._allocator, block.segment, block.segment.pool
        page = segment.page
        offset = block.address - segment.address
        start = segment.address + -(-offset // page) * page
        end = segment.address + (offset + block.size) // page * page
        if start >= end:
            return
        segment.free_blocks.remove(block)
        if start > block.address:
            tail = block.split(start - block.address)
            segment.free_blocks.add(block)
            block = tail
        if end < block.address + block.size:
            segment.free_blocks.add(block.split(end - block.address))
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
    """Return the bytes that the block can have if it grows into the unmapped range after it."""
    following = block.next
    if following is not None and following.state == UNMAPPED:
        return block.size + following.size
    return block.size


def _merge(block: Block) -> Block:
    """Merge the block with its neighbours of the same state and return the merged block.

    The neighbours leave the lists that they were in.
    """
    remove = block.segment.free_blocks.remove
    if block.state == UNMAPPED:
        remove = _remove_unmapped
    previous, following = block.previous, block.next
    if previous is not None and previous.state == block.state:
        remove(previous)
        previous.absorb_next()
        block = previous
    if following is not None and following.state == block.state:
        remove(following)
        block.absorb_next()
    return block


def _add_unmapped(block: Block) -> None:
    insort(block.segment.free_blocks.unmapped.setdefault(block.stream, []), (block.address, block))


def _remove_unmapped(block: Block) -> None:
    unmapped = block.segment.free_blocks.unmapped[block.stream]
    del unmapped[bisect_left(unmapped, (block.address,))]
