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

# Kept even with values=False: one number, which a script may print, and what programs count, index and mask with.
NUMBER_BYTES = 8  # of one tensor of floats that were drawn at random or come from the host: parameters and data
CONSTANTS_BYTES = 1 << 16  # of other floats
INTEGERS_BYTES = 1 << 20  # of integers or truth values
OPERATIONS = ("matmul", "conv", "rnn")  # that torch.backends has a precision for
AMPERE = 8  # the first major compute capability with TF32
# Unlike `allow_tf32`, the getter raises no error if a program uses PyTorch's old and new settings.
_float32_precision = torch._C._get_fp32_precision_getter
_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


class Selected(threading.local):
    """What one thread has selected: the current device, and the current stream of each device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, StreamTime] = {}
        self.gpu: Gpu | None = None  # where the last operator on a device tensor ran,
        self.call: tuple | None = None  # and which call it belonged to: see virtualgpu.host.cpu_operators
        self.frames = 0  # of Python in which operators ran
        self.waiting: tuple | None = None  # the call for which C++ made tensors on the CPU
        self.task = -1  # the backward under way,
        self.places: set[Gpu | None] = set()  # and where its operators ran so far; None stands for the CPU
        self.root: Gpu | None = None  # where the next backward starts
        self.untimed = False  # takes what the thread does none of the host's time?
        self.made_on: Gpu | None = None  # where that is to be which C++ makes on the CPU, for it believes its tensors to lie there
        self.nodes = 0  # nodes of autograd that this thread has made so far
        self.recorded: int | None = None  # of these, those that have taken their time
        self.node: tuple | None = None  # the node of a backward that took its time last,
        self.node_number = 0  # and the number of the last one that is no leaf
        self.ambient: dict[int, StreamTime] = {}  # by device: the streams to which the backward under way will return
        self.arrived: tuple | None = None  # the node of a backward whose stream has been chosen
        self.in_operator = False  # an operator is running of which the race detector knows: those that it is made of are part of it
        self.full_masks = False  # masks whose values were not kept are taken to be true everywhere
        self.product: Callable[[], Any] | None = None  # what the last matrix product was written to

    def visit(self, task: int, *places: "Gpu | None") -> None:
        """Note that the backward `task` has operators in these places."""
        if self.task != task:
            self.task, self.places = task, set() if self.root is None else {self.root}
        self.places.update(places)


class Gpu:
    """One virtual GPU."""

    def __init__(self, machine: "Machine", index: int) -> None:
        self.machine = machine
        self.index = index
        self.number = index  # among all of the computer, of which CUDA_VISIBLE_DEVICES may hide some
        self.received = 0  # bytes of addresses that memory of other processes has been given here
        self.context = False  # has this process a CUDA context here?
        self.device = torch.device("cuda", index)
        self.profile = machine.profile
        self._product_seconds = lru_cache(maxsize=4096)(partial(costs.kernel_seconds, machine.profile))
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
        self.passed_on: bool | None = None  # in a broadcast: have the bytes been sent once?
        self.fault: errors.Fault | None = None  # the device-side assert that stopped it
        self.generator: Any = None  # set by virtualgpu.install
        self.libraries: dict[str, Any] = {}  # what CUDA's libraries keep on this GPU, by library (virtualgpu.ops.blas)

    @cached_property
    def _has_tf32(self) -> bool:
        """Whether the GPU has TF32 and NVIDIA's libraries use it.

        The libraries read the variable at their first use.
        """
        return self.profile.major >= AMPERE and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"

    def multiplies_in_tf32(self, operation: str) -> bool:
        """Return whether float32 products use TF32 now.

        `operation` is "matmul" for products by cuBLAS, "conv" for cuDNN's convolutions and "rnn"
        for its recurrent layers. torch.backends has a setting for each.
        """
        if not self._has_tf32 or _float32_precision("cuda", operation) != "tf32":
            return False
        return operation != "matmul" or not is_guarded()

    @property
    def stream(self) -> StreamTime:
        """The calling thread's current stream on this GPU."""
        return self.machine.selected.streams.get(self.index, self.default_stream)

    def pool_stream(self, priority: int) -> StreamTime:
        """The next of the device's streams, round robin, as `torch.cuda.Stream()` takes them."""
        self.machine.several_streams = True
        identity = self._pool.take(priority)
        return self.streams.setdefault(identity, StreamTime(self.index, identity))

    # memory

    def allocate(self, nbytes: int) -> Block | None:
        """A block for the calling thread's current stream; None for no bytes. Raises torch.OutOfMemoryError."""
        machine = self.machine
        if machine.forked or not machine.alive:
            machine.require_alive()
        if not nbytes:
            return None
        if not self.context:
            self.open_context()
        machine.clock.advance_host(self.profile.allocate_seconds)
        try:
            return self.allocator.malloc(nbytes, self.stream.stream_id if machine.several_streams else 0)
        except OutOfMemory as error:
            for observer in self.machine.oom_observers:
                observer(self.index, nbytes, self.machine.total_memory, self.allocator.free_bytes())
            raise torch.OutOfMemoryError(error.message) from None

    def scratch(self, sizes: Iterable[int]) -> None:
        """Allocate these many bytes one after the other, and give them back in reverse: what a kernel needs while it is launched."""
        blocks = [self.allocate(nbytes) for nbytes in sizes]
        for block in reversed(blocks):
            if block is not None:
                self.allocator.free(block)

    def open_context(self) -> None:
        """What the first use of a device does: its CUDA context takes memory there."""
        if not self.context:
            self.context = True
            self._hold()

    def _hold(self) -> None:
        if not self.machine.forked:  # what a fork inherits is its parent's
            self.machine.usage.hold(self.number, self.profile.context_bytes + self.allocator.reserved)

    def _driver_call(self, action: str, stream: int) -> None:
        """What the allocator asks of the driver takes host time, and freeing waits for the device. All processes are to know of it."""
        self._hold()
        clock = self.machine.clock
        if action in ("segment_alloc", "segment_map"):
            clock.advance_host(self.profile.malloc_seconds)
        elif action == "segment_free":
            clock.synchronize_device(self.index, self.profile.free_seconds)
        elif action == "segment_unmap":
            clock.synchronize_stream(self.streams[stream], self.profile.free_seconds)

    # time

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
        """Queue a kernel, which does what `ops.call.Work` says, on the calling thread's current stream; `name` is the operator's."""
        if self.fault is not None:
            self.notice()
        profile, machine = self.profile, self.machine
        overhead = cudnn * profile.cudnn_seconds if cudnn else profile.launch_seconds + (profile.product_seconds if flops else 0.0)
        overhead += (launches + profile.further_launches.get(name, 0)) * profile.launch_seconds
        if machine.scheduler.several and _graph_task() == -1:
            overhead = max(overhead, machine.handing_over())  # the lock is free while the launch is made
        product: dict[str, Any] = {}
        if flops:
            product = {"flops": flops, "format": format, "outputs": outputs, "matrix": matrix, "split_terms": split_terms}
            seconds = self._product_seconds(bytes_moved=bytes_moved, matmul=True, **product)
        else:
            seconds = costs.kernel_seconds(profile, bytes_moved=bytes_moved)
        if clocks or serial or around:
            seconds += costs.further_seconds(profile, clocks, serial, around)
        several = len(self.streams) > 1  # whom should a program with one stream make room for?
        share = self._share(bytes_moved=bytes_moved, **product) if several else 1.0
        stream = self.stream if machine.several_streams else self.default_stream
        machine.clock.launch(stream, seconds, overhead, name, share)

    def copy(self, kind: costs.CopyKind, nbytes: int, pinned: bool = False, blocking: bool = True) -> None:
        """Queue a copy on the calling thread's current stream."""
        if self.fault is not None:
            self.notice(waits=blocking and kind != "d2d")
        profile = self.profile
        seconds = costs.copy_seconds(profile, kind, nbytes, pinned)
        if kind == "d2d":
            self.machine.clock.launch(self.stream, seconds, profile.launch_seconds, "copy", costs.share(profile, bytes_moved=2 * nbytes))
        else:
            if kind == "p2p" and self.passed_on is not None:
                seconds, self.passed_on = (0.0 if self.passed_on else seconds), True
            name = "copy" if kind == "p2p" else "copy, pinned" if pinned else "copy, pageable"
            self.machine.clock.copy(self.stream, kind, seconds, profile.launch_seconds, blocking, name)

    @contextmanager
    def broadcast(self) -> Iterator[None]:
        """In the block copies from this GPU to others are one broadcast of NCCL's: GPUs pass on what they receive, all at once."""
        self.passed_on = False
        try:
            yield
        finally:
            self.passed_on = None

    def read(self, nbytes: int) -> None:
        """The host waits for a few numbers that a kernel has found."""
        self.machine.sync_debug.notice()
        self.copy("d2h", nbytes, pinned=True)

    def send(self, nbytes: int) -> None:
        """The host waits while what lies in its pageable memory goes to the GPU."""
        self.machine.sync_debug.notice()
        self.copy("h2d", nbytes)

    def synchronize(self) -> None:
        if self.fault is not None:
            self.notice(waits=True)
        while self.machine.under_way:
            self.machine.under_way[0].land()
        self.machine.clock.synchronize_device(self.index, self.profile.synchronize_seconds)

    def notice(self, waits: bool = False) -> None:
        """Raises AcceleratorError if an assert has failed on this GPU, once the GPU has got there or the host waits for it."""
        fault = self.fault
        if fault is not None and (waits or fault.known or fault.time <= self.machine.clock.host + self.profile.launch_seconds):
            fault.surface()


