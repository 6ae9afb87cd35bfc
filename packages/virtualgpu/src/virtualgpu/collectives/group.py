"""`ProcessGroupNCCL` of virtual GPUs, and the work that its collectives return.

Gloo moves the values, from private copies, because its threads hold raw pointers. A collective
begins on its stream when the last rank has entered it. A rank learns this moment only when it waits
for the collective. Until then the collective is in `Machine.under_way`.
"""

import datetime
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

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

# Seconds after which NCCL's watchdog looks again for collectives that have finished
# (kWatchdogThreadSleepMillis, ProcessGroupNCCL.hpp).
WATCHDOG_SECONDS = 0.1

_Gloo: Any = ProcessGroupGloo  # typed as Any, because its type stub lacks methods
_alive: list[Any] = []  # keeps the groups alive, because C++ holds only pointers to them


@dataclass(eq=False)
class Transfer:
    """The tensors of one rank in one collective, and the functions that move their values.

    kind: the kind of collective for its time (see `ring`)
    name: the call, which must be the same on all ranks
    nbytes: bytes of this rank's input
    sent, received: this rank's inputs and outputs
    start: begins the collective with gloo and returns gloo's works
    finish: returns (tensor, its new value) for the results, when gloo's works are done
    peers: the source and the target of a send
    tag: the tag of a send, which gloo uses
    written: the outputs that are written to, if these are not all of `received`
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
    written: list[torch.Tensor] | None = None


class Options:
    """Options of a process group, as `torch.distributed.ProcessGroupNCCL.Options`."""

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
    """One rank's part of a group, with a communication stream on each GPU that the group uses.

    ranks_of_all: by rank of the group, the rank in the world
    coalescing: the works of the collectives of a batch that the program is making, or None
    to_itself: values that this rank has sent to itself and not yet received
    barrier_tensor: the tensor of the last barrier. Real ranks keep it from the first one on.
    last_end: by stream, and by GPU and channel, when the last collective ended
    """

    Options = Options
    NCCL_SPLIT_NOCOLOR = -1

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self._options = options or Options()
        self.store = store
        self.group_around = None
        super().__init__(store, rank, size, timeout=self._options._timeout)
        self.ranks_of_all = list(self._options.global_ranks_in_group) or list(range(size))
        found = of_group(self._options.group_name)
        self.rendezvous = found or self._made_by_hand(store, rank, size)
        self.coalescing: list[VirtualWork] | None = None
        self.to_itself: deque[list[torch.Tensor]] = deque()
        self.barrier_tensor: torch.Tensor | None = None
        self.last_end: dict[Any, float] = {}
        self._streams: dict[int, StreamTime] = {}
        self._stashed: list[VirtualWork] = []  # works that nobody has waited for
        self._destroyed = False
        # The GPUs on which the ranks have connected, alone for all ranks and with two ranks for a
        # send between them.
        self._communicators: set[Any] = set()
        self._watched = 0.0  # host time of the watchdog's last look outside its period
        _alive.append(self)

    def _made_by_hand(self, store: Any, rank: int, size: int) -> Rendezvous:
        """Let the ranks of a group meet that the program made by hand, and return the rendezvous.

        `store`, `rank` and `size` are the arguments with which the program made the group.
        """
        rendezvous = Rendezvous(rank, self.ranks_of_all, self._options._timeout)
        if size > 1:
            rendezvous.open(PrefixStore("virtual nccl", store), "ProcessGroupNCCL()")
        return rendezvous

    def name(self) -> str:
        """Return the name of the backend."""
        return "nccl"

    @property
    def options(self) -> Any:
        """The options with which this group was created."""
        return self._options

    @property
    def supports_coalescing(self) -> bool:
        """Whether the group can run several collectives as one."""
        return True

    @property
    def supports_splitting(self) -> bool:
        """Whether the group can be split into smaller ones."""
        return False

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of the group's collectives.

        `torch.distributed.distributed_c10d._set_pg_timeout` calls this method.
        """
        self._options._timeout = self.rendezvous.timeout = timeout

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing for a rank outside a split, because virtual groups share nothing."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing, because virtual groups are connected to `device` when they are created."""

    def abort(self) -> None:
        """Destroy the group and drop the tensors that it keeps."""
        self._destroyed = True
        self.rendezvous.end()
        for work in list(self._stashed):
            work.drop()

    def stream(self, gpu: Gpu) -> StreamTime:
        """Return the stream on `gpu` on which the group runs its collectives.

        The first call takes the stream from the pool that `torch.cuda.Stream` uses.
        """
        if gpu.index not in self._streams:
            several = gpu.machine.several_streams
            priority = 0
            if self._options.is_high_priority_stream:
                priority = -1
            self._streams[gpu.index] = gpu.pool_stream(priority)
            # The group orders its own work there, so the program still counts as using one stream.
            gpu.machine.several_streams = several
        return self._streams[gpu.index]

    def run(self, gpu: Gpu, transfer: Transfer, is_async: bool) -> "VirtualWork":
        """Enter the collective `transfer` on a GPU, and return its work.

        An asynchronous collective (`is_async`) runs on the group's own stream, and a synchronous
        one on the current stream. Raises torch.distributed.DistBackendError in a destroyed group.
        """
        machine = gpu.machine
        machine.require_alive()
        if self._destroyed:
            raise torch.distributed.DistBackendError(
                f"{transfer.name} in a group that this rank has destroyed"
            )
        machine.selected.gpu = gpu
        transfer.tag = 0  # NCCL ignores tags
        if gpu.profile.rising_addresses and self.size() > 1:
            gpu.allocator.raise_addresses()
        stream = gpu.stream
        if is_async or self.coalescing is not None:
            stream = self.stream(gpu)
        if stream is not gpu.stream:
            machine.clock.wait(stream, machine.clock.record(gpu.stream))
        self._unstash(machine.clock.host)
        machine.clock.advance_host(launch_seconds(transfer.kind))
        underway = Underway(self, gpu, stream, transfer)
        machine.under_way.append(underway)
        if transfer.peers is None and gpu.index not in self._communicators:
            underway.start_in_order()  # the host waits while NCCL connects the ranks
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
        """Return the values by which all ranks can tell this rank's GPU from other GPUs."""
        return identity(gpu)

    def connect(self, gpu: Gpu, peers: Any, gpus: list[Any]) -> None:
        """Connect ranks when they first use this GPU together.

        `peers` are the two ranks of a send, or None for all ranks. `gpus` are the identities of
        their GPUs. Raises torch.distributed.DistBackendError if two ranks share a GPU.
        """
        key = gpu.index if peers is None else (gpu.index, *sorted(peers))
        if key in self._communicators:
            return
        if peers is None:
            check_own_gpus(self.rank(), gpus)
        elif peers[0] != peers[1]:
            check_own_gpus(*_as_two(self.rank(), peers, gpus))
        self._communicators.add(key)

    def _unstash(self, now: float) -> None:
        """Drop the tensors of works that were finished at the time `now` without a wait.

        The watchdog notices once per period that a work has finished, and the next collective drops
        its tensors (shelvesToUnstash_, ProcessGroupNCCL.cpp). This is why the memory of real ranks
        varies between runs.
        """
        looked = max(now // WATCHDOG_SECONDS * WATCHDOG_SECONDS, self._watched)
        for work in list(self._stashed):
            if work.is_over(looked):
                work.note_over()
                work.drop()


def _as_two(rank: int, peers: tuple[int, int], gpus: list[Any]) -> tuple[int, list[Any]]:
    """Return (this rank's number, both GPUs) in the two-rank communicator of a send.

    `rank` and `peers` number the ranks of the group. NCCL orders the two as the result does.
    """
    in_order = [gpu for _, gpu in sorted(zip(peers, gpus, strict=True))]
    return int(rank == max(peers)), in_order


def let_watchdogs_look(now: float) -> None:
    """Let the watchdogs of all groups look for finished work at the host time `now`.

    A full garbage collection calls this. In a process that has imported torch, it takes about a
    watchdog's period.
    """
    for group in _alive:
        group._watched = now


class Underway:
    """A collective that this rank has entered but that has no place in its stream's order yet.

    The start of a collective is known only when the last rank has entered it.
    """

    def __init__(
        self, group: ProcessGroupNCCL, gpu: Gpu, stream: StreamTime, transfer: Transfer
    ) -> None:
        self.group = group
        self.gpu = gpu
        self.stream = stream
        self.transfer = transfer
        self.launched = gpu.machine.clock.host
        self.known = all_known(transfer.sent, transfer.received)
        self.stashed = group._stashed
        self.ready = max(self.launched, stream.ready)
        self.entry = group.rendezvous.enter(transfer, self.ready, self.known, group.identity(gpu))
        written = transfer.received if transfer.written is None else transfer.written
        name = transfer.name.partition("(")[0]
        if transfer.kind == "send" and written:
            name = "recv"
        self.races = gpu.machine.races.collectives
        of_nccl = stream is not gpu.stream
        self.flight = self.races.enter(stream, name, of_nccl, transfer.sent, written)
        self.stash = [*transfer.sent, *transfer.received]
        if transfer.peers is not None:
            # The program may free the tensors of a send at once. NCCL tells the allocator that the
            # stream uses them (recordStream in pointToPoint), and does not keep them.
            for x in self.stash:
                x.record_stream(stream)  # type: ignore[arg-type]  # it needs the number only
            self.stash, transfer.sent = [], []
        self.reports: list[dict[str, Any]] = []
        self.works: list[Any] | None = None
        self.event: EventTime | None = None

    def start(self, patience: datetime.timedelta | None = None) -> None:
        """Wait until all ranks have entered the collective, and let gloo move the values.

        `patience` is the time to wait for the other ranks. None means the group's timeout.
        """
        if self.works is None:
            self.reports = self.group.rendezvous.meet(self.entry, patience)
            gpus = [report["gpu"] for report in self.reports]
            try:
                self.group.connect(self.gpu, self.transfer.peers, gpus)
                works = []
                if self._all_keep_values():
                    with _DisableTorchDispatch():
                        works = self.transfer.start()
            except Exception:
                self.gpu.machine.under_way.remove(self)  # it never begins
                raise
            self.works = works

    def _all_keep_values(self) -> bool:
        """Return whether all ranks keep the values of their tensors."""
        return all(report["known"] for report in self.reports)

    def start_in_order(self) -> None:
        """Start this collective, after the earlier collectives of this rank on the same channel."""
        for other in list(self.gpu.machine.under_way):
            if self._shares_channel(other):
                other.start()

    def _shares_channel(self, other: "Underway") -> bool:
        """Return whether `other` uses the same channel, on which collectives run in order."""
        return other.group is self.group and other.entry.channel == self.entry.channel

    def land(self, patience: datetime.timedelta | None = None) -> EventTime:
        """Wait until the values have arrived, and return the collective's event on its stream.

        `patience` is the time to wait for the other ranks. None means the group's timeout. Raises
        torch.distributed.DistBackendError if a rank does not enter the collective.
        """
        machine = self.gpu.machine
        while self.event is None:
            first = next(other for other in machine.under_way if self._shares_channel(other))
            first.start(patience)
            # Other ranks may wait for collectives on other channels before they finish this one.
            for other in list(machine.under_way):
                if other.can_start():
                    other.start()
            first._finish()
        return self.event

    def can_start(self) -> bool:
        """Return whether this collective is the next on its channel and all ranks have entered."""
        if self.works is not None or not self._is_next():
            return False
        return self.group.rendezvous.is_complete(self.entry)

    def _is_next(self) -> bool:
        """Return whether all earlier collectives of this rank on the same channel have started."""
        for other in self.gpu.machine.under_way:
            if other is self:
                return True
            if self._shares_channel(other) and other.works is None:
                return False
        return True

    def _finish(self) -> None:
        """Store the results of the collective, and queue it on its stream at the known time."""
        machine, transfer = self.gpu.machine, self.transfer
        for work in self.works or ():
            work.wait()
        self.races.keep_old_values(self.flight, transfer.received)
        if self._all_keep_values():
            with torch.no_grad(), _DisableTorchDispatch():
                for target, value in transfer.finish():
                    if value.shape != target.shape:
                        value = value.view(target.shape)
                    target.copy_(value)
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
        start = max(*earlier, *(report["ready"] for report in self.reports))
        meeting = crc32(repr((ranks, self.entry.key)).encode())
        self.event = machine.clock.launch_together(
            self.stream,
            name,
            self.launched,
            start,
            seconds,
            transfer.nbytes,
            self.ready,
            meeting,
        )
        self.races.begun(self.flight, self.event, start)
        self.group.last_end |= dict.fromkeys(after, self.event.time)
        machine.under_way.remove(self)
        self.transfer = None  # type: ignore[assignment]  # it keeps private copies


class VirtualWork(Work):
    """NCCL's Work, which keeps its tensors until somebody has waited for it.

    `wait()` makes the current stream wait for the collective. `readers` is the number of tensors of
    a functional collective. C++ waits once for each of them.
    """

    readers = 0

    def __init__(self, parts: list[Any], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._parts = parts
        self._result = result
        self._future: Any = None
        self.readers = VirtualWork.readers
        _works.append(self)

    def land(self) -> None:
        """Wait until the values of the collective have arrived."""
        for part in self._parts:
            part.land()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Make the current stream wait for the collective, and with a timeout the host, too.

        Raises torch.distributed.DistBackendError if a rank does not enter the collective within the
        timeout (WorkNCCL::wait).
        """
        self.order(timeout or None)  # C++ passes 0 for no timeout
        if timeout:
            for part in self._parts:
                part.gpu.machine.clock.synchronize_event(part.land(), 0.0)
        self.readers -= 1
        self.drop()
        return True

    def is_over(self, time: float) -> bool:
        """Return whether the host knows that the collective has finished by this time."""
        return all(part.event is not None and part.event.time <= time for part in self._parts)

    def note_over(self) -> None:
        """Note that the host now knows that the collective has finished."""
        for part in self._parts:
            part.gpu.machine.clock.query(part.land(), 0.0)

    def drop(self) -> None:
        """Drop this work's tensors and its future.

        A caller who still holds the work keeps its result.
        """
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
        """Order the current stream after the collective now, and drop the tensors.

        The caller will still call `wait`, and C++ must find this object then.
        """
        self.order()
        for part in self._parts:
            part.stash = []
        if self._future is None:
            self._result = []

    def order(self, patience: datetime.timedelta | None = None) -> None:
        """Order later work on the current stream after the collective."""
        for part in self._parts:
            machine = part.gpu.machine
            machine.clock.wait(part.gpu.stream, part.land(patience))
            machine.races.collectives.look_again()

    def synchronize(self) -> None:
        """Make the current stream wait for the collective, as `Work.synchronize` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the collective, as `Work.block_current_stream` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True, after the host has waited until the collective is finished."""
        for part in self._parts:
            part.gpu.machine.clock.synchronize_event(part.land(), 0.0)
        return True

    def is_success(self) -> bool:
        """Return True, because a failed collective raises an exception."""
        return True

    def exception(self) -> None:
        """Return None, because a failed collective raises its exception itself."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors to which the collective has written its results."""
        return self._result

    def get_future(self) -> Any:
        """Return a finished future with the results of the collective.

        C++ (DDP's reducer) may wait for the future when Python cannot see it. The values therefore
        arrive during this call, and the stream of the backward pass waits for the collective at the
        end of the pass.
        """
        if self._future is not None:
            return self._future
        self.land()
        future = OrderedFuture([part.gpu for part in self._parts], self.order, self.wait)
        future.set_result(self._result)
        if self in _works:  # a work keeps its future until somebody has waited for it
            self._future = future
        _order_in_backward(self.order)
        return future

    def get_future_result(self) -> Any:
        """Return a finished future whose value says that the collective succeeded."""
        future: Any = torch.futures.Future()
        future.set_result(0)
        return future


class OrderedFuture(torch.futures.Future):
    """Future of work on GPUs. Waiting for it makes the current streams wait for that work.

    A callback runs on streams of its own, which wait for the work. So `then` does not hold up the
    current streams (CUDAFuture in PyTorch).
    """

    def __init__(
        self, gpus: list[Gpu], order: Callable[[], Any], waited: Callable[[], Any]
    ) -> None:
        """Create a future for work on `gpus`.

        `order` makes the current streams wait for the work before a callback runs. `waited` does so
        when somebody calls `wait()`.
        """
        super().__init__()
        self._gpus, self._order, self._waited = gpus, order, waited

    def wait(self) -> Any:
        """Make the current streams wait for the work, and return the future's value."""
        self._waited()
        return super().wait()

    def then(self, callback: Any) -> Any:
        """Call `callback` with this future, and return a future of the callback's result."""
        streams = {gpu: gpu.pool_stream(0) for gpu in self._gpus}
        with _current(streams):
            self._order()
            called = super().then(callback)
            ends = [(gpu, gpu.machine.clock.record(gpu.stream)) for gpu in streams]

        def order() -> None:
            """Make the current streams wait for the work that the callback has queued."""
            for gpu, end in ends:
                gpu.machine.clock.wait(gpu.stream, end)

        following = OrderedFuture(self._gpus, order, order)
        try:
            following.set_result(called.wait())
        except Exception as error:
            following.set_exception(error.with_traceback(None))
        _order_in_backward(order)
        return following


@contextmanager
def _current(streams: dict[Gpu, StreamTime]) -> Iterator[None]:
    """Make the given stream of each GPU the current one in a `with` block of this thread."""
    before = {gpu: gpu.stream for gpu in streams}
    for gpu, stream in streams.items():
        gpu.machine.selected.streams[gpu.index] = stream
    try:
        yield
    finally:
        for gpu, stream in before.items():
            gpu.machine.selected.streams[gpu.index] = stream


def _order_in_backward(order: Callable[[], Any]) -> None:
    """Call `order`, which makes streams wait, at the end of the running backward pass.

    C++ (DDP's reducer) waits for futures there. It starts the first buckets of a static graph at
    that end and waits for them at once, so `order` is then called now. Outside a backward pass
    nothing is done.
    """
    if torch._C._current_graph_task_id() == -1:
        return
    if torch._C._current_autograd_node() is None:
        order()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(order)


_works: list[VirtualWork] = []  # keeps the works alive, because C++ holds only pointers to them


def ordered(future: Any) -> OrderedFuture:
    """Return a finished future that also makes streams wait for the collective.

    `future` is a C++ future of the collective that began last. It does not order streams itself.
    """
    work = _works[-1]
    after = OrderedFuture([part.gpu for part in work._parts], work.order, work.wait)
    after.set_result(future.wait())
    return after


@contextmanager
def read_by(tensors: int) -> Iterator[None]:
    """Declare that C++ will wait `tensors` times for each collective that begins in the block."""
    VirtualWork.readers = tensors
    try:
        yield
    finally:
        VirtualWork.readers = 0


def end_coalescing(group: ProcessGroupNCCL) -> VirtualWork:
    """End the batch of collectives of `group`, and return one work for all of them."""
    works, group.coalescing = group.coalescing or [], None
    for work in works:
        _works.remove(work)  # only the batch has this work
    parts = [part for work in works for part in work._parts]
    received = [x for part in parts if part.transfer for x in part.transfer.received]
    return VirtualWork(parts, received)
