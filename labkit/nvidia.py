"""The real NVIDIA GPUs of this machine, as reported by NVML, the library of NVIDIA's driver."""

import contextlib
import importlib
from dataclasses import dataclass

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


def ask_nvml() -> Answer:
    """Return what NVML reports about all GPUs, also those that CUDA_VISIBLE_DEVICES hides.

    If NVML fails, the answer's `trouble` says why. This function raises no exception.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Answer(trouble=f"the package nvidia-ml-py is missing ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Answer(trouble=_TROUBLES.get(type(error).__name__, f"NVML failed: {error}"))
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        gpus = tuple(map(nvml.nvmlDeviceGetName, handles))
        return Answer(gpus, nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        return Answer(trouble=f"NVML failed: {error}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
