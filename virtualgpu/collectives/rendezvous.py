"""What ranks tell each other when they enter a collective: what they call, with what, from which line, and at which virtual time.

It travels through the group's store, ahead of the values. So a rank knows when the last one enters; ranks that call different things
are told so before any value moves; and one that waits in vain can say who is there, and where the missing rank was last.
"""

import json
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.distributed import PrefixStore, distributed_c10d

from virtualgpu.source_lines import caller_line


class Rendezvous:
    """The store of one group, seen by one of its ranks."""

    def __init__(self, store: Any, rank: int, ranks_of_all: list[int], timeout: timedelta) -> None:
        self._store, self._rank, self._ranks_of_all, self.timeout = store, rank, ranks_of_all, timeout
        self._numbers: dict[str, int] = {}  # by channel: how many collectives this rank has entered
        self._removed: dict[str, int] = {}
        self._met: dict[str, int] = {}
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._places = PrefixStore("virtual nccl places", store)  # what each rank entered last, in any group
        self._over = False
        if self._ranks_of_all[rank] != 0:  # which as a rule keeps the store, whose end tells the same
            Finalize(None, _leave, (weakref.ref(self),), exitpriority=0)

    def enter(self, transfer: Any, ready: float, known: bool) -> "Entry":
        """This rank enters the next collective of its channel: that of the whole group, or from one rank to another. It is ready at `ready`
        seconds, and `known` says whether its values are kept."""
        channel, name = "all", transfer.name
        if transfer.peers:
            channel = "{}>{} {}".format(*transfer.peers, transfer.tag)
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        ranks = list(range(len(self._ranks_of_all)))
        place = name
        if transfer.peers:
            ranks = source, target = list(transfer.peers)
            sends = self._rank == source
            other = self._ranks_of_all[target if sends else source]
            place = f"{name} to rank {other}" if sends else f"{name.replace('send', 'recv', 1)} from rank {other}"
        place += f" ({caller_line()})"
        mine = {"call": name, "kind": transfer.kind, "ready": ready, "known": known, "place": place, "met": self._met.get(channel, 0)}
        entry = Entry(channel, number, transfer.kind, ranks, place)
        self._tell(entry, mine, f"number {number}, {place}")
        return entry

    def open(self, name: str) -> None:
        """This rank makes the group, and waits for the others to do so. Raises as `meet`."""
        entry = Entry("made", 0, name, list(range(len(self._ranks_of_all))), f"{name} ({caller_line()})")
        self._tell(entry, {"call": name, "place": entry.place, "met": 0}, entry.place)
        self.meet(entry)

    def _tell(self, entry: "Entry", mine: dict[str, Any], last: str) -> None:
        with self._store_kept(entry):
            self._store.set(f"{entry.channel}/{entry.number}/{self._rank}", json.dumps(mine))
            self._places.set(str(self._ranks_of_all[self._rank]), last)

    def is_complete(self, entry: "Entry") -> bool:
        """Are all ranks there?"""
        return bool(self._store.check(entry.keys()))

    def meet(self, entry: "Entry", patience: timedelta | None = None) -> list[dict[str, Any]]:
        """What each rank says; waits for the last. Raises torch.distributed.DistBackendError for a rank that does not come in time (the
        group's timeout, if no other is given), or calls something else."""
        patience = patience or self.timeout
        with self._store_kept(entry):
            try:
                self._store.wait(entry.keys(), patience)
            except RuntimeError as error:
                if not isinstance(error, torch.distributed.DistStoreError) and str(error) != "Wait timeout":  # the words of a FileStore
                    raise
                raise torch.distributed.DistBackendError(self._waited_in_vain(entry, patience)) from None
            said = [json.loads(text) for text in self._store.multi_get(entry.keys())]
            if gone := [rank for rank, each in zip(entry.ranks, said, strict=True) if each["call"] is None]:
                raise torch.distributed.DistBackendError(self._in_vain(entry, gone, "will never start"))
        self._require_agreement(entry, dict(zip(entry.ranks, said, strict=True)))
        self._met[entry.channel] = entry.number
        self._remove(entry.channel, min(each["met"] for each in said))
        return said

    @contextmanager
    def _store_kept(self, entry: "Entry") -> Iterator[None]:
        """Say in the block who has ended, where the store has gone with it."""
        try:
            yield
        except torch.distributed.DistNetworkError:
            waited = f"rank {self._ranks_of_all[self._rank]} waited in {entry.place}"
            ended = f"The process that keeps the ranks' store, rank 0 as a rule, ended while {waited}"
            raise torch.distributed.DistBackendError(f"{ended}, {entry.title}.") from None

    def compare(self, entry: "Entry") -> None:
        """Raises torch.distributed.DistBackendError if a rank that is there already calls something else."""
        there = {rank: said for rank in entry.ranks if (said := self._said(entry.channel, entry.number, rank)) is not None}
        self._require_agreement(entry, there)

    def _require_agreement(self, entry: "Entry", said: dict[int, dict[str, Any]]) -> None:
        if len({each["call"] for each in said.values()}) > 1:
            calls = "; ".join(f"rank {self._ranks_of_all[rank]} calls {each['place']}" for rank, each in said.items())
            raise torch.distributed.DistBackendError(f"The ranks do not agree on collective number {entry.number} of their group: {calls}.")

    def _remove(self, channel: str, met: int) -> None:
        """Take away what this rank said of collectives that all have met for."""
        for number in range(self._removed.get(channel, 0) + 1, met):  # the last stays: where this rank was
            self._store.delete_key(f"{channel}/{number}/{self._rank}")
        self._removed[channel] = max(self._removed.get(channel, 0), met - 1)

    def _waited_in_vain(self, entry: "Entry", patience: timedelta) -> str:
        missing = [rank for rank in entry.ranks if self._said(entry.channel, entry.number, rank) is None]
        waited = f"did not start within {patience.total_seconds():g} s"
        return f"Watchdog caught collective operation timeout: {self._in_vain(entry, missing, waited)}"

    def _in_vain(self, entry: "Entry", missing: list[int], what: str) -> str:
        """Who is in the collective and where, and where those that are not were last."""
        there = {rank: self._said(entry.channel, entry.number, rank) for rank in entry.ranks if rank not in missing}
        told = [f"rank {self._ranks_of_all[rank]} never entered it{self._last(rank)}" for rank in missing]
        told += [f"rank {self._ranks_of_all[rank]} waits in {said['place']}" for rank, said in there.items() if said]
        return f"{entry.title} {what}: {'; '.join(told)}."

    def _last(self, rank: int) -> str:
        key = str(self._ranks_of_all[rank])
        return f", and was last in {self._places.get(key).decode()}" if self._places.check([key]) else ""

    def end(self) -> None:
        """This rank destroys the group, as a script does that comes to its end: the store may be gone before its process is."""
        self._over = True

    def leave(self) -> None:
        """This rank's script has ended: who waits for it in a next collective is told so at once."""
        if self._over:
            return
        for channel, number in {"all": 0, **self._numbers}.items():
            self._store.set(f"{channel}/{number + 1}/{self._rank}", json.dumps({"call": None, "met": number}))

    def _said(self, channel: str, number: int, rank: int) -> Any:
        key = f"{channel}/{number}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def made_by_all(make: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's way to make a group: first its ranks meet, so that who makes it alone is told which rank is missing, and where."""

    @wraps(make)
    def make_group(
        size: int, rank: int | None, ranks: list[int], backend: Any, store: Any, group_name: Any, *args: Any, **named: Any
    ) -> Any:
        named_backends = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
        if rank is not None and size > 1 and named.get("timeout") and ("nccl" in named_backends or "gloo" in named_backends):
            rendezvous = Rendezvous(PrefixStore(f"virtual nccl {group_name}", store), rank, ranks or list(range(size)), named["timeout"])
            rendezvous.open(f"new_group({ranks})" if ranks else "init_process_group()")
            rendezvous.end()
        return make(size, rank, ranks, backend, store, group_name, *args, **named)

    return make_group


def _leave(rendezvous: "weakref.ref[Rendezvous]") -> None:
    found = rendezvous()
    if found is not None:
        with suppress(RuntimeError), _quiet():  # the store went with another rank
            found.leave()


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing that C++ says in the block appears: c10d prints a warning and its stack before it raises."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Entry:
    """A collective that a rank has entered: its channel, its number there, its kind, who takes part, and where this rank entered."""

    def __init__(self, channel: str, number: int, kind: str, ranks: list[int], place: str) -> None:
        self.channel, self.number, self.kind, self.ranks, self.place = channel, number, kind, ranks, place

    @property
    def title(self) -> str:
        return f"{self.kind} number {self.number} of its group" if self.number else self.kind

    def keys(self) -> list[str]:
        return [f"{self.channel}/{self.number}/{rank}" for rank in self.ranks]
