"""What NVML says of each GPU, again and again: memory, utilization, power, temperature. Of real GPUs and virtual ones alike."""

import contextlib
import importlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from labkit.nvidia import nvml_text, nvml_trouble

PERIOD = 0.5  # seconds between two looks; asking NVML about a GPU takes 0.07 ms (an H200's driver)
RETRY = 2.0  # seconds while there is nothing to see: starting NVML takes longer than asking it
SPAN = 60.0  # seconds that are kept
INSTEAD = "labkit.use(gpus=1) gives you a virtual one"


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment.

    `index` is NVML's number, the one of `nvidia-smi`: it counts all GPUs, whatever CUDA_VISIBLE_DEVICES says. `used` and `total` are
    bytes, of all processes; `utilization`, from 0 to 1, is the share of NVML's last sample during which a kernel ran; then watts, the
    limit of watts, and °C. None stands for what the GPU does not offer (a GPU in MIG mode has no utilization, many laptops' tell no
    power) or, on a virtual GPU, for what is not modelled. `trouble` says why a GPU gives no figures at all.
    """

    index: int
    name: str
    virtual: bool = False
    used: int | None = None
    total: int | None = None
    utilization: float | None = None
    watts: float | None = None
    watts_limit: float | None = None
    celsius: float | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Look:
    """All GPUs at one moment (`seconds`, of `time.monotonic`); if there are none, `trouble` says why and what to do."""

    seconds: float
    gpus: tuple[GpuReading, ...] = ()
    trouble: str = ""


class NvmlSession:
    """NVML, started once and asked often. It follows when virtual GPUs take the place of real ones, and when the driver goes or returns.

    Who puts virtual GPUs in place exchanges the functions of the module `pynvml`. A session works with one set of them, those that it
    was started with, so it may be asked from another thread while that happens, but from one at a time.
    """

    def __init__(self) -> None:
        self._nvml: SimpleNamespace | None = None  # the module's functions, as they were when this session started
        self._known: dict[int, tuple[str, bool]] = {}  # by index, a GPU's name and whether it is virtual

    def look(self) -> Look:
        """The GPUs as they are now. Never raises."""
        try:
            gpus = self._gpus()
            trouble = "" if gpus else f"the NVIDIA driver knows of none; {INSTEAD}"
        except ImportError as error:
            gpus, trouble = (), f"the package nvidia-ml-py is missing ({error}); pip install nvidia-ml-py brings it"
        except Exception as error:  # whatever a driver does that is going away, who watches wants a sentence
            gpus, trouble = (), f"{nvml_trouble(error)}; {INSTEAD}"
            self.close()
        return Look(time.monotonic(), gpus, trouble)

    def close(self) -> None:
        """Let go of the driver. The next look starts anew."""
        nvml, self._nvml = self._nvml, None
        self._known.clear()
        if nvml is not None:
            with contextlib.suppress(Exception):  # a driver that is gone cannot be left in order
                nvml.nvmlShutdown()

    def _gpus(self) -> tuple[GpuReading, ...]:
        module = importlib.import_module("pynvml")
        if self._nvml is not None and self._nvml.nvmlInit is not module.nvmlInit:
            self.close()
        nvml = self._nvml or self._start(module)
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError_Uninitialized:  # someone else shut NVML down once too often
            count = self._start(module).nvmlDeviceGetCount()
        return tuple(self._reading(index) for index in range(count))

    def _start(self, module: Any) -> SimpleNamespace:
        nvml = SimpleNamespace(**vars(module))
        nvml.nvmlInit()
        self._nvml = nvml
        return nvml

    def _reading(self, index: int) -> GpuReading:
        nvml: Any = self._nvml
        name, virtual = self._known.get(index, ("unknown", False))
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if index not in self._known:
                name, virtual = self._known[index] = nvml_text(nvml.nvmlDeviceGetName(handle)), _is_virtual(handle)
            memory = self._offered(nvml.nvmlDeviceGetMemoryInfo, handle)
            rates = self._offered(nvml.nvmlDeviceGetUtilizationRates, handle)
            milliwatts = limit = celsius = None
            if not virtual:  # a virtual GPU would answer with constants
                milliwatts = self._offered(nvml.nvmlDeviceGetPowerUsage, handle)
                limit = self._offered(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
                celsius = self._offered(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError_Uninitialized:
            raise
        except nvml.NVMLError as error:  # one GPU that fell off the bus does not hide the others
            return GpuReading(index, name, virtual, trouble=nvml_trouble(error))
        return GpuReading(
            index,
            name,
            virtual,
            used=None if memory is None else memory.used,
            total=None if memory is None else memory.total,
            utilization=None if rates is None else rates.gpu / 100,
            watts=None if milliwatts is None else milliwatts / 1000,
            watts_limit=None if limit is None else limit / 1000,
            celsius=celsius,
        )

    def _offered(self, question: Callable[..., Any], *args: Any) -> Any:
        """The answer; None where this GPU or this driver has none."""
        nvml = self._nvml
        none = ("NotSupported", "NoPermission", "FunctionNotFound", "NoData", "InvalidArgument")
        try:
            return question(*args)
        except tuple(getattr(nvml, f"NVMLError_{name}") for name in none if hasattr(nvml, f"NVMLError_{name}")):
            return None


def _is_virtual(handle: Any) -> bool:
    """Is this handle a virtual GPU's? What is not loaded has made none."""
    hardware = sys.modules.get("labkit.vgpu.hardware")
    return hardware is not None and isinstance(handle, hardware.Gpu)


class GpuWatcher:
    """Looks at all GPUs, twice a second from a thread of its own once it is started. The thread reads figures and does nothing else.

    So a cell that keeps the kernel busy is seen, too. The thread ends with `stop`, and when `wanted` says no. A watcher that has
    stopped stays stopped.
    """

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        self._wanted = wanted
        self._session = NvmlSession()
        self._kept: deque[Look] = deque(maxlen=round(SPAN / PERIOD) + 1)
        self._ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.asked = time.monotonic()  # when the last look began

    @property
    def looks(self) -> tuple[Look, ...]:
        """The looks of the last minute, oldest first."""
        return tuple(self._kept)

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and not self._ended.is_set()

    def start(self) -> None:
        self.thread = threading.Thread(target=self._watch, name="labkit readings", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Look no more; what was seen stays. Does not wait for a driver that hangs: the thread ends with its last answer."""
        self._ended.set()
        if self.thread is None:
            self._session.close()

    def look(self) -> Look:
        """One look, now. Only where no thread looks."""
        self.asked = time.monotonic()
        look = self._session.look()
        self._kept.append(look)
        return look

    def _watch(self) -> None:
        try:
            while not self._ended.is_set() and self._wanted():
                self._ended.wait(PERIOD if self.look().gpus else RETRY)
        finally:
            self._session.close()


def history(looks: tuple[Look, ...]) -> tuple[Look, ...]:
    """The latest looks that saw the same GPUs as the last one: what came before belongs to another machine."""
    start = len(looks)
    while start and _identities(looks[start - 1]) == _identities(looks[-1]):
        start -= 1
    return looks[start:]


def _identities(look: Look) -> list[tuple[int, str, bool]]:
    return [(gpu.index, gpu.name, gpu.virtual) for gpu in look.gpus]
