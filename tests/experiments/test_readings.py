"""What is read of the GPUs, from drivers in every state and from virtual GPUs."""

import sys
import threading

import pynvml
import pytest
import torch
from fake_driver import MIB, FakeDriver

import labkit
from labkit.experiments import readings
from labkit.experiments.readings import GpuReading, GpuWatcher, Look, NvmlSession, history

H200 = GpuReading(0, "NVIDIA H200", False, 10 * MIB, 1000 * MIB, 0.5, 123.127, 700.0, 36)


@pytest.fixture
def driver(monkeypatch):
    return FakeDriver(monkeypatch)


@pytest.fixture
def session():
    session = NvmlSession()
    yield session
    session.close()


def test_all_figures_of_a_gpu(driver, session):
    look = session.look()
    assert look.gpus == (H200,)
    assert look.trouble == ""
    assert session.look().seconds >= look.seconds


def test_nvml_is_started_once_and_shut_down_at_the_end(driver, session):
    session.look()
    session.look()
    assert driver.started == 1
    session.close()
    session.close()
    assert driver.started == 0


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "NO_DATA"])
def test_what_a_gpu_does_not_offer_is_none(driver, session, code):
    questions = ("MemoryInfo", "UtilizationRates", "PowerUsage", "EnforcedPowerLimit", "Temperature")
    driver.broken = {f"nvmlDeviceGet{question}": code for question in questions}
    assert session.look().gpus == (GpuReading(0, "NVIDIA H200"),)


def test_a_gpu_that_is_lost_does_not_hide_the_others(driver, session):
    driver.gpus = 3
    session.look()
    driver.broken = {("nvmlDeviceGetHandleByIndex", 1): "GPU_IS_LOST"}
    first, lost, third = session.look().gpus
    assert (first, third.used, third.index) == (H200, 10 * MIB, 2)
    assert lost == GpuReading(1, "NVIDIA H200", trouble="NVML failed: GPU is lost")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("LIBRARY_NOT_FOUND", "no NVIDIA driver is installed here; labkit.use(gpus=1) gives you a virtual one"),
        ("DRIVER_NOT_LOADED", "not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "restart the machine"),
        ("UNKNOWN", "NVML failed: Unknown Error"),
    ],
)
def test_a_driver_that_does_not_start(driver, session, code, why):
    driver.broken = {"nvmlInit": code}
    look = session.look()
    assert look.gpus == ()
    assert why in look.trouble


def test_a_driver_without_gpus(driver, session):
    driver.gpus = 0
    assert "knows of none; labkit.use(gpus=1)" in session.look().trouble


def test_without_the_package(monkeypatch, session):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in session.look().trouble


@pytest.mark.parametrize("error", [OSError("no such file"), TypeError("odd"), AttributeError("gone")])
def test_other_errors_are_told_not_raised(driver, session, error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", fail)
    assert str(error) in session.look().trouble
    assert driver.started == 0


def test_a_driver_that_goes_away_and_returns(driver, session):
    session.look()
    driver.broken = {"nvmlDeviceGetCount": "DRIVER_NOT_LOADED", "nvmlShutdown": "DRIVER_NOT_LOADED", "nvmlInit": "DRIVER_NOT_LOADED"}
    assert [session.look().gpus for _ in range(2)] == [(), ()]
    driver.broken = {}
    assert session.look().gpus == (H200,)


def test_someone_else_shuts_nvml_down(driver, session):
    session.look()
    pynvml.nvmlShutdown()
    assert session.look().gpus == (H200,)


def test_virtual_gpus_tell_no_power_and_no_temperature(session):
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True):
        kept = torch.ones(MIB, device="cuda:1")
        first, second = session.look().gpus
        free, total = torch.cuda.mem_get_info(1)
    assert (second.name, second.virtual, second.total, second.used) == ("NVIDIA H200", True, total, total - free)
    assert (first.utilization, first.watts, first.watts_limit, first.celsius) == (0.0, None, None, None)
    assert kept.nbytes < second.used


