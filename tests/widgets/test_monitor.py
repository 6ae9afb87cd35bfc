"""The monitor, with a driver in every state, with virtual GPUs, with and without a kernel's event loop."""

import asyncio
import threading

import pytest
import torch
from fake_driver import MIB, FakeDriver

import labkit
from labkit.experiments import readings
from labkit.widgets import Monitor, monitor


@pytest.fixture
def driver(monkeypatch):
    return FakeDriver(monkeypatch)


@pytest.fixture
def quick(monkeypatch):
    """No half seconds in tests."""
    for module in (readings, monitor):
        monkeypatch.setattr(module, "PERIOD", 0.005)
    monkeypatch.setattr(readings, "RETRY", 0.005)
    monkeypatch.setattr(monitor, "FIRST", 0.001)


def in_kernel(learner) -> None:
    """Run it as cells run: on an event loop in the main thread. No thread of the monitor's may be left."""
    asyncio.run(asyncio.wait_for(learner(), 10))
    for thread in readers():
        thread.join(10)
    assert readers() == []


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "labkit readings"]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# Without an event loop


def test_it_shows_the_figures_at_once(driver):
    shown = Monitor()
    assert "Watching 1 GPU." in shown.message.value
    assert "<td>10 MiB</td>" in shown.figures.value
    assert "measured on NVIDIA H200" in shown.figures.value
    driver.used = 20 * MIB
    shown.refresh()
    assert "<td>20 MiB</td>" in shown.figures.value
    assert readers() == []
    shown.stop()


def test_its_text_in_a_stored_notebook_is_always_the_same(driver):
    shown = Monitor()
    assert repr(shown) == "Monitor()"
    shown.stop()


def test_after_stop_the_figures_stay_and_the_driver_is_let_go(driver):
    shown = Monitor()
    shown.stop_button.click()
    driver.used = 20 * MIB
    shown.refresh()
    assert "<td>10 MiB</td>" in shown.figures.value
    assert "Stopped." in shown.message.value
    assert driver.started == 0
    shown.stop_button.click()
    shown.start_button.click()
    assert "<td>20 MiB</td>" in shown.figures.value
    assert driver.started == 1
    shown.close()
    assert driver.started == 0


def test_its_buttons_keep_the_keyboard_s_place(driver):
    shown = Monitor()
    shown.stop()
    assert not shown.start_button.disabled
    assert not shown.stop_button.disabled


def test_without_a_driver_it_says_so_in_a_sentence_until_there_is_a_gpu(driver):
    driver.broken = {"nvmlInit": "LIBRARY_NOT_FOUND"}
    shown = Monitor()
    sentence = "No GPU to show: no NVIDIA driver is installed here; labkit.use(gpus=1) gives you a virtual one."
    assert shown.message.value == f'<p role="status">{sentence}</p>'
    assert shown.figures.value == ""
    with labkit.use(gpus=2, virtual=True, quiet=True):
        shown.refresh()
        assert "Watching 2 GPUs." in shown.message.value
        assert shown.figures.value.count("not modelled") == 4
    shown.refresh()
    assert sentence in shown.message.value
    assert shown.figures.value == ""
    shown.stop()


def test_the_driver_goes_away_and_returns(driver):
    shown = Monitor()
    driver.broken = dict.fromkeys(("nvmlInit", "nvmlDeviceGetCount"), "DRIVER_NOT_LOADED")
    shown.refresh()
    shown.refresh()
    assert "No GPU to show: an NVIDIA driver is installed but not loaded" in shown.message.value
    driver.broken = {}
    shown.refresh()
    assert "Watching 1 GPU." in shown.message.value
    shown.stop()


# In a kernel


def test_it_draws_between_cells_what_its_thread_read(driver, quick):
    drew = set()

    async def learner():
        shown = Monitor()
        shown.figures.observe(lambda _: drew.add(threading.current_thread()), "value")
        assert "Asking the driver." in shown.message.value
        await until(lambda: "<td>10 MiB</td>" in shown.figures.value)
        driver.used = 30 * MIB
        await until(lambda: "<td>30 MiB</td>" in shown.figures.value)
        await asyncio.to_thread(shown.stop_button.click)  # as JupyterLab hands on a click
        await until(lambda: "Stopped." in shown.message.value)

    in_kernel(learner)
    assert drew == {threading.main_thread()}
    assert driver.started == 0


