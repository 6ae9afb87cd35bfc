"""The real NVIDIA GPUs of this machine, as reported by NVML, the library of NVIDIA's driver."""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Found = TypeVar("Found")

# Explanations of the NVML errors that learners meet, by the name of the error's class.
_TROUBLES = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here",
    "NVMLError_DriverNotLoaded": (
        "an NVIDIA driver is installed but not loaded. "
        "Check that the machine has a GPU, and restart the machine"
    ),
    "NVMLError_LibRmVersionMismatch": (
        "the NVIDIA driver was updated but the old one still runs: restart the machine"
    ),
}


@dataclass(frozen=True)
class Answer:
    """What NVML reports about this machine.

    Attributes:
        gpus: the names of the GPUs.
        driver: the version of the driver, "" if it is not known.
        trouble: why NVML reports nothing, without a full stop. It is "" if NVML works.
    """

    gpus: tuple[str, ...] = ()
    driver: str = ""
    trouble: str = ""


@dataclass(frozen=True)
class Reading:
    """What NVML measures on one GPU. None stands for what this GPU does not report.

    Attributes:
        total, used: bytes. `used` counts all processes.
        busy: the percentage of NVML's last sample in which a kernel ran.
    """

    name: str
    total: int | None
    used: int | None
    busy: int | None


def ask_nvml() -> Answer:
    """Return what NVML reports about all GPUs, also those that CUDA_VISIBLE_DEVICES hides.

    If NVML fails, the answer's `trouble` says why. This function raises no exception.
    """
    return _asked(_names)


def readings() -> list[Reading]:
    """Return what NVML measures on all GPUs at this moment. Without a driver, the list is empty."""
    found = _asked(_measure)
    return [] if isinstance(found, Answer) else found


def _asked(read: Callable[[Any], Found]) -> Found | Answer:
    """Return the result of `read`, which gets the module `pynvml`, or the trouble with NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Answer(trouble=f"the package nvidia-ml-py is missing ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Answer(trouble=_TROUBLES.get(type(error).__name__, f"NVML failed: {error}"))
    try:
        return read(nvml)
    except nvml.NVMLError as error:
        return Answer(trouble=f"NVML failed: {error}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _names(nvml: Any) -> Answer:
    """Return an `Answer` with the names of all GPUs and the driver's version.

    `nvml` is the module `pynvml`.
    """
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    gpus = tuple(map(nvml.nvmlDeviceGetName, handles))
    return Answer(gpus, nvml.nvmlSystemGetDriverVersion())


def _measure(nvml: Any) -> list[Reading]:
    """Return the reading of each GPU. `nvml` is the module `pynvml`."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        total = used = busy = None
        with contextlib.suppress(nvml.NVMLError):  # a GPU that shares the host's memory
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, used = memory.total, memory.used
        with contextlib.suppress(nvml.NVMLError):  # a GPU that is divided into instances
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        found.append(Reading(nvml.nvmlDeviceGetName(handle), total, used, busy))
    return found
