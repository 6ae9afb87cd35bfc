"""The allocator's statistics, as `torch.cuda.memory_stats` names and nests them.

A malloc adds to three counters of its pool and a completed free to three others. Everything else is worked out here when it is
asked for; only peaks must be noted on the way, before a figure falls.
"""

from .pool import Pool

# Each statistic of a pool is a difference of lifetime sums: what rose, and what fell.
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
    """One plain statistic; the attributes are PyTorch's four figures."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount

    def nested(self) -> dict[str, int]:
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class Stats:
    """The statistics of an allocator with two pools."""

    def __init__(self, small: Pool, large: Pool) -> None:
        self._small = small
        self._large = large
        self._peaks = {key: [0, 0, 0] for key in _SUMS}  # all, large, small
        self._forgotten = {key: ((0, 0), (0, 0)) for key in _SUMS}  # the sums when they were last reset: large, small
        self._deferred = False
        self._join()
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = 0

    @property
    def reserved(self) -> int:
        """Bytes held from the device."""
        small, large = self._small, self._large
        return small.reserved_bytes - small.released_bytes + large.reserved_bytes - large.released_bytes

    @property
    def allocated(self) -> int:
        """Bytes in blocks that tensors hold."""
        return sum(pool.malloc_bytes - pool.completed_bytes - pool.pending_bytes for pool in (self._small, self._large))

    def peak(self, key: str) -> int:
        """The highest value so far, both pools together."""
        self.note_use()
        return self._peaks[key][0]

    # Peaks

    def _join(self) -> None:
        """While no free waits for another stream, what is allocated is what is active."""
        self._peaks["allocation"], self._peaks["allocated_bytes"] = self._peaks["active"], self._peaks["active_bytes"]

    def note_use(self) -> None:
        """Notes the peaks of what a malloc raises. To be called before any of it falls."""
        small, large, peaks = self._small, self._large, self._peaks
        few, many = small.mallocs - small.completed, large.mallocs - large.completed
        little, much = small.malloc_bytes - small.completed_bytes, large.malloc_bytes - large.completed_bytes
        _note(peaks["active"], few, many)
        _note(peaks["active_bytes"], little, much)
        _note(
            peaks["requested_bytes"],
            small.malloc_requested - small.completed_requested,
            large.malloc_requested - large.completed_requested,
        )
        if self._deferred:
            _note(peaks["allocation"], few - small.pending, many - large.pending)
            _note(peaks["allocated_bytes"], little - small.pending_bytes, much - large.pending_bytes)

    def note_deferred(self) -> None:
        """From the first deferred free on, allocated and active are apart. To be called before it counts."""
        self.note_use()
        if not self._deferred:
            self._deferred = True
            self._peaks |= {key: list(self._peaks[key]) for key in ("allocation", "allocated_bytes")}

    def note_split(self) -> None:
        """Notes the peaks of inactive split blocks, after they rose."""
        small, large = self._small, self._large
        _note(self._peaks["inactive_split"], small.split_blocks - small.unsplit_blocks, large.split_blocks - large.unsplit_blocks)
        _note(self._peaks["inactive_split_bytes"], small.split_bytes - small.unsplit_bytes, large.split_bytes - large.unsplit_bytes)

    def note_reserved(self) -> None:
        """Notes the peaks of segments and reserved bytes, after they rose."""
        small, large = self._small, self._large
        _note(self._peaks["segment"], small.segments - small.released_segments, large.segments - large.released_segments)
        _note(
            self._peaks["reserved_bytes"],
            small.reserved_bytes - small.released_bytes,
            large.reserved_bytes - large.released_bytes,
        )

    def reset_peaks(self) -> None:
        for key, sums in _SUMS.items():
            few, many = (rose - fell for rose, fell in (sums(self._small), sums(self._large)))
            self._peaks[key][:] = few + many, many, few
        if not (self._small.pending or self._large.pending):
            self._deferred = False
            self._join()
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        self._forgotten = {key: (sums(self._large), sums(self._small)) for key, sums in _SUMS.items()}
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.allocated = stat.freed = 0
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = 0

    # All of them

    def nested(self, max_split_size: int) -> dict:
        """As torch.cuda.memory_stats_as_nested_dict. `max_split_size` is -1 for no limit."""
        self.note_use()
        return {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_oom_rejections": 0,  # only throw_on_cudamalloc_oom rejects, and that setting is refused
            "max_split_size": max_split_size,
            **{key: self._by_pool(key) for key in _SUMS},
            "oversize_allocations": self.oversize_allocations.nested(),
            "oversize_segments": self.oversize_segments.nested(),
            "reserved_bytes_by_private_pools": {},  # they are not counted apart
        }

    def _by_pool(self, key: str) -> dict[str, dict[str, int]]:
        nested = {}
        for name, peak, pool, forgotten in zip(
            ("large_pool", "small_pool"), self._peaks[key][1:], (self._large, self._small), self._forgotten[key], strict=True
        ):
            rose, fell = _SUMS[key](pool)
            nested[name] = {"current": rose - fell, "peak": peak, "allocated": rose - forgotten[0], "freed": fell - forgotten[1]}
        both = {figure: nested["large_pool"][figure] + nested["small_pool"][figure] for figure in ("current", "allocated", "freed")}
        return {"all": {**both, "peak": self._peaks[key][0]}, **nested}


def _note(peaks: list[int], few: int, many: int) -> None:
    if few > peaks[2]:
        peaks[2] = few
    if many > peaks[1]:
        peaks[1] = many
    if few + many > peaks[0]:
        peaks[0] = few + many
