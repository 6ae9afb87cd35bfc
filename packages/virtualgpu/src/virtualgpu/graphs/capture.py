"""What one capture records: the operators with the memory that they work on, and the order of their kernels on streams.

A real GPU computes nothing while it records; so what an operator writes is put back once it has told the shapes of its results. These lie
in the capture's private pool. The values of a private pool lie in its segments, by address, as on a GPU: a graph finds them there though
the tensor is gone, and two graphs that share the pool see what the other one leaves.
"""

import mmap
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import errors
from virtualgpu.allocator.pool import NO_POOL
from virtualgpu.clock.machine_clock import EventTime, Known, Span, StreamTime
from virtualgpu.hardware import OPERATIONS, Gpu
from virtualgpu.memory import Memory
from virtualgpu.ops.call import Call, Operator
from virtualgpu.ops.dispatch import RANKS
from virtualgpu.ops.faults import survive
from virtualgpu.streams.accesses import Region, has_region, mapped
from virtualgpu.streams.launches import user_line
from virtualgpu.streams.race_detector import copies_elsewhere
from virtualgpu.tensor import VirtualTensor, empty_without_values, hang, memory_of, plain_set, tensors

_make_subclass = torch.Tensor._make_subclass
of_thread = threading.local()  # is it `replaying` a graph, and which operations use TF32 there?
_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_GONE = (
    "A CUDA graph works on a tensor of size {} that is gone since the capture: a GPU works on whatever lies there now. "
    "Keep what a graph reads and writes as long as you replay it."
)


class ReplayingGpu(Gpu):
    """A GPU on which a graph was captured: operators of a replay ask for no memory and no time, for the graph has them."""

    def allocate(self, nbytes: int) -> Any:
        return None if _is_replaying() else super().allocate(nbytes)

    def launch(self, *work: Any, **more: Any) -> None:
        if not _is_replaying():
            super().launch(*work, **more)

    def copy(self, *work: Any, **more: Any) -> None:
        if not _is_replaying():
            super().copy(*work, **more)

    def multiplies_in_tf32(self, operation: str) -> bool:
        """Return whether float32 products use TF32. A graph keeps the kernels of its capture."""
        if _is_replaying():
            return operation in of_thread.tf32
        return super().multiplies_in_tf32(operation)


def _is_replaying() -> bool:
    return getattr(of_thread, "replaying", False)


class Outer:
    """Stands among recorded arguments for memory that is not the graph's own: a replay works on what lies there then."""

    def __init__(self, x: torch.Tensor) -> None:
        storage: Any = x.untyped_storage()
        self.storage = weakref.ref(storage)  # the program has to keep it alive
        self.region = Region.of(x)
        self.bits = x.is_conj(), x.is_neg()
        self.gpu: Gpu = storage.memory.gpu
        self.gone: Any = None  # what is there in its place, once the program has let it go

    def tensor(self) -> VirtualTensor:
        storage = self.storage()
        if storage is None:
            if self.gone is None:
                nbytes = self.region.bytes()[1]
                if nbytes:
                    filename, line, _ = user_line() or ("<unknown>", 0, "")
                    warnings.warn_explicit(_GONE.format(list(self.region.size)), UserWarning, filename, line)
                with _DisableTorchDispatch():
                    self.gone = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
                hang(Memory(self.gpu, None, 0), self.gone)
            storage = self.gone
        return shown(storage, self.region, self.gpu, self.bits)


class Node(NamedTuple):
    """An operator of a graph.

    `draws` are generators with the state from which each drew. `tf32` are the operations that used
    TF32 during the capture.
    """

    op: Operator
    args: tuple
    kwargs: dict[str, Any]
    results: list[torch.Tensor]
    draws: list[tuple[Any, Any]]
    tf32: tuple[str, ...]


class Touched(NamedTuple):
    """A storage that the program can reach, and that the graph works on."""

    storage: Callable[[], Any]
    writes: bool


