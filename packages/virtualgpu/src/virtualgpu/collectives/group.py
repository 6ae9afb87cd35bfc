"""`ProcessGroupNCCL` of virtual GPUs, and the work that it hands out.

Values travel by gloo, from private copies: its threads hold raw pointers. A collective begins on its stream when the last rank has entered
it, which this rank learns when somebody waits for it, so until then it is under way (`Machine.under_way`).
"""

import datetime
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch.distributed import PrefixStore, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.collectives.by_hand import called_by_hand
from virtualgpu.collectives.nccl_errors import check_own_gpus, identity
from virtualgpu.collectives.rendezvous import Rendezvous, of_group
from virtualgpu.collectives.ring import collective_seconds, launch_seconds
from virtualgpu.hardware import Gpu
from virtualgpu.ops.without_values import all_known, forget

WATCHDOG_SECONDS = 0.1  # between two looks of NCCL's watchdog at what is done (kWatchdogThreadSleepMillis, ProcessGroupNCCL.hpp)

_Gloo: Any = ProcessGroupGloo  # whose methods its type stub leaves out
_alive: list[Any] = []  # C++ holds groups by pointer only


@dataclass(eq=False)
class Transfer:
    """What one collective moves. `start` begins it with gloo; `finish`, when that is done, says which values each tensor gets.

    `kind` is that of `ring`, `name` what all ranks must call alike, `nbytes` those of one rank's input, `peers` the two ranks of a send,
    and `tag` that of the send, which gloo heeds.
    """

    kind: str
    name: str
    nbytes: int
    sent: list[torch.Tensor]
    received: list[torch.Tensor]
    start: Callable[[], list[Any]]
    finish: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]] = list
    peers: tuple[int, int] | None = None
    tag: int = 0
    written: list[torch.Tensor] | None = None  # of what is received, if not all


