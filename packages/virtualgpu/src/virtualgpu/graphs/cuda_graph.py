"""`torch.cuda.CUDAGraph` of a virtual machine; what torch.cuda builds on it in Python runs as it is."""

import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import _DisableTorchDispatch
from torch.utils._python_dispatch import _disable_current_modes

from virtualgpu import hardware
from virtualgpu.allocator.pool import NO_POOL
from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.errors import unsupported
from virtualgpu.generators import VirtualGenerator, registered
from virtualgpu.graphs.capture import Capture, Node, Outer, of_thread, shown
from virtualgpu.graphs.pools import PoolId, new_number
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.ops.call import Call
from virtualgpu.ops.faults import survive
from virtualgpu.ops.without_values import forget
from virtualgpu.streams.accesses import Region, mapped
from virtualgpu.tensor import (
    VirtualTensor,
    attributes_of,
    empty_without_values,
    host_address,
    memory_of,
    tensors,
)

# Stands for the memory of a private pool, for which graphs that share it race; by machine, GPU and pool. It has the last one's nodes.
_pools: WeakValueDictionary[tuple[int, int, PoolId], VirtualTensor] = WeakValueDictionary()
_MODES = ("global", "thread_local", "relaxed")
_EMPTY = "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream."


class CUDAGraph:
    """Work that is recorded on a stream, and runs again at each `replay`, for one launch of the host's."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeps = keep_graph
        self._number = new_number()
        self._capture: Capture | None = None
        self._pool = NO_POOL
        self._states: list[tuple[Gpu, Any]] = []  # of generators that its kernels draw from
        self._ended = self._ready = False
        self._tracker: Any = None
        self._branches: dict[StreamTime, StreamTime] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let what is captured draw from this generator too. The GPU's own is always known."""
        known = registered(generator)
        known.state.register(known._gpu, self._number)
        self._states.append((known._gpu, known.state))

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False) -> None:
        machine = hardware.machine()
        machine.take_turn()
        if self._ready:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.")
        if capture_error_mode not in _MODES:
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}")
        gpu = machine.current
        self.register_generator_state(gpu.generator)
        stream = gpu.stream
        if stream is gpu.default_stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        self._pool = (pool[0], pool[1]) if pool and any(pool) else (new_number(), 0)
        self._gpu = gpu
        key = id(machine), gpu.index, self._pool
        if (shared := _pools.get(key)) is None:
            shared = _pools[key] = empty_without_values(gpu, (1,), (1,), torch.uint8, allocated=False)
        self._shared = shared
        streams = gpu.streams
        capture = Capture(gpu, capture_error_mode)
        gpu.allocator.begin_pool(self._pool, lambda stream: stream in streams and streams[stream].capture is capture)
        capture.begin({state: state.offset for _, state in self._states})
        machine.clock.captures += (capture,)
        self._capture = capture
        if check_input_liveness:
            from torch.utils._cuda_debug import _CUDAGraphInputLivenessTracker

            self._tracker = _CUDAGraphInputLivenessTracker()
            self._tracker.start()

    def capture_end(self) -> None:
        capture = self._capture
        if capture is None or self._ended:
            raise RuntimeError("capture_end() called before capture_begin().")
        if capture.gpu.stream is not capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._end_allocating()
        capture.end()
        if not capture.work:
            warnings.warn(_EMPTY, stacklevel=2)
        self._ended = True
        self._ready = not self._keeps

    def _end_allocating(self) -> None:
        capture, clock = self._capture, self._gpu.machine.clock
        if capture in clock.captures:
            clock.captures = tuple(other for other in clock.captures if other is not capture)
            self._gpu.allocator.end_pool(self._pool)
        if self._tracker is not None:
            self._tracker.stop()

    def instantiate(self) -> None:
        if not self._ended:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if self._ready and not self._keeps:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")
        self._ready = True

    def replay(self) -> None:
        """Run the graph on the current stream."""
        capture = self._capture
        if capture is None or not self._ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._ready = True
        if self._tracker is not None:
            self._tracker.check_alive(self.pool())
        gpu = capture.gpu
        machine, stream = gpu.machine, gpu.stream
        machine.require_alive()
        machine.take_turn()
        touched = []
        for storage_of, writes in capture.touched.values():
            if (storage := storage_of()) is not None and (nbytes := storage.nbytes()):
                touched.append((shown(storage, Region(0, (nbytes,), (1,), torch.uint8), gpu), writes))

        def run() -> None:
            self._take_time(capture, stream)
            compute(capture.nodes, gpu)

        if gpu.fault is not None:
            gpu.notice()
        raced = machine.races.replay([*touched, (self._shared, True)], stream, run)
        if any(x is self._shared for x in raced):  # graphs of one pool at once: each finds what the other one leaves
            others = attributes_of.__get__(self._shared)["nodes"]
            compute([node for pair in zip_longest(others, capture.nodes) for node in pair if node is not None], gpu)
        attributes_of.__get__(self._shared)["nodes"] = capture.nodes

    def _take_time(self, capture: Capture, stream: StreamTime) -> None:
        """Queue what the graph does on its streams, of which `stream` stands for the first: one launch of the host's."""
        clock = capture.gpu.machine.clock
        clock.advance_host(capture.gpu.profile.launch_seconds)
        with clock.one_launch(stream):
            self._queue_work(capture, stream)

    def _queue_work(self, capture: Capture, stream: StreamTime) -> None:
        clock = capture.gpu.machine.clock
        branches = self._branches
        branches[capture.origin] = stream
        events: dict[EventTime, EventTime] = {}
        for method, branch, rest in capture.work:
            if (on := branches.get(branch)) is None:
                on = branches[branch] = StreamTime(branch.device_index, branch.stream_id)
            if method == "record":
                events[rest[0]] = clock.record(on)
                if len(rest) > 1:  # an event of the program's own
                    rest[1]._recorded = events[rest[0]]
            elif method == "wait":
                clock.wait(on, events[rest[0]])
            else:
                getattr(clock, method)(on, *rest)

    def reset(self) -> None:
        """Forget what was captured. Its pool goes back to the device once nothing in it is used."""
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None
        if self._pool != NO_POOL:
            self._end_allocating()
            self._gpu.allocator.release_pool(self._pool)
        for gpu, state in self._states:
            state.unregister(gpu, self._number)
        self._states = []
        self._capture, self._pool = None, NO_POOL
        self._ended = self._ready = False

    def __del__(self) -> None:
        if self.__dict__.get("_states") is not None:
            self.reset()

    def pool(self) -> PoolId:
        """What another graph's `capture_begin` takes to share this one's memory."""
        if self._pool == NO_POOL:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Keep what `debug_dump` writes, which is kept here anyway."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the graph in the language of Graphviz: a row of kernels for each stream."""
        assert self._capture is not None
        lines = [
            f'"{i} {work[2][2] if work[0] == "launch" else work[0]} on stream {work[1].stream_id}"'
            for i, work in enumerate(self._capture.work)
        ]
        with open(debug_path, "w") as file:
            file.write("digraph graph_1 {\n" + "\n".join(lines) + "\n}\n")

    def raw_cuda_graph(self) -> int:
        raise unsupported("CUDAGraph.raw_cuda_graph (CUDA's own functions cannot read a graph of a virtual GPU)")

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph


