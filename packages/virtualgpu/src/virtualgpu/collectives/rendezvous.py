"""What ranks tell each other when they enter a collective: what they call, with what, from which line, and at which virtual time.

It travels from process to process, ahead of the values. So a rank knows when the last one enters; ranks that call different things
are told so before any value moves; and one that waits in vain can say who is there, and where the missing rank was last.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch.distributed import PrefixStore, distributed_c10d

from virtualgpu.collectives.endpoint import Endpoint, Message, current_endpoint
from virtualgpu.source_lines import caller_line


class Entry:
    """A collective that a rank has entered: its channel, its number there, its kind, who takes part, and where this rank entered."""

    def __init__(self, channel: str, number: int, kind: str, ranks: list[int], place: str) -> None:
        self.channel, self.number, self.kind, self.ranks, self.place = (
            channel,
            number,
            kind,
            ranks,
            place,
        )

    @property
    def title(self) -> str:
        return f"{self.kind} number {self.number} of its group" if self.number else self.kind

    @property
    def key(self) -> str:
        return f"{self.channel}/{self.number}"


class Rendezvous:
    """One group, seen by one of its ranks.

    The ranks meet in a store when they make the group (`open`). From then on they send to each other.
    """

    def __init__(self, rank: int, ranks_of_all: list[int], timeout: timedelta) -> None:
        self._rank, self._ranks_of_all, self.timeout = rank, ranks_of_all, timeout
        self._numbers: dict[str, int] = {}  # by channel: how many collectives this rank has entered
        self._said: dict[
            str, dict[int, dict[str, Any]]
        ] = {}  # by collective and rank: what the rank says of it
        self._endpoint: Endpoint | None = None  # none while this rank is alone
        self._token = ""
        self._peers: dict[
            int, dict[str, str]
        ] = {}  # by rank: the name of its endpoint, and the token of its end of this group

    def enter(
        self, transfer: Any, ready: float, known: bool, gpu: list[Any] | None = None
    ) -> Entry:
        """This rank enters the next collective of its channel: that of the whole group, or from one rank to another. It is ready at `ready`
        seconds, `known` says whether its values are kept, and `gpu` is the GPU that it uses, as all ranks know it."""
        channel, name = "all", transfer.name
        if transfer.peers:
            channel = "{}>{} {}".format(*transfer.peers, transfer.tag)
        number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        ranks = self._everybody()
        place = name
        if transfer.peers:
            ranks = source, target = list(transfer.peers)
            sends = self._rank == source
            other = self._ranks_of_all[target if sends else source]
            place = (
                f"{name} to rank {other}"
                if sends
                else f"{name.replace('send', 'recv', 1)} from rank {other}"
            )
        place += f" ({caller_line()})"
        entry = Entry(channel, number, transfer.kind, ranks, place)
        self._tell(
            entry,
            {
                "call": name,
                "kind": transfer.kind,
                "ready": ready,
                "known": known,
                "place": place,
                "gpu": gpu,
            },
        )
        return entry

    def _everybody(self) -> list[int]:
        return list(range(len(self._ranks_of_all)))

    def _tell(self, entry: Entry, mine: dict[str, Any]) -> None:
        """Say this to the ranks that take part. The others learn where this rank is, in case they wait for it."""
        self._said.setdefault(entry.key, {})[self._rank] = mine
        where = f"number {entry.number}, {entry.place}" if entry.number else entry.place
        message: Message = {"rank": self._ranks_of_all[self._rank], "place": where}
        for rank, peer in self._peers.items():
            if self._endpoint is not None:
                said = (
                    {"from": self._rank, "key": entry.key, "said": mine}
                    if rank in entry.ranks
                    else {}
                )
                self._endpoint.send(
                    peer["name"], message | {"to": peer["token"] if said else ""} | said
                )

    def _hear(self, message: Message) -> None:
        self._said.setdefault(message["key"], {})[message["from"]] = message["said"]

    def open(self, store: Any, name: str) -> int:
        """This rank makes the group, and waits for the others to do so. Returns how often this rank has now made it with this store.

        Raises torch.distributed.DistBackendError for a rank that does not come within the group's timeout.
        """
        entry = Entry("made", 0, name, self._everybody(), f"{name} ({caller_line()})")
        self._endpoint = current_endpoint(_underlying(store))
        self._token = self._endpoint.add_receiver(self._hear)
        mine = {"place": entry.place, "address": self._endpoint.address, "token": self._token}
        count = f"count/{self._rank}"
        try:
            times = store.add(count, 1)  # a program may make a group, destroy it and make it again
            store = PrefixStore(f"{times}", store)
            store.set(str(self._rank), json.dumps(mine))
            keys = [str(rank) for rank in entry.ranks]
            store.wait(keys, self.timeout)
            said = [json.loads(text) for text in store.multi_get(keys)]
        except RuntimeError as error:
            reason = self._not_opened(entry, store, error)
            self.end()
            raise reason from None
        for rank, each in enumerate(said):
            if rank != self._rank:
                self._peers[rank] = {
                    "name": self._endpoint.connect(each["address"]),
                    "token": each["token"],
                }
        return int(times)

    def _not_opened(self, entry: Entry, store: Any, error: RuntimeError) -> Exception:
        """The error to raise when the ranks did not meet in the store."""
        if isinstance(error, torch.distributed.DistNetworkError):
            ended = "the process that keeps the program's store, rank 0 as a rule, has ended"
            waited = f"rank {self._ranks_of_all[self._rank]} waits in {entry.place}"
            return torch.distributed.DistBackendError(
                f"{entry.title} will never start: {ended}; {waited}."
            )
        if (
            not isinstance(error, torch.distributed.DistStoreError) and str(error) != "Wait timeout"
        ):  # the words of a FileStore
            return error
        self.is_complete(entry)  # for what the missing ranks have said in other groups
        for rank in entry.ranks:
            if store.check([str(rank)]):
                self._said.setdefault(entry.key, {})[rank] = json.loads(store.get(str(rank)))
        with suppress(RuntimeError):  # the next attempt is the first that counts
            store.delete_key(str(self._rank))
            store.underlying_store.add(f"count/{self._rank}", -1)
        return torch.distributed.DistBackendError(self._waited_in_vain(entry, self.timeout))

    def meet_again(self, name: str) -> None:
        """Wait until each rank has made its part of the group: from then on nobody needs the store. Raises as `meet`."""
        entry = Entry("complete", 0, name, self._everybody(), f"{name} ({caller_line()})")
        self._tell(entry, {"call": name, "place": entry.place})
        self.meet(entry)

    def is_complete(self, entry: Entry) -> bool:
        """Are all ranks there?"""
        if self._endpoint is not None:
            self._endpoint.receive()
        return self._are_there(entry)

    def _are_there(self, entry: Entry) -> bool:
        said = self._said.get(entry.key, {})
        return all(rank in said for rank in entry.ranks)

    def _gone(self, entry: Entry) -> list[int]:
        """The ranks that will never enter the collective, because they have ended."""
        said = self._said.get(entry.key, {})
        ended = set() if self._endpoint is None else self._endpoint.ended
        return [
            rank
            for rank in entry.ranks
            if rank not in said and rank in self._peers and self._peers[rank]["name"] in ended
        ]

    def meet(self, entry: Entry, patience: timedelta | None = None) -> list[dict[str, Any]]:
        """What each rank says; waits for the last. Raises torch.distributed.DistBackendError for a rank that does not come in time (the
        group's timeout, if no other is given), that has ended, or that calls something else."""
        patience = patience or self.timeout

        def is_decided() -> bool:
            return self._are_there(entry) or bool(self._gone(entry))

        if self._endpoint is not None and not self._endpoint.wait(
            is_decided, patience.total_seconds()
        ):
            raise torch.distributed.DistBackendError(self._waited_in_vain(entry, patience))
        if not self._are_there(entry):
            raise torch.distributed.DistBackendError(
                self._in_vain(entry, self._gone(entry), "will never start")
            )
        said = self._said.pop(entry.key)
        self._require_agreement(entry, said)
        return [said[rank] for rank in entry.ranks]

    def compare(self, entry: Entry) -> None:
        """Raises torch.distributed.DistBackendError if a rank that is there already calls something else."""
        self.is_complete(entry)
        self._require_agreement(entry, self._said.get(entry.key, {}))

    def _require_agreement(self, entry: Entry, said: dict[int, dict[str, Any]]) -> None:
        if len({each["call"] for each in said.values()}) > 1:
            calls = "; ".join(
                f"rank {self._ranks_of_all[rank]} calls {each['place']}"
                for rank, each in sorted(said.items())
            )
            raise torch.distributed.DistBackendError(
                f"The ranks do not agree on collective number {entry.number} of their group: {calls}."
            )

    def _waited_in_vain(self, entry: Entry, patience: timedelta) -> str:
        said = self._said.get(entry.key, {})
        missing = [rank for rank in entry.ranks if rank not in said]
        waited = f"did not start within {patience.total_seconds():g} s"
        return (
            f"Watchdog caught collective operation timeout: {self._in_vain(entry, missing, waited)}"
        )

    def _in_vain(self, entry: Entry, missing: list[int], what: str) -> str:
        """Who is in the collective and where, and where those that are not were last."""
        told = [
            f"rank {self._ranks_of_all[rank]} never entered it{self._last(rank)}"
            for rank in missing
        ]
        for rank, said in sorted(self._said.get(entry.key, {}).items()):
            told.append(f"rank {self._ranks_of_all[rank]} waits in {said['place']}")
        return f"{entry.title} {what}: {'; '.join(told)}."

    def _last(self, rank: int) -> str:
        """Where the rank was heard last, in any group."""
        places = {} if self._endpoint is None else self._endpoint.places
        number = self._ranks_of_all[rank]
        return f", and was last in {places[number]}" if number in places else ""

    def end(self) -> None:
        """This rank destroys the group, or could not make it."""
        if self._endpoint is not None:
            self._endpoint.remove_receiver(self._token)


_made: dict[str, Rendezvous] = {}  # by the name of a group that PyTorch makes or has made


def of_group(name: str) -> Rendezvous | None:
    """Where the ranks of this group of PyTorch's meet. None for a group of one rank, and for one that a program makes by hand."""
    return _made.get(name)


def end_group(name: str) -> None:
    """This rank destroys the group of this name."""
    if name in _made:
        _made.pop(name).end()


def made_by_all(make: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's way to make a group: first its ranks meet, so that who makes it alone is told which rank is missing, and where. No rank
    goes on before all have made it: the store may end with any of them."""

    @wraps(make)
    def make_group(
        size: int,
        rank: int | None,
        ranks: list[int],
        backend: Any,
        store: Any,
        group_name: Any,
        *args: Any,
        **named: Any,
    ) -> Any:
        named_backends = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
        if (
            rank is None
            or size < 2
            or not named.get("timeout")
            or ("nccl" not in named_backends and "gloo" not in named_backends)
        ):
            return make(size, rank, ranks, backend, store, group_name, *args, **named)
        title = f"new_group({ranks})" if ranks else "init_process_group()"
        rendezvous = Rendezvous(rank, ranks or list(range(size)), named["timeout"])
        times = rendezvous.open(PrefixStore(f"virtual nccl {group_name}", store), title)
        if (
            times > 1
        ):  # the store still has what the ranks of an earlier group of this name left there
            store = PrefixStore(f"virtual nccl {times}", store)
        _made[group_name] = rendezvous
        try:
            made = make(size, rank, ranks, backend, store, group_name, *args, **named)
            rendezvous.meet_again(title)
        except BaseException:
            end_group(group_name)
            raise
        return made

    return make_group


def _underlying(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
