"""PyTorch's CUDA caching allocator for one virtual device.

`CachingAllocator` has the calls that a program makes, and serves one call at a time.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock

from .events import EventSource
from .history import Frames, History, snapshot
from .pool import ALLOCATED, NO_POOL, Block, PrivatePool
from .rules import AllocatorRules, BlockListener
from .settings import UNLIMITED, Settings

_REENTERED = "a finalizer or a listener called the allocator during another call"


class CachingAllocator(AllocatorRules):
    """The memory of one device. Any thread may call it.

    Args:
        index: the device's index
        total: the device's memory in bytes
        settings: as in PYTORCH_CUDA_ALLOC_CONF
        others: returns the bytes of the device that are held outside this allocator
        events: tells when streams have finished. Without it they have always finished
        processes: lists (pid, bytes) of the device's processes, for out-of-memory errors
        version: the PyTorch version whose rules and error texts apply
        first_address: the address below which the segments lie
        driver: called as `driver(action, stream)` for every `segment_*` action. On a real GPU these
            take time, `segment_free` waits for the device and `segment_unmap` for the stream
        claiming: returns a context in which no other process takes memory of the device
        collect: frees exported blocks that other processes have released, and returns whether there
            were any
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
        super().__init__(
            index,
            total,
            settings or Settings(),
            others,
            events,
            processes,
            version,
            first_address,
            driver,
            claiming,
        )
        self._collect = collect
        self._lock = RLock()
        self._busy = False  # a call is running
        self._late: list[Block] = []  # blocks that finalizers freed during a call

    # Allocate and free

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of at least `nbytes` bytes for use on `stream`.

        Raises OutOfMemory if the device is full, and ValueError unless `nbytes` is positive.
        """
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
        """Free a block, now or when the other streams that use it have done their current work.

        Raises ValueError if the block is not allocated.
        """
        with self._lock:
            if self._busy:  # a finalizer runs during another call
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
        """Note that `stream` uses the block, too.

        After `free`, the block is reused only when `stream` has finished the work that was
        queued on it at that time. Raises ValueError if the block is not allocated.
        """
        with self._lock:
            if block.state != ALLOCATED:
                raise ValueError(f"record_stream needs an allocated block, got {block}")
            if stream != block.stream:
                block.streams = {*(block.streams or ()), stream}

    def empty_cache(self) -> None:
        """Wait for the deferred frees and release every completely free segment to the device."""
        with self._alone():
            self._release_cached()

    def raise_addresses(self) -> None:
        """Place new segments at rising addresses from now on."""
        with self._lock:
            self._addresses.rise()

    # Private pools

    def make_pool(self, pool_id: tuple[int, int], on_oom: bool, splits: bool) -> None:
        """Create a private pool with one user.

        With `on_oom`, all requests may use the pool when memory runs out. `splits` says whether its
        segments may be cut into blocks.
        """
        with self._lock:
            private = PrivatePool(self._small, self._large, pool_id, on_oom, splits)
            self._private[pool_id] = private
            private.users = 1

    def begin_pool(self, pool_id: tuple[int, int], takes: Callable[[int], bool]) -> None:
        """Serve requests from a private pool if `takes(stream)` is true, and add a user to it.

        The pool is created if it does not exist. Raises RuntimeError if it serves requests already.
        """
        with self._lock:
            private = self._private.get(pool_id)
            if private is None:
                private = self._private[pool_id] = PrivatePool(self._small, self._large, pool_id)
            if any(other is private for other, _ in self._routes):
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            private.users += 1
            self._routes.append((private, takes))

    def end_pool(self, pool_id: tuple[int, int]) -> None:
        """Stop serving requests from a private pool."""
        with self._lock:
            ending = self._private.get(pool_id)
            self._routes = [route for route in self._routes if route[0] is not ending]

    def release_pool(self, pool_id: tuple[int, int]) -> None:
        """Remove a user of a private pool.

        Without users, `empty_cache` releases the pool's free segments, too.
        """
        with self._lock:
            self._private[pool_id].users -= 1

    def pool_users(self, pool_id: tuple[int, int]) -> int:
        """Return the number of users of a private pool."""
        return self._private[pool_id].users

    def empty_pool(self, pool_id: tuple[int, int]) -> None:
        """Release the free segments of a private pool to the device, if the pool has no users."""
        with self._alone():
            pools = [pool for pool in self._releasable() if pool.pool_id == pool_id]
            self._release_free(pools)

    # Limits and settings

    def configure(self, settings: Settings) -> None:
        """Use new settings for all later requests. The memory fraction does not change."""
        with self._lock:
            self._configure(settings)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the reserved memory to this share of the device's memory. 1 removes the limit.

        Raises ValueError unless the share is between 0 and 1.
        """
        with self._lock:
            self._limit(fraction)

    # Statistics

    @property
    def peak_allocated(self) -> int:
        """The largest number of bytes that were allocated at the same time so far."""
        return self._stats.peak("allocated_bytes")

    @property
    def peak_reserved(self) -> int:
        """The largest number of bytes that were reserved at the same time so far."""
        return self._stats.peak("reserved_bytes")

    def stats(self) -> dict:
        """Return all statistics, nested as in torch.cuda.memory_stats_as_nested_dict."""
        with self._lock:
            if self._max_split == UNLIMITED:
                return self._stats.nested(-1)
            return self._stats.nested(self._max_split)

    def reset_peak_stats(self) -> None:
        """Set all peaks to the current values."""
        with self._lock:
            self._stats.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """Set all counts of past events to 0."""
        with self._lock:
            self._stats.reset_accumulated()

    def segments(self, pool_id: tuple[int, int] = NO_POOL) -> list[dict]:
        """Return the segments with their blocks, as `torch.cuda.memory_snapshot()` does.

        With a `pool_id`, only the segments of this private pool are returned.
        """
        with self._lock:
            chosen = list(self._segments.values())
            if pool_id != NO_POOL:
                chosen = [x for x in chosen if x.free_blocks.pool_id == pool_id]
            listed = snapshot(self.index, chosen)
            if self._history is not None:
                active = sum(segment["active_size"] for segment in listed)
                self._history.add("snapshot", 0, active, 0)
            return listed

    # Watching

    def listen(self, listener: BlockListener) -> None:
        """Call `listener(action, block, size)` at every action, after the other listeners.

        The actions are `alloc`, `free_requested`, `free_completed`, `segment_*` and `oom`. An `oom`
        has no block. The listener runs during the call and must not allocate. What it frees is
        freed at the end of the call.
        """
        with self._lock:
            self._set_listeners((*self._listeners, listener))

    def unlisten(self, listener: BlockListener) -> None:
        """Stop calling `listener`. Raises ValueError if it does not listen."""
        with self._lock:
            if listener not in self._listeners:
                raise ValueError(f"{listener} does not listen to this allocator")
            others = tuple(other for other in self._listeners if other != listener)
            self._set_listeners(others)

    def _set_listeners(self, listeners: tuple[BlockListener, ...]) -> None:
        """Replace all listeners of the allocator's actions by `listeners`."""
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
        """Start a history, or end it if `enabled` is None.

        `torch.cuda.memory._record_memory_history` calls this method.

        Args:
            enabled: "all" keeps the last events, "state" only the stacks of the blocks in use
            max_entries: the number of events to keep
            frames: returns the stack of the caller
            context: "state", "alloc", "all" or None, the actions whose stacks are kept
            clock: returns the time in microseconds
            clear: whether to delete the events so far
            metadata: returns the program's own description
            skipped: actions that are not kept

        Raises ValueError for another `enabled` or `context`.
        """
        with self._lock:
            if enabled is None:
                self._history = None
            else:
                kept: Iterable[dict] = ()
                if self._history is not None and not clear:
                    kept = self._history.entries
                self._history = History(
                    enabled, max_entries, frames, context, clock, kept, metadata, skipped
                )
            self._set_listeners(self._listeners)

    def history(self) -> list[dict]:
        """Return the events kept so far, oldest first, as in a snapshot's `device_traces`."""
        with self._lock:
            if self._history is None:
                return []
            return list(self._history.entries)

    # One call at a time

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock in a `with` block, which runs one call of the allocator.

        Raises RuntimeError if the same thread is already inside a call.
        """
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
        """Free exported blocks that other processes have released.

        Returns whether there were any.
        """
        if not self._collect():
            return False
        while self._late:  # blocks that finalizers freed during this call
            self._free(self._late.pop(0))
        return True

    def _free_late(self) -> None:
        """Free the blocks that finalizers freed during the call that ends now."""
        while self._late:
            self._busy = True
            try:
                self._free(self._late.pop(0))
            finally:
                self._busy = False
