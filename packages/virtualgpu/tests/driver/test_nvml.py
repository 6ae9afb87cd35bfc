"""NVML's Python module and torch's functions that use it answer for the virtual GPUs only."""

import pynvml
import pytest
import torch

import virtualgpu
from virtualgpu.driver import nvml


@pytest.fixture
def two():
    with virtualgpu.use(gpus=2, like="H200"):
        pynvml.nvmlInit()
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]


def test_names_and_memory_are_the_machine_s(two):
    assert pynvml.nvmlDeviceGetCount() == 2
    assert [pynvml.nvmlDeviceGetName(handle) for handle in two] == ["NVIDIA H200"] * 2
    assert pynvml.nvmlDeviceGetUUID(two[1]) == f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    assert pynvml.nvmlDeviceGetCudaComputeCapability(two[0]) == (9, 0)
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
    memory = pynvml.nvmlDeviceGetMemoryInfo(two[1])
    free, total = torch.cuda.mem_get_info(1)
    assert (memory.free, memory.total, memory.used) == (free, total, total - free)
    assert memory.used > kept.nbytes
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(two[1])
    assert process.usedGpuMemory == memory.used


def test_nothing_is_used_before_cuda_starts(two):
    assert pynvml.nvmlDeviceGetMemoryInfo(two[0]).used == 0
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(two[0]) == []


def test_a_gpu_is_busy_while_work_is_queued(two):
    assert pynvml.nvmlDeviceGetUtilizationRates(two[0]).gpu == 0
    torch.cuda._sleep(10**10)
    assert pynvml.nvmlDeviceGetUtilizationRates(two[0]).gpu == 100
    assert pynvml.nvmlDeviceGetUtilizationRates(two[1]).gpu == 0
    torch.cuda.synchronize()
    assert pynvml.nvmlDeviceGetUtilizationRates(two[0]).gpu == 0


@pytest.mark.parametrize("hidden", [None, "", "1"])  # in a lesson about the computer's own GPUs
def test_torch_asks_through_it(two, hidden, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    torch.ones(3, device="cuda")
    answers = (
        torch.cuda.utilization(),
        torch.cuda.temperature(),
        torch.cuda.power_draw(),
        torch.cuda.clock_rate(),
        torch.cuda.memory_usage(),
    )
    # an idle H200 reported 2 %, 36 °C, 123,127 mW, 1980 MHz, 0 %
    assert answers == (
        0,
        nvml.IDLE_CELSIUS,
        125_000,
        1980,
        0,
    )
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.device_memory_used() == total - free
    assert torch.cuda.list_gpu_processes().splitlines()[0] == "GPU:0"
    assert f"{(total - free) / 2**20:12.3f} MB GPU memory" in torch.cuda.list_gpu_processes()


def test_handles_are_found_by_name_and_number(two):
    assert pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(two[1])) is two[1]
    assert pynvml.nvmlDeviceGetHandleByPciBusId(pynvml.nvmlDeviceGetPciInfo(two[0]).busId) is two[0]
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(2)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-0")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetName("cuda:0")


def test_what_is_not_served_never_reaches_the_library(two):
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetFanSpeed(two[0])
    served = {
        name for name, value in vars(pynvml).items() if name.startswith("nvml") and callable(value)
    }
    reached = {name for name in served if getattr(pynvml, name).__module__ == "pynvml"}
    assert reached == {
        "nvmlExceptionClass",
        "nvmlStructToFriendlyObject",
        "nvmlFriendlyObjectToStruct",
        "nvmlErrorString",
    }


def test_it_must_be_started():
    with virtualgpu.use(gpus=1):
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlShutdown()


def test_the_real_module_comes_back():
    before = dict(vars(pynvml))
    with virtualgpu.use(gpus=1):
        assert pynvml.nvmlInit is not before["nvmlInit"]
    assert {name: value for name, value in vars(pynvml).items() if name.startswith("nvml")} == {
        name: value for name, value in before.items() if name.startswith("nvml")
    }
