"""The leaks of a recorded block: the tensors born in it that outlive it, and who keeps each alive."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gputrace import units
from gputrace.holders.references import Snapshot
from gputrace.holders.search import UNSEEN, Holder, search
from gputrace.holders.tensors import Census, DeviceStorage, alive, shape_and_dtype
from gputrace.tables import Table, Tabulated
from virtualgpu.source_lines import SourceLine

_NONE = "no tensor born in the block outlives it"


@dataclass(frozen=True)
class Birth:
    """An allocation: where it lies, the bytes of its block, the user's line that made it, and what it is for."""

    device: int
    address: int
    size: int
    line: SourceLine | None
    category: str


@dataclass(frozen=True)
class Leak:
    """A tensor that outlives the block it was born in. `bytes` is what its block of the allocator takes.

    `shape` and `dtype` are those of the largest tensor on it, None and "" where Python knows none. `holders` has the shortest name first.
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
        """The leak in a sentence: how much, on which device, what it is, from which line, and who holds it."""
        what = self.category if self.shape is None else f"{self.dtype} {list(self.shape)}"
        return f"{units.byte_text(self.bytes)} on cuda:{self.device}: {what}, {_place(self.line)}, held by {_held_by(self.holders)}"

    def __str__(self) -> str:
        return self.text


class Leaks(Tabulated, list[Leak]):
    """Leaks, the largest first; prints as a table. It keeps no tensor alive.

    `workspaces` is the bytes of libraries' workspaces that were born in the block and are alive: no leak, for they are used again.
    """

    def __init__(self, leaks: Iterable[Leak], badge: str = "", workspaces: int = 0) -> None:
        super().__init__(leaks)
        self._badge = badge
        self.workspaces = workspaces

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(leak.bytes for leak in self)

    def table(self) -> Table:
        """A row for each, with its bytes, device, line, shape and holders, or one for many that differ in nothing else than their holders.

        What takes most comes first. Prints as text and as HTML.
        """
        header = ("bytes", "device", "born in", "what", "shape", "held by")
        alike: dict[tuple, list[Leak]] = {}
        for leak in self:
            alike.setdefault((leak.bytes, leak.device, leak.line, leak.category, leak.shape, leak.dtype), []).append(leak)
        groups = [group for each in alike.values() for group in ([each] if len(each) > MOST_ALIKE else [[leak] for leak in each])]
        rows = tuple(_row(group) for group in sorted(groups, key=lambda group: -sum(leak.bytes for leak in group)))
        some = "1 tensor" if len(self) == 1 else f"{len(self)} tensors"
        caption = f"{some} born in the block outlive{'s' * (len(self) == 1)} it: {units.byte_text(self.bytes)}" if self else _NONE
        if self.workspaces:
            caption += f" ({units.byte_text(self.workspaces)} of library workspaces stay: they are used again)"
        return Table(header if self else (), rows, f"{caption}, {self._badge}" if self._badge and self else caption)


def find_leaks(births: Iterable[Birth], census: Census | None = None, badge: str = "") -> Leaks:
    """Those of the births that are alive now, and who keeps them alive.

    With a `census` taken when the block ended, a tensor that came later to the address of one that has died is not mistaken for it.
    A library's workspace is no leak; memory without a tensor is held by C++ alone.
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
            workspaces += [birth] if storage is None else []
        elif census is None or census.alive_at((birth.device, birth.address)) is None:
            unknown.append(birth)
    there = _allocated() if unknown or workspaces else set()
    found += [(birth, None) for birth in unknown if (birth.device, birth.address) in there]
    stay = sum(birth.size for birth in workspaces if (birth.device, birth.address) in there)
    held = iter(search(snapshot, living, [storage for _, storage in found if storage is not None]) if found else ())
    leaks = [_leak(birth, storage, next(held) if storage else [UNSEEN]) for birth, storage in found]
    return Leaks(sorted(leaks, key=lambda leak: (-leak.bytes, leak.device, _place(leak.line), leak.text)), badge, stay)


def _leak(birth: Birth, storage: DeviceStorage | None, holders: list[Holder]) -> Leak:
    largest = None if storage is None else storage.largest
    shape, dtype = (None, "") if largest is None else shape_and_dtype(largest)
    return Leak(birth.size, birth.device, birth.line, birth.category, shape, dtype, tuple(holders))


def _allocated() -> set[tuple[int, int]]:
    """Where memory is allocated now: (device, address)."""
    if not torch.cuda.is_initialized():
        return set()
    segments = torch.cuda.memory_snapshot()
    return {
        (segment["device"], block["address"]) for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
    }


def _place(line: SourceLine | None) -> str:
    return "an unknown line" if line is None else line.location


def _row(alike: list[Leak]) -> tuple[str, ...]:
    leak, more = alike[0], len(alike) - 1
    return (
        f"{len(alike)} × {units.byte_text(leak.bytes)}" if more else units.byte_text(leak.bytes),
        f"cuda:{leak.device}",
        _place(leak.line),
        leak.category,
        "" if leak.shape is None else f"{leak.dtype} {list(leak.shape)}",
        _held_by(leak.holders) + f"; {more} more like this, each with holders of its own" * (more > 0),
    )


def _held_by(holders: tuple[Holder, ...]) -> str:
    return "; ".join(holder.text for holder in holders[:MOST_LISTED]) + f"; {len(holders) - MOST_LISTED} more" * (
        len(holders) > MOST_LISTED
    )


MOST_LISTED = 3  # holders of one tensor that a table names
MOST_ALIKE = 5  # tensors of one line, shape and purpose that a table still lists one by one
