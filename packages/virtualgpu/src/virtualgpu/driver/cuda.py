"""Answers where torch.cuda and torch.accelerator ask the CUDA driver.

torch.cuda is Python over some names in `torch._C`. With answers to these, its own code runs as it
is: lazy initialisation, device contexts, memory_stats and its summary, snapshots, streams. A name
that torch uses and that has no answer here raises an error that names it.
"""

import importlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn
import torch.cuda.nvtx

from virtualgpu import comm, errors, hardware
from virtualgpu.allocator import Settings
from virtualgpu.clock import costs
from virtualgpu.driver import memory_history, tunable
from virtualgpu.driver.properties import CUDA_VERSION, CUDNN_VERSION, properties
from virtualgpu.driver.runtime import external_stream, free_and_total, runtime
from virtualgpu.hardware import Machine
from virtualgpu.ops import blas
from virtualgpu.refusals import refuse
from virtualgpu.stream_numbers import raw_stream
from virtualgpu.streams import backward
from virtualgpu.streams.cuda_streams import CUDA, AcceleratorStream
from virtualgpu.tensor import VirtualTensor

# The architectures for which PyTorch's build for CUDA 13.0 holds kernels.
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
# Names of the driver in `torch._C`, and as they stand in the source of torch's own Python.
NAME = re.compile(r"_(cuda|accelerator|nccl)_\w+")
USES = re.compile(rf"\b_C\.({NAME.pattern})")
# Names that torch.accelerator has of its own, for what torch.cuda asks too.
SAME = {
    "_accelerator_deviceCount": "_cuda_getDeviceCount",
    "_accelerator_getDeviceIndex": "_cuda_getDevice",
    "_accelerator_setDeviceIndex": "_cuda_setDevice",
    "_accelerator_exchangeDevice": "_cuda_exchangeDevice",
    "_accelerator_maybeExchangeDevice": "_cuda_maybeExchangeDevice",
    "_accelerator_synchronizeDevice": "_cuda_synchronize",
    "_accelerator_emptyCache": "_cuda_emptyCache",
    "_accelerator_getDeviceStats": "_cuda_memoryStats",
    "_accelerator_resetPeakStats": "_cuda_resetPeakMemoryStats",
    "_accelerator_resetAccumulatedStats": "_cuda_resetAccumulatedMemoryStats",
}
CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)  # torch/backends/cudnn/__init__.py


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.

    The attributes are the functions of C++ that torch.cuda calls, and its caches of their results.
    """
    answered = answers(machine)
    yield torch._C, answered | {"_has_cuda": True}
    yield (
        torch.cuda,
        {
            "_initialized": False,
            "_queued_calls": list(torch.cuda._queued_calls),
            "_cached_device_count": None,
            "_device_count_nvml": lambda: len(machine.named_visible()),
            "_cudart": runtime(machine),
            "_exchange_device": answered["_cuda_exchangeDevice"],
            "_maybe_exchange_device": answered["_cuda_maybeExchangeDevice"],
            "_is_in_bad_fork": answered["_cuda_isInBadFork"],
            "_get_nvml_device_index": machine.nvml_index,
            "_get_device_properties": lambda index: properties(
                machine.profile, machine.total_memory, index
            ),
            "ExternalStream": external_stream(machine),
        },
    )
    if hasattr(torch.cuda, "_compile_kernel"):
        what = "torch.cuda._compile_kernel, which compiles CUDA code with nvrtc,"
        yield torch.cuda, {"_compile_kernel": refuse(what)}
    yield torch.cuda.memory, {"_get_nvml_device_index": machine.nvml_index}
    yield torch.cuda.nvtx, {"_nvtx": nvtx()}
    yield torch.version, {"cuda": CUDA_VERSION}
    cudnn = {
        "is_available": lambda: True,
        "version": lambda: CUDNN_VERSION,
        "is_acceptable": lambda tensor: tensor.is_cuda and tensor.dtype in CUDNN_DTYPES,
    }
    yield torch.backends.cudnn, cudnn
    # each has a list of its own
    for name in (
        "torch.optim.optimizer",
        "torch.utils._foreach_utils",
    ):
        module = importlib.import_module(name)  # torch.optim hides its submodule
        types = getattr(module, "_foreach_supported_types", None)
        if types:
            yield module, {"_foreach_supported_types": ForeachTypes(types)}


class ForeachTypes(list):
    """Types that foreach operators accept: those in torch's own list, and virtual tensors.

    A type that is appended, as DTensor is when it is imported, is appended to torch's list, too.
    """

    def __init__(self, types: list[type]) -> None:
        """Copy torch's list `types`, and add virtual tensors."""
        super().__init__([*types, VirtualTensor])
        self._types = types

    def append(self, added: type) -> None:
        """Append a type here and to torch's own list."""
        super().append(added)
        self._types.append(added)


