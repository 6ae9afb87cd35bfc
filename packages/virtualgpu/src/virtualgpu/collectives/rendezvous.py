"""What the ranks of a group tell each other when they enter a collective.

Each rank reports what it calls, with which tensors, from which line, and at which virtual time. The
reports go from process to process, ahead of the values. They have three uses. A rank learns when
the last rank enters. Ranks that call different collectives get an error before any value moves. A
rank that waits in vain can say who has entered, and where the missing rank was last.
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

Report = dict[str, Any]  # what a rank says of a collective that it enters


class Entry:
    """A collective that a rank has entered.

    channel: "all" for the collectives of the whole group, or the source, target and tag of a send
    number: the collective's number on its channel
    kind: the kind of collective (see `ring`)
    ranks: the ranks that take part, as the group numbers them
    place: the call and the line from which this rank entered
    """

    def __init__(self, channel: str, number: int, kind: str, ranks: list[int], place: str) -> None:
        self.channel = channel
        self.number = number
        self.kind = kind
        self.ranks = ranks
        self.place = place

    @property
    def title(self) -> str:
        """The name of this collective in an error message."""
        if self.number:
            return f"{self.kind} number {self.number} of its group"
        return self.kind

    @property
    def key(self) -> str:
        """The identifier of this collective in messages, which is the same on all ranks."""
        return f"{self.channel}/{self.number}"


class Rendezvous:
    """One group as one of its ranks knows it.

    The ranks find each other in a store when they make the group (`open`). From then on they send
    messages to each other. A group of one rank needs neither.
    """

    def __init__(self, rank: int, ranks_of_all: list[int], timeout: timedelta) -> None:
        self._rank = rank
        self._ranks_of_all = ranks_of_all
        self.timeout = timeout
        self._entered: dict[str, int] = {}  # by channel, the number of collectives entered
        self._reports: dict[str, dict[int, Report]] = {}  # by collective and rank
        self._endpoint: Endpoint | None = None  # None for a rank that is alone
        self._token = ""
        # By rank, the name of its endpoint, and the token of this group there.
        self._peers: dict[int, dict[str, str]] = {}

    def enter(
        self, transfer: Any, ready: float, known: bool, gpu: list[Any] | None = None
    ) -> Entry:
        """Enter the next collective of the group, or the next send between two ranks.

        `transfer` is a `group.Transfer`. This rank can begin at the virtual time `ready`, in
        seconds. `known` says whether its values are kept. `gpu` is the identity of its GPU (see
        `nccl_errors.identity`).
        """
        channel, ranks, place = "all", self._everybody(), transfer.name
        if transfer.peers:
            channel = "{}>{} {}".format(*transfer.peers, transfer.tag)
            ranks = list(transfer.peers)
            place = self._place_of_send(transfer)
        number = self._entered[channel] = self._entered.get(channel, 0) + 1
        place += f" ({caller_line()})"
        entry = Entry(channel, number, transfer.kind, ranks, place)
        report = {
            "call": transfer.name,
            "kind": transfer.kind,
            "ready": ready,
            "known": known,
            "place": place,
            "gpu": gpu,
        }
        self._tell(entry, report)
        return entry

    def _place_of_send(self, transfer: Any) -> str:
        """Return a description of a send or a receive, such as "send to rank 3".

        `transfer` is the transfer, and the description names the other rank.
        """
        source, target = transfer.peers
        if self._rank == source:
            return f"{transfer.name} to rank {self._ranks_of_all[target]}"
        received = transfer.name.replace("send", "recv", 1)
        return f"{received} from rank {self._ranks_of_all[source]}"

    def _everybody(self) -> list[int]:
        return list(range(len(self._ranks_of_all)))

    def _tell(self, entry: Entry, report: Report) -> None:
        """Send this rank's report to the ranks that take part in the collective `entry`.

        The ranks that take no part learn only which call this rank is in. They need that if they
        wait for this rank.
        """
        self._reports.setdefault(entry.key, {})[self._rank] = report
        where = f"number {entry.number}, {entry.place}" if entry.number else entry.place
        message: Message = {"rank": self._ranks_of_all[self._rank], "place": where}
        if self._endpoint is None:
            return
        for rank, peer in self._peers.items():
            if rank in entry.ranks:
                whole = message | {
                    "to": peer["token"],
                    "from": self._rank,
                    "key": entry.key,
                    "said": report,
                }
                self._endpoint.send(peer["name"], whole)
            else:
                self._endpoint.send(peer["name"], message | {"to": ""})

    def _hear(self, message: Message) -> None:
        """Store the report of another rank that arrived in `message`."""
        self._reports.setdefault(message["key"], {})[message["from"]] = message["said"]

    def open(self, store: Any, name: str) -> int:
        """Make the group and wait until all ranks do so.

        `name` is the call that makes the group. Return the number of times that this rank has now
        made the group with this store. Raises torch.distributed.DistBackendError if a rank does not
        come within the group's timeout.
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
            reports = [json.loads(text) for text in store.multi_get(keys)]
        except RuntimeError as error:
            reason = self._not_opened(entry, store, error)
            self.end()
            raise reason from None
        for rank, report in enumerate(reports):
            if rank != self._rank:
                self._peers[rank] = {
                    "name": self._endpoint.connect(report["address"]),
                    "token": report["token"],
                }
        return int(times)

    def _not_opened(self, entry: Entry, store: Any, error: RuntimeError) -> Exception:
        """Return the exception to raise if some ranks did not come to make the group.

        `entry` stands for the making of the group. `error` is the error of the wait for `store`.
        """
        if isinstance(error, torch.distributed.DistNetworkError):
            ended = "the process that keeps the program's store, rank 0 as a rule, has ended"
            waited = f"rank {self._ranks_of_all[self._rank]} waits in {entry.place}"
            return torch.distributed.DistBackendError(
                f"{entry.title} will never start: {ended}; {waited}."
            )
        # A FileStore raises a RuntimeError with the text "Wait timeout".
        is_timeout = isinstance(error, torch.distributed.DistStoreError)
        if not is_timeout and str(error) != "Wait timeout":
            return error
        self.is_complete(entry)  # receives what the missing ranks reported in other groups
        for rank in entry.ranks:
            if store.check([str(rank)]):
                report = json.loads(store.get(str(rank)))
                self._reports.setdefault(entry.key, {})[rank] = report
        with suppress(RuntimeError):  # this attempt does not count
            store.delete_key(str(self._rank))
            store.underlying_store.add(f"count/{self._rank}", -1)
        return torch.distributed.DistBackendError(self._waited_in_vain(entry, self.timeout))

    def meet_again(self, name: str) -> None:
        """Wait until each rank has made its part of the group and no longer needs the store.

        Raises the errors of `meet`.
        """
        entry = Entry("complete", 0, name, self._everybody(), f"{name} ({caller_line()})")
        self._tell(entry, {"call": name, "place": entry.place})
        self.meet(entry)

    def is_complete(self, entry: Entry) -> bool:
        """Return whether all ranks have entered the collective."""
        if self._endpoint is not None:
            self._endpoint.receive()
        return self._have_all_reported(entry)

    def _have_all_reported(self, entry: Entry) -> bool:
        """Return whether the reports of all ranks of this collective have arrived here."""
        reports = self._reports.get(entry.key, {})
        return all(rank in reports for rank in entry.ranks)

    def _gone(self, entry: Entry) -> list[int]:
        """Return the ranks that have ended and so will never enter this collective."""
        reports = self._reports.get(entry.key, {})
        ended = set() if self._endpoint is None else self._endpoint.ended
        return [
            rank
            for rank in entry.ranks
            if rank not in reports and rank in self._peers and self._peers[rank]["name"] in ended
        ]

    def meet(self, entry: Entry, patience: timedelta | None = None) -> list[Report]:
        """Wait until all ranks have entered the collective, and return their reports.

        Raises torch.distributed.DistBackendError if a rank does not come within `patience` (None
        means the group's timeout), has ended, or calls something else.
        """
        patience = patience or self.timeout

        def is_decided() -> bool:
            return self._have_all_reported(entry) or bool(self._gone(entry))

        endpoint, seconds = self._endpoint, patience.total_seconds()
        if endpoint is not None and not endpoint.wait(is_decided, seconds):
            raise torch.distributed.DistBackendError(self._waited_in_vain(entry, patience))
        if not self._have_all_reported(entry):
            raise torch.distributed.DistBackendError(
                self._in_vain(entry, self._gone(entry), "will never start")
            )
        reports = self._reports.pop(entry.key)
        self._require_agreement(entry, reports)
        return [reports[rank] for rank in entry.ranks]

    def compare(self, entry: Entry) -> None:
        """Compare the calls of the ranks that have entered this collective so far.

        Raises torch.distributed.DistBackendError if they differ.
        """
        self.is_complete(entry)
        self._require_agreement(entry, self._reports.get(entry.key, {}))

    def _require_agreement(self, entry: Entry, reports: dict[int, Report]) -> None:
        """Raise torch.distributed.DistBackendError if the calls in these ranks' reports differ."""
        if len({report["call"] for report in reports.values()}) > 1:
            calls = "; ".join(
                f"rank {self._ranks_of_all[rank]} calls {report['place']}"
                for rank, report in sorted(reports.items())
            )
            raise torch.distributed.DistBackendError(
                f"The ranks do not agree on collective number {entry.number} of their group: "
                f"{calls}."
            )

    def _waited_in_vain(self, entry: Entry, patience: timedelta) -> str:
        """Return the text of a timeout error: some ranks did not enter within `patience`.

        It begins as NCCL's own text.
        """
        reports = self._reports.get(entry.key, {})
        missing = [rank for rank in entry.ranks if rank not in reports]
        waited = f"did not start within {patience.total_seconds():g} s"
        return (
            f"Watchdog caught collective operation timeout: {self._in_vain(entry, missing, waited)}"
        )

    def _in_vain(self, entry: Entry, missing: list[int], what: str) -> str:
        """Return a sentence that says where the ranks wait and where the missing ranks were last.

        `missing` are ranks that have not entered. `what` is the predicate of the sentence, such as
        "will never start".
        """
        clauses = [
            f"rank {self._ranks_of_all[rank]} never entered it{self._last(rank)}"
            for rank in missing
        ]
        for rank, report in sorted(self._reports.get(entry.key, {}).items()):
            clauses.append(f"rank {self._ranks_of_all[rank]} waits in {report['place']}")
        return f"{entry.title} {what}: {'; '.join(clauses)}."

    def _last(self, rank: int) -> str:
        """Return a clause that says where the rank was last, in any group, or "" if unknown."""
        places = {}
        if self._endpoint is not None:
            places = self._endpoint.places
        number = self._ranks_of_all[rank]
        if number in places:
            return f", and was last in {places[number]}"
        return ""

    def end(self) -> None:
        """Destroy this rank's part of the group."""
        if self._endpoint is not None:
            self._endpoint.remove_receiver(self._token)


_made: dict[str, Rendezvous] = {}  # by the name of a group that PyTorch makes or has made


def of_group(name: str) -> Rendezvous | None:
    """Return the rendezvous of the group of this name.

    Return None for a group of one rank, and for a group that a program makes by hand.
    """
    return _made.get(name)


def end_group(name: str) -> None:
    """Destroy this rank's part of the group of this name, if there is one."""
    if name in _made:
        _made.pop(name).end()


def made_by_all(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, which makes a group, with a meeting of the ranks before and after it.

    A rank that makes the group alone learns which rank is missing and where it is. No rank
    continues before all have made the group, because the store may end with any of them.
    """

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
        backends = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
        is_ours = "nccl" in backends or "gloo" in backends
        if rank is None or size < 2 or not named.get("timeout") or not is_ours:
            return make(size, rank, ranks, backend, store, group_name, *args, **named)
        title = "init_process_group()"
        if ranks:
            title = f"new_group({ranks})"
        rendezvous = Rendezvous(rank, ranks or list(range(size)), named["timeout"])
        times = rendezvous.open(PrefixStore(f"virtual nccl {group_name}", store), title)
        if times > 1:
            # The store still holds what the ranks of an earlier group of this name wrote.
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
    """Return the store without the prefixes around it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
