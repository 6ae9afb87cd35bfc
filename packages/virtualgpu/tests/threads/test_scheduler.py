"""Host threads of one machine run in a fixed order."""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from virtualgpu import hardware
from virtualgpu.clock.machine_clock import Span
from virtualgpu.ops.call import operator
from virtualgpu.threads.scheduler import Scheduler

from .running_threads import fresh, run_threads


def work_of(index: int) -> Callable[[], list]:
    def work() -> list:
        seen = []
        generator = torch.Generator(device="cuda").manual_seed(index)
        for step in range(12):
            x = torch.rand(100 * (index + 1) + step, device="cuda", generator=generator)
            y = (x * 2).cpu() if step % 3 == index % 3 else x.add_(1)
            torch.zeros(1000).add_(index)
            sum(range(1000 * index))  # a different amount of Python in each thread
            seen.append((x.data_ptr(), hardware.machine().clock.host))
            event = torch.cuda.Event()
            event.record()
            if step % 5 == 0:
                event.synchronize()
            del x, y
        return seen

    return work


def traced() -> list:
    """Return what four threads on one GPU saw, launched and allocated, with times."""
    with fresh():
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
        machine = hardware.machine()
        heard: list[str] = []
        machine.clock.listen(lambda what: heard.append(repr(what)))
        seen = run_threads(*(work_of(index) for index in range(4)))
        events = [
            (event["action"], event["addr"], event["size"], event["time_us"])
            for event in torch.cuda.memory._snapshot()["device_traces"][0]
        ]
        return [seen, heard, events, machine.clock.host]


@pytest.fixture
def computer_busy() -> Iterator[None]:
    """Keep more processes busy than there are processors."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture(params=[1e-6, 5e-3, 1.0])
def switch_interval(request) -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield request.param
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def first_trace() -> list:
    return traced()


def test_every_run_is_the_same(first_trace, switch_interval):
    _, heard, events, _ = first_trace
    assert len(heard) > 100 and len(events) > 50
    for _ in range(5):
        assert traced() == first_trace


@pytest.mark.slow
def test_every_run_is_the_same_on_a_busy_computer(first_trace, computer_busy):
    for _ in range(3):
        assert traced() == first_trace


def spans_of_data_parallel() -> list[tuple[int, float]]:
    with fresh(gpus=4):
        torch.manual_seed(0)
        model = nn.DataParallel(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        )
        heard: list[Any] = []
        hardware.machine().clock.listen(heard.append)
        for _ in range(2):
            model(torch.randn(16, 16, device="cuda")).sum().backward()
        return [(span.device, span.start) for span in heard if isinstance(span, Span)]


@pytest.mark.slow
def test_data_parallel_launches_in_one_order(switch_interval):
    first = spans_of_data_parallel()
    assert {device for device, _ in first} == {0, 1, 2, 3}
    assert all(spans_of_data_parallel() == first for _ in range(4))


def test_threads_run_in_the_order_of_starting(machine):
    order: list[int] = []

    def work(index: int) -> None:
        for _ in range(3):
            torch.ones(1)
            order.append(index)

    run_threads(*(lambda index=index: work(index) for index in range(3)))
    assert order == [0, 1, 2] * 3


def test_a_thread_that_waits_for_its_kernels_own_threads_keeps_its_turn(machine, monkeypatch):
    """Check a kernel with threads, whose caller sleeps in a file of PyTorch's."""
    running, most = [], 0

    def kernel(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        running.append(x)
        most = max(most, len(running))
        # sleeps as in C++, because time.sleep would advance the machine's time
        select.select([], [], [], 0.05)
        running.pop()
        return torch.ops.aten.exp.default(x)

    monkeypatch.setattr(operator(torch.ops.aten.exp.default), "kernel", kernel)
    inputs = [torch.zeros(3, device="cuda") for _ in range(3)]
    run_threads(*[lambda x=x: [x.exp() for _ in range(3)] for x in inputs])
    assert most == 1


def test_sleeps_of_the_machines_clock_overlap(machine):
    clock = hardware.machine().clock
    start, woken = clock.host, []

    def sleep(seconds: float) -> None:
        hardware.machine().scheduler.sleep(seconds, clock)
        woken.append((seconds, clock.host - start >= seconds))
        torch.ones(2)

    run_threads(*(lambda seconds=seconds: sleep(seconds) for seconds in (3.0, 1.0, 2.0)))
    assert woken == [(1.0, True), (2.0, True), (3.0, True)]
    assert clock.host - start == pytest.approx(3.0, rel=1e-3)
    hardware.machine().scheduler.sleep(1.0, clock)
    assert clock.host - start == pytest.approx(4.0, rel=1e-3)


def test_a_sleep_is_shorter_than_the_work_beside_it(machine):
    clock = hardware.machine().clock
    start = clock.host

    def work() -> None:
        while clock.host - start < 1e-3:
            torch.ones(2)

    run_threads(work, lambda: hardware.machine().scheduler.sleep(5e-4, clock))
    assert clock.host - start == pytest.approx(1e-3, rel=0.2)


def test_who_is_alone_has_nothing_to_do_with_turns(machine, monkeypatch):
    monkeypatch.setattr(Scheduler, "take_turn", lambda self: pytest.fail("nobody else is there"))
    torch.ones(2, device="cuda").add(1)
    torch.cuda.synchronize()
