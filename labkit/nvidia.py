"""The real NVIDIA GPUs of this machine, as the driver's own library NVML describes them."""

import contextlib
import importlib
import types
from dataclasses import dataclass


@dataclass(frozen=True)
class GPUReading:
    """One GPU as NVML describes it. What the driver does not tell is None."""

    index: int
    name: str
    memory: int | None  # bytes in all
    used: int | None  # bytes, of all processes
    utilization: float | None  # 0 to 1: the share of the last sample during which a kernel ran
    driver: str
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Answer:
    """The GPUs of this machine. `trouble` is a sentence if there are none."""

    gpus: tuple[GPUReading, ...] = ()
    trouble: str = ""


def ask_nvml() -> Answer:
    """Ask the driver's management library, and raise nothing.

    It counts all GPUs, whatever CUDA_VISIBLE_DEVICES says.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Answer(trouble=f"the package nvidia-ml-py is missing ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Answer(trouble=_nvml_trouble(error))
    try:
        return Answer(tuple(_nvml_reading(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError as error:
        return Answer(trouble=_nvml_trouble(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _nvml_trouble(error: Exception) -> str:
    """The error in a sentence; the three that a learner meets, in plain words."""
    plain = {
        "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here",
        "NVMLError_DriverNotLoaded": "an NVIDIA driver is installed but not loaded (has the machine a GPU? was it restarted?)",
        "NVMLError_LibRmVersionMismatch": "the NVIDIA driver was updated and the old one still runs: restart the machine",
    }
    return plain.get(type(error).__name__, f"NVML failed: {error}")


def _nvml_reading(nvml: types.ModuleType, index: int) -> GPUReading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    if_supported = contextlib.suppress(nvml.NVMLError)  # a GPU in MIG mode, or one that shares the host's memory, leaves questions open
    memory = used = utilization = capability = None
    with if_supported:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        memory, used = info.total, info.used
    with if_supported:
        utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with if_supported:
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    name, driver = _nvml_text(nvml.nvmlDeviceGetName(handle)), _nvml_text(nvml.nvmlSystemGetDriverVersion())
    return GPUReading(index, name, memory, used, utilization, driver, capability)


def _nvml_text(answer: str | bytes) -> str:
    """NVML's Python binding gave bytes before its version 11.515."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
