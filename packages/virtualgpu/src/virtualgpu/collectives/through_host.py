"""What gloo does with tensors on GPUs: it moves copies on the host, where Python waits. The network takes no time here."""

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
    """Begin it: gloo's own threads move the values from now on, in the order in which this rank has called."""
    rendezvous = of_group(group.group_name)
    if rendezvous is None:  # of one rank
        rendezvous = Rendezvous(
            group.rank(), torch.distributed.get_process_group_ranks(group), backend.options._timeout
        )
    return VirtualWork([OnHost(rendezvous, gpu, transfer)], list(transfer.received))


class OnHost:
    """A collective that gloo has begun. Where some rank keeps no values, the results are unknown to all."""

    def __init__(self, rendezvous: Rendezvous, gpu: Gpu, transfer: Transfer) -> None:
        self.rendezvous, self.gpu, self.transfer = rendezvous, gpu, transfer
        self.stash: list[torch.Tensor] = []
        self.stashed: list[VirtualWork] = []
        self.event: EventTime | None = None
        known = all_known(transfer.sent, transfer.received)
        self.entry = rendezvous.enter(transfer, gpu.machine.clock.host, known)
        rendezvous.compare(self.entry)  # gloo would end the process
        for x in transfer.sent:
            gpu.copy("d2h", x.numel() * x.itemsize)
        with _DisableTorchDispatch():
            self.works = transfer.start()

    def land(self, patience: datetime.timedelta | None = None) -> EventTime:
        if self.event is None:
            said = self.rendezvous.meet(self.entry, patience)
            for work in self.works:
                work.wait()
            known = all(each["known"] for each in said)
            with torch.no_grad():
                for target, value in self.transfer.finish() if known else ():
                    target.copy_(value.view(target.shape))
            for target in () if known else self.transfer.received:
                forget(target)
            self.event = self.gpu.machine.clock.record(self.gpu.stream)
        return self.event