@cache
def names_in_torch() -> frozenset[str]:
    """Return the names of driver functions that torch may ask for.

    They are the names that the installed torch has, which a build for CUDA does, and the names
    that torch's Python code for GPUs uses.
    """
    folder = Path(torch.__file__).parent
    sources: list[Path] = []
    for part in ("accelerator", "backends", "cuda"):
        sources += (folder / part).rglob("*.py")
    sources.append(folder / "_dynamo/trace_rules.py")  # lists C functions that others call
    used: set[str] = set()
    for file in sources:
        used.update(found[0] for found in USES.findall(file.read_text("utf-8")))
    trees = folder / "_inductor/cudagraph_trees.py"  # imports some by name
    if trees.is_file():
        text = trees.read_text("utf-8")
        used.update(found[0] for found in re.finditer(rf"\b{NAME.pattern}", text))
    return frozenset(used.union(filter(NAME.fullmatch, dir(torch._C))))


def answers(machine: Machine) -> dict[str, Any]:
    """Return the values of the driver's names in `torch._C` while the machine is in place.

    A name without an answer gets a function that raises an error.
    """
    served = device_answers(machine) | build_answers(machine) | stream_answers(machine)
    served |= memory_answers(machine) | raw_memory_answers(machine)
    served |= memory_history.answers(machine) | tunable.answers(machine) | comm.ANSWERS
    served |= {name: served[same] for name, same in SAME.items()}
    refused = {}
    for name in names_in_torch() - served.keys():
        refused[name] = refuse(f"torch._C.{name}", getattr(torch._C, name, None))
    return refused | served


def one_gpu(machine: Machine, index: int) -> hardware.Gpu:
    """Return the GPU with this index.

    Raises RuntimeError with the words of CUDA's allocator if there is no such GPU.
    """
    if not 0 <= index < len(machine.gpus):
        raise RuntimeError(f"Invalid device argument {index}: did you call init?")
    return machine.gpus[index]


