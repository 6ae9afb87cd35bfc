"""Python's clocks show the host's time of a virtual machine."""

import pickle
import subprocess
import sysconfig
import threading
import time
import timeit
from typing import Any

import pytest
import torch

import virtualgpu
from virtualgpu.clock.machine_clock import Clock, StreamTime
from virtualgpu.host import time_module
from virtualgpu.host.time_module import EPOCH, READ_SECONDS


@pytest.fixture
def clock():
    clock = Clock()
    put_back = time_module.put_in_place(clock)
    yield clock
    put_back()


@pytest.mark.parametrize("name", ["perf_counter", "monotonic", "process_time"])
def test_a_clock_tells_the_hosts_time_and_a_reading_takes_some(clock, name):
    clock.advance_host(3.0)
    assert getattr(time, name)() == 3.0 + READ_SECONDS
    assert getattr(time, name + "_ns")() == 3_000_000_000 + round(2 * READ_SECONDS * 1e9)


def test_the_date_is_the_same_in_every_run(clock):
    assert time.time() == EPOCH + READ_SECONDS
    assert time.time_ns() == round(EPOCH) * 10**9 + round(2 * READ_SECONDS * 1e9)


def test_sleep_takes_the_hosts_time_and_no_processor_time(clock):
    time.sleep(1000)
    time.sleep(0)
    assert clock.host == 1000
    assert time.process_time() < 1


@pytest.mark.parametrize("wrong", [-1, float("nan"), "1", None])
def test_sleep_refuses_what_python_refuses(clock, wrong):
    with pytest.raises((ValueError, TypeError)):
        time.sleep(wrong)
    assert clock.host == 0


def test_work_on_a_gpu_is_timed_as_on_a_real_one(clock):
    stream = StreamTime(0)
    start = time.perf_counter()
    clock.launch(stream, 2.0, 0.5)
    launched = time.perf_counter()
    clock.synchronize_stream(stream, 0.0)
    assert launched - start == pytest.approx(0.5, abs=1e-6)
    assert time.perf_counter() - start == pytest.approx(2.5, abs=1e-6)


def test_a_loop_that_waits_for_a_moment_ends(clock):
    end = time.monotonic() + 1e-3
    while time.monotonic() < end:
        pass
    assert clock.host == pytest.approx(1e-3, rel=0.01)


def test_timeit_times_on_the_hosts_clock(clock):
    assert timeit.timeit(lambda: clock.advance_host(1.0), number=5) == pytest.approx(5.0, abs=1e-6)
    assert min(timeit.repeat(lambda: clock.advance_host(1.0), number=2, repeat=3)) == pytest.approx(
        2.0, abs=1e-6
    )


def test_a_clock_kept_by_a_class_does_not_become_a_method(clock):
    class Timer:
        now = time.perf_counter

    assert Timer().now() == READ_SECONDS


def test_the_standard_library_waits_by_the_real_clock(clock):
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["sleep", "20"], timeout=0.2)
    assert not threading.Event().wait(0.05)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert clock.host == 0


def test_the_real_clocks_come_back():
    names = (
        "perf_counter",
        "monotonic",
        "time",
        "process_time",
        "perf_counter_ns",
        "time_ns",
        "sleep",
    )
    before = (
        [getattr(time, name) for name in names],
        timeit.default_timer,
        timeit.timeit.__defaults__,
    )
    put_back = time_module.put_in_place(Clock())
    assert all(
        getattr(time, name) is not function for name, function in zip(names, before[0], strict=True)
    )
    put_back()
    assert (
        [getattr(time, name) for name in names],
        timeit.default_timer,
        timeit.timeit.__defaults__,
    ) == before


def test_who_sleeps_between_questions_to_an_event_waits_for_it():
    with virtualgpu.use(gpus=1, like="H200"):
        done, asked = torch.cuda.Event(), 0
        torch.cuda._sleep(10**8)  # 50 ms
        done.record()
        while not done.query():
            asked += 1
            time.sleep(0.01)
        # a function that refers to it can be sent to another process
        assert pickle.loads(pickle.dumps(time.sleep)) is time.sleep
    assert 4 <= asked <= 7
    assert isinstance(time.sleep, type(len))


def test_a_librarys_thread_that_sleeps_holds_nobody_up():
    """Check a thread like that of a progress bar, which does not take turns."""
    source = (
        "def pause(stop, times):\n"
        "    while not stop.is_set():\n"
        "        time.sleep(0.2)\n"
        "        times.append(1)"
    )
    library: dict[str, Any] = {"time": time}
    exec(compile(source, f"{sysconfig.get_path('purelib')}/bar.py", "exec"), library)
    with virtualgpu.use(gpus=1):
        x, stop, times = torch.ones(1, device="cuda"), threading.Event(), []
        thread = threading.Thread(target=library["pause"], args=(stop, times))
        thread.start()
        for _ in range(30):
            x.add_(1)
        slept = len(times)
        stop.set()
        thread.join()
    assert slept < 30  # each operator waited for a pause before the thread released its turn
