"""What one thread has selected: the current device, its streams, and which call it is in."""

import threading
from collections.abc import Callable
from typing import Any

from virtualgpu.clock.machine_clock import StreamTime

GpuOrNone = Any  # a Gpu of virtualgpu.hardware, which stands on this module


class Selected(threading.local):
    """What one thread has selected: the current device, and the current stream of each device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, StreamTime] = {}
        self.gpu: GpuOrNone = None  # where the last operator on a device tensor ran,
        self.call: tuple | None = None  # and which call it belonged to: see virtualgpu.host.cpu_operators
        self.waiting: tuple | None = None  # the call for which C++ made tensors on the CPU
        self.task = -1  # the backward under way,
        self.places: set[GpuOrNone] = set()  # and where its operators ran so far; None stands for the CPU
        self.root: GpuOrNone = None  # where the next backward starts
        self.untimed = False  # a thread whose work takes none of the host's time
        self.nodes = 0  # nodes of autograd that this thread has made so far
        self.ambient: dict[int, StreamTime] = {}  # by device: the streams to which the backward under way will return
        self.arrived: tuple | None = None  # the node of a backward whose stream has been chosen
        self.in_operator = False  # an operator is running of which the race detector knows: those that it is made of are part of it
        self.product: Callable[[], Any] | None = None  # what the last matrix product was written to

    def visit(self, task: int, *places: GpuOrNone) -> None:
        """Note that the backward `task` has operators in these places."""
        if self.task != task:
            self.task, self.places = task, set() if self.root is None else {self.root}
        self.places.update(places)