def compute(nodes: list[Node], gpu: Gpu) -> None:
    """Give the graph's memory the values that its operators make of what lies there now."""
    selected, host = gpu.machine.selected, gpu.machine.clock.host
    before: dict[VirtualGenerator, Any] = {}
    of_thread.replaying, in_operator, selected.in_operator = True, selected.in_operator, True
    try:
        with _disable_current_modes(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for node in nodes:
                for generator, state in node.draws:
                    before.setdefault(generator, generator.state)
                    generator.state = state
                of_thread.tf32 = node.tf32
                _run(node)
    finally:
        gpu.machine.clock.host = host  # the operators are the graph's: the host has launched that alone
        of_thread.replaying, selected.in_operator = False, in_operator
        for generator, state in before.items():
            generator.state = state


def _run(node: Node) -> None:
    args, kwargs, targets = mapped((node.args, node.kwargs, node.results), Outer.tensor, Outer)
    call = Call(node.op, args, kwargs)
    handler = node.op.handler
    assert handler is not None
    try:
        result = handler(call)
    except (IndexError, RuntimeError) as error:
        result = survive(call, error)
    for x, target in zip(tensors(result), targets, strict=False):  # a copy's target is none of what was recorded
        if type(x) is not VirtualTensor or x.layout is not torch.strided or memory_of(target).kept is None:
            continue
        if memory_of(x).kept is None:
            forget(target)
        elif host_address(x) != host_address(target):
            with _DisableTorchDispatch():
                target.copy_(x)


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""

    yield torch.cuda, {"CUDAGraph": CUDAGraph}
    yield (
        torch.cuda.graphs,
        {
            "CUDAGraph": CUDAGraph,
            "_graph_pool_handle": lambda: (0, new_number()),
            "_cuda_isCurrentStreamCapturing": torch._C._cuda_isCurrentStreamCapturing,
        },
    )
    yield torch.cuda.graph, {"default_capture_stream": None}  # it remembers the first program's
