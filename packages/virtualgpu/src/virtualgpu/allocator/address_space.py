"""The virtual addresses of a device's segments, chosen as the CUDA driver chooses them.

Addresses decide which of several equally large free blocks serves a request, so the allocator's
figures depend on them. NVIDIA does not document the driver's rules. They were derived from the
addresses that cudaMalloc returned to 14 programs on an NVIDIA H200 under CUDA 13.0
(tests/recordings/allocator_random.json).
"""

from bisect import bisect_left, insort

from .settings import MiB

CHUNK = 32 * MiB  # the driver reserves addresses in multiples of this size
GRANULE = 2 * MiB  # every range is a multiple of this size
CONTEXT = 6 * MiB  # bytes that the CUDA context occupies at the start of the first chunk
FAR_BELOW = 1 << 39  # bytes between the first chunk and the lowest address after `rise`


class AddressSpace:
    """Address ranges below the address `end`, in chunks that are reserved as needed.

    A range is placed in the lowest gap that fits inside the reserved chunks. If none fits, a new
    chunk is reserved. The chunk goes to the top of the highest hole between chunks that is longer
    than the chunk, or below all chunks. A chunk without ranges is given up.

    After `rise` there are no chunks. Each range then goes to the lowest hole that fits, counted
    from an address below all others. This rule was derived from the memory figures, not the
    addresses, of 24 programs on two H100s after NCCL had connected them
    (benchmarks/fidelity/ranks_further.py, driver 580.159.04). Twelve runs on two H200s did not
    follow this rule. A profile says whether its machine does.
    """

    def __init__(self, end: int) -> None:
        first = end - CHUNK
        # Each list holds pairs (start, end) in ascending order.
        self._chunks: list[tuple[int, int]] = [(first, end)]
        self._gaps: list[tuple[int, int]] = [(first + CONTEXT, end)]
        self._bottom = end - FAR_BELOW
        self._rising: list[tuple[int, int]] | None = None  # ranges taken since `rise`

    def rise(self) -> None:
        """Place all later ranges at rising addresses."""
        if self._rising is None:
            self._rising = []

    def take(self, size: int) -> int:
        """Reserve a range of `size` bytes and return its address."""
        size = -(-size // GRANULE) * GRANULE
        if self._rising is not None:
            start = self._bottom
            for taken, end in self._rising:
                if taken - start >= size:
                    break
                start = end
            insort(self._rising, (start, start + size))
            return start
        index = next((i for i, (low, high) in enumerate(self._gaps) if high - low >= size), None)
        if index is None:
            gap = self._reserve(-(-size // CHUNK) * CHUNK)
            index = bisect_left(self._gaps, gap)
            self._gaps.insert(index, gap)
        start, end = self._gaps[index]
        if end - start > size:
            self._gaps[index] = (start + size, end)
        else:
            del self._gaps[index]
        return start

    def give_back(self, address: int, size: int) -> None:
        """Release a range that `take` returned."""
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
        """Reserve a new chunk of `size` bytes and return its start and end."""
        end = self._chunks[0][0]
        from_the_top = reversed(self._chunks)
        lower_neighbours = reversed(self._chunks[:-1])
        for (_, below), (above, _) in zip(lower_neighbours, from_the_top, strict=False):
            if above - below > size:
                end = above
                break
        insort(self._chunks, (end - size, end))
        return end - size, end
