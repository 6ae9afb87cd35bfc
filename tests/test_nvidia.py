"""NVML's answers, with faked drivers in every state that learners meet."""

import sys
import types

import pytest
import torch

import labkit
from labkit import nvidia


class FakeNvml(types.ModuleType):
    """Module like pynvml, whose errors are subclasses of its NVMLError."""

    def __init__(self, broken: dict[str, str]):
        super().__init__("pynvml")
        self.NVMLError = type("NVMLError", (Exception,), {})
        self.shut_down = 0
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": self._shut_down,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlSystemGetDriverVersion": lambda: "570.1",
        }
        for name, answer in answers.items():
            setattr(self, name, self._failing(broken[name]) if name in broken else answer)

    def _shut_down(self):
        self.shut_down += 1

    def _failing(self, error: str):
        def fail(*arguments):
            raise type(error, (self.NVMLError,), {})(f"the text of {error}")

        return fail


@pytest.fixture
def nvml(monkeypatch):
    def install(broken: dict[str, str] | None = None) -> FakeNvml:
        fake = FakeNvml(broken or {})
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_nvml_reads_all(nvml):
    fake = nvml()
    answer = nvidia.ask_nvml()
    assert answer == nvidia.Answer(("NVIDIA H200",), "570.1")
    assert fake.shut_down == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NVMLError_LibraryNotFound", "no NVIDIA driver"),
        ("NVMLError_DriverNotLoaded", "not loaded"),
        ("NVMLError_LibRmVersionMismatch", "restart the machine"),
        ("NVMLError_Unknown", "the text of NVMLError_Unknown"),
    ],
)
def test_nvml_that_does_not_start(nvml, error, said):
    nvml({"nvmlInit": error})
    answer = nvidia.ask_nvml()
    assert answer.gpus == () and said in answer.trouble


def test_nvml_shuts_down_after_a_lost_gpu(nvml):
    fake = nvml({"nvmlDeviceGetHandleByIndex": "NVMLError_GpuIsLost"})
    answer = nvidia.ask_nvml()
    assert "GpuIsLost" in answer.trouble and fake.shut_down == 1


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is missing" in nvidia.ask_nvml().trouble


@pytest.mark.gpu
def test_a_real_gpu_has_the_name_that_pytorch_says():
    answer = nvidia.ask_nvml()
    assert answer.gpus[0] == torch.cuda.get_device_name(0) and answer.driver


def test_nvml_tells_of_virtual_gpus_too():
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        assert nvidia.ask_nvml().gpus == ("NVIDIA H200",) * 2


def test_readings_leave_out_what_a_gpu_does_not_report(nvml, monkeypatch):
    fake = nvml()

    def refuse(handle):
        raise fake.NVMLError

    memory = types.SimpleNamespace(total=100, used=30)
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", lambda handle: memory, raising=False)
    monkeypatch.setattr(fake, "nvmlDeviceGetUtilizationRates", refuse, raising=False)
    assert nvidia.readings() == [nvidia.Reading("NVIDIA H200", 100, 30, None)]


def test_without_a_driver_there_are_no_readings(nvml):
    nvml({"nvmlInit": "NVMLError_LibraryNotFound"})
    assert nvidia.readings() == []
