"""The accesses to memory that the race detector compares: who read or wrote which bytes."""

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.clock.machine_clock import Known
from virtualgpu.tensor import plain_set

AnyLaunch = Any  # virtualgpu.streams.launches.Launch, which cannot be imported here
MOST = 64  # accesses that are remembered per memory block; the oldest are forgotten first


class Region(NamedTuple):
    """The elements of a storage that a tensor can access.

    `offset` and `stride` count elements of `dtype`.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """Return the region of its storage that a tensor can access."""
        return cls(
            int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.dtype
        )

    def bytes(self) -> tuple[int, int]:
        """Return (first byte of the region, byte after its last one)."""
        first = self.offset * self.dtype.itemsize
        if 0 in self.size:
            return first, first
        elements = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return first, first + elements * self.dtype.itemsize

    def overlaps(self, other: "Region", shift: int = 0) -> bool:
        """Return whether both regions have a byte in common.

        The other region's storage begins `shift` bytes after this one's.
        """
        first, end = self.bytes()
        other_first, other_end = (byte + shift for byte in other.bytes())
        if max(first, other_first) >= min(end, other_end):
            return False
        if self == other and not shift:
            return True
        if self._shows_all(first, end, other_first, other_end):
            return True
        if other._shows_all(other_first, other_end, first, end):
            return True
        start, stop = min(first, other_first), max(end, other_end)
        mask = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
        self._shown(mask, -start).fill_(True)
        return bool(other._shown(mask, shift - start).any())

    def _shows_all(self, first: int, end: int, other_first: int, other_end: int) -> bool:
        """Return whether a fast test shows that this region overlaps another one.

        The arguments are the first byte of each region and the byte after its last one. The test is
        that this region has no gaps and contains the other one's first or last byte. If it fails,
        the regions are compared byte by byte.
        """
        if not (first <= other_first < end or first < other_end <= end):
            return False
        expected = 1
        dimensions = zip(self.size, self.stride, strict=True)
        for stride, size in sorted((stride, size) for size, stride in dimensions if size > 1):
            if stride != expected:
                return False
            expected *= size
        return True
        return True

    def _shown(self, mask: torch.Tensor, shift: int) -> torch.Tensor:
        """Return a view of the entries of `mask` that belong to bytes of this region.

        `mask` has one entry per byte. The region's storage begins at entry `shift`.
        """
        width = self.dtype.itemsize
        size = (*self.size, width)
        stride = (*(step * width for step in self.stride), 1)
        return mask.as_strided(size, stride, shift + self.offset * width)


class AccessLog:
    """The accesses to a memory block that several streams may use, in the order of their launches.

    The log belongs to the memory block. It lives longer than the block if the detector still
    remembers a launch that read the block. `filled` says whether anything was written to the block.
    """

    __slots__ = ("__weakref__", "accesses", "filled")

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.filled = False

    def add(self, access: "Access") -> None:
        """Append an access to the log."""
        self.filled = self.filled or access.writes
        if not access.writes:
            # An earlier read of the same region on the same stream is ordered before this one.
            stream = access.launch.stream
            self.accesses = [
                earlier
                for earlier in self.accesses
                if earlier.writes
                or earlier.launch.stream is not stream
                or earlier.region != access.region
                or earlier.launch.dependents
            ]
        self.accesses.append(access)
        del self.accesses[:-MOST]

    def unordered(self, region: Region, before: Known) -> "list[Access]":
        """Return the accesses to `region` that are not ordered before a launch, oldest first.

        `before` says which launches are done before it.
        """
        found = []
        for access in self.accesses:
            launch = access.launch
            if before.get(launch.stream, 0) < launch.count and access.touches(region):
                found.append(access)
        return found

    def writer(self, region: Region) -> "Access | None":
        """Return the last access that wrote to the region, or None."""
        for access in reversed(self.accesses):
            if access.writes and access.origin() is self and access.region.overlaps(region):
                return access
        return None


class Access:
    """The use of a region of a memory block by one launch.

    `before` is a copy of the tensor before a write. The copy is kept until the host has waited for
    the write. It is None if nothing was written there earlier.

    New memory takes over the accesses to the freed memory whose bytes it reuses. `origin` is then
    the log of the freed memory, whose storage begins `shift` bytes after the new one. `origin` is a
    weak reference, so that no cycle has to wait for the garbage collector.
    """

    __slots__ = ("__weakref__", "before", "launch", "origin", "region", "shift", "writes")

    def __init__(
        self,
        launch: AnyLaunch,
        origin: AccessLog,
        region: Region,
        writes: bool,
        before: torch.Tensor | None = None,
    ) -> None:
        self.launch = launch
        self.origin = weakref.ref(origin)
        self.region = region
        self.writes = writes
        self.before = before
        self.shift = 0

    def touches(self, region: Region) -> bool:
        """Return whether the access uses a byte of the region."""
        return region.overlaps(self.region, self.shift)

    def shifted(self, shift: int) -> "Access":
        """Return this access for the log of new memory whose bytes were freed by its own memory.

        The old storage begins `shift` bytes after the new one.
        """
        moved = copy.copy(self)
        moved.before = None
        moved.shift = self.shift + shift
        return moved


def has_region(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a region of one storage. Sparse and nested tensors are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


# The functions below return plain CPU tensors. A whole storage is a tensor of bytes.


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor with its whole storage.

    The copy shares the memory until one of the two is written to.
    """
    with _DisableTorchDispatch():
        storage = tensor.untyped_storage()
        # A storage that torch.load made has no allocator. The first write to it would need one.
        if storage.nbytes() and storage.resizable():
            try:
                return torch._lazy_clone(tensor.detach())
            except RuntimeError:  # memory of another library cannot be shared in this way
                pass
        return at(whole(tensor).clone(), Region.of(tensor))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage as a tensor, without a copy."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return plain_set(empty, storage, 0, (storage.nbytes(),), (1,))


def at(content: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the elements of `region` without a copy.

    `content` is a tensor with the storage to which the region belongs.
    """
    empty = torch.empty(0, dtype=region.dtype, device="cpu")
    return plain_set(empty, content.untyped_storage(), *region[:3])


def as_before(tensor: torch.Tensor, writes: list[Access]) -> torch.Tensor:
    """Return the values that a tensor had before these writes.

    The writes are given oldest first. Memory that nobody had written to contains zeros, like new
    memory from the driver.
    """
    content = whole(snapshot(tensor)).clone()
    for write in reversed(writes):
        old = at(content, write.region)
        if write.before is None:
            old.zero_()
        else:
            old.copy_(write.before)
    return at(content, Region.of(tensor))


def overlaid(content: torch.Tensor, upper: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a copy of the bytes `content`, with the bytes `upper` written at position `shift`."""
    result = content.clone()
    start, stop = max(shift, 0), min(shift + upper.numel(), content.numel())
    result[start:stop] = upper[start - shift : stop - shift]
    return result


def mapped(value: Any, change: Any, kind: type = torch.Tensor) -> Any:
    """Return `value`, the arguments of an operator, with `change` applied to each tensor.

    Tensors inside lists are changed, too. With another `kind`, `change` is applied to the instances
    of that class instead.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(x, change, kind) for x in value)
    if isinstance(value, dict):
        return {key: mapped(x, change, kind) for key, x in value.items()}
    return value