def test_it_follows_when_machines_change(driver, session):
    assert session.look().gpus == (H200,)
    with labkit.use(gpus=3, virtual=True, quiet=True):
        assert [gpu.virtual for gpu in session.look().gpus] == [True] * 3
        assert driver.started == 0
        session.look()
    assert session.look().gpus == (H200,)
    labkit.use(gpus=1, virtual=True, quiet=True)
    labkit.use(None)
    labkit.use(gpus=2, virtual=True, quiet=True)
    assert len(session.look().gpus) == 2
    labkit.use(None)
    session.close()
    assert driver.started == 0


def test_a_look_survives_that_the_machine_is_taken_away_meanwhile(driver, session):
    """A thread's look may be under way when virtual GPUs come: it ends with the answers that it began with."""
    driver.asked = lambda: labkit.current() or labkit.use(gpus=2, virtual=True, quiet=True)
    try:
        assert session.look().gpus == (H200,)
        assert len(session.look().gpus) == 2
    finally:
        labkit.use(None)


@pytest.mark.gpu
def test_a_real_gpu_tells_plausible_figures(session):
    torch.ones(MIB, device="cuda")
    gpu = session.look().gpus[0]
    _, total = torch.cuda.mem_get_info(0)
    assert not gpu.virtual
    assert gpu.trouble == ""
    assert abs(gpu.total - total) < total / 10
    assert 0 < gpu.used <= gpu.total
    assert gpu.utilization is None or 0 <= gpu.utilization <= 1
    assert gpu.watts is None or 0 < gpu.watts < 2000
    assert gpu.celsius is None or 0 < gpu.celsius < 120


# The watcher


def wait_for(watcher: GpuWatcher, looks: int, driver: FakeDriver) -> None:
    """Until the watcher's thread has had that many looks."""
    enough = threading.Event()
    driver.asked = lambda: enough.set() if len(watcher.looks) >= looks else None
    assert enough.wait(10)


def test_its_thread_looks_again_and_again(driver, monkeypatch):
    monkeypatch.setattr(readings, "PERIOD", 0.001)
    watcher = GpuWatcher()
    watcher.start()
    wait_for(watcher, 3, driver)
    assert watcher.running
    watcher.stop()
    assert not watcher.running
    watcher.thread.join(10)
    assert not watcher.thread.is_alive()
    assert driver.started == 0
    assert {look.gpus for look in watcher.looks} == {(H200,)}


def test_its_thread_ends_when_nobody_wants_it(driver, monkeypatch):
    monkeypatch.setattr(readings, "PERIOD", 0.001)
    watcher = GpuWatcher(wanted=lambda: len(watcher.looks) < 2)
    watcher.start()
    watcher.thread.join(10)
    assert not watcher.running
    assert len(watcher.looks) == 2
    assert driver.started == 0


def test_stop_does_not_wait_for_a_driver_that_hangs(driver):
    hangs, released = threading.Event(), threading.Event()
    driver.asked = lambda: hangs.set() or released.wait(10)
    watcher = GpuWatcher()
    watcher.start()
    assert hangs.wait(10)
    watcher.stop()
    assert not watcher.running
    released.set()
    watcher.thread.join(10)
    assert not watcher.thread.is_alive()


def test_it_keeps_the_last_minute(driver):
    watcher = GpuWatcher()
    for _ in range(200):
        watcher.look()
    assert len(watcher.looks) == 121
    watcher.stop()
    assert driver.started == 0


def test_the_history_begins_with_the_machine():
    other = GpuReading(0, "NVIDIA T4")
    looks = (Look(0.0, (other,)), Look(0.5, (H200,)), Look(1.0, trouble="gone"), Look(1.5, (H200,)), Look(2.0, (H200,)))
    assert history(looks) == looks[3:]
    assert history(looks[:3]) == looks[2:3]
    assert history(()) == ()
