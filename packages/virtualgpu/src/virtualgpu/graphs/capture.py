"""The capture of a CUDA graph: operators with their memory, and the order of kernels on streams.

A real GPU computes nothing during a capture. An operator's writes are therefore undone when the
shapes of its results are known. The results are in the capture's private pool. The values of a
private pool are in its segments, by address, as on a GPU. A graph finds them there even if the
tensor is gone, and two graphs that share the pool see each other's values.
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
from virtualgpu.tensor import (
    VirtualTensor,
    empty_without_values,
    hang,
    memory_of,
    plain_set,
    tensors,
)

_make_subclass = torch.Tensor._make_subclass
of_thread = threading.local()  # `replaying` a graph or not, and the operations that use TF32 there
_PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_GONE = (
    "A CUDA graph works on a tensor of size {} that was freed after the capture. A GPU works on "
    "whatever is there now. Keep the tensors that a graph reads and writes while you replay it."
)


class ReplayingGpu(Gpu):
    """A GPU that has captured a graph. It does nothing while a graph is replayed.

    The operators of a replay take no memory and no time, because the graph has both.
    """

    def allocate(self, nbytes: int) -> Any:
        """Return a memory block of `nbytes` bytes, or None during a replay."""
        if _is_replaying():
            return None
        return super().allocate(nbytes)

    def launch(self, *work: Any, **more: Any) -> None:
        """Queue a kernel as `Gpu.launch` does, except during a replay."""
        if not _is_replaying():
            super().launch(*work, **more)

    def copy(self, *work: Any, **more: Any) -> None:
        """Queue a copy as `Gpu.copy` does, except during a replay."""
        if not _is_replaying():
            super().copy(*work, **more)

    def multiplies_in_tf32(self, operation: str) -> bool:
        """Return whether float32 products of this operation use TF32.

        During a replay, they do if they did in the capture.
        """
        if _is_replaying():
            return operation in of_thread.tf32
        return super().multiplies_in_tf32(operation)


def _is_replaying() -> bool:
    """Return whether the calling thread is replaying a graph."""
    return getattr(of_thread, "replaying", False)


class Outer:
    """Placeholder, in a recorded operator, for memory that does not belong to the graph.

    A replay uses the contents that the memory has at that time.
    """

    def __init__(self, x: torch.Tensor) -> None:
        storage: Any = x.untyped_storage()
        self.storage = weakref.ref(storage)  # the program has to keep it alive
        self.region = Region.of(x)
        self.bits = x.is_conj(), x.is_neg()
        self.gpu: Gpu = storage.memory.gpu
        self.gone: Any = None  # a replacement for memory that the program has freed

    def tensor(self) -> VirtualTensor:
        """Return a tensor of this memory for a replay.

        If the program has freed the memory, warn and return zeros.
        """
        storage = self.storage()
        if storage is None:
            if self.gone is None:
                nbytes = self.region.bytes()[1]
                if nbytes:
                    filename, line, _ = user_line() or ("<unknown>", 0, "")
                    text = _GONE.format(list(self.region.size))
                    warnings.warn_explicit(text, UserWarning, filename, line)
                with _DisableTorchDispatch():
                    self.gone = torch.zeros(
                        nbytes, dtype=torch.uint8, device="cpu"
                    ).untyped_storage()
                hang(Memory(self.gpu, None, 0), self.gone)
            storage = self.gone
        return shown(storage, self.region, self.gpu, self.bits)


class Node(NamedTuple):
    """An operator of a graph.

    `draws` are generators, each with the state from which it drew. `tf32` are the operations that
    used TF32 during the capture.
    """

    op: Operator
    args: tuple
    kwargs: dict[str, Any]
    results: list[torch.Tensor]
    draws: list[tuple[Any, Any]]
    tf32: tuple[str, ...]


class Touched(NamedTuple):
    """A storage that the graph reads or writes and that the program can still reach."""

    storage: Callable[[], Any]
    writes: bool


class Capture:
    """A capture of the calling thread's current stream of a GPU, and of streams that wait for it.

    `work` lists what the streams do, in order: a method of `Clock`, the stream, and the method's
    other arguments.
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
        self.invalid = False  # whether something happened that a capture forbids
        # For each stream, how many launches of every stream precede its next launch.
        self._known: dict[StreamTime, Known] = {}
        self._draws: list[tuple[Any, Any]] = []

    def begin(self, states: dict[Any, int]) -> None:
        """Start the capture.

        `states` has the generator states from which the capture may draw, each with its offset.
        """
        self.states = states
        self.join(self.origin, {})

    def join(self, stream: StreamTime, known: Known) -> None:
        """Record the work of `stream` from now on, after the launches in `known`."""
        self._known[stream] = {stream: 0, **known}
        stream.capture, stream.learned = self, -1
        self.gpu.machine.gpus[stream.device_index].__class__ = ReplayingGpu

    def end(self) -> None:
        """End the capture. Raises CUDA's error if the recorded work is not a graph."""
        for stream in self._known:
            stream.capture = None
        for state, offset in self.states.items():
            state.offset = offset
        if self.invalid:
            raise self._previous_error()
        last = self._known[self.origin]
        for stream, known in self._known.items():
            if last.get(stream, 0) < known[stream]:
                raise errors.stream_capture("capturing stream has unjoined work", "Unjoined")

    # The clock calls these methods instead of doing the work itself

    def _add(self, method: str, stream: StreamTime, *rest: Any) -> None:
        """Record a launch on `stream`: a method of `Clock` and the method's other arguments.

        Raises CUDA's error if the capture is invalid.
        """
        if self.invalid:
            raise self._previous_error()
        self._known[stream][stream] += 1
        self.work.append((method, stream, rest))

    def launch(self, stream: StreamTime, seconds: float, name: str, share: float) -> Span:
        """Record a kernel on `stream`."""
        self._add("launch", stream, seconds, 0.0, name, share)
        now = self.gpu.machine.clock.host
        return Span(stream.device_index, stream.stream_id, "kernel", name, now, 0.0)

    def copy(
        self, stream: StreamTime, engine: str, seconds: float, blocking: bool, name: str
    ) -> Span:
        """Record a copy on `stream`. Raises CUDA's error for a blocking copy."""
        if blocking:
            raise self._not_permitted()
        self._add("copy", stream, engine, seconds, 0.0, False, name)
        now = self.gpu.machine.clock.host
        return Span(stream.device_index, stream.stream_id, engine, name, now, 0.0)

    def record(self, stream: StreamTime) -> EventTime:
        """Record an event on `stream`, and return it."""
        event = EventTime(stream, 0.0, dict(self._known[stream]), self)
        self.work.append(("record", stream, (event,)))
        return event

    def happens(self, event: EventTime, of_program: Any) -> None:
        """Make an event of the program happen in each replay, where `event` was recorded last.

        `of_program` is the program's event object.
        """
        self.work[-1] = ("record", event.stream, (event, of_program))

    def wait(self, stream: StreamTime, event: EventTime) -> None:
        """Record that a stream waits for an event. A stream outside the capture joins it.

        Raises CUDA's error for an event outside the capture.
        """
        if stream.capture is None and event.capture in self.gpu.machine.clock.captures:
            self.join(stream, event.known)
        elif stream.capture is not event.capture:
            if stream.capture is None:
                return  # the capture has ended, so the event happens only in replays
            self.invalid = True
            raise errors.stream_capture(
                "dependency created on uncaptured work in another stream", "Isolation"
            )
        known = self._known[stream]
        for other, count in event.known.items():
            known[other] = max(count, known.get(other, 0))
        self.work.append(("wait", stream, (event,)))

    def check_wait(self, awaited: StreamTime | EventTime | int, asks: bool = False) -> None:
        """Raise CUDA's error if this capture forbids waiting for a stream, event or device.

        With `asks`, the program only asks whether the work of `awaited` is done.
        """
        if isinstance(awaited, EventTime) and awaited.capture is self:
            self.invalid = True
            raise errors.stream_capture(
                "operation not permitted on an event last recorded in a capturing stream",
                "",
                "CapturedEvent",
            )
        forbids_queries = self.mode == "global"
        if self.mode == "thread_local":
            forbids_queries = threading.get_ident() == self.thread
        is_captured = awaited in self._known or awaited == self.gpu.index
        if is_captured or (asks and forbids_queries):
            raise self._not_permitted()

    def _not_permitted(self) -> Exception:
        """Mark the capture as invalid, and return CUDA's error for a forbidden operation."""
        self.invalid = True
        return errors.stream_capture(
            "operation not permitted when stream is capturing", "Unsupported"
        )

    def _previous_error(self) -> Exception:
        """Return CUDA's error for recording more work after a forbidden operation."""
        return errors.stream_capture(
            "operation failed due to a previous error during capture", "Invalidated"
        )

    # Operators

    def run(self, call: Call) -> Any:
        """Record an operator on device tensors, and return its results without values.

        Raises NotImplementedError for collectives.
        """
        op, handler = call.op, call.op.handler
        assert handler is not None
        if op.func.namespace in RANKS:
            raise errors.unsupported("a collective in a CUDA graph")
        if self.gpu.machine.selected.in_operator or not op.touches_values or copies_elsewhere(call):
            return handler(call)
        return self.note(call, handler)

    def note(self, call: Call, do: Callable[[Call], Any]) -> Any:
        """Record a call as a node of the graph, and return its results.

        `do(call)` computes the results. What it writes is undone, because a GPU computes nothing
        during a capture.
        """
        selected, op = self.gpu.machine.selected, call.op
        args, kwargs = mapped((call.args, call.kwargs), self.argument)
        written = [x for x in call.written() if has_region(x)]
        for x in written:
            self._touch(x, True)
        before = []
        for x in written:
            kept = memory_of(x).kept if type(x) is VirtualTensor else 0
            before.append((x, kept, _copy(x)))
        self._draws = []
        selected.in_operator = True
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
        """Move a new tensor of the program to the private pool, and return it."""
        if self.gpu.machine.selected.in_operator:
            return x
        return homed(x)

    def draw(self, generator: Any) -> None:
        """Note that the operator being recorded draws from `generator`.

        Raises RuntimeError for a generator that is not registered.
        """
        if generator.state not in self.states:
            raise RuntimeError(
                "Attempt to increase offset for a CUDA generator not in capture mode."
            )
        self._draws.append((generator, generator.state))

    def _touch(self, x: torch.Tensor, writes: bool) -> None:
        """Note that the graph uses the storage of `x`. `writes` says whether it writes to it."""
        if type(x) is VirtualTensor and has_region(x):
            storage = x.untyped_storage()
            before = self.touched.get(storage._cdata)
            if before is not None and before.storage() is not None and before.writes:
                writes = True
            self.touched[storage._cdata] = Touched(weakref.ref(storage), writes)

    def argument(self, x: torch.Tensor, writes: bool = False) -> Any:
        """Return what the graph stores in place of the tensor `x`, an argument or a result.

        It is a placeholder for memory outside the graph, and otherwise a view of the private pool.
        `writes` says whether the graph writes to the tensor.
        """
        if type(x) is not VirtualTensor:
            # A number keeps its present value. Page-locked memory is read at each replay.
            return x if x.dim() else x.clone()
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
    """Move the values of an operator's results to the segments of their pools, and return them."""
    homes: dict[int, Any] = {}
    return mapped(result, lambda x: _home(x, homes))


