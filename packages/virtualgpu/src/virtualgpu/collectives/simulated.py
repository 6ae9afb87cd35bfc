"""Process groups for one rank of a large world whose other ranks do not exist.

The other ranks are assumed to do what this rank does, at the same time. A collective therefore
never waits for a slow rank. If values are kept, every rank is assumed to send the values of this
one. Memory and time follow the same rules as for ranks that exist.
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
    """Yield (store, rank, world size), as PyTorch's rendezvous does, without other processes.

    The rank and the size are those of the arguments or of the environment.
    """
    if rank < 0:
        rank = int(os.environ["RANK"])
    if world_size < 0:
        world_size = int(os.environ["WORLD_SIZE"])
    yield HashStore(), rank, world_size


# PyTorch's function that makes a group, without the meeting of ranks that may replace it now.
_make_group: Any = inspect.unwrap(distributed_c10d._new_process_group_helper)


def _group(size: int, *args: Any, **named: Any) -> Any:
    """Return PyTorch's process group of `size` ranks, and its store.

    From version 2.14 on, a group asks its default backend for rank and size. The virtual NCCL is a
    group of one rank in C++, so it must not be the default.
    """
    group, store = _make_group(size, *args, **named)
    if isinstance(group, dist.ProcessGroup) and group.size() != size:
        group._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
    return group, store


def _gloo(store: Any, rank: int, size: int, timeout: Any = None) -> Any:
    """Return PyTorch's FakeProcessGroup in place of gloo, for CPU tensors of a simulated rank."""
    return c10d.FakeProcessGroup._create_internal(rank, size)


class Everybody(Rendezvous):
    """A rendezvous of simulated ranks, at which all arrive at the same time as this one."""

    def is_complete(self, entry: Entry) -> bool:
        """Return True, because all ranks have entered the collective."""
        return True

    def meet(self, entry: Entry, patience: Any = None) -> list[dict[str, Any]]:
        """Return this rank's report as the report of every rank."""
        return [self._reports.pop(entry.key)[self._rank]] * len(entry.ranks)


class SimulatedNCCL(ProcessGroupNCCL):
    """One rank of a group whose other ranks are only simulated.

    The base class is a group of this rank alone. The methods with the names of gloo's methods
    compute results from this rank's values.
    """

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        options = options or Options()
        options.global_ranks_in_group = list(options.global_ranks_in_group) or list(range(size))
        self._rank_and_size = rank, size
        super().__init__(HashStore(), 0, 1, options)
        self.rendezvous = Everybody(rank, self.ranks_of_all, options._timeout)

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._rank_and_size[0]

    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self._rank_and_size[1]

    def identity(self, gpu: Gpu) -> None:
        """Return None, because each rank is assumed to have a GPU of its own."""

    def run(self, gpu: Gpu, transfer: Transfer, is_async: bool) -> VirtualWork:
        """Enter a collective and return its work.

        Raises NotImplementedError if the results would be the values of another rank.
        """
        received = []
        if not transfer.sent:
            received = transfer.received
        for x in received:
            if not gpu.machine.may_fill(bytes_of(x), x.dtype):
                forget(x)
        if received and all_known(received):
            raise unsupported(
                f"{transfer.name}: its values are those of a rank that is only simulated, which"
            )
        return super().run(gpu, transfer, is_async)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Reduce each tensor with itself, once per rank."""
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
        """Reduce `given` with itself, once per rank, and store this rank's part in `output`."""
        self.allreduce([given], options)
        output.copy_(given.view(self.size(), *output.shape)[self.rank()])
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Do nothing, because all ranks have the same values."""
        return Done()

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        """Copy each input into all parts of its output."""
        for received, given in zip(outputs, inputs, strict=True):
            for part in received:
                part.copy_(given)
        return Done()

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> dist.Work:
        """Copy the input `given` into each rank's part of `output`."""
        return self.allgather([list(output.split(len(given)))], [given], options)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        """Copy each input into all parts of its output, on the root only."""
        if outputs:
            return self.allgather(outputs, inputs, options)
        return Done()

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any
    ) -> dist.Work:
        """Copy this rank's part of the input into the output."""
        outputs[0].copy_(inputs[0][self.rank()])
        return Done()

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *splits: Any) -> dist.Work:
        """Copy the part for this rank into all parts of the output.

        Every rank sends to this one what this one sends to itself. Raises NotImplementedError if
        the parts' sizes differ.
        """
        received_sizes, sent_sizes = (
            sizes or [len(x) // self.size()] * self.size()
            for x, sizes in zip((output, given), splits[:2], strict=True)
        )
        mine = given.split(sent_sizes)[self.rank()]
        for part in output.split(received_sizes):
            if part.shape != mine.shape:
                raise unsupported("an all_to_all of uneven sizes in a simulated world")
            part.copy_(mine)
        return Done()

    def send(self, *args: Any) -> dist.Work:
        """Do nothing, because the receiver does not exist."""
        return Done()

    def barrier(self, options: Any) -> dist.Work:
        """Do nothing, because all ranks arrive at the same time."""
        return Done()


class Done(dist.Work):
    """The work of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True


# Replacements in distributed_c10d, where PyTorch makes groups.
REPLACED: dict[str, Any] = {
    "ProcessGroupNCCL": SimulatedNCCL,
    "ProcessGroupGloo": _gloo,
    "rendezvous": _rendezvous,
    "_new_process_group_helper": _group,
}


def put_in_place() -> None:
    """Make all process groups of this process simulated ones, until the process ends.

    The other ranks of such groups do not exist.
    """
    for name, value in REPLACED.items():
        setattr(distributed_c10d, name, value)