def test_it_sees_what_a_cell_does_that_keeps_the_kernel_busy(driver, quick):
    async def learner():
        shown = Monitor()
        seen = threading.Event()
        driver.asked = lambda: seen.set() if shown._watcher.looks[-1:] and shown._watcher.looks[-1].gpus[0].used == 900 * MIB else None
        await until(lambda: "<td>10 MiB</td>" in shown.figures.value)
        driver.used = 900 * MIB  # the cell: it blocks the event loop
        assert seen.wait(10)
        driver.used = 10 * MIB
        await until(lambda: "10 MiB to 900 MiB in the last 60 s" in shown.figures.value)

    in_kernel(learner)


def test_it_survives_that_a_machine_comes_and_goes(driver, quick):
    async def learner():
        driver.broken = {"nvmlInit": "LIBRARY_NOT_FOUND"}
        shown = Monitor()
        labkit.use(gpus=2, virtual=True, quiet=True)
        kept = torch.ones(MIB, device="cuda")
        await until(lambda: "Watching 2 GPUs." in shown.message.value)
        await until(lambda: "<td>146 MiB</td>" in shown.figures.value)
        labkit.use(None)
        del kept
        await until(lambda: "No GPU to show" in shown.message.value)
        assert shown.figures.value == ""

    in_kernel(learner)


def test_when_the_loop_ends_its_thread_ends(driver, quick):
    async def learner():
        Monitor()
        await until(readers)

    in_kernel(learner)
    assert driver.started == 0


def test_a_loop_that_is_dropped_ends_its_thread_too(driver, quick):
    async def learner():
        return Monitor()

    loop = asyncio.new_event_loop()
    shown = loop.run_until_complete(learner())
    (thread,) = [shown._watcher.thread]
    thread.join(10)
    assert not thread.is_alive()
    shown.stop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_thread_that_ended_by_itself_is_not_called_watching(driver, quick):
    async def learner():
        shown = Monitor()
        await until(lambda: "Watching" in shown.message.value)
        shown._watcher.stop()
        await until(lambda: "Stopped." in shown.message.value)
        shown.start()
        await until(lambda: "Watching" in shown.message.value)

    in_kernel(learner)


def test_two_monitors_at_once(driver, quick):
    async def learner():
        first, second = Monitor(), Monitor()
        await until(lambda: first.figures.value and second.figures.value)
        first.stop()
        driver.used = 40 * MIB
        await until(lambda: "<td>40 MiB</td>" in second.figures.value)
        assert "<td>40 MiB</td>" not in first.figures.value
        second.close()

    in_kernel(learner)
    assert driver.started == 0


def test_it_rests_while_no_front_end_displays_it(driver, quick):
    async def learner():
        shown = Monitor()
        for views in (1, 2, 1):  # displayed, displayed twice, once closed
            shown._view_count = views
            await asyncio.sleep(0)
            assert readers()
        shown._view_count = 0
        await until(lambda: "Resting" in shown.message.value)
        await until(lambda: not readers())
        shown._view_count = 1
        await until(lambda: "Watching 1 GPU." in shown.message.value)
        shown.stop()
        for views in (0, 1):
            shown._view_count = views
            await asyncio.sleep(0.01)
        assert "Stopped." in shown.message.value

    in_kernel(learner)


def test_a_driver_that_hangs_is_told(driver, quick, monkeypatch):
    monkeypatch.setattr(monitor, "SILENT", 0.05)
    released = threading.Event()

    async def learner():
        shown = Monitor()
        await until(lambda: "Watching" in shown.message.value)
        driver.asked = lambda: released.wait(10)
        await until(lambda: "The driver has not answered" in shown.message.value)
        assert "<td>10 MiB</td>" in shown.figures.value
        driver.asked = lambda: None
        released.set()
        await until(lambda: "Watching" in shown.message.value)

    in_kernel(learner)


def test_starting_again_forgets_and_leaves_one_thread(driver, quick):
    async def learner():
        shown = Monitor()
        await until(lambda: shown.figures.value)
        for _ in range(5):
            shown.start()
        await until(lambda: len(readers()) == 1)
        await until(lambda: "Watching" in shown.message.value)
        await until(lambda: driver.started == 1)

    in_kernel(learner)
    assert driver.started == 0
