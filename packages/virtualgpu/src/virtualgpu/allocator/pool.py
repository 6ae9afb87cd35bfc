"""The parts of the caching allocator: blocks, segments, lists of free blocks, and pools."""

from bisect import bisect_left, insort
from typing import Any

from .settings import MIN_BLOCK, SMALL_SIZE, UNLIMITED, Settings

# The states of a block.
ALLOCATED = 0  # a tensor holds it
PENDING = 1  # the tensor is gone, but other streams may still use the block
FREE = 2  # ready for a request
UNMAPPED = 3  # addresses of an expandable segment without memory

NO_POOL = 0, 0  # the pool id of blocks that belong to no private pool


class Block:
    """A range of addresses in a segment.

    `size` and `requested` are bytes. `previous` and `next` are its neighbours in the segment.
    """

    __slots__ = (
        "address", "events", "frames", "freed_at", "next", "previous", "requested", "segment",
        "size", "state", "stream", "streams",
    )  # fmt: skip

    def __init__(self, address: int, size: int, segment: "Segment", state: int = FREE) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.stream: int = segment.stream
        self.state = state
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None
        self.streams: set[int] | None = None  # the other streams that use it
        self.events = 0  # the number of events of other streams that its free waits for
        self.frames: list[dict] | None = None  # the stack that allocated it, if it is recorded
        self.freed_at = 0  # the value of `FreeBlocks.searches` when it became free

    def __repr__(self) -> str:
        state = ("allocated", "pending", "free", "unmapped")[self.state]
        return (
            f"Block(address={self.address:#x}, size={self.size}, requested={self.requested}, "
            f"stream={self.stream}, {state})"
        )

    def split(self, size: int) -> "Block":
        """Cut the block at `size` bytes and return the rest, which has the same state."""
        tail = Block(self.address + size, self.size - size, self.segment, self.state)
        tail.previous = self
        following = tail.next = self.next
        if following is not None:
            following.previous = tail
        self.next = tail
        self.size = size
        return tail

    def absorb_next(self) -> None:
        """Extend this block over its next neighbour, which ceases to exist."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        following = self.next = absorbed.next
        if following is not None:
            following.previous = self


class Segment:
    """A range of addresses that the driver returned for one call.

    `page` is the number of bytes that are mapped at a time, or 0 if the segment is not expandable.
    `first` is the block at the lowest address. It never changes, because a merge keeps the lower
    of two blocks.
    """

    __slots__ = (
        "address",
        "content",
        "first",
        "frames",
        "free_blocks",
        "page",
        "pool",
        "size",
        "stream",
    )

    def __init__(
        self, address: int, size: int, stream: int, free_blocks: "FreeBlocks", page: int = 0
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.free_blocks = free_blocks
        self.pool = free_blocks.pool
        self.content: Any = None  # the values in the segment, which virtualgpu.graphs keeps here
        self.page = page
        self.frames: list[dict] | None = None
        state = UNMAPPED if page else FREE
        self.first = Block(address, size, self, state)


class FreeBlocks:
    """The free blocks of one pool, in a sorted list per stream.

    by_stream: free blocks with memory, as (size, address, block)
    unmapped: free addresses without memory, as (address, block)
    pool: the small or large `Pool`, which counts the blocks
    pool_id: the id of the private pool, or NO_POOL
    splits: whether segments of this pool may be cut into blocks
    searches: the number of searches so far, if garbage collection is on
    """

    __slots__ = ("by_stream", "pool", "pool_id", "searches", "splits", "unmapped")

    def __init__(self, pool: "Pool", pool_id: tuple[int, int], splits: bool = True) -> None:
        self.pool = pool
        self.splits = splits
        self.pool_id = pool_id
        self.searches = 0
        self.by_stream: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    def add(self, block: Block) -> None:
        """Insert a free block into the list of its stream."""
        free = self.by_stream.get(block.stream)
        if free is None:
            free = self.by_stream[block.stream] = []
        block.freed_at = self.searches
        insort(free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from the list of its stream."""
        free = self.by_stream[block.stream]
        del free[bisect_left(free, (block.size, block.address))]


class Pool:
    """Counters of all small or all large requests, and the rule for splitting their blocks.

    The counters never fall, except `pending` and `pending_bytes`. A current value is the
    difference of two counters. `free_blocks` holds the blocks that are in no private pool.
    """

    __slots__ = (
        "completed", "completed_bytes", "completed_requested", "free_blocks", "least_tail",
        "malloc_bytes", "malloc_requested", "mallocs", "pending", "pending_bytes", "released_bytes",
        "released_segments", "reserved_bytes", "segments", "small", "split_below", "split_blocks",
        "split_bytes", "unsplit_blocks", "unsplit_bytes",
    )  # fmt: skip

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free_blocks = FreeBlocks(self, NO_POOL)
        self.mallocs = self.malloc_bytes = self.malloc_requested = 0
        # Completed frees, and frees that wait for other streams.
        self.completed = self.completed_bytes = self.completed_requested = 0
        self.pending = self.pending_bytes = 0
        self.segments = self.released_segments = self.reserved_bytes = self.released_bytes = 0
        self.split_blocks = self.unsplit_blocks = self.split_bytes = self.unsplit_bytes = 0

    def configure(self, settings: Settings) -> None:
        """Apply the settings that say when a block is split.

        A block is split if at least `least_tail` bytes remain and the request is smaller than
        `split_below` bytes.
        """
        if self.small or settings.expandable_segments:
            self.least_tail = MIN_BLOCK
            self.split_below = UNLIMITED
        else:
            self.least_tail = SMALL_SIZE + 1
            self.split_below = settings.max_split_size


class PrivatePool:
    """The free blocks that only a graph capture or a `use_mem_pool` block may use.

    `users` counts those that use the pool now. With `on_oom`, all requests may use the pool when
    the device is out of memory.
    """

    def __init__(
        self,
        small: Pool,
        large: Pool,
        pool_id: tuple[int, int],
        on_oom: bool = False,
        splits: bool = True,
    ) -> None:
        self.small = FreeBlocks(small, pool_id, splits)
        self.large = FreeBlocks(large, pool_id, splits)
        self.on_oom = on_oom
        self.users = 0
