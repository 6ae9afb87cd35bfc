"""Answers where torch.cuda and torch.accelerator ask the CUDA driver.

torch.cuda is Python over some names in `torch._C`. Given these, its own code runs as it is: lazy initialisation, device contexts,
memory_stats and its summary, snapshots, streams. A name that torch uses and that is not served here is refused by name.
"""

import hashlib
import inspect
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from labkit.vgpu import comm, errors, hardware, history
from labkit.vgpu.hardware import Machine
from labkit.vgpu.profiles import Profile
from labkit.vgpu.streams import CUDA, Stream
from labkit.vgpu.tensor import unsupported

MIB = 1 << 20
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # what PyTorch's build for CUDA 13.0 holds kernels for
# Names that torch's own Python uses for the driver, as they stand in its source.
NAMES = re.compile(r"\b_C\.(_cuda_\w+|_accelerator_\w+|_nccl_\w+)")
CUDA_VERSION, CUDNN_VERSION = "13.0", 91900  # of the recordings that the virtual GPU is held against


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns. Sizes in bytes, clocks in kHz."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    warp_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    uuid: uuid.UUID
    pci_bus_id: int
    gcnArchName: str  # noqa: N815 (torch's name; on NVIDIA's GPUs it is the model's)
    max_threads_per_block: int = 1024
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, "
            f"pci_device_id={self.pci_device_id}, pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def properties(profile: Profile, total_memory: int, index: int) -> DeviceProperties:
    return DeviceProperties(
        name=profile.name,
        major=profile.major,
        minor=profile.minor,
        total_memory=total_memory,
        multi_processor_count=profile.multiprocessors,
        L2_cache_size=profile.l2_bytes,
        max_threads_per_multi_processor=profile.max_threads_per_multiprocessor,
        regs_per_multiprocessor=profile.registers_per_multiprocessor,
        shared_memory_per_block=profile.shared_memory_per_block_bytes,
        shared_memory_per_block_optin=profile.shared_memory_per_block_optin_bytes,
        shared_memory_per_multiprocessor=profile.shared_memory_per_multiprocessor_bytes,
        warp_size=profile.warp_size,
        clock_rate=profile.sm_clock_khz,
        memory_clock_rate=profile.memory_clock_khz,
        memory_bus_width=profile.memory_bus_bits,
        uuid=uuid.UUID(bytes=hashlib.md5(f"virtual {profile.name} {index}".encode()).digest()),
        pci_bus_id=index + 1,
        gcnArchName=profile.name,
    )


@cache
def names_in_torch() -> frozenset[str]:
    """The driver's names that the installed torch's own source uses."""
    import torch.accelerator.memory
    import torch.cuda.nccl
    import torch.cuda.tunable

    modules = (torch.cuda, torch.cuda.memory, torch.cuda.streams, torch.cuda.nccl, torch.cuda.graphs, torch.cuda.tunable)
    modules += (torch.accelerator, torch.accelerator.memory)
    return frozenset(name for module in modules for name in NAMES.findall(inspect.getsource(module)))


def answers(machine: Machine) -> dict[str, Any]:
    """What stands in `torch._C` while the machine is in place: every name of the driver, served or refused."""
    served = device_answers(machine) | stream_answers(machine) | memory_answers(machine) | history.answers(machine) | comm.answers(machine)
    refused = {name: refuse(f"torch._C.{name}") for name in names_in_torch() - served.keys()}
    return refused | served


def one_gpu(machine: Machine, index: int) -> hardware.Gpu:
    """The GPU of this number. Raises RuntimeError as the allocator does for a number that is not there."""
    if not 0 <= index < len(machine.gpus):
        raise RuntimeError(f"Invalid device argument {index}: did you call init?")
    return machine.gpus[index]


