"""NVML for virtual GPUs: a report of each GPU, and the Python module `pynvml` that reads it.

nvidia-smi answers from the same report. NVML numbers all GPUs of the machine, whatever
CUDA_VISIBLE_DEVICES says, and counts what every process holds. Memory, clocks, names and processes
are the machine's. Temperature and power are not modelled: they are those of an idle H200.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from virtualgpu.driver.properties import CUDA_VERSION, properties
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.processes.usage_table import program

# Recorded on an idle H200 in November 2026 (benchmarks/fidelity/h200/probe.json): 36 °C, and 125 W
# of 700 W.
IDLE_CELSIUS = 36
IDLE_SHARE_OF_POWER = 125 / 700
# NVML's utilization is that of its last sample, of 1/6 s to 1 s (nvml.h,
# nvmlDeviceGetUtilizationRates).
SAMPLE_SECONDS = 1 / 6


@dataclass(frozen=True)
class GpuReport:
    """The state of one virtual GPU at one moment. Sizes in bytes, clocks in MHz, power in watts.

    `busy`, from 0 to 1, is the share of a sample period for which work is queued. The host's
    clock does not advance while NVML asks.
    """

    index: int
    name: str
    uuid: str
    bus_id: str
    capability: tuple[int, int]
    total: int
    used: int
    busy: float
    celsius: int
    watts: float
    watts_limit: float
    sm_clock: int
    memory_clock: int
    nvlinks: int
    processes: tuple[tuple[int, str, int], ...]  # process id, program, bytes


@dataclass(frozen=True)
class Report:
    """The state of a machine at one moment: its versions, its processes and its GPUs."""

    driver: str
    cuda: str
    processors: int
    gpus: tuple[GpuReport, ...]

    def plain(self) -> dict[str, Any]:
        """Return the report as a dictionary that can be converted to JSON."""
        return asdict(self)


def report(machine: Machine) -> Report:
    """Return the report of a machine at this moment."""
    gpus = tuple(map(gpu_report, machine.gpus))
    return Report(machine.profile.driver_version, CUDA_VERSION, os.cpu_count() or 1, gpus)


def gpu_report(gpu: Gpu) -> GpuReport:
    """Return the report of one GPU at this moment."""
    machine, profile = gpu.machine, gpu.profile
    figures = properties(profile, machine.total_memory, gpu.index)
    holders = machine.usage.holders(gpu.number)
    ends = max(stream.ready for stream in list(gpu.streams.values()))
    bus, device = figures.pci_bus_id, figures.pci_device_id
    return GpuReport(
        index=gpu.index,
        name=profile.name,
        uuid=f"GPU-{figures.uuid}",
        bus_id=f"{figures.pci_domain_id:08X}:{bus:02X}:{device:02X}.0",
        capability=(profile.major, profile.minor),
        total=machine.total_memory,
        used=sum(nbytes for _, nbytes in holders),
        busy=min(1.0, max(0.0, ends - machine.clock.host) / SAMPLE_SECONDS),
        celsius=IDLE_CELSIUS,
        watts=round(profile.power_limit_watts * IDLE_SHARE_OF_POWER, 2),
        watts_limit=profile.power_limit_watts,
        sm_clock=profile.sm_clock_khz // 1000,
        memory_clock=profile.memory_clock_khz // 1000,
        nvlinks=profile.nvlinks,
        processes=tuple((pid, program(pid), nbytes) for pid, nbytes in holders),
    )


# The module pynvml.


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield `pynvml` with a replacement of every function that would ask the real library.

    Unsupported functions raise NVML's own error. Without the package nvidia-ml-py, yield
    nothing.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return
    served = System(pynvml, machine).functions()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Raise NVML's error for a function that is not supported."""
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    yield pynvml, {name: served.get(_unversioned(name), refuse) for name in _asking(pynvml)}


@cache
def _asking(pynvml: ModuleType) -> list[str]:
    """Return the names of the functions of `pynvml` that would call NVIDIA's library."""
    kept = (
        "nvmlExceptionClass",
        "nvmlStructToFriendlyObject",
        "nvmlFriendlyObjectToStruct",
        "nvmlErrorString",
    )
    functions = [name for name, value in vars(pynvml).items() if callable(value)]
    return [name for name in functions if name.startswith("nvml") and name not in kept]


def _unversioned(name: str) -> str:
    """Remove the version, such as _v2, from the end of an NVML function's name."""
    stem, _, version = name.rpartition("_v")
    if stem and version.isdigit():
        return stem
    return name