def _home(x: torch.Tensor, homes: dict[int, Any]) -> torch.Tensor:
    """Return `x` with its values in the segment of its private pool, as on a GPU.

    `homes` maps storages to their new storages, so that views stay together. A tensor that is in no
    private pool is returned unchanged.
    """
    if type(x) is not VirtualTensor or not has_region(x) or _is_home(x):
        return x
    storage = x.untyped_storage()
    memory = storage.memory
    if memory.kept is None or memory.block is None:
        return x
    if memory.block.segment.free_blocks.pool_id == NO_POOL:
        return x
    base = homes.get(storage._cdata)
    if base is None:
        base = homes[storage._cdata] = _at_home(memory, storage.nbytes())
        hang(memory, base)
    return shown(base, Region.of(x), x._gpu, (x.is_conj(), x.is_neg()))


def _is_home(x: torch.Tensor) -> bool:
    """Return whether the values of `x` are in the segment of a private pool."""
    return "at_home" in x.untyped_storage().__dict__


def _at_home(memory: Memory, nbytes: int) -> Any:
    """Return a storage of `nbytes` bytes at the block of `memory` in the pool's segment."""
    block = memory.block
    assert block is not None
    segment = block.segment
    if segment.content is None:  # unused pages take no memory of the host
        segment.content = mmap.mmap(-1, segment.size, _PAGES)
    with _DisableTorchDispatch():
        offset = block.address - segment.address
        content: Any = segment.content
        values = torch.frombuffer(content, dtype=torch.uint8, count=nbytes, offset=offset)
        storage = values.untyped_storage()
    storage.__dict__["at_home"] = True
    return storage


