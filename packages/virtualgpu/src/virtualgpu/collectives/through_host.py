"""Gloo's collectives for tensors on GPUs.

Gloo copies the tensors to the host and exchanges these copies, and Python waits for it. In the
model, the copies take time and the network takes none.
"""

import datetime
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch.distributed import ProcessGroup

from virtualgpu.clock.machine_clock import EventTime
from virtualgpu.collectives.group import Transfer, VirtualWork
from virtualgpu.collectives.rendezvous import Rendezvous, of_group
from virtualgpu.hardware import Gpu
from virtualgpu.ops.without_values import all_known, forget


def through_host(group: ProcessGroup, backend: Any, gpu: Gpu, transfer: Transfer) -> VirtualWork:
    """Begin a collective with gloo and return its work.

    Gloo's threads move the values from now on, in the order in which this rank has made its calls.
    """
    rendezvous = of_group(group.group_name)
    if rendezvous is None:  # the group has one rank
        rendezvous = Rendezvous(
            group.rank(), torch.distributed.get_process_group_ranks(group), backend.options._timeout
        )
    return VirtualWork([OnHost(rendezvous, gpu, transfer)], list(transfer.received))


class OnHost:
    """A collective that gloo has begun for tensors on GPUs.

    If one rank keeps no values, no rank gets results.
    """

    def __init__(self, rendezvous: Rendezvous, gpu: Gpu, transfer: Transfer) -> None:
        self.rendezvous = rendezvous
        self.gpu = gpu
        self.transfer = transfer
        self.stash: list[torch.Tensor] = []
        self.stashed: list[VirtualWork] = []
        self.event: EventTime | None = None
        known = all_known(transfer.sent, transfer.received)
        self.entry = rendezvous.enter(transfer, gpu.machine.clock.host, known)
        rendezvous.compare(self.entry)  # gloo would end the process if the ranks disagreed
        for x in transfer.sent:
            gpu.copy("d2h", x.numel() * x.itemsize)
        with _DisableTorchDispatch():
            self.works = transfer.start()

    def land(self, patience: datetime.timedelta | None = None) -> EventTime:
        """Wait until the collective has finished, and return its event on the current stream.

        `patience` is the time to wait for the other ranks. None means the group's timeout. Raises
        torch.distributed.DistBackendError if a rank does not enter the collective.
        """
        if self.event is None:
            reports = self.rendezvous.meet(self.entry, patience)
            for work in self.works:
                work.wait()
            if all(report["known"] for report in reports):
                with torch.no_grad():
                    for target, value in self.transfer.finish():
                        target.copy_(value.view(target.shape))
            else:
                for target in self.transfer.received:
                    forget(target)
            self.event = self.gpu.machine.clock.record(self.gpu.stream)
        return self.event
