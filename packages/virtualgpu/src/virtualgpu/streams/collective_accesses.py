"""What collectives read and write: from the call on, until whoever uses it has waited for them.

Which piece of its stream's work a collective is, is known when it has begun, with the last rank. Until then it comes before nothing.
A program that stays on one stream can race with its collectives alone: only their memory is looked at there, and only until that stream
comes after them.
"""

import weakref
from collections.abc import Iterable
from math import inf
from typing import Any

import torch

from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.memory import Memory, unwatched
from virtualgpu.ops.call import Call
from virtualgpu.streams.accesses import Access, Place, Region, at, has_region, snapshot
from virtualgpu.streams.launches import Launch, user_line
from virtualgpu.tensor import VirtualTensor, memory_of


class Flight:
    """A collective: its launch, the memory that it touches, and what it writes, of which something stood in `filled` before."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.memories: dict[Place, weakref.ref[Memory]] = {}
        self.writes: list[Access] = []
        self.filled: set[Place] = set()


class Collectives:
    """Those of one machine. `flights` are those that a program on one stream has not waited for yet."""

    def __init__(self, races: Any) -> None:
        self._races, self._machine = races, races.machine
        self.flights: list[Flight] = []
        self._places: set[Place] = set()  # that these touch

    def enter(self, stream: StreamTime, name: str, of_nccl: bool, read: list[torch.Tensor], written: list[torch.Tensor]) -> Flight:
        """This rank enters a collective, on NCCL's stream or on the current one."""
        clock = self._machine.clock
        launch = Launch(stream, name, clock.host, user_line())
        launch.count, launch.of_nccl = inf, of_nccl
        flight = Flight(launch)
        if clock.captures or not (read or written):
            return flight
        if not of_nccl and self._machine.several_streams:  # NCCL's streams leave a program where it is
            self._races.lone.has_work(stream)
        before = {**clock.before(stream), stream: inf}
        reads, writes = self._regions(flight, read), self._regions(flight, written)
        for place, region in dict.fromkeys((*reads, *writes)):
            is_written = (place, region) in writes
            self._races.compare(launch, place, region, (place, region) in reads, is_written, before)
            if place.filled:
                flight.filled.add(place)
            access = Access(launch, place, region, is_written)
            place.add(access)
            if is_written:
                flight.writes.append(access)
        if unwatched(self._machine.gpus[stream.device_index]) is not None:
            self.flights.append(flight)
            self._places.update(flight.memories)
        return flight

    def _regions(self, flight: Flight, tensors: list[torch.Tensor]) -> list[tuple[Place, Region]]:
        parts: dict[Place, list[torch.Tensor]] = {}
        for x in tensors:
            if (place := self._races.place_of(x)) is not None:
                flight.memories[place] = weakref.ref(memory_of(x))
                parts.setdefault(place, []).append(x)
        return [(place, region) for place, xs in parts.items() for region in joined(xs)]

    def keep_old_values(self, flight: Flight, written: list[torch.Tensor]) -> None:
        """The values arrive now. Streams that do not come after the collective still read what stands there."""
        if unwatched(self._machine.gpus[flight.launch.device]) is not None:
            return
        old = {place: snapshot(x) for x in written if (place := self._races.place_of(x)) in flight.filled and memory_of(x).kept is not None}
        for access in flight.writes:
            if (content := old.get(access.origin())) is not None:
                access.before = at(content, access.region)
                self._races.replacing.add(access)

    def begun(self, flight: Flight, event: EventTime, start: float) -> None:
        """It has its place on its stream."""
        flight.launch.count, flight.launch.start, flight.launch.end = event.known[event.stream], start, event.time

    def check(self, call: Call) -> None:
        """Before an operator of a program on one stream, while there are `flights`."""
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
                self._races.compare(launch, memory.touched, Region.of(x), reads, writes, before)

    def _in_flight(self, x: torch.Tensor) -> bool:
        return type(x) is VirtualTensor and has_region(x) and memory_of(x).touched in self._places

    def look_again(self) -> None:
        """A stream, or the host, has waited: forget what the program's one stream comes after by now."""
        if not self.flights:
            return
        over = [flight for flight in self.flights if self._is_over(flight.launch)]
        self.flights = [flight for flight in self.flights if flight not in over]
        self._places = {place for flight in self.flights for place in flight.memories}
        if self._machine.several_streams:
            return
        for flight in over:
            for place, reference in flight.memories.items():
                if place not in self._places and (memory := reference()) is not None:
                    memory.touched = None

    def _is_over(self, launch: Launch) -> bool:
        """Need nobody look for it here? Where there are several streams by now, all operators are looked at."""
        stream = unwatched(self._machine.gpus[launch.device])
        return stream in (None, launch.stream) or self._machine.clock.before(stream).get(launch.stream, 0) >= launch.count


def joined(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """What tensors show of one storage. Parts that follow one another, as an all-gather of many ranks has them, are one region."""
    spans: list[list[int]] = []
    regions = [Region.of(x) for x in tensors]
    if len(regions) == 1:
        return regions
    dense = [x.is_contiguous() for x in tensors]
    for start, end in sorted(region.bytes() for region, whole in zip(regions, dense, strict=True) if whole):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    others = [region for region, whole in zip(regions, dense, strict=True) if not whole]
    return others + [Region(start, (end - start,), (1,), torch.uint8) for start, end in spans]