def shown(
    storage: Any, region: Region, gpu: Gpu, bits: tuple[bool, bool] = (False, False)
) -> VirtualTensor:
    """Return a tensor on `gpu` that is a view of a region of a storage.

    `bits` are two flags. They say whether the tensor is the conjugate, and whether it is the
    negative, of what the memory holds.
    """
    with _DisableTorchDispatch():
        plain = plain_set(torch.empty(0, dtype=region.dtype, device="cpu"), storage, *region[:3])
        if bits[0]:
            plain = torch._conj(plain)
        if bits[1]:
            plain = torch._neg_view(plain)
        tensor = _make_subclass(VirtualTensor, plain)
    tensor._gpu = gpu
    return tensor


def _copy(x: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of the values of `x`, or None if they were not kept."""
    if type(x) is VirtualTensor and memory_of(x).kept is None:
        return None
    with _DisableTorchDispatch():
        return x.detach().clone()


def _put_back(x: torch.Tensor, kept: int | None, value: torch.Tensor | None) -> None:
    """Undo a write to `x`.

    `value` has the values from before the write, and `kept` their number of bytes. Without a
    `value` nothing is done.
    """
    if value is None:
        return
    if type(x) is VirtualTensor:
        memory = memory_of(x)
        if memory.kept is None:
            memory.remember(kept)
    with _DisableTorchDispatch(), torch.inference_mode(x.is_inference()):
        x.detach().copy_(value)
