"""The virtual GPUs of one machine: their memory, streams and random generators."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any

import torch

from virtualgpu import errors, front_end
from virtualgpu.allocator import Block, CachingAllocator, OutOfMemory, Settings
from virtualgpu.clock import costs
from virtualgpu.clock.machine_clock import Clock, StreamEvents, StreamTime
from virtualgpu.cluster import Cluster
from virtualgpu.host_memory import host_budget
from virtualgpu.processes.exported_blocks import PendingFrees
from virtualgpu.processes.usage_table import UsageTable
from virtualgpu.profiles import Profile
from virtualgpu.stream_numbers import StreamPool
from virtualgpu.sync_debug import SyncDebug
from virtualgpu.tf32_guard import is_guarded
from virtualgpu.threads.scheduler import Scheduler

# With values=False, small tensors still keep their values. These are single numbers, which a script
# may print, and what programs count, index and mask with.
NUMBER_BYTES = 8  # floats drawn at random or from the host, which are parameters and data
CONSTANTS_BYTES = 1 << 16  # other floats
INTEGERS_BYTES = 1 << 20  # integers and truth values
OPERATIONS = ("matmul", "conv", "rnn")  # those for which torch.backends has a precision
AMPERE = 8  # the first major compute capability with TF32
# Unlike `allow_tf32`, the getter raises no error if a program uses PyTorch's old and new settings.
_float32_precision = torch._C._get_fp32_precision_getter
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass


class Selected(threading.local):
    """The state of one thread: its current device and streams, and its place in a backward pass."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, StreamTime] = {}
        # The GPU of the last operator on a device tensor, and the call that the operator belonged
        # to (see virtualgpu.host.cpu_operators).
        self.gpu: Gpu | None = None
        self.call: tuple | None = None
        self.frames = 0  # the number of Python frames in which operators ran
        self.waiting: tuple | None = None  # the call for which C++ made tensors on the CPU
        # The running backward pass, and the GPUs of its operators so far. None means the CPU.
        self.task = -1
        self.places: set[Gpu | None] = set()
        self.root: Gpu | None = None  # the GPU on which the next backward pass starts
        self.untimed = False  # whether this thread's work takes no host time
        # The GPU for tensors that C++ makes on the CPU because it believes its inputs to be there.
        self.made_on: Gpu | None = None
        self.nodes = 0  # the number of autograd nodes that this thread has made
        self.recorded: int | None = None  # the number of these whose time is counted
        # The node of a backward pass whose time was counted last, and the number of the last such
        # node that is not a leaf.
        self.node: tuple | None = None
        self.node_number = 0
        # The streams, by device, that are current again after the backward pass.
        self.ambient: dict[int, StreamTime] = {}
        self.arrived: tuple | None = None  # the node of a backward pass whose stream is chosen
        self.read_zeros: tuple | None = None  # the node that read last whether there is a zero
        # An operator is running that the race detector has noted. Nested operators are not noted.
        self.in_operator = False
        self.full_masks = False  # whether masks without values count as true everywhere
        self.product: Callable[[], Any] | None = None  # a reference to the last product's output

    @contextmanager
    def without_time(self) -> Iterator[None]:
        """Let what this thread does in the block take none of the host's time."""
        before, self.untimed = self.untimed, True
        try:
            yield
        finally:
            self.untimed = before

    def visit(self, task: int, *places: "Gpu | None") -> None:
        """Note that the backward pass `task` runs operators on these GPUs. None means the CPU."""
        if self.task != task:
            self.task = task
            self.places = set() if self.root is None else {self.root}
        self.places.update(places)


