"""The memory that collectives read and write, from the call until the user has waited for them.

A collective gets its position on its stream when the last rank has entered it. Until then nothing
is ordered after it. A program that stays on one stream can race only with its own collectives.
There, only the memory of the collectives is checked, until the stream is ordered after them.
"""

import weakref
from collections.abc import Iterable
from math import inf
from typing import Any

import torch

from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.memory import Memory, unwatched
from virtualgpu.ops.call import Call
from virtualgpu.streams.accesses import Access, AccessLog, Region, at, has_region, snapshot
from virtualgpu.streams.launches import Launch, user_line
from virtualgpu.tensor import VirtualTensor, memory_of


class Flight:
    """A collective that is not known to have finished.

    memories: the memory that it uses, by access log
    writes: its accesses that write
    filled: the logs of memory that had contents before
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.memories: dict[AccessLog, weakref.ref[Memory]] = {}
        self.writes: list[Access] = []
        self.filled: set[AccessLog] = set()


class Collectives:
    """The collectives of one machine, for the race detector.

    `flights` are the collectives that a program on one stream has not waited for yet.
    """

    def __init__(self, races: Any) -> None:
        self._races, self._machine = races, races.machine
        self.flights: list[Flight] = []
        self._logs: set[AccessLog] = set()  # of the memory that the flights use

    def enter(
        self,
        stream: StreamTime,
        name: str,
        of_nccl: bool,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Flight:
        """Note that this rank enters a collective, and return its flight.

        `of_nccl` says whether it runs on NCCL's own stream. `read` and `written` are the tensors
        that it reads and writes.
        """
        clock = self._machine.clock
        launch = Launch(stream, name, clock.host, user_line())
        launch.count = inf
        launch.of_nccl = of_nccl
        flight = Flight(launch)
        if clock.captures or not (read or written):
            return flight
        if not of_nccl and self._machine.several_streams:
            # Work on NCCL's own stream does not make a program use several streams.
            self._races.lone.has_work(stream)
        before = {**clock.before(stream), stream: inf}
        reads, writes = self._regions(flight, read), self._regions(flight, written)
        for log, region in dict.fromkeys((*reads, *writes)):
            is_written = (log, region) in writes
            self._races.compare(launch, log, region, (log, region) in reads, is_written, before)
            if log.filled:
                flight.filled.add(log)
            access = Access(launch, log, region, is_written)
            log.add(access)
            if is_written:
                flight.writes.append(access)
        if unwatched(self._machine.gpus[stream.device_index]) is not None:
            self.flights.append(flight)
            self._logs.update(flight.memories)
        return flight

    def _regions(
        self, flight: Flight, tensors: list[torch.Tensor]
    ) -> list[tuple[AccessLog, Region]]:
        """Return (access log, region) for each region that the tensors of a collective use.

        The memory is also noted in `flight`.
        """
        by_log: dict[AccessLog, list[torch.Tensor]] = {}
        for x in tensors:
            log = self._races.log_of(x)
            if log is not None:
                flight.memories[log] = weakref.ref(memory_of(x))
                by_log.setdefault(log, []).append(x)
        return [(log, region) for log, parts in by_log.items() for region in joined(parts)]

    def keep_old_values(self, flight: Flight, written: list[torch.Tensor]) -> None:
        """Copy what is in the tensors `written` before the collective writes its results there.

        Streams that are not ordered after the collective still read the old values.
        """
        if unwatched(self._machine.gpus[flight.launch.device]) is not None:
            return
        old = {}
        for x in written:
            log = self._races.log_of(x)
            if log in flight.filled and memory_of(x).kept is not None:
                old[log] = snapshot(x)
        for access in flight.writes:
            content = old.get(access.origin())
            if content is not None:
                access.before = at(content, access.region)
                self._races.replacing.add(access)

    def begun(self, flight: Flight, event: EventTime, start: float) -> None:
        """Note the place of a collective on its stream, when the last rank has entered it.

        `event` is its end, and `start` the time at which it starts.
        """
        flight.launch.count = event.known[event.stream]
        flight.launch.start = start
        flight.launch.end = event.time

    def check(self, call: Call) -> None:
        """Report a race of an operator with a collective in flight.

        This is for a program on one stream, whose other operators are not compared.
        """
        op = call.op
        if self._machine.selected.in_operator or not op.touches_values or op.model_only:
            return
        if not any(self._in_flight(x) for x in call.tensors()):
            return
        launch = Launch(call.gpu.stream, op.name, self._machine.clock.host, user_line())
        for x, reads, writes in call.roles():
            if self._in_flight(x):
                memory = memory_of(x)
                before = self._machine.clock.before(memory.gpu.stream)
                self._races.compare(launch, memory.access_log, Region.of(x), reads, writes, before)

    def _in_flight(self, x: torch.Tensor) -> bool:
        """Return whether a collective in flight uses the memory of this tensor."""
        return type(x) is VirtualTensor and has_region(x) and memory_of(x).access_log in self._logs

    def look_again(self) -> None:
        """Remove the collectives that the program's only stream is now ordered after.

        Call this when a stream or the host has waited for something.
        """
        if not self.flights:
            return
        over = [flight for flight in self.flights if self._is_over(flight.launch)]
        self.flights = [flight for flight in self.flights if flight not in over]
        self._logs = {log for flight in self.flights for log in flight.memories}
        if self._machine.several_streams:
            return
        for flight in over:
            for log, reference in flight.memories.items():
                memory = reference()
                if log not in self._logs and memory is not None:
                    memory.access_log = None

    def _is_over(self, launch: Launch) -> bool:
        """Return whether the detector need not remember this collective any more.

        With several streams, it compares all operators anyway.
        """
        stream = unwatched(self._machine.gpus[launch.device])
        if stream in (None, launch.stream):
            return True
        return self._machine.clock.before(stream).get(launch.stream, 0) >= launch.count


def joined(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """Return the regions of tensors in one storage, with adjacent regions merged if they are dense.

    An all-gather of many ranks, for example, writes adjacent parts.
    """
    spans: list[list[int]] = []
    regions = [Region.of(x) for x in tensors]
    if len(regions) == 1:
        return regions
    dense = [x.is_contiguous() for x in tensors]
    dense_regions = [region for region, whole in zip(regions, dense, strict=True) if whole]
    for start, end in sorted(region.bytes() for region in dense_regions):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    merged = [Region(start, (end - start,), (1,), torch.uint8) for start, end in spans]
    others = [region for region, whole in zip(regions, dense, strict=True) if not whole]
    return others + merged
