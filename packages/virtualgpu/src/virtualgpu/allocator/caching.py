"""PyTorch's CUDA caching allocator for one virtual device: the calls that a program makes, any thread's, one at a time."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock

from .events import EventSource
from .history import Frames, History, snapshot
from .pool import ALLOCATED, NO_POOL, Block, PrivatePool
from .rules import AllocatorRules, BlockListener
from .settings import UNLIMITED, Settings

_REENTERED = "the allocator was called from a finalizer or a listener while it was at work"


class CachingAllocator(AllocatorRules):
    """The memory of device `index`, of `total` bytes. May be called from any thread.

    `others()` gives the bytes of the device that are held outside this allocator. `events` says when streams are done;
    without it they always are. `processes()` lists (pid, bytes) of the processes on the device, for the text of an
    out-of-memory error, which is worded as PyTorch `version` words it. `driver(action, stream)` is called at every `segment_*`:
    on a real GPU these take time, `segment_free` waits for the device and `segment_unmap` for the stream. `claiming()` is a context in
    which no other process takes memory of the device. `collect()` frees exported blocks that other processes have released; it returns
    whether there was one.
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
        driver: Callable[[str, int], None] = lambda action, stream: None,
        claiming: Callable[[], AbstractContextManager] = nullcontext,
        collect: Callable[[], bool] = bool,
    ) -> None:
        if first_address is None:
            first_address = 0x7F0000000000 + index * (1 << 40)
        super().__init__(index, total, settings or Settings(), others, events, processes, version, first_address, driver, claiming)
        self._collect = collect
        self._lock = RLock()
        self._busy = False  # a call is under way
        self._late: list[Block] = []  # freed by a finalizer that ran during a call

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
                return self._malloc(nbytes, stream)
            finally:
                self._busy = False
                if self._late:
                    self._free_late()

    def free(self, block: Block) -> None:
        """Gives a block back. It is free at once, or when the other streams that use it have done what they were asked so far."""
        with self._lock:
            if self._busy:  # a finalizer that ran during a call
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

    def raise_addresses(self) -> None:
        """New segments have rising addresses from now on."""
        with self._lock:
            self._addresses.rise()

    # Private pools

    def make_pool(self, pool_id: tuple[int, int], on_oom: bool, splits: bool) -> None:
        """A private pool with one user; `on_oom` it serves all. Its segments are cut into blocks, if it `splits`."""
        with self._lock:
            private = self._private[pool_id] = PrivatePool(self._small, self._large, pool_id, on_oom, splits)
            private.users = 1

    def begin_pool(self, pool_id: tuple[int, int], takes: Callable[[int], bool]) -> None:
        """This private pool has a user more: from now on requests for a stream that it `takes` go there."""
        with self._lock:
            private = self._private.get(pool_id)
            if private is None:
                private = self._private[pool_id] = PrivatePool(self._small, self._large, pool_id)
            if any(other is private for other, _ in self._routes):
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            private.users += 1
            self._routes.append((private, takes))

    def end_pool(self, pool_id: tuple[int, int]) -> None:
        """Requests go where they went before."""
        with self._lock:
            self._routes = [route for route in self._routes if route[0] is not self._private[pool_id]]

    def release_pool(self, pool_id: tuple[int, int]) -> None:
        """A user of the pool is gone: after the last, `empty_cache` returns its free segments too."""
        with self._lock:
            self._private[pool_id].users -= 1

    def pool_users(self, pool_id: tuple[int, int]) -> int:
        return self._private[pool_id].users

    def empty_pool(self, pool_id: tuple[int, int]) -> None:
        """Returns what is free of a private pool to the device, if nobody uses the pool."""
        with self._alone():
            self._release_free([shelf for shelf in self._releasable() if shelf.pool_id == pool_id])

    # Limits and settings

    def configure(self, settings: Settings) -> None:
        """Takes new settings for all later requests. The memory fraction stays as it is."""
        with self._lock:
            self._configure(settings)

    def set_memory_fraction(self, fraction: float) -> None:
        """Lets this allocator reserve at most that share of the device's memory; 1 removes the limit."""
        with self._lock:
            self._limit(fraction)

    # Figures

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

    def segments(self, pool_id: tuple[int, int] = NO_POOL) -> list[dict]:
        """The segments and their blocks, by address, as in `torch.cuda.memory_snapshot()`; of a private pool alone, where one is named."""
        with self._lock:
            chosen = [x for x in self._segments.values() if pool_id in (NO_POOL, x.shelf.pool_id)]
            listed = snapshot(self.index, chosen)
            if self._history is not None:
                self._history.add("snapshot", 0, sum(segment["active_size"] for segment in listed), 0)
            return listed

    # Watching

    def listen(self, listener: BlockListener) -> None:
        """Calls `listener(action, block, size)` at every `alloc`, `free_requested`, `free_completed`, `segment_*` and `oom` (which has no
        block), after those that listen already.

        The listener runs during the call: it must not allocate, and what it frees is freed when the call is over.
        """
        with self._lock:
            self._hear((*self._listeners, listener))

    def unlisten(self, listener: BlockListener) -> None:
        """Calls `listener` no more. Raises ValueError if it does not listen."""
        with self._lock:
            if listener not in self._listeners:
                raise ValueError(f"{listener} does not listen to this allocator")
            self._hear(tuple(other for other in self._listeners if other != listener))

    def _hear(self, listeners: tuple[BlockListener, ...]) -> None:
        self._listeners = listeners
        self._watched = bool(listeners) or self._history is not None

    def record_history(
        self,
        enabled: str | None = "all",
        max_entries: int = sys.maxsize,
        frames: Frames | None = None,
        *,
        context: str | None = "all",
        clock: Callable[[], int] = lambda: 0,
        clear: bool = False,
        metadata: Callable[[], str] = str,
        skipped: Collection[str] = (),
    ) -> None:
        """Starts or (None) ends a history, as `torch.cuda.memory._record_memory_history` asks for it.

        `enabled` "all" keeps the last `max_entries` events, "state" only where the blocks in use were allocated. `frames()`
        gives the stack of the caller, `context` ("state", "alloc", "all" or None) what it is kept for; `clock()` gives
        microseconds, `metadata()` the program's own words; `skipped` actions are not kept.
        """
        with self._lock:
            entries = () if self._history is None or clear or enabled is None else self._history.entries
            self._history = None if enabled is None else History(enabled, max_entries, frames, context, clock, entries, metadata, skipped)
            self._hear(self._listeners)

    def history(self) -> list[dict]:
        """The events kept so far, oldest first, as in a snapshot's `device_traces`."""
        with self._lock:
            return [] if self._history is None else list(self._history.entries)

    # One call at a time

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

    def _reclaim(self) -> bool:
        if not self._collect():
            return False
        while self._late:  # by finalizers during this call
            self._free(self._late.pop(0))
        return True

    def _free_late(self) -> None:
        """Frees what finalizers gave back during the call that now ends."""
        while self._late:
            self._busy = True
            try:
                self._free(self._late.pop(0))
            finally:
                self._busy = False
