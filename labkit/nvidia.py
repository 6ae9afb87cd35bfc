"""The real NVIDIA GPUs of this machine, as the driver's own library NVML describes them."""

import contextlib
import importlib
from dataclasses import dataclass

# Plain words for the errors that learners meet.
_TROUBLES = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here",
    "NVMLError_DriverNotLoaded": "an NVIDIA driver is installed but not loaded. Has the machine a GPU? Was it restarted?",
    "NVMLError_LibRmVersionMismatch": "the NVIDIA driver was updated and the old one still runs: restart the machine",
}


@dataclass(frozen=True)
class Answer:
    """The names of this machine's GPUs, and the driver. `trouble` is a sentence if there are none."""

    gpus: tuple[str, ...] = ()
    driver: str = ""
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