class Gpu:
    """One virtual GPU: its allocator, streams, random generator and times.

    number: its index among all GPUs of the computer, some of which CUDA_VISIBLE_DEVICES can hide
    received: bytes of addresses used for memory of other processes
    context: whether this process has a CUDA context here
    passed_on: in a broadcast, whether the bytes have been sent once; None outside
    fault: the device-side assert that stopped the GPU
    generator: the random generator, which virtualgpu.generators sets
    libraries: what CUDA's libraries keep on this GPU, by library (see virtualgpu.ops.blas)
    """

    def __init__(self, machine: "Machine", index: int) -> None:
        self.machine = machine
        self.index = index
        self.number = index
        self.received = 0
        self.context = False
        self.device = torch.device("cuda", index)
        self.profile = machine.profile
        self._product_seconds = lru_cache(maxsize=4096)(
            partial(costs.kernel_seconds, machine.profile)
        )
        self._share = lru_cache(maxsize=4096)(partial(costs.share, machine.profile))
        self.default_stream = StreamTime(index, 0)
        self.streams = {0: self.default_stream}
        self.allocator = CachingAllocator(
            index,
            machine.total_memory,
            settings=Settings.from_environment(os.environ),
            others=lambda: self.profile.context_bytes + machine.usage.others(self.number),
            events=StreamEvents(machine.clock, self.streams),
            processes=lambda: machine.usage.holders(self.number),
            version=torch.__version__,
            driver=self._driver_call,
            claiming=machine.usage.claiming,
            collect=machine.pending_frees.collect,
        )
        self._pool = StreamPool()
        self.passed_on: bool | None = None
        self.fault: errors.Fault | None = None
        self.generator: Any = None
        self.libraries: dict[str, Any] = {}

    @cached_property
    def _has_tf32(self) -> bool:
        """Whether the GPU has TF32 and the environment variable for NVIDIA's libraries allows it.

        The libraries read the variable at their first use.
        """
        return self.profile.major >= AMPERE and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"

    def multiplies_in_tf32(self, operation: str) -> bool:
        """Return whether float32 products use TF32 now.

        `operation` is "matmul" for cuBLAS's products, "conv" for cuDNN's convolutions or "rnn" for
        its recurrent layers. torch.backends has a setting for each.
        """
        if not self._has_tf32 or _float32_precision("cuda", operation) != "tf32":
            return False
        return operation != "matmul" or not is_guarded()

    @property
    def stream(self) -> StreamTime:
        """The current stream of the calling thread on this GPU."""
        return self.machine.selected.streams.get(self.index, self.default_stream)

    def pool_stream(self, priority: int) -> StreamTime:
        """Return a stream of this priority from the GPU's pool, as `torch.cuda.Stream()` does.

        The streams of the pool are used in turn.
        """
        self.machine.several_streams = True
        identity = self._pool.take(priority)
        return self.streams.setdefault(identity, StreamTime(self.index, identity))

    # Memory

    def allocate(self, nbytes: int) -> Block | None:
        """Return a block for the calling thread's current stream, or None for 0 bytes.

        Raises torch.OutOfMemoryError.
        """
        machine = self.machine
        if machine.forked or not machine.alive:
            machine.require_alive()
        if not nbytes:
            return None
        if not self.context:
            self.open_context()
        machine.clock.advance_host(self.profile.allocate_seconds)
        try:
            return self.allocator.malloc(
                nbytes, self.stream.stream_id if machine.several_streams else 0
            )
        except OutOfMemory as error:
            for observer in self.machine.oom_observers:
                observer(self.index, nbytes, self.machine.total_memory, self.allocator.free_bytes())
            message = error.message
        # Raised in the `except` clause, the error would keep this function's callers alive, with
        # their tensors, in its `__context__`.
        raise torch.OutOfMemoryError(message)

    def scratch(self, sizes: Iterable[int]) -> None:
        """Allocate blocks of these sizes in bytes, and free them in reverse order.

        This is the memory that a kernel needs only while it is launched.
        """
        blocks = [self.allocate(nbytes) for nbytes in sizes]
        for block in reversed(blocks):
            if block is not None:
                self.allocator.free(block)

    def open_context(self) -> None:
        """Create the CUDA context of this process on the GPU, which takes memory.

        This happens at the first use of the GPU. Later calls do nothing.
        """
        if not self.context:
            self.context = True
            self._hold()

    def _hold(self) -> None:
        """Record the bytes that this process holds on the GPU in the table of all processes."""
        if not self.machine.forked:  # the table of a forked child is its parent's
            held = self.profile.context_bytes + self.allocator.reserved
            self.machine.usage.hold(self.number, held)

    def _driver_call(self, action: str, stream: int) -> None:
        """Advance the host's time by that of a call of the driver.

        `action` is the allocator's action, such as "segment_alloc". Freeing also waits for the
        device, and unmapping for `stream`.
        """
        self._hold()
        clock = self.machine.clock
        if action in ("segment_alloc", "segment_map"):
            clock.advance_host(self.profile.malloc_seconds)
        elif action == "segment_free":
            clock.synchronize_device(self.index, self.profile.free_seconds)
        elif action == "segment_unmap":
            clock.synchronize_stream(self.streams[stream], self.profile.free_seconds)

    # Time

    def launch(
        self,
        bytes_moved: float,
        flops: float = 0,
        format: str = "float32",
        outputs: int = 0,
        clocks: float = 0.0,
        serial: float = 0.0,
        around: float = 0.0,
        matrix: costs.Sides | None = None,
        cudnn: int = 0,
        launches: float = 0.0,
        split_terms: int = costs.SPLIT_TERMS,
        name: str = "kernel",
    ) -> None:
        """Queue a kernel on the calling thread's current stream.

        `ops.call.Work` describes the arguments. `name` is the operator's name.
        """
        if self.fault is not None:
            self.notice()
        profile, machine = self.profile, self.machine
        if cudnn:
            overhead = cudnn * profile.cudnn_seconds
        elif flops:
            overhead = profile.launch_seconds + profile.product_seconds
        else:
            overhead = profile.launch_seconds
        overhead += (launches + profile.further_launches.get(name, 0)) * profile.launch_seconds
        if machine.scheduler.several and _graph_task() == -1:
            # The interpreter's lock is free during the launch.
            overhead = max(overhead, machine.handing_over())
        product: dict[str, Any] = {}
        if flops:
            product = {
                "flops": flops,
                "format": format,
                "outputs": outputs,
                "matrix": matrix,
                "split_terms": split_terms,
            }
            seconds = self._product_seconds(bytes_moved=bytes_moved, matmul=True, **product)
        else:
            seconds = costs.kernel_seconds(profile, bytes_moved=bytes_moved)
        if clocks or serial or around:
            seconds += costs.further_seconds(profile, clocks, serial, around)
        share = 1.0  # with a single stream, no other kernel needs part of the GPU
        if len(self.streams) > 1:
            share = self._share(bytes_moved=bytes_moved, **product)
        stream = self.stream if machine.several_streams else self.default_stream
        machine.clock.launch(stream, seconds, overhead, name, share)

    def copy(
        self, kind: costs.CopyKind, nbytes: int, pinned: bool = False, blocking: bool = True
    ) -> None:
        """Queue a copy of `nbytes` bytes on the calling thread's current stream.

        `kind`, such as "h2d", and `pinned` are explained at `costs.copy_seconds`. With `blocking`
        the host waits for the copy.
        """
        if self.fault is not None:
            self.notice(waits=blocking and kind != "d2d")
        profile = self.profile
        seconds = costs.copy_seconds(profile, kind, nbytes, pinned)
        clock, overhead = self.machine.clock, profile.launch_seconds
        if kind == "d2d":
            share = costs.share(profile, bytes_moved=2 * nbytes)
            clock.launch(self.stream, seconds, overhead, "copy", share)
            return
        if kind == "p2p":
            name = "copy"
            if self.passed_on is not None:
                if self.passed_on:
                    seconds = 0.0
                self.passed_on = True
        elif pinned:
            name = "copy, pinned"
        else:
            name = "copy, pageable"
        clock.copy(self.stream, kind, seconds, overhead, blocking, name, nbytes)

    @contextmanager
    def broadcast(self) -> Iterator[None]:
        """Count the copies from this GPU in a `with` block as one broadcast of NCCL.

        The GPUs pass on what they receive, all at the same time.
        """
        self.passed_on = False
        try:
            yield
        finally:
            self.passed_on = None

    def read(self, nbytes: int) -> None:
        """Let the host wait until `nbytes` bytes that a kernel has computed are copied to it."""
        self.machine.sync_debug.notice()
        self.copy("d2h", nbytes, pinned=True)

    def send(self, nbytes: int) -> None:
        """Let the host wait until `nbytes` bytes of its pageable memory are copied to this GPU."""
        self.machine.sync_debug.notice()
        self.copy("h2d", nbytes)

    def synchronize(self) -> None:
        """Let the host wait for all work on this GPU.

        Raises AcceleratorError if an assert of a kernel has failed on it.
        """
        if self.fault is not None:
            self.notice(waits=True)
        while self.machine.under_way:
            self.machine.under_way[0].land()
        self.machine.clock.synchronize_device(self.index, self.profile.synchronize_seconds)

    def notice(self, waits: bool = False) -> None:
        """Raise AcceleratorError if an assert of a kernel has failed on this GPU.

        The host learns of the failure if it `waits` for the GPU, or when the GPU has reached the
        assert.
        """
        fault = self.fault
        if fault is None:
            return
        now = self.machine.clock.host + self.profile.launch_seconds
        if waits or fault.known or fault.time <= now:
            fault.surface()


