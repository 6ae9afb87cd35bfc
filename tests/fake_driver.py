"""A driver for tests: its answers take the place of those of NVML's module. It can refuse, go away and return."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1 << 20


class FakeDriver:
    """`gpus` H200s. `broken` gives, by function or by (function, index), the code of the error that it raises: "NOT_SUPPORTED"."""

    def __init__(self, monkeypatch: Any, gpus: int = 1) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # PyTorch's numbers of GPUs are the driver's
        self.gpus = gpus
        self.used = 10 * MIB
        self.broken: dict[Any, str] = {}
        self.started = 0  # how many sessions are open
        self.asked: Callable[[], None] = lambda: None  # done at each question for the memory
        answers = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlDeviceGetCount": lambda: self.gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: (self.asked(), SimpleNamespace(total=1000 * MIB, used=self.used))[1],
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=50, memory=1),
            "nvmlDeviceGetPowerUsage": lambda handle: 123_127,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 36,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._served(name, answer))

    def _count(self, sessions: int) -> None:
        self.started += sessions

    def _served(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            code = self.broken.get(name) or self.broken.get((name, *args[:1]))
            if not code and name != "nvmlInit" and not self.started:
                code = "UNINITIALIZED"
            if code:
                raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
            return answer(*args)

        return call
