"""Addresses of a device's segments, chosen as the CUDA driver was seen to choose them.

Addresses decide ties between free blocks of one size, so figures of the allocator hang on them. The rules were read off the
addresses that cudaMalloc returned for 14 programs on an NVIDIA H200 under CUDA 13.0 (tests/virtualgpu/recordings/allocator_random.json);
NVIDIA documents none of them.
"""

from bisect import bisect_left, insort

from .settings import MiB

CHUNK = 32 * MiB  # the driver reserves addresses in multiples of it
GRANULE = 2 * MiB
CONTEXT = 6 * MiB  # at the start of the first chunk, taken by the CUDA context
FAR_BELOW = 1 << 39  # bytes from the first chunk down to where ranges rise


class AddressSpace:
    """Hands out ranges of addresses below `end` and takes them back.

    A range goes to the lowest gap that fits in the chunks there are. Otherwise a new chunk is reserved: at the top of the highest
    hole between chunks that is longer than the chunk, or below all of them. A chunk without ranges is given up.

    After `rise` ranges have no chunks: each goes to the lowest hole that fits, from an address on that lies below all others. This was
    read off no addresses, but off the figures of 24 programs on two H100s (benchmarks/fidelity/ranks_further.py, driver 580.159.04), once
    NCCL had connected them. Twelve runs on two H200s speak against it there: the profile says which machine does it.
    """

    def __init__(self, end: int) -> None:
        first = end - CHUNK
        self._chunks: list[tuple[int, int]] = [(first, end)]  # start and end, ascending
        self._gaps: list[tuple[int, int]] = [(first + CONTEXT, end)]  # start and end, ascending, within chunks
        self._bottom = end - FAR_BELOW
        self._rising: list[tuple[int, int]] | None = None  # start and end, ascending, of the ranges taken since `rise`

    def rise(self) -> None:
        """From now on ranges rise."""
        if self._rising is None:
            self._rising = []

    def take(self, size: int) -> int:
        """The address of a range of `size` bytes."""
        size = -(-size // GRANULE) * GRANULE
        if self._rising is not None:
            start = self._bottom
            for taken, end in self._rising:
                if taken - start >= size:
                    break
                start = end
            insort(self._rising, (start, start + size))
            return start
        index = next((i for i, (start, end) in enumerate(self._gaps) if end - start >= size), None)
        if index is None:
            gap = self._reserve(-(-size // CHUNK) * CHUNK)
            index = bisect_left(self._gaps, gap)
            self._gaps.insert(index, gap)
        start, end = self._gaps[index]
        self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
        return start

    def give_back(self, address: int, size: int) -> None:
        """Takes back a range that `take` gave."""
        start, end = address, address + -(-size // GRANULE) * GRANULE
        if self._rising and start <= self._rising[-1][0]:
            self._rising.remove((start, end))
            return
        chunk = self._chunks[bisect_left(self._chunks, (address + 1,)) - 1]
        i = bisect_left(self._gaps, (start,))
        if i < len(self._gaps) and self._gaps[i][0] == end and end < chunk[1]:
            end = self._gaps.pop(i)[1]
        if i and self._gaps[i - 1][1] == start and start > chunk[0]:
            start = self._gaps.pop(i - 1)[0]
        if (start, end) == chunk:
            self._chunks.remove(chunk)
        else:
            insort(self._gaps, (start, end))

    def _reserve(self, size: int) -> tuple[int, int]:
        """A new chunk of `size` bytes."""
        end = self._chunks[0][0]
        for (_, below), (above, _) in zip(reversed(self._chunks[:-1]), reversed(self._chunks), strict=False):
            if above - below > size:
                end = above
                break
        insort(self._chunks, (end - size, end))
        return end - size, end
