"""Addresses of a device's segments: a simple stand-in for those that the CUDA driver chooses."""

from bisect import bisect_left, insort

GRANULE = 2 << 20  # cudaMalloc places a segment at a multiple of 2 MiB


class AddressSpace:
    """Hands out ranges of addresses, always the lowest one that fits, and takes them back.

    Addresses decide nothing but ties between free blocks of one size; which ones the real driver would choose is not known.
    """

    __slots__ = ("_end", "_gaps")

    def __init__(self, start: int) -> None:
        self._end = start
        self._gaps: list[tuple[int, int]] = []  # (address, size), ascending, below _end

    def take(self, size: int) -> int:
        size = -(-size // GRANULE) * GRANULE
        for i, (address, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[i : i + 1] = [(address + size, gap - size)] if gap > size else []
                return address
        self._end += size
        return self._end - size

    def give_back(self, address: int, size: int) -> None:
        size = -(-size // GRANULE) * GRANULE
        gaps = self._gaps
        i = bisect_left(gaps, (address,))
        if i < len(gaps) and gaps[i][0] == address + size:
            size += gaps.pop(i)[1]
        if i and sum(gaps[i - 1]) == address:
            address, before = gaps.pop(i - 1)
            size += before
        if address + size == self._end:
            self._end = address
        else:
            insort(gaps, (address, size))