class Machine:
    """Several virtual GPUs of one model, their host and one clock."""

    def __init__(
        self,
        profile: Profile,
        count: int,
        total_memory: int | None = None,
        values: bool = True,
        heeds_environment: bool = False,
        usage: UsageTable | None = None,
    ) -> None:
        self.profile = profile
        self.total_memory = total_memory or profile.total_memory
        self.usage = usage or UsageTable(profile.name, count, self.total_memory)
        self.pending_frees = PendingFrees()
        self.values = values
        self.was_without_values = not values  # whether values were switched off at any time
        self.alive = True
        self.initialised = False  # whether torch.cuda.init() has run
        # Numbers of the GPUs that CUDA has seen since its driver was initialised.
        self._seen: list[int] | None = None
        self._settings_are_read = False
        self.forked = False  # whether this process was forked after CUDA's initialisation
        self.heeds_environment = heeds_environment
        self.clock = Clock()
        self.scheduler = Scheduler()
        self.sync_debug = SyncDebug()
        self.launcher = self.scheduler.running  # the thread that launched last
        self.selected = Selected()
        self.kept_bytes = 0
        self.host_budget, self.largest_kept = host_budget()
        self.valueless_storages = 0  # the number of live storages without values
        # Whether a copy to the host may happen without values. It then writes NaN if the dtype has
        # NaN.
        self.blanks_host = False
        # Called with the dtype when the host reads a value that was not computed. The host gets the
        # returned value. Without it the host gets an error, or NaN with `blanks_host`.
        self.makes_up: Callable[[torch.dtype], bool | int | float] | None = None
        self._count = count
        self.gpus = [Gpu(self, index) for index in range(count)]
        self.host_operators: Any = None  # the mode that sees every operator, HostOperators
        self.races: Any = None  # the RaceDetector, which `host_operators` creates
        self.under_way: list[Any] = []  # collectives that this rank entered and has not waited for
        self.cluster = Cluster()  # the cluster in which this machine is a node
        # Without a second stream a program cannot race, so the race detector is off until then.
        self.several_streams = False
        # Called with (device, requested bytes, total bytes, free bytes).
        self.oom_observers: list[Callable[[int, int, int, int], object]] = []
        # The stream of a leaf's first use, by the leaf's memory.
        self.leaf_streams: weakref.WeakKeyDictionary[Any, StreamTime] = weakref.WeakKeyDictionary()
        # The streams of autograd's nodes, by device and node (see `streams.backward`).
        self.forward_streams: OrderedDict[tuple[int, int], StreamTime] = OrderedDict()

    def handing_over(self) -> float:
        """Return the host seconds until this thread gets Python's global interpreter lock.

        This is 0 unless another thread launched last. PyTorch releases the lock in every
        operator, and a thread that waits for the lock has to be woken up.
        """
        before = self.launcher
        # The thread's state, because the system reuses the numbers of threads.
        self.launcher = self.scheduler.running
        if before is self.launcher:
            return 0.0
        return self.profile.handoff_seconds

    def take_turn(self) -> None:
        """Wait for the calling thread's turn, before anything that takes time or memory."""
        if self.scheduler.several:
            self.scheduler.take_turn()

    @property
    def current(self) -> Gpu:
        """The calling thread's current GPU."""
        return self.gpus[self.selected.device]

    def visible(self) -> list[int]:
        """Return the numbers of the GPUs that CUDA sees. They are fixed once the driver starts."""
        if self._seen is None:
            return self.named_visible()
        return self._seen

    def named_visible(self) -> list[int]:
        """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES names at this moment.

        A lesson's machine ignores the variable, which refers to the computer's real GPUs there.
        """
        if not self.heeds_environment or "CUDA_VISIBLE_DEVICES" not in os.environ:
            return list(range(self._count))
        # As in CUDA, everything after the first invalid entry is ignored.
        named: Any = torch.cuda._parse_visible_devices()  # numbers, or UUIDs
        return list(takewhile(range(self._count).__contains__, named))

    def start_driver(self) -> None:
        """Start the driver as `cuInit` does: read CUDA_VISIBLE_DEVICES once."""
        if self._seen is None:
            self._seen = self.named_visible()

    def stop_driver(self) -> None:
        """Undo `start_driver`, so that the program itself starts the driver."""
        self._seen = None

    def read_settings(self) -> None:
        """Give the allocators the settings of the environment, at the first use of CUDA.

        Raises RuntimeError for invalid settings.
        """
        if self._settings_are_read:
            return
        try:
            settings = Settings.from_environment(os.environ)
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        self._settings_are_read = True
        for gpu in self.gpus:
            gpu.allocator.configure(settings)
            gpu.allocator.set_memory_fraction(settings.per_process_memory_fraction)

    def nvml_index(self, device: "torch.device | int | str | None") -> int:
        """Return NVML's number of a visible device. NVML counts all GPUs of the computer.

        Raises RuntimeError for a device that is not visible.
        """
        index = torch.cuda._utils._get_device_index(device, optional=True)
        numbers = self.visible()
        if not 0 <= index < len(numbers):
            raise RuntimeError(f"device {index} is not visible (CUDA_VISIBLE_DEVICES={numbers})")
        return numbers[index]

    def initialise(self) -> None:
        """Initialise CUDA as `torch.cuda.init` does. Raises RuntimeError if no GPU is visible."""
        self.start_driver()
        numbers = self.visible()
        if not numbers:
            raise RuntimeError("No CUDA GPUs are available")
        self.read_settings()
        del self.gpus[len(numbers) :]
        for gpu, number in zip(self.gpus, numbers, strict=True):
            gpu.number = number
        self.initialised = True
        self.current.open_context()

    def gpu(self, device: "torch.device | int | str | None") -> Gpu | None:
        """Return the GPU that `device` names, the current one for "cuda", or None for the CPU.

        Raises AcceleratorError for a GPU that does not exist, and RuntimeError for a device of
        another type.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.type == "cpu":
            return None
        if not self.initialised or self.forked:
            # The first tensor initialises CUDA, and a forked child gets CUDA's error.
            torch.cuda._lazy_init()
        if device is None:
            return self.current
        if not isinstance(device, int):
            if device.type != "cuda":
                raise RuntimeError(f"expected a device of type cpu or cuda, got {device.type!r}")
            if device.index is None:
                return self.current
            device = device.index
        if not 0 <= device < len(self.gpus):
            raise errors.invalid_ordinal()
        return self.gpus[device]

    def may_keep(self, nbytes: int, dtype: torch.dtype, data: bool = False) -> bool:
        """Return whether the host has enough memory to keep the values of one more tensor.

        The tensor has `nbytes` bytes. With values=False the limit is lower, and depends on `dtype`.
        It is lowest for `data`, which is random or comes from the host.
        """
        largest = self.largest_kept
        if self.selected.made_on is not None:  # a bucket of DDP is as large as all its gradients
            largest = self.host_budget
        if not self.values:
            if not (dtype.is_floating_point or dtype.is_complex):
                limit = INTEGERS_BYTES
            elif data:
                limit = NUMBER_BYTES
            else:
                limit = CONSTANTS_BYTES
            largest = min(largest, limit)
        return nbytes <= largest and self.kept_bytes + nbytes <= self.host_budget

    def may_fill(self, nbytes: int, dtype: torch.dtype) -> bool:
        """Return whether the host may keep the values of data that arrive from outside.

        They are `nbytes` bytes, and replace values that were kept.
        """
        return self.values or self.may_keep(nbytes, dtype, data=True)

    def require_alive(self) -> None:
        """Raise RuntimeError if this machine was taken away, or CUDA's error in a forked child."""
        if self.forked:
            torch.cuda._lazy_init()
        if not self.alive:
            raise RuntimeError(
                f"this virtual GPU is gone. {front_end.name()}.use(None) or the end of a `with` "
                "block took it away"
            )


_in_place: Machine | None = None


def _mark_forked() -> None:
    """Prepare the machine of a forked child.

    If CUDA was initialised before the fork, it cannot be used in the child.
    """
    if _in_place is not None:
        _in_place.scheduler.after_fork()
        _in_place.usage.after_fork()
        _in_place.forked |= _in_place.initialised or _in_place._seen is not None


os.register_at_fork(after_in_child=_mark_forked)


def put_in_place(machine: Machine | None) -> None:
    """Make `machine` the one that "cuda" refers to. None means that there is none any more."""
    global _in_place
    if _in_place is not None:
        _in_place.several_streams = False  # memory that is freed from now on cannot race
    _in_place = machine


def machine() -> Machine:
    """Return the machine in use. Raises RuntimeError if there is none."""
    if _in_place is None:
        raise RuntimeError(f"no virtual GPU is in use. Call {front_end.name()}.use(gpus=1) first")
    return _in_place
