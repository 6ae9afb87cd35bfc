"""The numbers in PyTorch's out-of-memory error, as torch 2.6 to 2.15 word it (c10/cuda/CUDACachingAllocator.cpp, `malloc`)."""

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Message:
    """What an error says, in bytes, to two decimals of the unit that it is printed in; None of what it does not say.

    `requested` is the size of the segment that the allocator asked the device for. `processes` are (number, bytes) of those that the
    driver lists beside this one. `own` counts this process's memory with its CUDA context. `rejected` tells that the allocator refused
    by itself, for a limit. Every number is missing from the error about a request beyond all measure.
    """

    requested: int | None
    device: int | None
    total: int | None
    free: int | None
    own: int | None
    processes: tuple[tuple[int, int], ...]
    allowed: int | None
    allocated: int | None
    private: int | None
    unallocated: int | None
    rejected: bool

    @classmethod
    def read(cls, text: str) -> "Message":
        """The numbers of a message; whatever is not in it is None."""
        device = re.search(r"\bGPU (\d+) has a total capacity", text)
        listed = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
        return cls(
            requested=_size(rf"(?:Tried to allocate|Requested size:?) {_SIZE}", text),
            device=int(device[1]) if device else None,
            total=_size(rf"total capacity of {_SIZE}", text),
            free=_size(rf"of which {_SIZE} is free", text),
            own=_size(rf"this process has {_SIZE} memory in use", text),
            processes=tuple((int(number), _bytes(size, unit)) for number, size, unit in listed),
            allowed=_size(rf"{_SIZE} allowed;", text),
            allocated=_size(rf"{_SIZE} is allocated by PyTorch", text),
            private=_size(rf"{_SIZE} allocated in private pools", text),
            unallocated=_size(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
            rejected="preemptively rejected" in text,
        )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1], found[2]) if found else None


def _bytes(size: str, unit: str) -> int:
    return round(float(size) * _UNITS[unit])