def group_tensors(lists: list[list[torch.Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
    """Lists of tensors, one entry a parameter, cut up by the device and dtype of the first list's: foreach optimizers ask for it."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    if any(x and len(x) != len(lists[0]) for x in lists):
        raise RuntimeError("the lists of tensors differ in length")
    filled = [x or [None] * len(lists[0]) for x in lists]  # an empty list among the others stands for "none of these"
    for position, entry in enumerate(zip(*filled, strict=True)):
        members, indices = groups.setdefault((entry[0].device, entry[0].dtype), ([[] for _ in lists], []))
        for member, tensor, whole in zip(members, entry, lists, strict=True):
            if whole:
                member.append(tensor)
        if with_indices:
            indices.append(position)
    return groups


def refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise unsupported(name)

    return refused


def refuse_type(name: str) -> type:
    """The same for a class, which may stand in annotations and `isinstance` without harm."""

    def refused(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise unsupported(name)

    return type(name.rpartition(".")[2], (), {"__new__": refused, "__module__": name.rpartition(".")[0]})


def device_answers(machine: Machine) -> dict[str, Any]:
    selected = machine.selected
    sync_debug = {"mode": 0}

    def checked(index: int) -> int:
        machine.require_alive()
        if not 0 <= index < len(machine.gpus):
            raise errors.invalid_ordinal()
        return index

    def set_device(index: int) -> None:
        selected.device = checked(index)

    def exchange(index: int) -> int:
        before = selected.device
        if index >= 0:
            selected.device = checked(index)
            return before
        return -1

    def synchronize(index: int | None = None) -> None:
        machine.require_alive()
        machine.gpus[selected.device if index is None else checked(index)].synchronize()

    def sleep(cycles: int) -> None:
        gpu = machine.current
        gpu.machine.clock.launch(gpu.stream, cycles / (gpu.profile.sm_clock_khz * 1e3), gpu.profile.launch_seconds, "sleep")

    def capability(index: int) -> dict[str, Any]:
        return {"supported_dtypes": set(), "major": machine.profile.major, "minor": machine.profile.minor}

    answers = {
        "_cuda_init": machine.initialise,
        "_cuda_getDeviceCount": machine.visible,
        "_cuda_getDevice": lambda: selected.device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": synchronize,
        "_cuda_sleep": sleep,
        "_cuda_isInBadFork": lambda: machine.forked,
        "_cuda_canDeviceAccessPeer": lambda a, b: a != b and machine.profile.peer_access,
        "_cuda_getArchFlags": lambda: ARCHITECTURES,
        "_cuda_get_sync_debug_mode": lambda: sync_debug["mode"],
        "_cuda_set_sync_debug_mode": lambda mode: sync_debug.update(mode=mode),
        "_cuda_ipc_collect": lambda: None,
        "_group_tensors_by_device_and_dtype": group_tensors,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: selected.device,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_exchangeDevice": exchange,
        "_accelerator_maybeExchangeDevice": exchange,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_getDeviceCapability": capability,
    }
    return answers


def stream_answers(machine: Machine) -> dict[str, Any]:
    def current(index: int) -> tuple[int, int, int]:
        return one_gpu(machine, index).stream.stream_id, index, CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int = CUDA) -> None:
        gpu = machine.gpus[device_index]
        machine.selected.device = device_index
        machine.selected.streams[device_index] = gpu.streams[stream_id]

    def accelerator_stream(index: int) -> Stream:
        stream_id, device_index, _ = current(index)
        return Stream(stream_id=stream_id, device_index=device_index)

    return {
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda index: (0, index, CUDA),
        "_cuda_getCurrentRawStream": lambda index: current(index)[0],
        "_cuda_setStream": set_stream,
        "_accelerator_getStream": accelerator_stream,
        "_accelerator_setStream": lambda stream: set_stream(stream.stream_id, stream.device_index),
    }


def memory_answers(machine: Machine) -> dict[str, Any]:
    gpus = machine.gpus
    raw: dict[int, tuple[Any, Any]] = {}  # address -> GPU and block of caching_allocator_alloc

    def every(method: str) -> Callable[[], None]:
        def call() -> None:
            for gpu in gpus:
                getattr(gpu.allocator, method)()

        return call

    def empty_cache() -> None:
        for gpu in gpus:
            gpu.notice(waits=True)
            gpu.allocator.empty_cache()

    def of_one(method: str) -> Callable[[int], Any]:
        return lambda index: getattr(one_gpu(machine, index).allocator, method)()

    def set_fraction(fraction: float, index: int) -> None:
        one_gpu(machine, index).allocator.set_memory_fraction(fraction)

    def raw_allocate(size: int, stream: int) -> int:
        gpu = machine.current
        block = gpu.allocate(size)
        raw[block.address] = gpu, block
        return block.address

    def raw_free(address: int) -> None:
        gpu, block = raw.pop(address)
        gpu.allocator.free(block)

    def information(index: int) -> tuple[int, int]:
        return one_gpu(machine, index).allocator.free_bytes(), machine.total_memory

    return {
        "_cuda_memoryStats": of_one("stats"),
        "_cuda_resetPeakMemoryStats": of_one("reset_peak_stats"),
        "_cuda_resetAccumulatedMemoryStats": of_one("reset_accumulated_stats"),
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda index: one_gpu(machine, index).allocator.memory_fraction,
        "_cuda_emptyCache": empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": raw_allocate,
        "_cuda_cudaCachingAllocator_raw_delete": raw_free,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_getDeviceStats": of_one("stats"),
        "_accelerator_resetPeakStats": of_one("reset_peak_stats"),
        "_accelerator_resetAccumulatedStats": of_one("reset_accumulated_stats"),
        "_accelerator_getMemoryInfo": information,
    }


def runtime(machine: Machine) -> SimpleNamespace:
    """`torch.cuda.cudart()`: the few functions of the CUDA runtime that torch's own Python calls."""
    success = 0

    def memory_information(index: int) -> tuple[int, int]:
        gpu = machine.gpu(index)
        return gpu.allocator.free_bytes(), machine.total_memory

    return SimpleNamespace(
        cudaError=SimpleNamespace(success=success),
        cudaGetErrorString=lambda error: f"CUDA error {error}",
        cudaMemGetInfo=memory_information,
        cudaProfilerStart=lambda: success,
        cudaProfilerStop=lambda: success,
    )