class Capture:
    """A capture of the calling thread's current stream of a GPU, and of those that come to wait for it.

    `work` is what streams do, in order: a method of `Clock`, the stream, and what else the method takes.
    """

    def __init__(self, gpu: Gpu, mode: str) -> None:
        self.gpu = gpu
        self.mode = mode
        self.thread = threading.get_ident()
        self.origin = gpu.stream
        self.work: list[tuple[str, StreamTime, tuple]] = []
        self.nodes: list[Node] = []
        self.touched: dict[int, Touched] = {}
        self.states: dict[Any, int] = {}
        self.invalid = False  # something was done that no capture admits
        self._known: dict[StreamTime, Known] = {}  # by stream: how many pieces of work of each come before what comes next
        self._draws: list[tuple[Any, Any]] = []

    def begin(self, states: dict[Any, int]) -> None:
        """Capture. `states` are those of generators that may draw, and where they stand."""
        self.states = states
        self.join(self.origin, {})

    def join(self, stream: StreamTime, known: Known) -> None:
        """From now on what is queued on the stream is recorded."""
        self._known[stream] = {stream: 0, **known}
        stream.capture, stream.learned = self, -1
        self.gpu.machine.gpus[stream.device_index].__class__ = ReplayingGpu

    def end(self) -> None:
        """Raises CUDA's error if what was recorded is no graph."""
        for stream in self._known:
            stream.capture = None
        for state, offset in self.states.items():
            state.offset = offset
        if self.invalid:
            raise self._previous_error()
        last = self._known[self.origin]
        if any(last.get(stream, 0) < known[stream] for stream, known in self._known.items()):
            raise errors.stream_capture("capturing stream has unjoined work", "Unjoined")

    # What the clock hands over

    def _add(self, method: str, stream: StreamTime, *rest: Any) -> None:
        if self.invalid:
            raise self._previous_error()
        self._known[stream][stream] += 1
        self.work.append((method, stream, rest))

    def launch(self, stream: StreamTime, seconds: float, name: str, share: float) -> Span:
        self._add("launch", stream, seconds, 0.0, name, share)
        return Span(stream.device_index, stream.stream_id, "kernel", name, self.gpu.machine.clock.host, 0.0)

    def copy(self, stream: StreamTime, engine: str, seconds: float, blocking: bool, name: str) -> Span:
        if blocking:
            raise self._not_permitted()
        self._add("copy", stream, engine, seconds, 0.0, False, name)
        return Span(stream.device_index, stream.stream_id, engine, name, self.gpu.machine.clock.host, 0.0)

    def record(self, stream: StreamTime) -> EventTime:
        event = EventTime(stream, 0.0, dict(self._known[stream]), self)
        self.work.append(("record", stream, (event,)))
        return event

    def happens(self, event: EventTime, of_program: Any) -> None:
        """At each replay the program's own event happens with this one, which was recorded last."""
        self.work[-1] = ("record", event.stream, (event, of_program))

    def wait(self, stream: StreamTime, event: EventTime) -> None:
        if stream.capture is None and event.capture in self.gpu.machine.clock.captures:
            self.join(stream, event.known)
        elif stream.capture is not event.capture:
            if stream.capture is None:
                return  # the capture is over: the event happens in replays alone
            self.invalid = True
            raise errors.stream_capture("dependency created on uncaptured work in another stream", "Isolation")
        known = self._known[stream]
        known.update({other: max(count, known.get(other, 0)) for other, count in event.known.items()})
        self.work.append(("wait", stream, (event,)))

    def check_wait(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        if isinstance(awaited, EventTime) and awaited.capture is self:
            self.invalid = True
            raise errors.stream_capture("operation not permitted on an event last recorded in a capturing stream", "", "CapturedEvent")
        heeds = self.mode == "global" or (self.mode == "thread_local" and threading.get_ident() == self.thread)
        if awaited in self._known or awaited == self.gpu.index or (asks and heeds):
            raise self._not_permitted()

    def _not_permitted(self) -> Exception:
        self.invalid = True
        return errors.stream_capture("operation not permitted when stream is capturing", "Unsupported")

    def _previous_error(self) -> Exception:
        return errors.stream_capture("operation failed due to a previous error during capture", "Invalidated")

    # Operators

    def run(self, call: Call) -> Any:
        """Record an operator on device tensors, which a captured stream is to run."""
        op, handler = call.op, call.op.handler
        assert handler is not None
        if op.func.namespace in RANKS:
            raise errors.unsupported("a collective in a CUDA graph")
        if self.gpu.machine.selected.in_operator or not op.touches_values or copies_elsewhere(call):
            return handler(call)
        return self.note(call, handler)

    def note(self, call: Call, do: Callable[[Call], Any]) -> Any:
        """Let `do` make the results, without values, and record the call."""
        selected, op = self.gpu.machine.selected, call.op
        args, kwargs = mapped((call.args, call.kwargs), self.argument)
        written = [x for x in call.written() if has_region(x)]
        for x in written:
            self._touch(x, True)
        before = [(x, memory_of(x).kept if type(x) is VirtualTensor else 0, _copy(x)) for x in written]
        self._draws, selected.in_operator = [], True
        try:
            result = do(call)
        except (IndexError, RuntimeError) as error:
            result = survive(call, error)
        finally:
            selected.in_operator = False
            for x, kept, value in before:
                _put_back(x, kept, value)
        result = homed(result)
        if not (op.model_only and "empty" in op.name):
            results = [self.argument(x, True) for x in tensors(result)]
            tf32 = tuple(filter(self.gpu.multiplies_in_tf32, OPERATIONS))
            self.nodes.append(Node(op, args, kwargs, results, self._draws, tf32))
        return result

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """Memory without values, which the program has made."""
        return x if self.gpu.machine.selected.in_operator else homed(x)

    def draw(self, generator: Any) -> None:
        """The operator that is being recorded draws from a generator."""
        if generator.state not in self.states:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        self._draws.append((generator, generator.state))

    def _touch(self, x: torch.Tensor, writes: bool) -> None:
        if type(x) is VirtualTensor and has_region(x):
            storage = x.untyped_storage()
            before = self.touched.get(storage._cdata)
            writes = writes or (before is not None and before.storage() is not None and before.writes)
            self.touched[storage._cdata] = Touched(weakref.ref(storage), writes)

    def argument(self, x: torch.Tensor, writes: bool = False) -> Any:
        """What stands for a tensor in the graph."""
        if type(x) is not VirtualTensor:
            return x if x.dim() else x.clone()  # numbers are taken as they are now, page-locked memory as it will be
        if not has_region(x):
            return x
        self._touch(x, writes)
        memory = memory_of(x)
        if memory.kept is None:
            return empty_without_values(x._gpu, x.size(), x.stride(), x.dtype, allocated=False)
        if not _is_home(x):
            return Outer(x)
        base = _at_home(memory, x.untyped_storage().nbytes())
        hang(Memory(x._gpu, None, 0), base)
        return shown(base, Region.of(x), x._gpu, (x.is_conj(), x.is_neg()))


def homed(result: Any) -> Any:
    """What an operator returns, with its values at home."""
    homes: dict[int, Any] = {}
    return mapped(result, lambda x: _home(x, homes))


def _home(x: torch.Tensor, homes: dict[int, Any]) -> torch.Tensor:
    """The same tensor with its values where they lie on a GPU: in the segment of its private pool. `homes` are by old storage."""
    if type(x) is not VirtualTensor or not has_region(x) or _is_home(x):
        return x
    storage = x.untyped_storage()
    memory = storage.memory
    if memory.kept is None or memory.block is None or memory.block.segment.free_blocks.pool_id == NO_POOL:
        return x
    base = homes.get(storage._cdata)
    if base is None:
        base = homes[storage._cdata] = _at_home(memory, storage.nbytes())
        hang(memory, base)
    return shown(base, Region.of(x), x._gpu, (x.is_conj(), x.is_neg()))


def _is_home(x: torch.Tensor) -> bool:
    return "at_home" in x.untyped_storage().__dict__


def _at_home(memory: Memory, nbytes: int) -> Any:
    """A storage over bytes of a private pool's segment."""
    block = memory.block
    assert block is not None
    segment = block.segment
    if segment.content is None:  # pages that nobody touches take no memory of the host
        segment.content = mmap.mmap(-1, segment.size, _PAGES)
    with _DisableTorchDispatch():
        there = torch.frombuffer(segment.content, dtype=torch.uint8, count=nbytes, offset=block.address - segment.address)
        storage = there.untyped_storage()
    storage.__dict__["at_home"] = True
    return storage


def shown(storage: Any, region: Region, gpu: Gpu, bits: tuple[bool, bool] = (False, False)) -> VirtualTensor:
    """The tensor that shows a region of a storage; `bits` say whether as its conjugate, and as its negative."""
    with _DisableTorchDispatch():
        plain = plain_set(torch.empty(0, dtype=region.dtype, device="cpu"), storage, *region[:3])
        plain = torch._conj(plain) if bits[0] else plain
        plain = torch._neg_view(plain) if bits[1] else plain
        tensor = _make_subclass(VirtualTensor, plain)
    tensor._gpu = gpu
    return tensor


def _copy(x: torch.Tensor) -> torch.Tensor | None:
    with _DisableTorchDispatch():
        return None if type(x) is VirtualTensor and memory_of(x).kept is None else x.detach().clone()


def _put_back(x: torch.Tensor, kept: int | None, value: torch.Tensor | None) -> None:
    """Undo what an operator has written."""
    if value is None:
        return
    if type(x) is VirtualTensor and (memory := memory_of(x)).kept is None:
        memory.remember(kept)
    with _DisableTorchDispatch(), torch.inference_mode(x.is_inference()):
        x.detach().copy_(value)