class Options:
    """`ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = datetime.timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = self.group_desc = ""
        self.split_from: Any = None
        self.split_color = 0
        self.config = type("Config", (), {})()


@called_by_hand
class ProcessGroupNCCL(_Gloo):
    """One group of ranks, with a communication stream on each GPU that it is used on."""

    Options = Options
    NCCL_SPLIT_NOCOLOR = -1

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self._options = options or Options()
        self.store, self.group_around = store, None
        super().__init__(store, rank, size, timeout=self._options._timeout)
        self.ranks_of_all = list(self._options.global_ranks_in_group) or list(range(size))
        self.rendezvous = of_group(self._options.group_name) or self._made_by_hand(
            store, rank, size
        )
        self.coalescing: list[VirtualWork] | None = None
        self.to_itself: deque[list[torch.Tensor]] = deque()  # what this rank has sent to itself
        self.barrier_tensor: torch.Tensor | None = (
            None  # of the last barrier: real ranks have 512 bytes more from the first one on
        )
        self.last_end: dict[
            Any, float
        ] = {}  # of the collectives on a stream, and on a GPU for each channel
        self._streams: dict[int, StreamTime] = {}
        self._stashed: list[VirtualWork] = []
        self._destroyed = False
        self._communicators: set[Any] = (
            set()
        )  # the GPUs on which the ranks have connected: for all, and for two that send
        self._watched = 0.0  # when the watchdog looked last, beside its period
        _alive.append(self)

    def _made_by_hand(self, store: Any, rank: int, size: int) -> Rendezvous:
        """Let the ranks of a group meet that PyTorch did not make."""
        rendezvous = Rendezvous(rank, self.ranks_of_all, self._options._timeout)
        if size > 1:
            rendezvous.open(PrefixStore("virtual nccl", store), "ProcessGroupNCCL()")
        return rendezvous

    def name(self) -> str:
        return "nccl"

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        """As `torch.distributed.distributed_c10d._set_pg_timeout` asks."""
        self._options._timeout = self.rendezvous.timeout = timeout

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing is shared between groups."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Groups are connected from the start."""

    def abort(self) -> None:
        """The group is destroyed: nobody waits any more for what it keeps."""
        self._destroyed = True
        self.rendezvous.end()
        for work in list(self._stashed):
            work.drop()

    def stream(self, gpu: Gpu) -> StreamTime:
        """The group's own stream on a GPU: of those that `torch.cuda.Stream` takes too."""
        if gpu.index not in self._streams:
            several = gpu.machine.several_streams
            self._streams[gpu.index] = gpu.pool_stream(
                -1 if self._options.is_high_priority_stream else 0
            )
            gpu.machine.several_streams = several  # what the group does there is in order by itself
        return self._streams[gpu.index]

    def run(self, gpu: Gpu, transfer: Transfer, is_async: bool) -> "VirtualWork":
        """Enter a collective; a synchronous one runs on the current stream."""
        machine = gpu.machine
        machine.require_alive()
        if self._destroyed:
            raise torch.distributed.DistBackendError(
                f"{transfer.name} in a group that this rank has destroyed"
            )
        machine.selected.gpu = gpu
        transfer.tag = 0  # NCCL ignores it
        if gpu.profile.rising_addresses and self.size() > 1:
            gpu.allocator.raise_addresses()
        stream = self.stream(gpu) if is_async or self.coalescing is not None else gpu.stream
        if stream is not gpu.stream:
            machine.clock.wait(stream, machine.clock.record(gpu.stream))
        self._unstash(machine.clock.host)
        machine.clock.advance_host(launch_seconds(transfer.kind))
        underway = Underway(self, gpu, stream, transfer)
        machine.under_way.append(underway)
        if transfer.peers is None and gpu.index not in self._communicators:
            underway.start_in_order()  # NCCL connects the ranks, for which the host waits
        if self.coalescing is not None:
            self.coalescing.append(VirtualWork([underway], []))
            return self.coalescing[-1]
        work = VirtualWork([underway], list(transfer.received))
        if is_async:
            self._stashed.append(work)
        else:
            work.settle()
        return work

    def identity(self, gpu: Gpu) -> list[Any] | None:
        """This rank's GPU, as all ranks know it."""
        return identity(gpu)

    def connect(self, gpu: Gpu, peers: Any, gpus: list[Any]) -> None:
        """Connect ranks when they first use this GPU together. Raises torch.distributed.DistBackendError if two of them share a GPU."""
        key = gpu.index if peers is None else (gpu.index, *sorted(peers))
        if key in self._communicators:
            return
        if peers is None:
            check_own_gpus(self.rank(), gpus)
        elif peers[0] != peers[1]:
            check_own_gpus(*_as_two(self.rank(), peers, gpus))
        self._communicators.add(key)

    def _unstash(self, now: float) -> None:
        """Let go of the tensors of works that nobody has waited for: the watchdog finds out now and then that they are done, and the next
        collective drops them (shelvesToUnstash_, ProcessGroupNCCL.cpp). Where real ranks' memory varies between runs, this is why."""
        looked = max(now // WATCHDOG_SECONDS * WATCHDOG_SECONDS, self._watched)
        for work in list(self._stashed):
            if work.is_over(looked):
                work.note_over()
                work.drop()


def _as_two(rank: int, peers: tuple[int, int], gpus: list[Any]) -> tuple[int, list[Any]]:
    """Ranks that send and receive as NCCL numbers them in a communicator of two."""
    in_order = [gpu for _, gpu in sorted(zip(peers, gpus, strict=True))]
    return int(rank == max(peers)), in_order


def let_watchdogs_look(now: float) -> None:
    """Garbage is collected in full, which with torch imported takes a process about their period."""
    for group in _alive:
        group._watched = now


class Underway:
    """A collective that this rank has entered."""

    def __init__(
        self, group: ProcessGroupNCCL, gpu: Gpu, stream: StreamTime, transfer: Transfer
    ) -> None:
        self.group, self.gpu, self.stream, self.transfer = group, gpu, stream, transfer
        self.launched = gpu.machine.clock.host
        self.known = all_known(transfer.sent, transfer.received)
        self.stashed = group._stashed
        self.entry = group.rendezvous.enter(
            transfer, max(self.launched, stream.ready), self.known, group.identity(gpu)
        )
        written = transfer.received if transfer.written is None else transfer.written
        name = "recv" if transfer.kind == "send" and written else transfer.name.partition("(")[0]
        self.races = gpu.machine.races.collectives
        self.flight = self.races.enter(
            stream, name, stream is not gpu.stream, transfer.sent, written
        )
        self.stash = [*transfer.sent, *transfer.received]
        if (
            transfer.peers is not None
        ):  # who sends may free under way: only the allocator is told (recordStream in pointToPoint)
            for x in self.stash:
                x.record_stream(stream)  # type: ignore[arg-type]  # it needs the number only
            self.stash, transfer.sent = [], []
        self.said: list[dict[str, Any]] = []
        self.works: list[Any] | None = None
        self.event: EventTime | None = None

    def start(self, patience: datetime.timedelta | None = None) -> None:
        """Let the values move, when all ranks are there."""
        if self.works is None:
            self.said = self.group.rendezvous.meet(self.entry, patience)
            try:
                self.group.connect(
                    self.gpu, self.transfer.peers, [each["gpu"] for each in self.said]
                )
            except Exception:
                self.gpu.machine.under_way.remove(self)  # it never begins
                raise
            with _DisableTorchDispatch():
                self.works = (
                    self.transfer.start() if all(each["known"] for each in self.said) else []
                )

    def start_in_order(self) -> None:
        """As `start`, after those before it in its group."""
        for other in list(self.gpu.machine.under_way):
            if other.group is self.group and other.entry.channel == self.entry.channel:
                other.start()

    def land(self, patience: datetime.timedelta | None = None) -> EventTime:
        """Wait for it: its values are there, and it has its place on its stream. Without `patience`, the group's timeout holds."""
        machine = self.gpu.machine
        while self.event is None:
            # A group's collectives start in one order on all ranks; those of others that can start must not wait for this one.
            mine = [
                other
                for other in machine.under_way
                if other.group is self.group and other.entry.channel == self.entry.channel
            ]
            first = mine[0]
            first.start(patience)
            for other in list(machine.under_way):
                if (
                    other.works is None
                    and other.is_next()
                    and other.group.rendezvous.is_complete(other.entry)
                ):
                    other.start()
            first._finish()
        return self.event

    def is_next(self) -> bool:
        """Have those before it in its group started?"""
        for other in self.gpu.machine.under_way:
            if other is self:
                return True
            if (
                other.group is self.group
                and other.entry.channel == self.entry.channel
                and other.works is None
            ):
                return False
        return True

    def _finish(self) -> None:
        machine, transfer = self.gpu.machine, self.transfer
        for work in self.works or ():
            work.wait()
        self.races.keep_old_values(self.flight, transfer.received)
        if all(each["known"] for each in self.said):
            with torch.no_grad(), _DisableTorchDispatch():
                for target, value in transfer.finish():
                    target.copy_(value.view(target.shape) if value.shape != target.shape else value)
        else:
            for target in transfer.received:
                forget(target)
        ranks = [self.group.ranks_of_all[rank] for rank in self.entry.ranks]
        seconds = collective_seconds(
            self.gpu.profile, transfer.kind, transfer.nbytes, ranks, machine.cluster
        )
        name = f"nccl {transfer.kind}"
        # A communicator runs one collective at a time, on whatever streams they are launched
        # (FSDPModule.set_separate_reduce_scatter_group in PyTorch says what follows).
        after = self.stream, (self.gpu.index, self.entry.channel)
        earlier = [self.group.last_end.get(key, 0.0) for key in after]
        start = max(*earlier, *(each["ready"] for each in self.said))
        self.event = machine.clock.launch_together(self.stream, name, self.launched, start, seconds)
        self.races.begun(self.flight, self.event, start)
        self.group.last_end |= dict.fromkeys(after, self.event.time)
        machine.under_way.remove(self)
        self.transfer = None  # type: ignore[assignment]  # it keeps no private copies


class VirtualWork(Work):
    """NCCL's Work: `wait()` lets the current stream wait for the group's. It keeps its tensors until then."""

    readers = 0  # tensors of a functional collective, for each of which C++ will wait

    def __init__(self, parts: list[Any], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._parts, self._result = parts, result
        self._future: Any = None
        self.readers = VirtualWork.readers
        _works.append(self)

    def land(self) -> None:
        """Its values are there."""
        for part in self._parts:
            part.land()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """With a timeout, the host waits too, and ranks that have not entered the collective within it are an error (WorkNCCL::wait)."""
        self.order(timeout or None)  # none is 0 in C++
        if timeout:
            for part in self._parts:
                part.gpu.machine.clock.synchronize_event(part.land(), 0.0)
        self.readers -= 1
        self.drop()
        return True

    def is_over(self, time: float) -> bool:
        return all(part.event is not None and part.event.time <= time for part in self._parts)

    def note_over(self) -> None:
        """The host knows that it is done."""
        for part in self._parts:
            part.gpu.machine.clock.query(part.land(), 0.0)

    def drop(self) -> None:
        """Nobody needs it any more, nor what it keeps; who still holds it finds its result there."""
        for part in self._parts:
            part.stash = []
            if self in part.stashed:
                part.stashed.remove(self)
        self._future = None
        if self.readers > 0:
            self._result = []  # C++ has the tensors
        elif self in _works:
            _works.remove(self)

    def settle(self) -> None:
        """As `wait`, by the group itself: the caller will wait once more, and then C++ must still find this object."""
        self.order()
        for part in self._parts:
            part.stash = []
        if self._future is None:
            self._result = []

    def order(self, patience: datetime.timedelta | None = None) -> None:
        """What the current stream does from now on comes after it."""
        for part in self._parts:
            machine = part.gpu.machine
            machine.clock.wait(part.gpu.stream, part.land(patience))
            machine.races.collectives.look_again()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """The host, which is told that it is done, goes on from then."""
        for part in self._parts:
            part.gpu.machine.clock.synchronize_event(part.land(), 0.0)
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Any:
        """C++ waits for it (DDP's reducer) when nobody can see, so the values land now; the backward's stream waits at its end."""
        if self._future is not None:
            return self._future
        self.land()
        future = OrderedFuture(self)
        future.set_result(self._result)
        if self in _works:  # nobody has waited for it: until then it keeps its future
            self._future = future
        if torch._C._current_graph_task_id() != -1 and torch._C._current_autograd_node() is None:
            self.order()  # at the end of the backward, where a static graph's first buckets go: C++ waits at once
        elif torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.order)
        return future

    def get_future_result(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(0)
        return future


class OrderedFuture(torch.futures.Future):
    """A future of a collective: who waits for it, or goes on with its value, comes after it on the current stream."""

    def __init__(self, work: VirtualWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def then(self, callback: Any) -> Any:
        self._work.order()
        return super().then(callback)


_works: list[VirtualWork] = []  # C++ holds them by pointer only


def ordered(future: Any) -> OrderedFuture:
    """In place of a future that C++ made of the collective that began last, and which orders nothing."""
    after = OrderedFuture(_works[-1])
    after.set_result(future.wait())
    return after


@contextmanager
def read_by(tensors: int) -> Iterator[None]:
    """A collective that begins in the block is one that C++ waits for once for each of so many tensors."""
    VirtualWork.readers = tensors
    try:
        yield
    finally:
        VirtualWork.readers = 0


def end_coalescing(group: ProcessGroupNCCL) -> VirtualWork:
    works, group.coalescing = group.coalescing or [], None
    for work in works:
        _works.remove(work)  # nobody has got them
    parts = [part for work in works for part in work._parts]
    return VirtualWork(
        parts, [x for part in parts if part.transfer for x in part.transfer.received]
    )