def group_tensors(
    lists: list[list[torch.Tensor | None]], with_indices: bool = False
) -> dict[Any, Any]:
    """Group lists of tensors by the device and dtype of the first list's tensors.

    Each list has one entry for each parameter. Foreach optimizers call this function. Raises
    RuntimeError if the lists differ in length.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    if any(x and len(x) != len(lists[0]) for x in lists):
        raise RuntimeError("the lists of tensors differ in length")
    filled = [x or [None] * len(lists[0]) for x in lists]  # an empty list stands for None each
    for position, entry in enumerate(zip(*filled, strict=True)):
        key = (entry[0].device, entry[0].dtype)
        members, indices = groups.setdefault(key, ([[] for _ in lists], []))
        for member, tensor, whole in zip(members, entry, lists, strict=True):
            if whole:
                member.append(tensor)
        if with_indices:
            indices.append(position)
    return groups


def device_answers(machine: Machine) -> dict[str, Any]:
    """Return the driver's functions that count GPUs, select the current one and wait for one."""
    selected = machine.selected

    def checked(index: int) -> int:
        """Return `index`, or raise CUDA's error if no GPU with this index is visible."""
        machine.require_alive()
        machine.start_driver()  # CUDA_VISIBLE_DEVICES may hide some of the machine's GPUs
        if not 0 <= index < len(machine.visible()):
            raise errors.invalid_ordinal()
        return index

    def set_device(index: int) -> None:
        """Make the GPU with this index the current GPU of the calling thread."""
        selected.device = checked(index)
        if machine.initialised:
            machine.current.open_context()

    def device_count() -> int:
        """Return the number of GPUs that CUDA sees."""
        machine.start_driver()  # so that `torch.cuda.is_available()` fixes which GPUs CUDA sees
        return len(machine.visible())

    def exchange(index: int) -> int:
        """Make the GPU with this index the current one, and return the index of the previous one.

        -1 changes nothing and returns -1.
        """
        before = selected.device
        if index >= 0:
            set_device(index)
            return before
        return -1

    def maybe_exchange(index: int) -> int:
        """Make a GPU the current one and return the previous index, as `exchange` does."""
        # A function of its own: torch.compile's tables are keyed by function.
        return exchange(index)

    def synchronize(index: int | None = None) -> None:
        """Wait for all work of the GPU with this index, by default the current one."""
        machine.require_alive()
        machine.take_turn()
        chosen = selected.device if index is None else checked(index)
        machine.gpus[chosen].synchronize()

    def collect_exported() -> None:
        """Free memory that no process uses any more (`torch.cuda.ipc_collect`)."""
        machine.pending_frees.collect()

    def sleep(cycles: int) -> None:
        """Launch a kernel that takes this many clock cycles (`torch.cuda._sleep`)."""
        machine.take_turn()
        gpu = machine.current
        profile = gpu.profile
        seconds = cycles / (profile.sm_clock_khz * 1e3)
        share = costs.share(profile, bytes_moved=0)
        gpu.machine.clock.launch(gpu.stream, seconds, profile.launch_seconds, "sleep", share)

    return {
        "_cuda_init": machine.initialise,
        "_cuda_getDeviceCount": device_count,
        "_cuda_getDevice": lambda: selected.device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_cuda_synchronize": synchronize,
        "_cuda_sleep": sleep,
        "_cuda_isInBadFork": lambda: machine.forked,
        "_cuda_get_sync_debug_mode": lambda: machine.sync_debug.mode,
        "_cuda_set_sync_debug_mode": machine.sync_debug.set,
        "_cuda_hasPrimaryContext": lambda index: machine.initialised and checked(index) == index,
        "_cuda_isCurrentStreamCapturing": lambda: machine.current.stream.capture is not None,
        "_cuda_ipc_collect": collect_exported,
        "_accelerator_getDefaultGenerator": lambda index: machine.gpus[checked(index)].generator,
    }


def build_answers(machine: Machine) -> dict[str, Any]:
    """Return the functions about PyTorch's build and the GPU's model.

    Their results do not depend on the current GPU.
    """
    profile = machine.profile
    benchmark = {"limit": 10}
    jiterator = refuse("torch.cuda.jiterator, which compiles CUDA code with nvrtc,")
    return {
        "_cuda_canDeviceAccessPeer": lambda a, b: a != b and profile.peer_access,
        "_cuda_getArchFlags": lambda: ARCHITECTURES,
        "_cuda_getCompiledVersion": lambda: int(CUDA_VERSION.replace(".", "0")) * 10,
        "_cuda_jiterator_compile_and_launch_kernel": jiterator,
        "_cuda_get_cudnn_benchmark_limit": lambda: benchmark["limit"],
        "_cuda_set_cudnn_benchmark_limit": lambda limit: benchmark.update(limit=limit),
        "_group_tensors_by_device_and_dtype": group_tensors,
        "_get_accelerator": lambda: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceCapability": lambda index: {
            "supported_dtypes": set(),
            "major": profile.major,
            "minor": profile.minor,
        },
    }


def stream_answers(machine: Machine) -> dict[str, Any]:
    """Return the driver's functions that get and set current streams."""

    def current(index: int) -> tuple[int, int, int]:
        """Return (stream id, device index, device type) of the current stream of a GPU."""
        if not 0 <= index < len(machine.gpus):
            raise RuntimeError(
                f"Device index value {index} is out of index range [0, {len(machine.gpus)})"
            )
        gpu = machine.gpus[index]
        if machine.several_streams:
            node = torch._C._current_autograd_node()
            if node is not None:
                backward.arrive(machine, node, gpu)
        return gpu.stream.stream_id, index, CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        """Make a stream the current one of its GPU, and its GPU the current GPU."""
        gpu = machine.gpus[device_index]
        machine.selected.device = device_index
        machine.selected.streams[device_index] = gpu.streams[stream_id]

    def accelerator_stream(index: int) -> AcceleratorStream:
        """Return the current stream of a GPU as an object for torch.accelerator."""
        stream_id, device_index, _ = current(index)
        return AcceleratorStream(stream_id=stream_id, device_index=device_index)

    return {
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
        "_cuda_getCurrentRawStream": lambda index: raw_stream(index, current(index)[0]),
        "_cuda_setStream": set_stream,
        "_accelerator_getStream": accelerator_stream,
        "_accelerator_setStream": lambda stream: set_stream(stream.stream_id, stream.device_index),
    }


