"""Who touched which part of a memory: what the search for races compares."""

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.clock.machine_clock import Known
from virtualgpu.tensor import plain_set

AnyLaunch = Any  # of virtualgpu.streams.launches, which stands on this module
MOST = 64  # accesses remembered of one memory: the oldest are forgotten first


class Region(NamedTuple):
    """The elements of a storage that a tensor shows. `offset` and `stride` count elements of `dtype`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        return cls(int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.dtype)

    def bytes(self) -> tuple[int, int]:
        """The first byte of the storage that is shown, and the byte after the last."""
        first = self.offset * self.dtype.itemsize
        if 0 in self.size:
            return first, first
        elements = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return first, first + elements * self.dtype.itemsize

    def overlaps(self, other: "Region", shift: int = 0) -> bool:
        """Do both show a byte in common? The other's storage begins `shift` bytes after this one's."""
        first, end = self.bytes()
        other_first, other_end = (byte + shift for byte in other.bytes())
        if max(first, other_first) >= min(end, other_end):
            return False
        if self == other and not shift:
            return True
        if self._shows_all(first, end, other_first, other_end) or other._shows_all(other_first, other_end, first, end):
            return True
        start, stop = min(first, other_first), max(end, other_end)
        mask = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
        self._shown(mask, -start).fill_(True)
        return bool(other._shown(mask, shift - start).any())

    def _shows_all(self, first: int, end: int, other_first: int, other_end: int) -> bool:
        """Does this region show each byte from `first` to `end`, among them the other's first or last? Then no mask need be made."""
        if not (first <= other_first < end or first < other_end <= end):
            return False
        expected = 1
        for stride, size in sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1):
            if stride != expected:
                return False
            expected *= size
        return True

    def _shown(self, mask: torch.Tensor, shift: int) -> torch.Tensor:
        """The bytes of `mask` that stand for this region, whose storage begins at byte `shift` of it."""
        width = self.dtype.itemsize
        size, stride = (*self.size, width), (*(s * width for s in self.stride), 1)
        return mask.as_strided(size, stride, shift + self.offset * width)


class Place:
    """A memory that several streams may touch: its accesses, in the order of their launches.

    It hangs on the memory, and outlives it as long as a launch that reads it is remembered. `filled` says whether anything has been
    written into it.
    """

    __slots__ = ("__weakref__", "accesses", "filled")

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.filled = False

    def add(self, access: "Access") -> None:
        self.filled = self.filled or access.writes
        if not access.writes:  # an earlier read of the same by the same stream is before this one
            mine = access.launch.stream, access.region
            self.accesses = [x for x in self.accesses if x.writes or (x.launch.stream, x.region) != mine or x.launch.dependents]
        self.accesses.append(access)
        del self.accesses[:-MOST]

    def unordered(self, region: Region, before: Known) -> "list[Access]":
        """Accesses to the region, oldest first, that are not done before."""
        return [x for x in self.accesses if before.get(x.launch.stream, 0) < x.launch.count and x.touches(region)]

    def writer(self, region: Region) -> "Access | None":
        """The last access that wrote into the region."""
        return next((x for x in reversed(self.accesses) if x.writes and x.origin() is self and x.region.overlaps(region)), None)


class Access:
    """One launch's use of a region of a place.

    `before` is a copy of the tensor as it was before a write, until the host has waited for that; None where nothing was there before.
    What was done to a memory that has been freed goes on to the one that is made of the same bytes: `origin` is then the place of the
    freed one, whose storage begins `shift` bytes after this place's. It is a weak reference: no circle is left to the garbage collector.
    """

    __slots__ = ("__weakref__", "before", "launch", "origin", "region", "shift", "writes")

    def __init__(self, launch: AnyLaunch, origin: Place, region: Region, writes: bool, before: torch.Tensor | None = None) -> None:
        self.launch = launch
        self.origin = weakref.ref(origin)
        self.region = region
        self.writes = writes
        self.before = before
        self.shift = 0

    def touches(self, region: Region) -> bool:
        return region.overlaps(self.region, self.shift)

    def shifted(self, shift: int) -> "Access":
        """The same access as the memory made of the same bytes has it."""
        moved = copy.copy(self)
        moved.before, moved.shift = None, self.shift + shift
        return moved


def has_region(tensor: torch.Tensor) -> bool:
    """Does the tensor show a region of one storage, as sparse and nested ones do not?"""
    return tensor.layout is torch.strided and not tensor.is_nested


# Contents of storages, all plain tensors. Whole storages are tensors of bytes.


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor and all of its storage as they are now, in memory that is shared until one of the two is written to."""
    with _DisableTorchDispatch():
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():  # else it has no allocator (torch.load), which a write then would call
            try:
                return torch._lazy_clone(tensor.detach())
            except RuntimeError:  # memory that another library made cannot be shared so
                pass
        return at(whole(tensor).clone(), Region.of(tensor))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor's storage, not copied."""
    storage = tensor.untyped_storage()
    return plain_set(torch.empty(0, dtype=torch.uint8, device="cpu"), storage, 0, (storage.nbytes(),), (1,))


def at(content: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region in the bytes of a storage, not copied."""
    return plain_set(torch.empty(0, dtype=region.dtype, device="cpu"), content.untyped_storage(), *region[:3])


def as_before(tensor: torch.Tensor, writes: list[Access]) -> torch.Tensor:
    """The tensor as it is for a reader to which these writes, oldest first, have not happened yet.

    Memory into which nobody has written since it was allocated reads as zeros, as memory fresh from the driver does.
    """
    content = whole(snapshot(tensor)).clone()
    for write in reversed(writes):
        old = at(content, write.region)
        old.zero_() if write.before is None else old.copy_(write.before)
    return at(content, Region.of(tensor))


def overlaid(content: torch.Tensor, upper: torch.Tensor, shift: int) -> torch.Tensor:
    """A copy of the bytes `content` over which the bytes `upper` are laid, from byte `shift` on."""
    result = content.clone()
    start, stop = max(shift, 0), min(shift + upper.numel(), content.numel())
    result[start:stop] = upper[start - shift : stop - shift]
    return result


def mapped(value: Any, change: Any, kind: type = torch.Tensor) -> Any:
    """An operator's arguments with each tensor, or what else is of that `kind`, changed, those in lists too."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(x, change, kind) for x in value)
    if isinstance(value, dict):
        return {key: mapped(x, change, kind) for key, x in value.items()}
    return value
