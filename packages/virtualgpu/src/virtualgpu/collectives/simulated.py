"""One rank of a world whose other ranks are not there: each of them is taken to do what this one does, at the time when it does it.

So a collective never waits for a slow rank, and where values are kept, every rank sends what this one has. Memory and time follow the
rules of ranks that are there.
"""

import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import HashStore, distributed_c10d

from virtualgpu.collectives.group import Options, ProcessGroupNCCL, Transfer, VirtualWork
from virtualgpu.collectives.rendezvous import Entry, Rendezvous
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Gpu
from virtualgpu.ops.call import bytes_of
from virtualgpu.ops.without_values import all_known, forget

_Reduction: Any = dist.ReduceOp.RedOpType


def _rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[HashStore, int, int]]:
    """Nobody to meet: the rank and the world as the program or the environment names them."""
    yield (
        HashStore(),
        int(os.environ["RANK"]) if rank < 0 else rank,
        int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size,
    )


_make_group: Any = inspect.unwrap(
    distributed_c10d._new_process_group_helper
)  # by which no rank meets another, whatever is in place


def _group(size: int, *args: Any, **named: Any) -> Any:
    """PyTorch's own group. From 2.14 on it asks its default backend, if it has one, for rank and size; the one here is alone in C++."""
    group, store = _make_group(size, *args, **named)
    if isinstance(group, dist.ProcessGroup) and group.size() != size:
        group._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
    return group, store


def _gloo(store: Any, rank: int, size: int, timeout: Any = None) -> Any:
    return c10d.FakeProcessGroup._create_internal(rank, size)


class Everybody(Rendezvous):
    """All ranks are there as soon as this one is."""

    def is_complete(self, entry: Entry) -> bool:
        return True

    def meet(self, entry: Entry, patience: Any = None) -> list[dict[str, Any]]:
        return [self._reports.pop(entry.key)[self._rank]] * len(entry.ranks)


class SimulatedNCCL(ProcessGroupNCCL):
    """One rank of a group. Its base connects this rank with itself."""

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        options = options or Options()
        options.global_ranks_in_group = list(options.global_ranks_in_group) or list(range(size))
        self._place = rank, size
        super().__init__(HashStore(), 0, 1, options)
        self.rendezvous = Everybody(rank, self.ranks_of_all, options._timeout)

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]

    def identity(self, gpu: Gpu) -> None:
        """Each rank is taken to have a GPU of its own."""

    def run(self, gpu: Gpu, transfer: Transfer, is_async: bool) -> VirtualWork:
        received = [] if transfer.sent else transfer.received
        for x in received:
            if not gpu.machine.may_fill(bytes_of(x), x.dtype):
                forget(x)
        if received and all_known(received):
            raise unsupported(
                f"{transfer.name}: its values are those of a rank that is only simulated, which"
            )
        return super().run(gpu, transfer, is_async)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        for x in tensors:
            if options.reduceOp == _Reduction.SUM:
                x.mul_(self.size())
            elif options.reduceOp == _Reduction.PRODUCT:
                x.pow_(self.size())
            elif options.reduceOp == _Reduction.BXOR and self.size() % 2 == 0:
                x.zero_()
        return Done()

    reduce = allreduce_coalesced = allreduce

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, options: Any
    ) -> dist.Work:
        self.allreduce([given], options)
        output.copy_(given.view(self.size(), *output.shape)[self.rank()])
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        return Done()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        for received, given in zip(outputs, inputs, strict=True):
            for part in received:
                part.copy_(given)
        return Done()

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> dist.Work:
        return self.allgather([list(output.split(len(given)))], [given], options)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        return self.allgather(outputs, inputs, options) if outputs else Done()

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any
    ) -> dist.Work:
        outputs[0].copy_(inputs[0][self.rank()])
        return Done()

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *splits: Any) -> dist.Work:
        """Each rank sends here what this one sends to a rank of this number: to itself."""
        received, sent = (
            sizes or [len(x) // self.size()] * self.size()
            for x, sizes in zip((output, given), splits[:2], strict=True)
        )
        mine = given.split(sent)[self.rank()]
        for part in output.split(received):
            if part.shape != mine.shape:
                raise unsupported("an all_to_all of uneven sizes in a simulated world")
            part.copy_(mine)
        return Done()

    def send(self, *args: Any) -> dist.Work:
        return Done()

    def barrier(self, options: Any) -> dist.Work:
        return Done()


class Done(dist.Work):
    """What is over at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True


# Of distributed_c10d, where PyTorch makes groups. On CPU tensors its own FakeProcessGroup stands for gloo.
REPLACED: dict[str, Any] = {
    "ProcessGroupNCCL": SimulatedNCCL,
    "ProcessGroupGloo": _gloo,
    "rendezvous": _rendezvous,
    "_new_process_group_helper": _group,
}


def put_in_place() -> None:
    """From now on, until this process ends, the groups that PyTorch makes are those of one rank alone."""
    for name, value in REPLACED.items():
        setattr(distributed_c10d, name, value)