def memory_answers(machine: Machine) -> dict[str, Any]:
    """Return the functions of CUDA's caching allocator."""
    gpus = machine.gpus

    def empty_cache() -> None:
        """Give every GPU's cached memory back to the driver."""
        machine.take_turn()
        machine.clock.advance_host(machine.profile.empty_cache_seconds)
        for gpu in gpus:
            gpu.notice(waits=True)
            gpu.allocator.empty_cache()

    def of_one(method: str) -> Callable[[int], Any]:
        """Return a function of a GPU's index that calls `method` of that GPU's allocator."""
        return lambda index: getattr(one_gpu(machine, index).allocator, method)()

    def set_fraction(fraction: float, index: int) -> None:
        """Let the allocator of a GPU reserve at most this fraction of the GPU's memory."""
        one_gpu(machine, index).allocator.set_memory_fraction(fraction)

    def configure(text: str) -> None:
        """Change the settings of PYTORCH_CUDA_ALLOC_CONF, with a text in the same syntax.

        If the text does not name expandable segments, that setting does not change.
        """
        try:
            settings = Settings.parse(text)
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        gpus[0].machine.read_settings()
        if "expandable_segments" not in text:
            expandable = gpus[0].allocator.settings.expandable_segments
            settings = replace(settings, expandable_segments=expandable)
        for gpu in gpus:
            gpu.allocator.configure(settings)

    def clear_workspaces() -> None:
        """Free cuBLAS's workspaces on every GPU."""
        for gpu in gpus:
            blas.clear_workspaces(gpu)

    return {
        "_cuda_attach_out_of_memory_observer": lambda observer: machine.oom_observers.append(
            observer
        ),
        "_cuda_clearCublasWorkspaces": clear_workspaces,
        "_cuda_memoryStats": of_one("stats"),
        "_cuda_resetPeakMemoryStats": of_one("reset_peak_stats"),
        "_cuda_resetAccumulatedMemoryStats": of_one("reset_accumulated_stats"),
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda index: one_gpu(machine, index).allocator.memory_fraction,
        "_cuda_emptyCache": empty_cache,
        "_host_emptyCache": lambda: None,  # of page-locked memory nothing is kept
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_accelerator_setAllocatorSettings": configure,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getMemoryInfo": lambda index: free_and_total(one_gpu(machine, index)),
    }


def raw_memory_answers(machine: Machine) -> dict[str, Any]:
    """Return the functions behind `torch.cuda.caching_allocator_alloc` and its counterpart."""
    blocks: dict[int, tuple[Any, Any]] = {}  # by address, with their GPU

    def raw_allocate(size: int, stream: int) -> int:
        """Allocate `size` bytes for `stream` on the current GPU and return their address."""
        machine.take_turn()
        gpu = machine.current
        block = gpu.allocate(size)
        assert block is not None
        blocks[block.address] = gpu, block
        return block.address

    def raw_free(address: int) -> None:
        """Free the memory that `raw_allocate` returned at this address."""
        gpu, block = blocks.pop(address)
        gpu.allocator.free(block)

    return {
        "_cuda_cudaCachingAllocator_raw_alloc": raw_allocate,
        "_cuda_cudaCachingAllocator_raw_delete": raw_free,
    }


def nvtx() -> SimpleNamespace:
    """Return replacements for the functions of `torch._C._nvtx`.

    The real functions name ranges on a profiler's timeline. Here they only count how deeply ranges
    are nested.
    """
    open_ranges = threading.local()

    def push(name: str) -> int:
        """Begin a range and return its depth. The name is not used."""
        open_ranges.depth = getattr(open_ranges, "depth", 0) + 1
        return open_ranges.depth - 1

    def pop() -> int:
        """End a range and return the remaining depth."""
        open_ranges.depth = getattr(open_ranges, "depth", 0) - 1
        return open_ranges.depth

    def nothing(*arguments: Any) -> int:
        """Do nothing with the arguments, and return 0. It replaces the other NVTX functions."""
        return 0

    others = ("rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")
    return SimpleNamespace(rangePushA=push, rangePop=pop, **dict.fromkeys(others, nothing))
