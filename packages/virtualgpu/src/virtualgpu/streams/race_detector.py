"""The detector of races: launches that use the same memory without an order between them.

The clock knows which launches are done before which (`Clock.before`). Every operator is computed
when it is launched. An operator that reads after an unordered write therefore gets the old values
instead, and an operator that read before an unordered write is computed again. A real GPU computes
such programs wrongly sometimes. A virtual GPU always does, and warns.

A program without a stream of its own cannot race, so its operators are not compared until it
creates a stream. Neither are those of a program that stays on one stream for long (`lone_stream`),
until another stream gets work. For that time only the memory that was written is known, not the
lines that wrote it and not what was read. Copies between a GPU and page-locked memory are always
compared if the host does not wait for them.
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
from virtualgpu.streams.accesses import (
    Access,
    AccessLog,
    Region,
    as_before,
    at,
    has_region,
    mapped,
    overlaid,
    snapshot,
    whole,
)
from virtualgpu.streams.collective_accesses import Collectives
from virtualgpu.streams.launches import (
    Arrival,
    Launch,
    UserLine,
    outputs_of,
    reference,
    user_line,
)
from virtualgpu.streams.lone_stream import LoneStream
from virtualgpu.streams.race_reports import Race, Races, RacingWork
from virtualgpu.tensor import VirtualTensor, allocate_on, tensors, wrap

SHARE = 0.25  # share of the host's memory for values that copies of arguments may take


class Use(NamedTuple):
    """The use of one tensor by an operator. `known` says whether the tensor has values."""

    tensor: torch.Tensor
    reads: bool
    writes: bool
    log: AccessLog
    region: Region
    known: bool


class Freed(NamedTuple):
    """Memory that was freed while a stream that the allocator does not know used it.

    `stream` is the stream that the memory belongs to.
    """

    address: int
    size: int
    stream: StreamTime
    log: AccessLog


class RaceDetector:
    """Follows the order of one machine's work and reports races.

    `races` are the races found so far, each pair of lines once. `host_copies` are the copies that
    the host has not waited for, as (stream, number of the launch on the stream).
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.races = Races()
        self.host_copies: list[tuple[StreamTime, int]] = []
        self._watching: list[Races] = []
        self._in_flight: deque[Launch] = deque()  # launches that can be computed again
        self._held = 0  # bytes that the copies of their arguments take
        self.replacing: WeakSet[Access] = WeakSet()  # writes that hold what was there before them
        self._arrivals: list[Arrival] = []
        self._freed: dict[int, list[Freed]] = {}  # by GPU index
        self.lone = LoneStream(machine)
        self.collectives = Collectives(self)
        machine.clock.call_when_learned(self._learn)

    def end(self) -> None:
        """Complete all pending copies to the host, because the machine is taken away."""
        for arrival in self._arrivals:
            arrival.arrive()
        self._arrivals.clear()

    # One operator

    def run(self, call: Call) -> Any:
        """Run an operator on device tensors.

        It reads the values that its stream's order guarantees.
        """
        op, handler = call.op, call.op.handler
        assert handler is not None
        if self.machine.clock.captures:
            capture = call.gpu.stream.capture
            if capture is not None:
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
        before = self.machine.clock.before(call.gpu.stream)
        uses = []
        if not op.model_only:  # the argument of such an operator gives only a shape
            uses = self._uses(call)
        return self._ordered(call, call.gpu.stream, before, uses, handler)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        stream: StreamTime,
        before: Known,
        do: Callable[[Call], Any],
    ) -> None:
        """Run a copy on `stream`, and report its races. `do(call)` makes the copy.

        `before` says which launches are done before the copy.
        """
        self.lone.has_work(stream)
        uses = [self._use(target, False, True), self._use(source, True, False)]
        known_uses = [use for use in uses if use is not None]
        call = Call(operator(torch.ops.aten.copy_.default), (target, source), {})
        self._ordered(call, stream, before, known_uses, do)

    def replay(
        self,
        touched: list[tuple[torch.Tensor, bool]],
        stream: StreamTime,
        do: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Run `do`, the work of a CUDA graph, on `stream`. Return the tensors with a race.

        `touched` lists the tensors that the graph uses, each with whether the graph writes it.
        """
        raced = []
        self.lone.has_work(stream)
        before = self.machine.clock.before(stream)
        launch = Launch(stream, "CUDA graph", self.machine.clock.host, user_line())
        uses = []
        for x, writes in touched:
            use = self._use(x, True, writes)
            if use is not None:
                uses.append(use)
        for use in uses:
            if self.compare(launch, use.log, use.region, use.reads, use.writes, before):
                raced.append(use.tensor)
        befores: list[torch.Tensor | None] = []  # what each write replaces, if it is known
        for use in uses:
            replaces = use.writes and use.known and use.log.filled
            befores.append(snapshot(use.tensor) if replaces else None)
        do()
        launch.count, launch.end = stream.count, stream.ready
        for use, old in zip(uses, befores, strict=True):
            self._note(launch, use, old)
        return raced

    def compare_pass(
        self,
        name: str,
        arguments: list[torch.Tensor],
        stream: StreamTime,
        do: Callable[[], Any],
    ) -> Any:
        """Run `do`, which reads the arguments and writes its results, and report its races.

        The values are those of the program's order, even if there is a race. Returns the result
        of `do`.
        """
        clock = self.machine.clock
        if stream.capture is not None:
            return do()
        self.lone.has_work(stream)
        launch = Launch(stream, name, clock.host, user_line())
        before = clock.before(stream)
        read = [use for x in arguments if (use := self._use(x, True, False)) is not None]
        for use in read:
            self.compare(launch, use.log, use.region, True, False, before)
        result = do()
        launch.count, launch.end = stream.count, stream.ready
        before = clock.before(stream)  # the pass is ordered after operators that it has called
        made = [use for x in tensors(result) if (use := self._use(x, False, True)) is not None]
        for use in made:
            self.compare(launch, use.log, use.region, False, True, before)
        for use in (*read, *made):
            self._note(launch, use, None)
        return result

    def _ordered(
        self,
        call: Call,
        stream: StreamTime,
        before: Known,
        uses: list[Use],
        do: Callable[[Call], Any],
    ) -> Any:
        """Run `do(call)`, report the races of the operator, and note its accesses.

        `before` says which launches are done before it, and `uses` lists the memory that it uses.
        """
        selected, clock = self.machine.selected, self.machine.clock
        launch = Launch(stream, call.op.name, clock.host, user_line())
        stale: dict[int, torch.Tensor] = {}
        overwritten: list[tuple[Access, Use]] = []
        for use in uses:
            unordered = use.log.unordered(use.region, before)
            if not unordered:
                continue
            missed = [access for access in unordered if access.writes]
            if use.reads and missed:
                self.report(
                    race_reports.STALE, missed[-1].launch, RacingWork.of(launch), launch.line
                )
                if use.known:
                    stale[id(use.tensor)] = self._stale(use, missed)
            if use.writes:
                overwritten += self._overwritten(launch, use, unordered)
        if stale:
            arguments = mapped((call.args, call.kwargs), lambda x: stale.get(id(x), x))
            call = Call(call.op, *arguments)
        befores: list[torch.Tensor | None] = []  # what each write replaces, if it is known
        for use in uses:
            replaces = use.writes and use.known and use.log.filled
            befores.append(snapshot(use.tensor) if replaces else None)
        # With `made_on`, C++ code writes to the host's tensors through pointers. Such writes do not
        # reach memory that was shared with a snapshot before.
        has_values = selected.made_on is None and all(use.known for use in uses)
        if has_values and all(map(has_region, call.tensors())):
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
            if not is_new(x):
                continue
            made = self._use(x, False, True)
            if made is not None:
                unordered = made.log.unordered(made.region, before)
                overwritten += self._overwritten(launch, made, unordered)
                self._note(launch, made, None)
        if launch.call is not None:
            self._note_outputs(launch, call, result)
        for access, use in overwritten:
            self._run_again(access, use)
        return result

    def compare(
        self,
        launch: Launch,
        log: AccessLog,
        region: Region,
        reads: bool,
        writes: bool,
        before: Known,
    ) -> bool:
        """Report a race of `launch` with earlier accesses that are not ordered before it.

        The launch uses `region` of the memory of `log`. `before` says which launches are done
        before it. Returns whether there is a race.
        """
        unordered = log.unordered(region, before)
        if not writes:
            unordered = [access for access in unordered if access.writes]
        if not unordered:
            return False
        first = unordered[-1]
        if not first.writes:
            kind = race_reports.OVERWRITTEN
        elif reads:
            kind = race_reports.STALE
        else:
            kind = race_reports.BOTH_WRITE
        self.report(kind, first.launch, RacingWork.of(launch), launch.line)
        return True

    def _overwritten(
        self, launch: Launch, use: Use, unordered: list[Access]
    ) -> list[tuple[Access, Use]]:
        """Report the race of a launch that writes, and return the earlier reads that race with it.

        `unordered` are the accesses without an order before it. Each read is returned with `use`.
        """
        reads = [access for access in unordered if not access.writes]
        if reads:
            kind, first = race_reports.OVERWRITTEN, reads[-1].launch
            self.report(kind, first, RacingWork.of(launch), launch.line)
        elif unordered:
            kind, first = race_reports.BOTH_WRITE, unordered[-1].launch
            self.report(kind, first, RacingWork.of(launch), launch.line)
        return [(access, use) for access in reads]

    def _stale(self, use: Use, missed: list[Access]) -> torch.Tensor:
        """Return the tensor with the values from before the writes that a launch does not wait for.

        `missed` are these writes. If the launch also writes the tensor, the tensor itself gets the
        old values, and the missed write is lost.
        """
        # Accesses to freed memory do not count, nor does a collective that has not started.
        happened = [x for x in missed if not x.shift and x.launch.count < inf]
        with _DisableTorchDispatch():
            old = as_before(use.tensor, happened)
            if use.writes:
                use.tensor.detach().copy_(old)
                return use.tensor
            if type(use.tensor) is not VirtualTensor:
                return old
            allocate_on(use.tensor._gpu, old.untyped_storage(), allocated=False)
            return wrap(old, use.tensor._gpu)

    def _keep(self, launch: Launch, call: Call) -> None:
        """Keep copies of a launch's arguments, with which it can be computed again.

        If all copies take too much memory, the oldest ones are dropped.
        """

        def kept(x: torch.Tensor) -> torch.Tensor:
            copy = snapshot(x)
            log = self.log_of(x)
            if log is not None:
                launch.logs[id(copy)] = log
            launch.nbytes += copy.untyped_storage().nbytes()
            return copy

        launch.call = Call(call.op, mapped(call.args, kept), mapped(call.kwargs, kept))
        self._in_flight.append(launch)
        self._held += launch.nbytes
        while self._held > SHARE * self.machine.host_budget:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the copies of the arguments of the oldest launch."""
        oldest = self._in_flight.popleft()
        self._held -= oldest.nbytes
        oldest.forget()

    def _note(self, launch: Launch, use: Use, before: torch.Tensor | None) -> None:
        """Add an access of a launch to the log of the memory that it uses.

        If it reads, it becomes a dependent of the launch that wrote last. `before` is a copy of
        what it overwrites, or None.
        """
        if use.reads:
            write = use.log.writer(use.region)
            if write is not None and write.launch.call is not None:
                write.launch.dependents.append(launch)
        access = Access(launch, use.log, use.region, use.writes, before)
        if before is not None:
            self.replacing.add(access)
        use.log.add(access)

    def _note_outputs(self, launch: Launch, call: Call, result: Any) -> None:
        """Store the outputs of a launch, so that it can be computed again."""
        for x in outputs_of(call, result):
            log = self.log_of(x)
            if log is None:
                continue
            target = next((a for a in reversed(self._arrivals) if a.target is x), None)
            if target is None:
                target = reference(x)
            launch.outputs.append((target, log, Region.of(x)))

    def _run_again(self, access: Access, use: Use) -> None:
        """Compute a launch again that read this memory before an unordered write.

        `access` is its read, and `use` the use of the tensor by the launch that writes.
        """
        launch, origin = access.launch, access.origin()
        if launch.call is None or origin is None or not use.known:
            return
        kept = None
        for x in launch.call.tensors():
            if launch.logs.get(id(x)) is origin:
                kept = x
                break
        if kept is not None:
            with _DisableTorchDispatch():
                content = overlaid(whole(kept), whole(use.tensor), -access.shift)
            launch.run_again({origin: content})

    def report(self, kind: str, first: Launch, second: RacingWork, line: UserLine | None) -> None:
        """Store a race, and warn at `line` unless the same two lines raced before.

        `kind` is the kind of race (see `Race`).
        """
        race = Race(kind, RacingWork.of(first), second)
        for watching in self._watching:
            watching.note(race)
        if self.races.note(race):
            race.warn(line)

    @contextmanager
    def watched(self) -> Iterator[list[Race]]:
        """Yield a list that collects the races of a `with` block.

        It includes races of lines that raced before.
        """
        found = Races()
        self._watching.append(found)
        try:
            yield found
        finally:
            self._watching = [other for other in self._watching if other is not found]

    # Memory that is allocated and freed

    def _uses(self, call: Call) -> list[Use]:
        """Return the uses of a call's tensors that the detector compares.

        Tensors that no other stream can use are left out.
        """
        uses = []
        for x, reads, writes in call.roles():
            use = self._use(x, reads, writes)
            if use is not None:
                uses.append(use)
        return uses

    def _use(self, tensor: torch.Tensor, reads: bool, writes: bool) -> Use | None:
        """Return the use of a tensor by an operator, or None if its memory has no access log."""
        log = self.log_of(tensor)
        if log is None:
            return None
        known = True
        if type(tensor) is VirtualTensor:
            known = tensor.untyped_storage().memory.kept is not None
        return Use(tensor, reads, writes, log, Region.of(tensor), known)

    def log_of(self, tensor: torch.Tensor) -> AccessLog | None:
        """Return the access log of a tensor's memory, or None.

        Device memory has a log, and so does page-locked memory that was copied to or from.
        """
        if not has_region(tensor):
            return None
        if type(tensor) is not VirtualTensor:
            return getattr(tensor.untyped_storage(), "access_log", None)
        memory = tensor.untyped_storage().memory
        if memory.access_log is None:
            memory.access_log = AccessLog()
            self._inherit(memory)
        return memory.access_log

    def _inherit(self, memory: Memory) -> None:
        """Add earlier accesses to the access log of a memory block that gets one.

        These are writes from the time when operators were not compared, and accesses to freed
        memory whose bytes are reused.
        """
        if memory.written and memory.writer is not None:
            launch = Launch(memory.writer, "earlier work", 0.0, None)
            launch.count = memory.written
            nbytes = 0
            if memory.block is not None:
                nbytes = memory.block.requested
            region = Region(0, (nbytes,), (1,), torch.uint8)
            log = memory.access_log
            log.add(Access(launch, log, region, True))
        if memory.block is None or not self._freed:
            return
        address, size = memory.block.address, memory.block.size
        all_freed = self._freed.get(memory.gpu.index, [])
        for freed in all_freed:
            if freed.address < address + size and address < freed.address + freed.size:
                shift = freed.address - address
                moved = [access.shifted(shift) for access in freed.log.accesses]
                memory.access_log.accesses += moved
        self._freed[memory.gpu.index] = [freed for freed in all_freed if self._still_used(freed)]

    def freed(self, gpu: Gpu, block: Block, log: AccessLog) -> None:
        """Note a freed block that streams unknown to the allocator may still use."""
        known = {block.stream, *(block.streams or ())}  # to the allocator
        if any(access.launch.stream.stream_id not in known for access in log.accesses):
            freed = Freed(block.address, block.size, gpu.streams[block.stream], log)
            if self._still_used(freed):
                self._freed.setdefault(gpu.index, []).append(freed)

    def _still_used(self, freed: Freed) -> bool:
        """Return whether a freed block may be reused before all accesses to it are done.

        The stream to which the memory belongs may reuse it at once.
        """
        before = self.machine.clock.before(freed.stream)
        for access in freed.log.accesses:
            if before.get(access.launch.stream, 0) < access.launch.count:
                return True
        return False

    # The host

    def mark_host(self, tensor: torch.Tensor) -> None:
        """Find races of this page-locked tensor from now on.

        It is the source or the target of a copy for which the host does not wait.
        """
        attributes = tensor.untyped_storage().__dict__
        attributes.setdefault("access_log", AccessLog()).filled = True

    def to_host(self, source: torch.Tensor, target: torch.Tensor, stream: StreamTime) -> None:
        """Note a copy to the page-locked tensor `target` on `stream`.

        The values arrive when the host has waited for it.
        """
        self._arrivals.append(Arrival(stream, target, snapshot(source)))

    def on_arrival(self, source: torch.Tensor, stream: StreamTime) -> torch.Tensor:
        """Return the values that a copy on `stream` reads from the host's memory.

        Earlier copies into this memory have arrived if they are ordered before this one.
        """
        storage = source.untyped_storage()._cdata
        before = self.machine.clock.before(stream)
        arrived = []
        for arrival in self._arrivals:
            same_storage = arrival.target.untyped_storage()._cdata == storage
            if same_storage and before.get(arrival.stream, 0) >= arrival.count:
                arrived.append(arrival)
        if not arrived:
            return source
        content = whole(source).clone()
        for arrival in arrived:
            at(content, Region.of(arrival.target)).copy_(arrival.value)
        return at(content, Region.of(source))

    def host_runs(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        """Run a CPU operator, which may use page-locked memory that is being copied."""
        name, clock = op.name, self.machine.clock
        overwritten: list[tuple[Access, Use]] = []
        uses = []
        if not op.returns_views:
            uses = self._uses(Call(op, args, kwargs))
        for use in uses:
            if use.reads:
                self.host_reads(use.tensor, name)
            unordered = use.log.unordered(use.region, clock.known)
            if use.writes and unordered:
                reads = [access for access in unordered if not access.writes]
                if reads:
                    kind, first = race_reports.OVERWRITTEN, reads[-1]
                else:
                    kind, first = race_reports.BOTH_WRITE, unordered[-1]
                line = user_line()
                second = RacingWork.of_host(name, line, clock.host)
                self.report(kind, first.launch, second, line)
                overwritten += [(access, use) for access in reads]
        result = op.func(*args, **kwargs)
        for access, use in overwritten:
            self._run_again(access, use)
        return result

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """Report a race if the host reads one of its tensors while a copy into it is pending."""
        use = self._use(tensor, True, False)
        if use is None:
            return
        clock = self.machine.clock
        late = [access for access in use.log.unordered(use.region, clock.known) if access.writes]
        if late:
            line = user_line()
            second = RacingWork.of_host(name, line, clock.host)
            self.report(race_reports.STALE, late[-1].launch, second, line)

    def _learn(self) -> None:
        """Forget launches that are now known to be done.

        It is called after the host has waited for something.
        """
        known = self.machine.clock.known
        if self._arrivals:
            for arrival in [x for x in self._arrivals if known.get(x.stream, 0) >= x.count]:
                self._arrivals.remove(arrival)
                arrival.arrive()
        if self.host_copies:
            self.host_copies = [
                (stream, count)
                for stream, count in self.host_copies
                if known.get(stream, 0) < count
            ]
        while self._in_flight:
            oldest = self._in_flight[0]
            if known.get(oldest.stream, 0) < oldest.count:
                break
            self._forget_oldest()
        if self.replacing:
            for access in [
                x for x in self.replacing if known.get(x.launch.stream, 0) >= x.launch.count
            ]:
                access.before = None  # all later launches are ordered after it
                self.replacing.discard(access)
        self.collectives.look_again()


def copies_elsewhere(call: Call) -> bool:
    """Return whether the races of this operator, a copy, are found where the copy is queued.

    This is in `virtualgpu.ops.copies`. Such copies have an order of their own.
    """
    name, device = call.op.name, call.kwargs.get("device")
    return name == "copy_" or (name == "_to_copy" and device is not None and device.type != "cpu")


def _is_elsewhere(call: Call) -> bool:
    """Return whether the call makes a tensor like another tensor, but on another GPU."""
    device = call.kwargs.get("device")
    return device is not None and device.type == "cuda" and device != call.gpu.device


def is_new(tensor: torch.Tensor) -> bool:
    """Return whether an operator has just made this tensor's memory."""
    return (
        type(tensor) is VirtualTensor
        and has_region(tensor)
        and tensor.untyped_storage().memory.access_log is None
    )
