"""The allocator's statistics, with the names and the nesting of `torch.cuda.memory_stats`.

An allocation adds to three counters of its pool, and a completed free to three others. All other
values are computed from the counters when they are requested. Only the peaks must be noted on the
way, before a value falls.
"""

from .pool import Pool

# The current value of each statistic is the difference of two counters: what was added, and what
# was removed.
_SUMS = {
    "allocation": lambda pool: (pool.mallocs, pool.completed + pool.pending),
    "segment": lambda pool: (pool.segments, pool.released_segments),
    "active": lambda pool: (pool.mallocs, pool.completed),
    "inactive_split": lambda pool: (pool.split_blocks, pool.unsplit_blocks),
    "allocated_bytes": lambda pool: (pool.malloc_bytes, pool.completed_bytes + pool.pending_bytes),
    "reserved_bytes": lambda pool: (pool.reserved_bytes, pool.released_bytes),
    "active_bytes": lambda pool: (pool.malloc_bytes, pool.completed_bytes),
    "inactive_split_bytes": lambda pool: (pool.split_bytes, pool.unsplit_bytes),
    "requested_bytes": lambda pool: (pool.malloc_requested, pool.completed_requested),
}


class Stat:
    """One statistic with PyTorch's four figures: current, peak, allocated and freed."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add `amount`, which may be negative, to the statistic, and update its four figures."""
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount

    def nested(self) -> dict[str, int]:
        """Return the four figures as a dictionary with PyTorch's keys."""
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.freed,
        }


