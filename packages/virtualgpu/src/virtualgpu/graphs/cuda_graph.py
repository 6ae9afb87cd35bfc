"""`torch.cuda.CUDAGraph` of a virtual machine. torch.cuda works with it unchanged."""

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

# Tensors that stand for the memory of private pools. Graphs that share a pool race for its tensor,
# which holds the nodes of the last graph. The keys are machine, GPU and pool.
_pools: WeakValueDictionary[tuple[int, int, PoolId], VirtualTensor] = WeakValueDictionary()
_MODES = ("global", "thread_local", "relaxed")
_EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
    "wrong device or stream."
)


class CUDAGraph:
    """Work that is recorded from streams and runs again at each `replay`, with one host launch."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeps = keep_graph
        self._number = new_number()
        self._capture: Capture | None = None
        self._pool = NO_POOL
        self._states: list[tuple[Gpu, Any]] = []  # states from which its kernels draw
        self._ended = self._ready = False
        self._tracker: Any = None
        self._branches: dict[StreamTime, StreamTime] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Allow the captured work to draw from this generator. The GPU's own is always allowed."""
        known = registered(generator)
        known.state.register(known._gpu, self._number)
        self._states.append((known._gpu, known.state))

    def capture_begin(
        self,
        pool: PoolId | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Start to capture the work of the current stream.

        The memory comes from the private pool `pool`, or from a new one. Raises RuntimeError as
        CUDA does.
        """
        machine = hardware.machine()
        machine.take_turn()
        if self._ready:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
                "create a new instance."
            )
        if capture_error_mode not in _MODES:
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, "
                f"got {capture_error_mode}"
            )
        gpu = machine.current
        self.register_generator_state(gpu.generator)
        stream = gpu.stream
        if stream is gpu.default_stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        if pool and any(pool):
            self._pool = (pool[0], pool[1])
        else:
            self._pool = (new_number(), 0)
        self._gpu = gpu
        key = id(machine), gpu.index, self._pool
        shared = _pools.get(key)
        if shared is None:
            shared = empty_without_values(gpu, (1,), (1,), torch.uint8, allocated=False)
            _pools[key] = shared
        self._shared = shared
        streams = gpu.streams
        capture = Capture(gpu, capture_error_mode)

        def takes(stream_id: int) -> bool:
            return stream_id in streams and streams[stream_id].capture is capture

        gpu.allocator.begin_pool(self._pool, takes)
        capture.begin({state: state.offset for _, state in self._states})
        machine.clock.captures += (capture,)
        self._capture = capture
        if check_input_liveness:
            from torch.utils._cuda_debug import _CUDAGraphInputLivenessTracker

            self._tracker = _CUDAGraphInputLivenessTracker()
            self._tracker.start()

    def capture_end(self) -> None:
        """End the capture. Raises RuntimeError as CUDA does."""
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
        """Stop using the private pool for allocations and recording the clock's work."""
        capture, clock = self._capture, self._gpu.machine.clock
        if capture in clock.captures:
            clock.captures = tuple(other for other in clock.captures if other is not capture)
            self._gpu.allocator.end_pool(self._pool)
        if self._tracker is not None:
            self._tracker.stop()

    def instantiate(self) -> None:
        """Prepare the graph for replays. Raises RuntimeError as CUDA does."""
        if not self._ended:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if self._ready and not self._keeps:
            raise RuntimeError(
                "instantiate() is intended to be called by the user only when keep_graph=true"
            )
        self._ready = True

    def replay(self) -> None:
        """Run the graph on the current stream. Raises RuntimeError without a capture."""
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
            storage = storage_of()
            nbytes = 0 if storage is None else storage.nbytes()
            if nbytes:
                whole = Region(0, (nbytes,), (1,), torch.uint8)
                touched.append((shown(storage, whole, gpu), writes))

        def run() -> None:
            self._take_time(capture, stream)
            compute(capture.nodes, gpu)

        if gpu.fault is not None:
            gpu.notice()
        raced = machine.races.replay([*touched, (self._shared, True)], stream, run)
        # Graphs of one pool that run at the same time find each other's values.
        if any(x is self._shared for x in raced):
            others = attributes_of.__get__(self._shared)["nodes"]
            both = []
            for pair in zip_longest(others, capture.nodes):
                both += [node for node in pair if node is not None]
            compute(both, gpu)
        attributes_of.__get__(self._shared)["nodes"] = capture.nodes

    def _take_time(self, capture: Capture, stream: StreamTime) -> None:
        """Queue the graph's work as one launch of the host.

        `stream` takes the place of the stream on which the capture began.
        """
        clock = capture.gpu.machine.clock
        with clock.one_launch(stream, capture.gpu.profile.launch_seconds):
            self._queue_work(capture, stream)

    def _queue_work(self, capture: Capture, stream: StreamTime) -> None:
        """Queue the captured work on the graph's streams.

        `stream` takes the place of the stream on which the capture began.
        """
        clock = capture.gpu.machine.clock
        branches = self._branches
        branches[capture.origin] = stream
        events: dict[EventTime, EventTime] = {}
        for method, branch, rest in capture.work:
            on = branches.get(branch)
            if on is None:
                on = branches[branch] = StreamTime(branch.device_index, branch.stream_id)
            if method == "record":
                events[rest[0]] = clock.record(on)
                if len(rest) > 1:  # an event of the program
                    rest[1]._recorded = events[rest[0]]
            elif method == "wait":
                clock.wait(on, events[rest[0]])
            else:
                getattr(clock, method)(on, *rest)

    def reset(self) -> None:
        """Delete the captured work. Its pool is released when nothing in it is used any more."""
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
        """Return the id of the graph's memory pool, for another graph's `capture_begin`.

        Raises RuntimeError without a capture.
        """
        if self._pool == NO_POOL:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Do nothing. What `debug_dump` writes is always kept here."""

    def debug_dump(self, debug_path: str) -> None:
        """Write the graph as a Graphviz file with one row of kernels per stream."""
        assert self._capture is not None
        lines = []
        for index, (method, stream, rest) in enumerate(self._capture.work):
            name = rest[2] if method == "launch" else method
            lines.append(f'"{index} {name} on stream {stream.stream_id}"')
        with open(debug_path, "w") as file:
            file.write("digraph graph_1 {\n" + "\n".join(lines) + "\n}\n")

    def raw_cuda_graph(self) -> int:
        """Raise NotImplementedError, because a virtual graph has no handle of CUDA."""
        because = "CUDA's own functions cannot read a graph of a virtual GPU"
        raise unsupported(f"CUDAGraph.raw_cuda_graph ({because})")

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph


def compute(nodes: list[Node], gpu: Gpu) -> None:
    """Compute the operators of a graph again, with the present contents of its memory."""
    selected, host = gpu.machine.selected, gpu.machine.clock.host
    before: dict[VirtualGenerator, Any] = {}
    in_operator = selected.in_operator
    of_thread.replaying = selected.in_operator = True
    try:
        with _disable_current_modes(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for node in nodes:
                for generator, state in node.draws:
                    before.setdefault(generator, generator.state)
                    generator.state = state
                of_thread.tf32 = node.tf32
                _run(node)
    finally:
        # The operators take no host time, because the host has launched only the graph.
        gpu.machine.clock.host = host
        of_thread.replaying = False
        selected.in_operator = in_operator
        for generator, state in before.items():
            generator.state = state


def _run(node: Node) -> None:
    """Compute one operator of a graph, and write its results to the graph's memory."""
    args, kwargs, targets = mapped((node.args, node.kwargs, node.results), Outer.tensor, Outer)
    call = Call(node.op, args, kwargs)
    handler = node.op.handler
    assert handler is not None
    try:
        result = handler(call)
    except (IndexError, RuntimeError) as error:
        result = survive(call, error)
    # A copy's target was not recorded as a result.
    for x, target in zip(tensors(result), targets, strict=False):
        if type(x) is not VirtualTensor or x.layout is not torch.strided:
            continue
        if memory_of(target).kept is None:
            continue
        if memory_of(x).kept is None:
            forget(target)
        elif host_address(x) != host_address(target):
            with _DisableTorchDispatch():
                target.copy_(x)


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch.cuda, {"CUDAGraph": CUDAGraph}
    yield (
        torch.cuda.graphs,
        {
            "CUDAGraph": CUDAGraph,
            "_graph_pool_handle": lambda: (0, new_number()),
            "_cuda_isCurrentStreamCapturing": torch._C._cuda_isCurrentStreamCapturing,
        },
    )
    yield torch.cuda.graph, {"default_capture_stream": None}  # it keeps an earlier machine's stream