class Machine:
    """Several virtual GPUs of one model, their host, and one clock."""

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
        self.was_without_values = not values  # at any time so far
        self.alive = True
        self.initialised = False  # what torch.cuda.init() does has been done
        # Numbers of the GPUs that CUDA has seen since its driver was initialised.
        self._seen: list[int] | None = None
        self._settings_are_read = False
        self.forked = False  # this is a child process that was forked after that
        self.heeds_environment = heeds_environment
        self.clock = Clock()
        self.scheduler = Scheduler()
        self.sync_debug = SyncDebug()
        self.launcher = self.scheduler.running  # the thread that launched last
        self.selected = Selected()
        self.kept_bytes = 0
        self.host_budget, self.largest_kept = host_budget()
        self.valueless_storages = 0  # that are alive
        self.blanks_host = False  # may a copy to a tensor on the host take place without values? It leaves NaN there, if the dtype has it
        # Called with the dtype when the host reads a value that nothing computed. The host gets what
        # it returns. Without it the host gets an error, or NaN if `blanks_host`.
        self.makes_up: Callable[[torch.dtype], bool | int | float] | None = None
        self._count = count
        self.gpus = [Gpu(self, index) for index in range(count)]
        self.host_operators: Any = None  # what sees every operator of the machine's threads, while it is in place
        self.races: Any = None  # the RaceDetector of virtualgpu.streams, which `host_operators` brings
        self.under_way: list[Any] = []  # collectives that this rank has entered, and nobody has waited for
        self.cluster = Cluster()  # on which this machine is a node
        self.several_streams = False  # with one stream a program cannot race: until it makes another, nobody looks
        self.oom_observers: list[Callable[[int, int, int, int], object]] = []  # device, bytes asked for, all of its bytes, free ones
        self.leaf_streams: weakref.WeakKeyDictionary[Any, StreamTime] = weakref.WeakKeyDictionary()  # of first use, by a leaf's memory
        self.forward_streams: OrderedDict[tuple[int, int], StreamTime] = OrderedDict()  # by device and node: see `streams.backward`

    def handing_over(self) -> float:
        """Host seconds until this thread has the interpreter's lock, if another one launched last.

        PyTorch lets the lock go in every operator; a thread that waits for it has to be woken.
        """
        before, self.launcher = self.launcher, self.scheduler.running  # by its state: the system gives a thread's number to the next one
        return self.profile.handoff_seconds if before is not self.launcher else 0.0

    def take_turn(self) -> None:
        """What takes host time, or memory, begins here: where there are other threads, the caller waits for its turn."""
        if self.scheduler.several:
            self.scheduler.take_turn()

    @property
    def current(self) -> Gpu:
        return self.gpus[self.selected.device]

    def visible(self) -> list[int]:
        """Return the numbers of the GPUs that CUDA sees, fixed once its driver is initialised."""
        if self._seen is None:
            return self.named_visible()
        return self._seen

    def named_visible(self) -> list[int]:
        """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES names at this moment.

        A lesson's machine does not read the variable, which there means the computer's real GPUs.
        """
        if not self.heeds_environment or "CUDA_VISIBLE_DEVICES" not in os.environ:
            return list(range(self._count))
        # As CUDA does: what follows the first invalid entry is ignored.
        named: Any = torch.cuda._parse_visible_devices()  # numbers, or UUIDs
        return list(takewhile(range(self._count).__contains__, named))

    def start_driver(self) -> None:
        """Do what `cuInit` does: read CUDA_VISIBLE_DEVICES, once. Forked children cannot use CUDA."""
        if self._seen is None:
            self._seen = self.named_visible()

    def stop_driver(self) -> None:
        """Forget that the driver was initialised, before the program runs."""
        self._seen = None

    def read_settings(self) -> None:
        """Give the allocators the settings of the environment, at the first use of CUDA."""
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
        """NVML's number of what the program calls so: NVML counts all GPUs of the computer. Raises RuntimeError for one not visible."""
        index, numbers = torch.cuda._utils._get_device_index(device, optional=True), self.visible()
        if not 0 <= index < len(numbers):
            raise RuntimeError(f"device {index} is not visible (CUDA_VISIBLE_DEVICES={numbers})")
        return numbers[index]

    def initialise(self) -> None:
        """Do what `torch.cuda.init` does. Raises RuntimeError if no GPU is visible."""
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
        """The GPU that a device names, the current one for "cuda"; None for the CPU. Raises RuntimeError for a bad ordinal."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.type == "cpu":
            return None
        if not self.initialised or self.forked:
            torch.cuda._lazy_init()  # so that the first tensor initialises CUDA, and a forked child gets CUDA's error
        if device is None:
            return self.current
        if not isinstance(device, int):
            if device.type != "cuda":
                raise RuntimeError(f"the virtual machine has the devices cpu and cuda, not {device.type!r}")
            if device.index is None:
                return self.current
            device = device.index
        if not 0 <= device < len(self.gpus):
            raise errors.invalid_ordinal()
        return self.gpus[device]

    def may_keep(self, nbytes: int, dtype: torch.dtype, data: bool = False) -> bool:
        """Is there room on the host for the values of one more tensor? Of `data`, drawn or from the host, values=False keeps less."""
        largest = self.largest_kept if self.selected.made_on is None else self.host_budget  # a bucket is as large as what lies in it
        if not self.values:
            floats = NUMBER_BYTES if data else CONSTANTS_BYTES
            largest = min(largest, floats if dtype.is_floating_point or dtype.is_complex else INTEGERS_BYTES)
        return nbytes <= largest and self.kept_bytes + nbytes <= self.host_budget

    def may_fill(self, nbytes: int, dtype: torch.dtype) -> bool:
        """May memory whose values were kept so far keep those of data that arrive there?"""
        return self.values or self.may_keep(nbytes, dtype, data=True)

    def require_alive(self) -> None:
        if self.forked:
            torch.cuda._lazy_init()
        if not self.alive:
            raise RuntimeError(f"this virtual GPU is gone: {front_end.name()}.use(None) or the end of a `with` block took it away")


_in_place: Machine | None = None


def _mark_forked() -> None:
    if _in_place is not None:
        _in_place.scheduler.after_fork()
        _in_place.usage.after_fork()
        _in_place.forked |= _in_place.initialised or _in_place._seen is not None


os.register_at_fork(after_in_child=_mark_forked)


def put_in_place(machine: Machine | None) -> None:
    """Make this the machine that "cuda" means."""
    global _in_place
    if _in_place is not None:
        _in_place.several_streams = False  # what is freed from now on races with nothing
    _in_place = machine


def machine() -> Machine:
    """The machine in place. Raises RuntimeError when there is none."""
    if _in_place is None:
        raise RuntimeError(f"no virtual GPU is in use: {front_end.name()}.use(gpus=1) puts one in place")
    return _in_place