class Stats:
    """The statistics of an allocator with a small and a large pool."""

    def __init__(self, small: Pool, large: Pool) -> None:
        self._small = small
        self._large = large
        self._peaks = {key: [0, 0, 0] for key in _SUMS}  # all, large, small
        # The counters (added, removed) at the last reset, of the large and of the small pool.
        self._forgotten = {key: ((0, 0), (0, 0)) for key in _SUMS}
        self._deferred = False  # a free waits for another stream
        self._share_peaks()
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self._reset_counts()

    def _reset_counts(self) -> None:
        """Set the counts of rare events to 0."""
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds from the device."""
        small, large = self._small, self._large
        reserved = small.reserved_bytes + large.reserved_bytes
        return reserved - small.released_bytes - large.released_bytes

    @property
    def allocated(self) -> int:
        """Bytes in blocks that tensors hold."""
        small, large = self._small, self._large
        completed = small.completed_bytes + large.completed_bytes
        pending = small.pending_bytes + large.pending_bytes
        return small.malloc_bytes + large.malloc_bytes - completed - pending

    def peak(self, key: str) -> int:
        """Return the highest value so far of the statistic `key`, for both pools together."""
        self.note_use()
        return self._peaks[key][0]

    # Peaks

    def _share_peaks(self) -> None:
        """Store the peaks of allocated and of active memory in the same lists.

        Both are equal as long as no free waits for another stream.
        """
        self._peaks["allocation"] = self._peaks["active"]
        self._peaks["allocated_bytes"] = self._peaks["active_bytes"]

    def note_use(self) -> None:
        """Update the peaks of the values that an allocation raised, before any of them falls."""
        small, large, peaks = self._small, self._large, self._peaks
        few = small.mallocs - small.completed
        many = large.mallocs - large.completed
        little = small.malloc_bytes - small.completed_bytes
        much = large.malloc_bytes - large.completed_bytes
        _raise_peaks(peaks["active"], few, many)
        _raise_peaks(peaks["active_bytes"], little, much)
        _raise_peaks(
            peaks["requested_bytes"],
            small.malloc_requested - small.completed_requested,
            large.malloc_requested - large.completed_requested,
        )
        if self._deferred:
            _raise_peaks(peaks["allocation"], few - small.pending, many - large.pending)
            _raise_peaks(
                peaks["allocated_bytes"], little - small.pending_bytes, much - large.pending_bytes
            )

    def note_deferred(self) -> None:
        """Update the peaks before a free is deferred. From then on, allocated and active differ."""
        self.note_use()
        if not self._deferred:
            self._deferred = True
            for key in ("allocation", "allocated_bytes"):
                self._peaks[key] = list(self._peaks[key])

    def note_split(self) -> None:
        """Update the peaks of inactive split blocks, after their number rose."""
        small, large = self._small, self._large
        _raise_peaks(
            self._peaks["inactive_split"],
            small.split_blocks - small.unsplit_blocks,
            large.split_blocks - large.unsplit_blocks,
        )
        _raise_peaks(
            self._peaks["inactive_split_bytes"],
            small.split_bytes - small.unsplit_bytes,
            large.split_bytes - large.unsplit_bytes,
        )

    def note_reserved(self) -> None:
        """Update the peaks of segments and reserved bytes, after they rose."""
        small, large = self._small, self._large
        _raise_peaks(
            self._peaks["segment"],
            small.segments - small.released_segments,
            large.segments - large.released_segments,
        )
        _raise_peaks(
            self._peaks["reserved_bytes"],
            small.reserved_bytes - small.released_bytes,
            large.reserved_bytes - large.released_bytes,
        )

    def reset_peaks(self) -> None:
        """Set all peaks to the current values."""
        for key, sums in _SUMS.items():
            added, removed = sums(self._small)
            few = added - removed
            added, removed = sums(self._large)
            many = added - removed
            self._peaks[key][:] = few + many, many, few
        if not (self._small.pending or self._large.pending):
            self._deferred = False
            self._share_peaks()
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """Set all counts of past events to 0."""
        for key, sums in _SUMS.items():
            self._forgotten[key] = sums(self._large), sums(self._small)
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.allocated = stat.freed = 0
        self._reset_counts()

    def nested(self, max_split_size: int) -> dict:
        """Return all statistics as torch.cuda.memory_stats_as_nested_dict does.

        `max_split_size` is in bytes, or -1 without a limit.
        """
        self.note_use()
        return {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_oom_rejections": 0,  # the setting throw_on_cudamalloc_oom does not exist here
            "max_split_size": max_split_size,
            **{key: self._by_pool(key) for key in _SUMS},
            "oversize_allocations": self.oversize_allocations.nested(),
            "oversize_segments": self.oversize_segments.nested(),
            "reserved_bytes_by_private_pools": {},  # the virtual GPU does not count them separately
        }

    def _by_pool(self, key: str) -> dict[str, dict[str, int]]:
        """Return the figures of the statistic `key` for the large pool, the small pool and both."""
        peak, large_peak, small_peak = self._peaks[key]
        large_forgotten, small_forgotten = self._forgotten[key]
        large = _figures(_SUMS[key](self._large), large_forgotten, large_peak)
        small = _figures(_SUMS[key](self._small), small_forgotten, small_peak)
        both = {figure: large[figure] + small[figure] for figure in large}
        both["peak"] = peak
        return {"all": both, "large_pool": large, "small_pool": small}


def _figures(sums: tuple[int, int], forgotten: tuple[int, int], peak: int) -> dict[str, int]:
    """Return a dictionary of PyTorch's four figures of a statistic.

    `sums` are two counters, of what was added and of what was removed. `forgotten` has their values
    at the last reset. `peak` is the highest difference of the two.
    """
    added, removed = sums
    return {
        "current": added - removed,
        "peak": peak,
        "allocated": added - forgotten[0],
        "freed": removed - forgotten[1],
    }


def _raise_peaks(peaks: list[int], few: int, many: int) -> None:
    """Raise the peaks to at least the present values.

    `peaks` has the peak of both pools together, of the large pool and of the small pool. `few` is
    the value of the small pool, and `many` that of the large pool.
    """
    if few > peaks[2]:
        peaks[2] = few
    if many > peaks[1]:
        peaks[1] = many
    if few + many > peaks[0]:
        peaks[0] = few + many