class System:
    """The functions of NVML for a machine. Handles are `Gpu` objects. Each call makes a report."""

    def __init__(self, pynvml: ModuleType, machine: Machine) -> None:
        """Keep the machine to report, and the module `pynvml` for its errors and constants."""
        self._nvml = pynvml
        self._machine = machine
        self._started = 0

    def _error(self, code: str) -> Exception:
        """Return NVML's exception for an error code, such as "NOT_FOUND"."""
        return self._nvml.NVMLError(getattr(self._nvml, f"NVML_ERROR_{code}"))

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of NVML that are supported, by name without version."""
        answers: dict[str, Callable[..., Any]] = {
            "nvmlSystemGetDriverVersion": lambda: self._machine.profile.driver_version,
            "nvmlSystemGetNVMLVersion": lambda: f"13.{self._machine.profile.driver_version}",
            "nvmlSystemGetCudaDriverVersion": self._cuda_version,
            "nvmlDeviceGetCount": lambda: len(self._machine.gpus),
            "nvmlDeviceGetHandleByIndex": self._by_index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: self._search("uuid", uuid),
            "nvmlDeviceGetHandleByPciBusId": lambda bus_id: self._search("bus_id", bus_id),
        }
        for name, answer in self._device_answers().items():
            answers[name] = self._of_gpu(answer)
        started = {name: self._once_started(answer) for name, answer in answers.items()}
        switches = {"nvmlInit": self._start, "nvmlInitWithFlags": self._start}
        return started | switches | {"nvmlShutdown": self._stop}

    def _device_answers(self) -> dict[str, Callable[..., Any]]:
        """Return functions that answer from the report of one GPU, by NVML's name.

        Units are NVML's: bytes, per cent, °C, MHz, milliwatts.
        """
        return {
            "nvmlDeviceGetIndex": lambda gpu: gpu.index,
            "nvmlDeviceGetMinorNumber": lambda gpu: gpu.index,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetMemoryInfo": _memory,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(
                gpu=round(100 * gpu.busy), memory=0
            ),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu.celsius,
            "nvmlDeviceGetPowerUsage": lambda gpu: round(1000 * gpu.watts),
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: round(1000 * gpu.watts_limit),
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: round(1000 * gpu.watts_limit),
            "nvmlDeviceGetClockInfo": self._clock,
            "nvmlDeviceGetMaxClockInfo": self._clock,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
            "nvmlDeviceGetComputeRunningProcesses": _processes,
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: [],
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(
                busId=gpu.bus_id, bus=gpu.index + 1, device=0, domain=0
            ),
            "nvmlDeviceGetPerformanceState": lambda gpu: 0,
            "nvmlDeviceGetPersistenceMode": lambda gpu: 1,
            "nvmlDeviceGetDisplayActive": lambda gpu: 0,
            "nvmlDeviceGetComputeMode": lambda gpu: 0,
        }

    def _of_gpu(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of NVML that takes a GPU's handle as its first argument.

        It calls `answer` with the report of this GPU in place of the handle.
        """

        def call(handle: Any, *args: Any, **kwargs: Any) -> Any:
            """Call `answer` with the report of the handle's GPU.

            Raises NVML's error for an invalid handle.
            """
            if not isinstance(handle, Gpu):
                raise self._error("INVALID_ARGUMENT")
            return answer(gpu_report(handle), *args, **kwargs)

        return call

    def _once_started(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return `answer`, changed to raise NVML's error before nvmlInit was called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call `answer`. Raises NVML's error if nvmlInit was not called before."""
            if not self._started:
                raise self._error("UNINITIALIZED")
            return answer(*args, **kwargs)

        return call

    def _start(self, flags: int = 0) -> None:
        """Start NVML. Each start needs a stop. The flags have no effect."""
        self._started += 1

    def _stop(self) -> None:
        """Undo one start of NVML. Raises NVML's error if there was none."""
        if not self._started:
            raise self._error("UNINITIALIZED")
        self._started -= 1

    def _cuda_version(self) -> int:
        """Return CUDA's version as NVML writes it: 13000 for 13.0."""
        major, minor = map(int, CUDA_VERSION.split("."))
        return 1000 * major + 10 * minor

    def _by_index(self, index: int) -> Gpu:
        """Return the handle of the GPU with this index."""
        if not 0 <= index < len(self._machine.gpus):
            raise self._error("INVALID_ARGUMENT")
        return self._machine.gpus[index]

    def _search(self, field: str, value: str | bytes) -> Gpu:
        """Return the handle of the GPU whose report has `value` in `field`.

        Raises NVML's error if there is no such GPU.
        """
        if isinstance(value, bytes):
            value = value.decode()
        for gpu in self._machine.gpus:
            if getattr(gpu_report(gpu), field) == value:
                return gpu
        raise self._error("NOT_FOUND")

    def _clock(self, gpu: GpuReport, kind: int) -> int:
        """Return the clock of a GPU, in MHz. `kind` is NVML's number for a kind of clock."""
        if kind == self._nvml.NVML_CLOCK_MEM:
            return gpu.memory_clock
        return gpu.sm_clock


def _memory(gpu: GpuReport, version: Any = None) -> SimpleNamespace:
    """Return the memory figures of a GPU as NVML's structure.

    `version` is the version of the structure that the caller asked for.
    """
    free = gpu.total - gpu.used
    return SimpleNamespace(total=gpu.total, free=free, used=gpu.used, reserved=0, version=version)


def _processes(gpu: GpuReport) -> list[SimpleNamespace]:
    """Return the processes that hold memory of a GPU, as NVML's structures."""
    found = []
    for pid, _, nbytes in gpu.processes:
        found.append(SimpleNamespace(pid=pid, usedGpuMemory=nbytes, gpuInstanceId=None))
    return found
