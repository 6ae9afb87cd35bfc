"""What NVML, `nvidia-smi` and GPUtil each say about the real NVIDIA GPUs of this machine, whatever state the driver is in.

Each `ask_*` returns an `Answer` and never raises: an answer holds the GPUs, or one sentence saying why there are none.
"""

import contextlib
import csv
import importlib
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
TIMEOUT = 20.0  # seconds; without persistence mode a driver may take several to wake eight GPUs


@dataclass(frozen=True)
class GPUReading:
    """One GPU as one source describes it. What the source does not know, or the driver does not tell, is None."""

    index: int
    name: str
    uuid: str
    memory: int | None  # bytes in all
    used: int | None  # bytes, of all processes
    utilization: float | None  # 0 to 1: the share of the last sample during which a kernel ran
    driver: str
    capability: tuple[int, int] | None = None  # NVML only


@dataclass(frozen=True)
class Answer:
    """The answer of `source`: its GPUs, and in `trouble` what went wrong (empty when nothing did)."""

    source: str
    gpus: tuple[GPUReading, ...] = ()
    trouble: str = ""


def ask_all(timeout: float = TIMEOUT) -> list[Answer]:
    """NVML, `nvidia-smi` and GPUtil, in this order. GPUtil waits for `nvidia-smi` without end, so a hanging one spares it the question."""
    smi = ask_nvidia_smi(timeout)
    if "did not answer" in smi.trouble:
        gputil = Answer("GPUtil", trouble="not asked: it would wait for nvidia-smi, which does not answer")
    else:
        gputil = ask_gputil()
    return [ask_nvml(), smi, gputil]


# NVML: the driver's own library, a function call away.


def ask_nvml() -> Answer:
    """Ask the driver's management library. It counts all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return Answer("NVML", trouble=f"the package nvidia-ml-py is missing ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Answer("NVML", trouble=_nvml_trouble(error))
    try:
        return Answer("NVML", tuple(_nvml_reading(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError as error:
        return Answer("NVML", trouble=_nvml_trouble(error))
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
    name, uuid, driver = (
        _nvml_text(answer) for answer in (nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle), nvml.nvmlSystemGetDriverVersion())
    )
    return GPUReading(index, name, uuid, memory, used, utilization, driver, capability)


def _nvml_text(answer: str | bytes) -> str:
    """NVML's Python binding gave bytes before its version 11.515."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


# nvidia-smi: a program, some twenty milliseconds away.

FIELDS = ("index", "name", "uuid", "memory.total", "memory.used", "utilization.gpu", "driver_version")


def ask_nvidia_smi(timeout: float = TIMEOUT) -> Answer:
    """Run `nvidia-smi` and read its table; wait at most `timeout` seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Answer("nvidia-smi", trouble="there is no nvidia-smi on the PATH (it comes with the NVIDIA driver)")
    try:
        status, output = _run([program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"], timeout)
    except OSError as error:
        return Answer("nvidia-smi", trouble=f"{program} cannot be run: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return Answer("nvidia-smi", trouble=f"{program} did not answer in {timeout:g} s")
    if status:
        return Answer("nvidia-smi", trouble=f"{program} failed with exit status {status}: {_first_line(output)}")
    try:
        return Answer("nvidia-smi", tuple(_smi_reading(row) for row in csv.reader(output.splitlines(), skipinitialspace=True) if row))
    except (ValueError, csv.Error):
        return Answer("nvidia-smi", trouble=f"{program} printed something that is not its table: {_first_line(output)}")


def _run(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit status and output. subprocess.run would wait without end for a process that a hung driver holds, even killed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        if process.stdout is not None:
            process.stdout.close()
        raise
    return process.returncode, output


def _smi_reading(row: list[str]) -> GPUReading:
    """One line of the table. `[N/A]`, `[Not Supported]` and other words in a number's place mean None; ValueError for no such line."""
    index, name, uuid, memory, used, utilization, driver = row
    memory_mib, used_mib, percent = _number(memory), _number(used), _number(utilization)
    return GPUReading(
        index=int(index),
        name=name,
        uuid=uuid,
        memory=None if memory_mib is None else int(memory_mib * MIB),
        used=None if used_mib is None else int(used_mib * MIB),
        utilization=None if percent is None else percent / 100,
        driver=driver,
    )


def _number(text: str) -> float | None:
    """A number, also with a decimal comma and a unit, as some languages and drivers print it; None for words."""
    figure = text.split()[0].replace(",", ".") if text.split() else ""
    try:
        number = float(figure)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _first_line(output: str) -> str:
    return next((line.strip()[:200] for line in output.splitlines() if line.strip()), "(nothing)")


# GPUtil: a Python package that runs nvidia-smi and reads its table.


def gputil() -> types.ModuleType:
    """The package GPUtil, also where `distutils` is gone.

    GPUtil 1.4.0 imports `distutils.spawn` for one function that finds a program. Python 3.12 took distutils away, and only setuptools
    brings it back. A stand-in holds that function for the moment of the import. Once imported, a plain `import GPUtil` finds it too.
    """
    with _distutils_stand_in():
        return importlib.import_module("GPUtil")


@contextlib.contextmanager
def _distutils_stand_in() -> Iterator[None]:
    """A `distutils.spawn.find_executable` for the length of the block, where no distutils is loaded."""
    if "distutils" in sys.modules:
        yield
        return
    package: Any
    spawn: Any
    package, spawn = types.ModuleType("distutils"), types.ModuleType("distutils.spawn")
    package.__path__ = []
    package.spawn = spawn
    spawn.find_executable = shutil.which
    sys.modules.update({"distutils": package, "distutils.spawn": spawn})
    try:
        yield
    finally:
        del sys.modules["distutils"], sys.modules["distutils.spawn"]


def ask_gputil() -> Answer:
    """Ask GPUtil. It has no time limit, hides a missing `nvidia-smi` (no GPUs), and stumbles over anything but the table."""
    try:
        package = gputil()
    except Exception as error:  # whatever a broken package raises: the other two answer all the same
        return Answer("GPUtil", trouble=f"the package GPUtil cannot be imported ({error})")
    try:
        found = package.getGPUs()
    except (ValueError, IndexError, ZeroDivisionError) as error:
        return Answer("GPUtil", trouble=f"GPUtil could not read what nvidia-smi printed: {type(error).__name__}: {error}")
    if not found:
        return Answer("GPUtil", trouble="GPUtil found no GPU; it says the same when nvidia-smi is missing or cannot be run")
    return Answer("GPUtil", tuple(_gputil_reading(gpu) for gpu in found))


def _gputil_reading(gpu: Any) -> GPUReading:
    """GPUtil speaks in MiB and gives NaN for what it cannot read."""

    def known(number: float) -> float | None:
        return number if number == number else None

    memory, used = known(gpu.memoryTotal), known(gpu.memoryUsed)
    return GPUReading(
        index=gpu.id,
        name=gpu.name,
        uuid=gpu.uuid,
        memory=None if memory is None else int(memory * MIB),
        used=None if used is None else int(used * MIB),
        utilization=known(gpu.load),
        driver=gpu.driver,
    )
