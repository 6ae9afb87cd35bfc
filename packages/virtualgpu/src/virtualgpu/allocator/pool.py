"""The parts of the caching allocator's memory: blocks, the segments they lie in, the pools that free ones wait in."""

from bisect import bisect_left, insort
from typing import Any

from .settings import MIN_BLOCK, SMALL_SIZE, UNLIMITED, Settings

# The states of a block.
ALLOCATED = 0  # a tensor's
PENDING = 1  # freed, but other streams may still use it
FREE = 2  # in its pool, ready for a request
UNMAPPED = 3  # addresses of an expandable segment without memory behind them

NO_POOL = 0, 0  # the number of the pool that is nobody's own


class Block:
    """A stretch of a segment. `size` and `requested` are bytes; `previous` and `next` are its neighbours in the segment."""

    __slots__ = (
        "address", "events", "frames", "next", "previous", "requested", "segment", "shelved", "size", "state", "stream", "streams",
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
        self.streams: set[int] | None = None  # other streams that use it
        self.events = 0  # those of other streams that its free waits for
        self.frames: list[dict] | None = None  # where it was allocated, if that is recorded
        self.shelved = 0  # what its shelf's `searches` were when it came there

    def __repr__(self) -> str:
        state = ("allocated", "pending", "free", "unmapped")[self.state]
        return f"Block(address={self.address:#x}, size={self.size}, requested={self.requested}, stream={self.stream}, {state})"

    def split(self, size: int) -> "Block":
        """Cuts the block at `size` bytes and returns the tail, of the same state."""
        tail = Block(self.address + size, self.size - size, self.segment, self.state)
        tail.previous = self
        following = tail.next = self.next
        if following is not None:
            following.previous = tail
        self.next = tail
        self.size = size
        return tail

    def absorb_next(self) -> None:
        """Takes over the neighbour at the next address, which is then no block any more."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        following = self.next = absorbed.next
        if following is not None:
            following.previous = self


class Segment:
    """A range of addresses got from the driver at once. `page` is the bytes mapped at a time, 0 where all are mapped at once.

    `first` is the block at its lowest address: merging always keeps the lower block, so it never changes.
    """

    __slots__ = ("address", "content", "first", "frames", "page", "pool", "shelf", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, shelf: "Shelf", page: int = 0) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.shelf = shelf
        self.pool = shelf.pool
        self.content: Any = None  # what lies in it, where somebody keeps that (virtualgpu.graphs)
        self.page = page
        self.frames: list[dict] | None = None
        self.first = Block(address, size, self, UNMAPPED if page else FREE)


class Shelf:
    """Free blocks for small or for large requests, by stream, each stream's sorted by size and then address; `pool` counts them.

    `pool_id` names the private pool that they belong to. `free` ones have memory behind them, `unmapped` ones have addresses alone.
    `searches` are counted where garbage is collected.
    """

    __slots__ = ("free", "pool", "pool_id", "searches", "splits", "unmapped")

    def __init__(self, pool: "Pool", pool_id: tuple[int, int], splits: bool = True) -> None:
        self.pool = pool
        self.splits = splits  # may a segment be cut into blocks?
        self.pool_id = pool_id
        self.searches = 0
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    def add(self, block: Block) -> None:
        """Puts a block among the free ones of its stream."""
        free = self.free.get(block.stream)
        if free is None:
            free = self.free[block.stream] = []
        block.shelved = self.searches
        insort(free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        free = self.free[block.stream]
        del free[bisect_left(free, (block.size, block.address))]


class Pool:
    """What is counted of small or of large requests, and how their blocks are split. `shelf` has those of no private pool.

    The counts only grow, but for `pending`, `pending_bytes` and the peaks; what is current is a difference of two.
    """

    __slots__ = (
        "completed", "completed_bytes", "completed_requested", "least_tail", "malloc_bytes", "malloc_requested", "mallocs",
        "pending", "pending_bytes", "released_bytes", "released_segments", "reserved_bytes", "segments", "shelf", "small", "split_below",
        "split_blocks", "split_bytes", "unsplit_blocks", "unsplit_bytes",
    )  # fmt: skip

    def __init__(self, small: bool) -> None:
        self.small = small
        self.shelf = Shelf(self, NO_POOL)
        self.mallocs = self.malloc_bytes = self.malloc_requested = 0
        self.completed = self.completed_bytes = self.completed_requested = 0  # frees
        self.pending = self.pending_bytes = 0  # frees that wait for other streams
        self.segments = self.released_segments = self.reserved_bytes = self.released_bytes = 0
        self.split_blocks = self.unsplit_blocks = self.split_bytes = self.unsplit_bytes = 0

    def configure(self, settings: Settings) -> None:
        """When a block is split: from `least_tail` bytes left over on, for requests below `split_below` bytes."""
        always = self.small or settings.expandable_segments
        self.least_tail = MIN_BLOCK if always else SMALL_SIZE + 1
        self.split_below = UNLIMITED if always else settings.max_split_size


class PrivatePool:
    """Segments for what asks in a capture or under `use_mem_pool` alone, but where memory runs out `on_oom`. `users` there are now."""

    def __init__(self, small: Pool, large: Pool, pool_id: tuple[int, int], on_oom: bool = False, splits: bool = True) -> None:
        self.small, self.large = Shelf(small, pool_id, splits), Shelf(large, pool_id, splits)
        self.on_oom = on_oom
        self.users = 0
