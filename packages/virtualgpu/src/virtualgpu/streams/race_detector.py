"""Finds races: work on the same memory that nothing orders. Such work meets what it might meet on a real GPU.

The clock knows what is done before what (`Clock.before`). Every operator is computed when it is launched; so one that reads what an
unordered write has left is given the old values instead, and one that has read what an unordered write replaces is computed again.
A real GPU gets this wrong sometimes, this one always, and says so.

A program without a stream of its own cannot race on a GPU, so its operators are not looked at until one is made. Nor are those of a
program that stays on one stream for long (`lone_stream`), until another stream has work: of that time it is known what was written, but
not by which line, and not what was read. Copies between a GPU and page-locked memory for which the host does not wait are looked at always.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.allocator import Block
from virtualgpu.clock.machine_clock import Known, StreamTime
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.memory import Memory
from virtualgpu.ops.call import Call, Operator, operator
from virtualgpu.streams import race_reports
from virtualgpu.streams.accesses import Access, Place, Region, as_before, at, has_region, mapped, overlaid, snapshot, whole
from virtualgpu.streams.collective_accesses import Collectives
from virtualgpu.streams.launches import Arrival, Launch, UserLine, outputs_of, reference, user_line
from virtualgpu.streams.lone_stream import LoneStream
from virtualgpu.streams.race_reports import Race, Races, Side
from virtualgpu.tensor import VirtualTensor, allocate_on, tensors, wrap

SHARE = 0.25  # of the host's budget for values: what launches that may have to run again may hold


class Use(NamedTuple):
    """What an operator does with one of its tensors, and where that lies. `known` says whether its values are."""

    tensor: torch.Tensor
    reads: bool
    writes: bool
    place: Place
    region: Region
    known: bool


class Freed(NamedTuple):
    """Memory that was given back while streams of which the allocator does not know used it. `stream` is the one it belongs to."""

    address: int
    size: int
    stream: StreamTime
    place: Place


class RaceDetector:
    """Follows the order of one machine's work. `races` are those found so far, each pair of lines once.

    `host_copies` are copies for which the host has not waited: (stream, number of the piece of work on it).
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.races = Races()
        self.host_copies: list[tuple[StreamTime, int]] = []
        self._watching: list[Races] = []
        self._in_flight: deque[Launch] = deque()  # those that can be run again
        self._held = 0  # bytes that these hold
        self.replacing: WeakSet[Access] = WeakSet()  # writes that hold what was there before them
        self._arrivals: list[Arrival] = []
        self._freed: dict[int, list[Freed]] = {}  # by GPU
        self.lone = LoneStream(machine)
        self.collectives = Collectives(self)
        machine.clock.call_when_learned(self._learn)

    def end(self) -> None:
        """The machine goes: what is under way to the host arrives."""
        for arrival in self._arrivals:
            arrival.arrive()
        self._arrivals.clear()

    # One operator

    def run(self, call: Call) -> Any:
        """Run an operator on device tensors, on what it may read by the order of its stream."""
        op, handler = call.op, call.op.handler
        assert handler is not None
        if self.machine.clock.captures and (capture := call.gpu.stream.capture) is not None:
            return capture.run(call)
        if self.machine.selected.in_operator or not op.touches_values or copies_elsewhere(call):
            return handler(call)
        if self.lone.has_work(call.gpu.stream):
            if self.collectives.flights:
                self.collectives.check(call)
            return self.lone.run(call)
        if op.model_only and ("empty" in op.name or _is_elsewhere(call)):
            return handler(call)
        if not call.is_on_one_gpu():  # most operators refuse several devices
            return handler(call)
        uses = [] if op.model_only else self._uses(call)  # whose argument gives a shape alone
        return self._ordered(call, call.gpu.stream, self.machine.clock.before(call.gpu.stream), uses, handler)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: StreamTime, before: Known, do: Callable[[Call], Any]) -> None:
        """Run `do`, called as an operator's handler is, as a copy on `stream`. `before` is what is done before it."""
        self.lone.has_work(stream)
        uses = [use for use in (self._use(target, False, True), self._use(source, True, False)) if use is not None]
        self._ordered(Call(operator(torch.ops.aten.copy_.default), (target, source), {}), stream, before, uses, do)

    def replay(self, touched: list[tuple[torch.Tensor, bool]], stream: StreamTime, do: Callable[[], None]) -> list[torch.Tensor]:
        """Run `do`, a graph's work on the `stream`, which touches these tensors, and writes those with True. Returns those raced for."""
        raced = []
        self.lone.has_work(stream)
        before = self.machine.clock.before(stream)
        launch = Launch(stream, "CUDA graph", self.machine.clock.host, user_line())
        uses = [use for x, writes in touched if (use := self._use(x, True, writes)) is not None]
        for use in uses:
            if self.compare(launch, use.place, use.region, use.reads, use.writes, before):
                raced.append(use.tensor)
        befores = [snapshot(use.tensor) if use.writes and use.known and use.place.filled else None for use in uses]
        do()
        launch.count, launch.end = stream.count, stream.ready
        for use, old in zip(uses, befores, strict=True):
            self._note(launch, use, old)
        return raced

    def _ordered(self, call: Call, stream: StreamTime, before: Known, uses: list[Use], do: Callable[[Call], Any]) -> Any:
        selected, clock = self.machine.selected, self.machine.clock
        launch = Launch(stream, call.op.name, clock.host, user_line())
        stale: dict[int, torch.Tensor] = {}
        overwritten: list[tuple[Access, Use]] = []
        for use in uses:
            unordered = use.place.unordered(use.region, before)
            if not unordered:
                continue
            missed = [access for access in unordered if access.writes]
            if use.reads and missed:
                self.report(race_reports.STALE, missed[-1].launch, Side.of(launch), launch.line)
                if use.known:
                    stale[id(use.tensor)] = self._stale(use, missed)
            if use.writes:
                overwritten += self._overwritten(launch, use, unordered)
        if stale:
            call = Call(call.op, *mapped((call.args, call.kwargs), lambda x: stale.get(id(x), x)))
        # What a write replaces: nothing if nobody has written there yet, or nobody knows what.
        befores = [snapshot(use.tensor) if use.writes and use.known and use.place.filled else None for use in uses]
        # C++ that is told where it is writes to the host's tensors by pointers, which miss a memory that was shared before.
        if selected.made_on is None and all(use.known for use in uses) and all(map(has_region, call.tensors())):
            self._keep(launch, call)
        ready = stream.ready
        selected.in_operator = True
        try:
            result = do(call)
        finally:
            selected.in_operator = False
        launch.count, launch.end = stream.count, stream.ready
        launch.start = min(max(ready, clock.host), launch.end)
        for use, old in zip(uses, befores, strict=True):
            self._note(launch, use, old)
        for x in tensors(result):
            if is_new(x) and (made := self._use(x, False, True)) is not None:
                overwritten += self._overwritten(launch, made, made.place.unordered(made.region, before))
                self._note(launch, made, None)
        if launch.call is not None:
            self._note_outputs(launch, call, result)
        for access, use in overwritten:
            self._run_again(access, use)
        return result

    def compare(self, launch: Launch, place: Place, region: Region, reads: bool, writes: bool, before: Known) -> bool:
        """Say so if the launch, which does this there, races with what was there before. Returns whether it does."""
        unordered = [access for access in place.unordered(region, before) if access.writes or writes]
        if unordered:
            first = unordered[-1]
            kind = race_reports.OVERWRITTEN if not first.writes else race_reports.STALE if reads else race_reports.BOTH_WRITE
            self.report(kind, first.launch, Side.of(launch), launch.line)
        return bool(unordered)

    def _overwritten(self, launch: Launch, use: Use, unordered: list[Access]) -> list[tuple[Access, Use]]:
        """The reads that see what `launch` writes there, which it may do before or after them."""
        reads = [access for access in unordered if not access.writes]
        if reads:
            self.report(race_reports.OVERWRITTEN, reads[-1].launch, Side.of(launch), launch.line)
        elif unordered:
            self.report(race_reports.BOTH_WRITE, unordered[-1].launch, Side.of(launch), launch.line)
        return [(access, use) for access in reads]

    def _stale(self, use: Use, missed: list[Access]) -> torch.Tensor:
        """What stands in for a tensor that is read too early. One that is written too gets the old values itself: a write is lost."""
        with _DisableTorchDispatch():
            # A collective that has not begun has written nothing yet.
            old = as_before(use.tensor, [access for access in missed if not access.shift and access.launch.count < inf])
            if use.writes:
                use.tensor.detach().copy_(old)
                return use.tensor
            if type(use.tensor) is not VirtualTensor:
                return old
            allocate_on(use.tensor._gpu, old.untyped_storage(), allocated=False)
            return wrap(old, use.tensor._gpu)

    def _keep(self, launch: Launch, call: Call) -> None:
        """Remember the arguments as they are, and forget those of the oldest launches beyond the host's means."""

        def kept(x: torch.Tensor) -> torch.Tensor:
            copy = snapshot(x)
            if (place := self.place_of(x)) is not None:
                launch.places[id(copy)] = place
            launch.nbytes += copy.untyped_storage().nbytes()
            return copy

        launch.call = Call(call.op, mapped(call.args, kept), mapped(call.kwargs, kept))
        self._in_flight.append(launch)
        self._held += launch.nbytes
        while self._held > SHARE * self.machine.host_budget:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._in_flight.popleft()
        self._held -= oldest.nbytes
        oldest.forget()

    def _note(self, launch: Launch, use: Use, before: torch.Tensor | None) -> None:
        """Write down what the launch has touched, and on whose work it stands."""
        if use.reads and (write := use.place.writer(use.region)) is not None and write.launch.call is not None:
            write.launch.dependents.append(launch)
        access = Access(launch, use.place, use.region, use.writes, before)
        if before is not None:
            self.replacing.add(access)
        use.place.add(access)

    def _note_outputs(self, launch: Launch, call: Call, result: Any) -> None:
        for x in outputs_of(call, result):
            if (place := self.place_of(x)) is not None:
                arrival = next((a for a in reversed(self._arrivals) if a.target is x), None)
                launch.outputs.append((arrival or reference(x), place, Region.of(x)))

    def _run_again(self, access: Access, use: Use) -> None:
        """A launch that has read this memory reads it after a write that nothing ordered after it."""
        launch, origin = access.launch, access.origin()
        if launch.call is None or origin is None or not use.known:
            return
        kept = next((x for x in launch.call.tensors() if launch.places.get(id(x)) is origin), None)
        if kept is not None:
            with _DisableTorchDispatch():
                content = overlaid(whole(kept), whole(use.tensor), -access.shift)
            launch.run_again({origin: content})

    def report(self, kind: str, first: Launch, second: Side, line: UserLine | None) -> None:
        race = Race(kind, Side.of(first), second)
        for watching in self._watching:
            watching.note(race)
        if self.races.note(race):
            race.warn(line)

    @contextmanager
    def watched(self) -> Iterator[list[Race]]:
        """The races of the block, those among them too that were found before it."""
        found = Races()
        self._watching.append(found)
        try:
            yield found
        finally:
            self._watching = [watching for watching in self._watching if watching is not found]

    # Memory that comes and goes

    def _uses(self, call: Call) -> list[Use]:
        """What the operator does with each of the tensors among its arguments that others may touch."""
        return [use for x, reads, writes in call.roles() if (use := self._use(x, reads, writes)) is not None]

    def _use(self, tensor: torch.Tensor, reads: bool, writes: bool) -> Use | None:
        place = self.place_of(tensor)
        if place is None:
            return None
        known = type(tensor) is not VirtualTensor or tensor.untyped_storage().memory.kept is not None
        return Use(tensor, reads, writes, place, Region.of(tensor), known)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """The place of a device tensor's memory, or of page-locked memory that has been copied from or to; None for other tensors."""
        if not has_region(tensor):
            return None
        if type(tensor) is not VirtualTensor:
            return getattr(tensor.untyped_storage(), "place", None)
        memory = tensor.untyped_storage().memory
        if memory.touched is None:
            memory.touched = Place()
            self._inherit(memory)
        return memory.touched

    def _inherit(self, memory: Memory) -> None:
        """What was done with this memory before this detector looked at it, and what is still done with the bytes that it is made of."""
        if memory.written and memory.writer is not None:
            launch = Launch(memory.writer, "earlier work", 0.0, None)
            launch.count = memory.written
            nbytes = memory.block.requested if memory.block is not None else 0
            memory.touched.add(Access(launch, memory.touched, Region(0, (nbytes,), (1,), torch.uint8), True))
        if memory.block is None or not self._freed:
            return
        address, size = memory.block.address, memory.block.size
        for freed in self._freed.get(memory.gpu.index, ()):
            if freed.address < address + size and address < freed.address + freed.size:
                memory.touched.accesses += [access.shifted(freed.address - address) for access in freed.place.accesses]
        self._freed[memory.gpu.index] = [freed for freed in self._freed.get(memory.gpu.index, ()) if self._still_used(freed)]

    def freed(self, gpu: Gpu, block: Block, place: Place) -> None:
        """The program gives a block back: streams that the allocator does not know of may still use its bytes."""
        known = {block.stream, *(block.streams or ())}  # to the allocator
        if any(access.launch.stream.stream_id not in known for access in place.accesses):
            freed = Freed(block.address, block.size, gpu.streams[block.stream], place)
            if self._still_used(freed):
                self._freed.setdefault(gpu.index, []).append(freed)

    def _still_used(self, freed: Freed) -> bool:
        """May its stream hand the memory out again before all that was done with it is over?"""
        before = self.machine.clock.before(freed.stream)
        return any(before.get(access.launch.stream, 0) < access.launch.count for access in freed.place.accesses)

    # The host

    def mark_host(self, tensor: torch.Tensor) -> None:
        """This page-locked memory is copied from or to while the host goes on: from now on races over it are found."""
        tensor.untyped_storage().__dict__.setdefault("place", Place()).filled = True

    def to_host(self, source: torch.Tensor, target: torch.Tensor, stream: StreamTime) -> None:
        """A copy to page-locked memory has been queued on the stream: the host finds its values there once it has waited."""
        self._arrivals.append(Arrival(stream, target, snapshot(source)))

    def on_arrival(self, source: torch.Tensor, stream: StreamTime) -> torch.Tensor:
        """What a copy queued on the stream finds in memory of the host: copies into it that are done before have arrived by then."""
        storage, before = source.untyped_storage()._cdata, self.machine.clock.before(stream)
        arrived = [x for x in self._arrivals if x.target.untyped_storage()._cdata == storage and before.get(x.stream, 0) >= x.count]
        if not arrived:
            return source
        content = whole(source).clone()
        for arrival in arrived:
            at(content, Region.of(arrival.target)).copy_(arrival.value)
        return at(content, Region.of(source))

    def host_runs(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        """Run an operator of the host, which may touch page-locked memory that is being copied."""
        name = op.name
        overwritten: list[tuple[Access, Use]] = []
        for use in [] if op.returns_views else self._uses(Call(op, args, kwargs)):
            if use.reads:
                self.host_reads(use.tensor, name)
            unordered = use.place.unordered(use.region, self.machine.clock.known)
            reads = [access for access in unordered if not access.writes]
            if use.writes and unordered:
                kind, first = (race_reports.OVERWRITTEN, reads[-1]) if reads else (race_reports.BOTH_WRITE, unordered[-1])
                line = user_line()
                self.report(kind, first.launch, Side.of_host(name, line, self.machine.clock.host), line)
                overwritten += [(access, use) for access in reads]
        result = op.func(*args, **kwargs)
        for access, use in overwritten:
            self._run_again(access, use)
        return result

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """The host looks at a tensor of its own, which holds the old values while a copy into it is under way."""
        use = self._use(tensor, True, False)
        late = [access for access in use.place.unordered(use.region, self.machine.clock.known) if access.writes] if use is not None else []
        if late:
            line = user_line()
            self.report(race_reports.STALE, late[-1].launch, Side.of_host(name, line, self.machine.clock.host), line)

    def _learn(self) -> None:
        """The host has waited for something: what is known to be done cannot race any more."""
        known = self.machine.clock.known
        if self._arrivals:
            for arrival in [x for x in self._arrivals if known.get(x.stream, 0) >= x.count]:
                self._arrivals.remove(arrival)
                arrival.arrive()
        if self.host_copies:
            self.host_copies = [(stream, count) for stream, count in self.host_copies if known.get(stream, 0) < count]
        while self._in_flight and known.get(self._in_flight[0].stream, 0) >= self._in_flight[0].count:
            self._forget_oldest()
        if self.replacing:
            for access in [x for x in self.replacing if known.get(x.launch.stream, 0) >= x.launch.count]:
                access.before = None  # all that is launched from now on comes after it
                self.replacing.discard(access)
        self.collectives.look_again()


def copies_elsewhere(call: Call) -> bool:
    """Races of copies are found where they are queued (virtualgpu.ops.copies), for they have an order of their own."""
    name, device = call.op.name, call.kwargs.get("device")
    return name == "copy_" or (name == "_to_copy" and device is not None and device.type != "cpu")


def _is_elsewhere(call: Call) -> bool:
    """Is a tensor made after the model of another, on another GPU?"""
    device = call.kwargs.get("device")
    return device is not None and device.type == "cuda" and device != call.gpu.device


def is_new(tensor: torch.Tensor) -> bool:
    """Has an operator made this tensor's memory just now?"""
    return type(tensor) is VirtualTensor and has_region(tensor) and tensor.untyped_storage().memory.touched is None
