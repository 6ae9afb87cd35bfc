"""Leaks of a recorded block: tensors that were allocated in it and are still alive."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from gputrace import units
from gputrace.holders.references import Snapshot
from gputrace.holders.search import UNSEEN, Holder, search
from gputrace.holders.tensors import Census, DeviceStorage, alive, shape_and_dtype
from gputrace.tables import Table, Tabulated
from virtualgpu.source_lines import SourceLine

MOST_LISTED = 3  # holders of one tensor that a table names
MOST_ALIKE = 5  # similar tensors that a table still lists one by one
_NONE = "no tensor born in the block outlives it"


@dataclass(frozen=True)
class Birth:
    """An allocation in the recorded block.

    Attributes:
        size: the bytes of its block.
        line: the user's line that allocated it, or None.
        category: what it is for, such as "parameters".
    """

    device: int
    address: int
    size: int
    line: SourceLine | None
    category: str


@dataclass(frozen=True)
class Leak:
    """A tensor that was allocated in the recorded block and outlives it.

    Attributes:
        bytes: the bytes of its block in the allocator.
        line: the user's line that allocated it, or None.
        category: what it is for, such as "parameters".
        shape, dtype: those of the largest tensor in this memory. None and "" if Python knows none.
        holders: what keeps it alive, the shortest name first.
    """

    bytes: int
    device: int
    line: SourceLine | None
    category: str
    shape: tuple[int, ...] | None
    dtype: str
    holders: tuple[Holder, ...]

    @property
    def text(self) -> str:
        """The leak in words: its size, device, shape or category, line, and holders."""
        what = self.category
        if self.shape is not None:
            what = f"{self.dtype} {list(self.shape)}"
        where = f"{units.byte_text(self.bytes)} on cuda:{self.device}"
        return f"{where}: {what}, {_place(self.line)}, held by {_held_by(self.holders)}"

    def __str__(self) -> str:
        return self.text


class Leaks(Tabulated, list[Leak]):
    """List of leaks, the largest first, which prints as a table. It keeps no tensor alive.

    Attributes:
        workspaces: the bytes of library workspaces from the block that are still allocated. They
            are no leaks, because the libraries use them again.
    """

    def __init__(self, leaks: Iterable[Leak], badge: str = "", workspaces: int = 0) -> None:
        super().__init__(leaks)
        self._badge = badge
        self.workspaces = workspaces

    @property
    def bytes(self) -> int:
        """The bytes of all leaks."""
        return sum(leak.bytes for leak in self)

    def table(self) -> Table:
        """Return a table of the leaks, those with most bytes first.

        Each row has the bytes, the device, the line, the shape and the holders. Many leaks that
        differ only in their holders share a row.
        """
        header = ("bytes", "device", "born in", "what", "shape", "held by")
        alike: dict[tuple, list[Leak]] = {}
        for leak in self:
            key = (leak.bytes, leak.device, leak.line, leak.category, leak.shape, leak.dtype)
            alike.setdefault(key, []).append(leak)
        groups: list[list[Leak]] = []
        for each in alike.values():
            if len(each) > MOST_ALIKE:
                groups.append(each)
            else:
                groups += [[leak] for leak in each]
        groups.sort(key=lambda group: -sum(leak.bytes for leak in group))
        caption = _NONE
        if len(self) == 1:
            caption = f"1 tensor born in the block outlives it: {units.byte_text(self.bytes)}"
        elif self:
            caption = f"{len(self)} tensors born in the block outlive it: "
            caption += units.byte_text(self.bytes)
        if self.workspaces:
            workspaces = units.byte_text(self.workspaces)
            caption += f" ({workspaces} of library workspaces stay: they are used again)"
        if not self:
            return Table((), (), caption)
        if self._badge:
            caption += f", {self._badge}"
        return Table(header, tuple(map(_row, groups)), caption)


def find_leaks(births: Iterable[Birth], census: Census | None = None, badge: str = "") -> Leaks:
    """Return the allocations that are alive now, and what keeps them alive.

    A library's workspace is not a leak. Memory without a tensor is held by C++ only.

    Args:
        census: the storages that were alive when the block ended. With it, a later tensor at the
            address of a freed one is not mistaken for it.
    """
    snapshot = Snapshot.take()
    living = alive(snapshot.objects)
    found: list[tuple[Birth, DeviceStorage | None]] = []
    unknown: list[Birth] = []
    workspaces: list[Birth] = []
    for birth in births:
        storage = living.storages.get((birth.device, birth.address))
        if storage is not None and (census is None or storage in census):
            found.append((birth, storage))
        elif birth.category == "workspace":
            if storage is None:
                workspaces.append(birth)
        elif census is None or census.alive_at((birth.device, birth.address)) is None:
            unknown.append(birth)
    there = _allocated() if unknown or workspaces else set()
    found += [(birth, None) for birth in unknown if (birth.device, birth.address) in there]
    stay = sum(birth.size for birth in workspaces if (birth.device, birth.address) in there)
    holders: Iterator[list[Holder]] = iter(())
    if found:
        storages = [storage for _, storage in found if storage is not None]
        holders = iter(search(snapshot, living, storages))
    leaks = []
    for birth, storage in found:
        leaks.append(_leak(birth, storage, next(holders) if storage else [UNSEEN]))
    leaks.sort(key=lambda leak: (-leak.bytes, leak.device, _place(leak.line), leak.text))
    return Leaks(leaks, badge, stay)


def _leak(birth: Birth, storage: DeviceStorage | None, holders: list[Holder]) -> Leak:
    """Return the leak that an allocation has become, with the storage and the holders found."""
    shape, dtype = None, ""
    if storage is not None and storage.largest is not None:
        shape, dtype = shape_and_dtype(storage.largest)
    return Leak(birth.size, birth.device, birth.line, birth.category, shape, dtype, tuple(holders))


def _allocated() -> set[tuple[int, int]]:
    """Return the (device, address) of each block that is allocated now."""
    if not torch.cuda.is_initialized():
        return set()
    found = set()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.add((segment["device"], block["address"]))
    return found


def _place(line: SourceLine | None) -> str:
    """Return the location of a line in words."""
    if line is None:
        return "an unknown line"
    return line.location


def _row(alike: list[Leak]) -> tuple[str, ...]:
    """Return the row of a table for leaks that differ only in their holders."""
    leak = alike[0]
    size, held_by = units.byte_text(leak.bytes), _held_by(leak.holders)
    if len(alike) > 1:
        size = f"{len(alike)} × {size}"
        held_by += f"; {len(alike) - 1} more like this, each with holders of its own"
    shape = ""
    if leak.shape is not None:
        shape = f"{leak.dtype} {list(leak.shape)}"
    return size, f"cuda:{leak.device}", _place(leak.line), leak.category, shape, held_by


def _held_by(holders: tuple[Holder, ...]) -> str:
    """Return a text that names the first holders, and counts the others."""
    text = "; ".join(holder.text for holder in holders[:MOST_LISTED])
    if len(holders) > MOST_LISTED:
        text += f"; {len(holders) - MOST_LISTED} more"
    return text
