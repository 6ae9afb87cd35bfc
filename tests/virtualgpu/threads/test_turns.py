"""Host threads of one machine take turns in one fixed order, and none waits for ever."""

import _thread
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import labkit
from labkit.machine import Machine
from virtualgpu import hardware
from virtualgpu.clock.clock import Span
from virtualgpu.ops.call import operator
from virtualgpu.threads.seats import Seat, State
from virtualgpu.threads.turns import Turns

QUICK = 60.0  # seconds, on a computer that does much else


@pytest.fixture
def quick() -> Iterator[None]:
    """The test ends soon, or fails."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < QUICK


@contextmanager
def fresh(gpus: int = 1) -> Iterator[Machine]:
    """A machine of the test's own, whatever is in place before."""
    labkit.use(None)
    with labkit.use(gpus=gpus, like="H200", virtual=True, quiet=True) as machine:
        yield machine


def run_threads(*works: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own; what they returned."""
    results: list[Any] = [None] * len(works)

    def keep(index: int, work: Callable[[], Any]) -> None:
        results[index] = work()

    threads = [threading.Thread(target=keep, args=(index, work), daemon=True) for index, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# The same order in every run


def work_of(index: int) -> Callable[[], list]:
    def work() -> list:
        seen = []
        generator = torch.Generator(device="cuda").manual_seed(index)
        for step in range(12):
            x = torch.rand(100 * (index + 1) + step, device="cuda", generator=generator)
            y = (x * 2).cpu() if step % 3 == index % 3 else x.add_(1)
            torch.zeros(1000).add_(index)
            sum(range(1000 * index))  # Python of another length in each thread
            seen.append((x.data_ptr(), hardware.machine().clock.host))
            event = torch.cuda.Event()
            event.record()
            event.synchronize() if step % 5 == 0 else None
            del x, y
        return seen

    return work


def traced() -> list:
    """Four threads that share one GPU: what each saw, what was queued when and where, what the allocator did."""
    with fresh():
        torch.cuda.memory._record_memory_history(context=None, stacks="python")
        machine = hardware.machine()
        heard: list[str] = []
        machine.clock.listen(lambda what: heard.append(repr(what)))
        seen = run_threads(*(work_of(index) for index in range(4)))
        events = [
            (event["action"], event["addr"], event["size"], event["time_us"]) for event in torch.cuda.memory._snapshot()["device_traces"][0]
        ]
        return [seen, heard, events, machine.clock.host]


@pytest.fixture
def computer_busy() -> Iterator[None]:
    """Other programs want more processors than there are."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
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
        model = nn.DataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda())
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


def test_turns_go_round_in_the_order_of_starting(machine):
    order: list[int] = []

    def work(index: int) -> None:
        for _ in range(3):
            torch.ones(1)
            order.append(index)

    run_threads(*(lambda index=index: work(index) for index in range(3)))
    assert order == [0, 1, 2] * 3


def test_a_thread_that_waits_for_its_kernels_own_threads_keeps_its_turn(machine, monkeypatch):
    """A kernel of PyTorch's with threads of its own lets the caller sleep, in a file of PyTorch's."""
    running, most = [], 0

    def kernel(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        running.append(x)
        most = max(most, len(running))
        time.sleep(0.05)
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
        hardware.machine().turns.sleep(seconds, clock)
        woken.append((seconds, clock.host - start >= seconds))
        torch.ones(2)

    run_threads(*(lambda seconds=seconds: sleep(seconds) for seconds in (3.0, 1.0, 2.0)))
    assert woken == [(1.0, True), (2.0, True), (3.0, True)]
    assert clock.host - start == pytest.approx(3.0, rel=1e-3)
    hardware.machine().turns.sleep(1.0, clock)
    assert clock.host - start == pytest.approx(4.0, rel=1e-3)


def test_a_sleep_is_shorter_than_the_work_beside_it(machine):
    clock = hardware.machine().clock
    start = clock.host

    def work() -> None:
        while clock.host - start < 1e-3:
            torch.ones(2)

    run_threads(work, lambda: hardware.machine().turns.sleep(5e-4, clock))
    assert clock.host - start == pytest.approx(1e-3, rel=0.2)


def test_who_is_alone_has_nothing_to_do_with_turns(machine, monkeypatch):
    monkeypatch.setattr(Turns, "take", lambda self: pytest.fail("nobody else is there"))
    torch.ones(2, device="cuda").add(1)
    torch.cuda.synchronize()


# Nobody waits for ever


def launch(times: int = 3) -> float:
    return sum(torch.ones(2, device="cuda").sum().item() for _ in range(times))


def test_a_lock_held_at_the_gate(machine, quick):
    lock = threading.Lock()

    def hold() -> float:
        with lock:
            return launch(20)

    assert run_threads(hold, hold, hold) == [40.0] * 3


def test_conditions_events_and_barriers(machine, quick):
    barrier, event, condition, ready = threading.Barrier(3), threading.Event(), threading.Condition(), []

    def first() -> float:
        with condition:
            condition.wait_for(lambda: ready)
        barrier.wait()
        event.set()
        return launch()

    def second() -> float:
        launch()
        with condition:
            ready.append(True)
            condition.notify_all()
        barrier.wait()
        return launch()

    def third() -> float:
        barrier.wait()
        event.wait()
        assert not threading.Event().wait(0.01)  # nobody comes: the time runs out
        return launch()

    assert run_threads(first, second, third) == [6.0] * 3


@pytest.mark.parametrize("kind", [queue.Queue, queue.SimpleQueue])
def test_queues(machine, quick, kind):
    there, back = kind(), kind()

    def echo() -> None:
        while (x := there.get()) is not None:
            back.put(x + 1)

    def ask() -> float:
        total = 0.0
        for step in range(20):
            there.put(torch.full((), float(step), device="cuda"))
            total += back.get().item()
        there.put(None)
        return total

    assert run_threads(echo, ask) == [None, 210.0]


def test_a_pool_of_threads(machine, quick):
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(launch, range(20))) == [2.0 * times for times in range(20)]
        assert launch() == 6.0  # the idle ones hold nobody up


def test_backwards_that_meet_at_one_leaf(machine, quick):
    """C++ holds a lock of its own around a leaf's gradient while it runs operators."""
    leaf = torch.ones(4, device="cuda", requires_grad=True)

    def back() -> None:
        for _ in range(10):
            (leaf * 2).sum().backward()

    run_threads(back, back, back)
    assert leaf.grad.tolist() == [60.0] * 4


def test_who_asks_again_and_again(machine):
    """A loop without an operator in it, with and without a pause: the others go on after a while."""
    start = time.monotonic()
    for pause in (0.01, 0.001, None):
        done: list[float] = []
        thread = threading.Thread(target=lambda done=done: done.append(launch()))
        thread.start()
        while not done:
            if pause is not None:
                time.sleep(pause)
        thread.join()
    assert time.monotonic() - start < 5


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_pins(machine):
    data = TensorDataset(torch.arange(64.0))
    for _ in range(2):
        seen = sum(x.cuda(non_blocking=True).sum().item() for (x,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=True))
        assert seen == 2016


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_how_far_a_loader_has_pinned_ahead_takes_no_host_time():
    def host_time() -> float:
        with fresh() as machine:
            for (x,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=2, pin_memory=True):
                x.cuda(non_blocking=True).mul_(2)
            return machine.host_time()

    assert host_time() == host_time()


def test_an_interrupt_comes_through(machine, quick):
    def waits(release: threading.Event) -> None:
        launch(10)
        release.wait()

    def computes(release: threading.Event) -> None:
        launch(10)
        while not release.is_set():
            pass

    # At the gate and in a join: elsewhere Python may drop an interrupt, as in the freeing of a tensor.
    for keeps, wait in ((computes, lambda thread: launch(100)), (waits, threading.Thread.join)):
        release = threading.Event()
        thread = threading.Thread(target=keeps, args=(release,))
        thread.start()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                wait(thread)
        finally:
            signal.signal(signal.SIGALRM, before)
        release.set()
        assert launch() == 6.0
        thread.join()


def test_threads_that_outlive_the_machine(quick):
    told: list[str] = []

    def go_on() -> None:
        try:
            while True:
                torch.ones(2, device="cuda").add_(1)
        except RuntimeError as error:
            told.append(str(error))

    threads = [threading.Thread(target=go_on) for _ in range(3)]
    with fresh():
        for thread in threads:
            thread.start()
        assert launch() == 6.0
    for thread in threads:
        thread.join()
    assert len(told) == 3
    with fresh():
        assert run_threads(launch, launch) == [6.0, 6.0]


def test_a_thread_that_cannot_start_leaves_the_round(machine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", lambda *args: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=launch).start()
    assert not hardware.machine().turns.several
    assert run_threads(launch) == [6.0]


def run_script(text: str) -> subprocess.CompletedProcess:
    setup = "import os, sys, threading, time, torch, labkit\nlabkit.use(gpus=1, virtual=True, quiet=True)\n"
    return subprocess.run([sys.executable, "-c", setup + text], capture_output=True, text=True, timeout=60)


LAUNCHING = """
def launch():
    while True:
        torch.ones(2, device="cuda").add_(1)
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_daemon_threads_launch():
    start = "for _ in range(3): threading.Thread(target=launch, daemon=True).start()\ntorch.ones(2).sum()\nprint('end')"
    ended = run_script(LAUNCHING + start)
    assert ended.stdout == "end\n"  # with which status hangs on PyTorch: under daemon threads its C++ may abort, without a machine too


@pytest.mark.slow
def test_the_interpreter_waits_for_the_others():
    text = "def work():\n    for _ in range(20): torch.ones(2, device='cuda').add_(1)\n    print('done')\n"
    ended = run_script(text + "for _ in range(3): threading.Thread(target=work).start()\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n" * 3, "")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_alone():
    text = """
import warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
for _ in range(3): threading.Thread(target=launch, daemon=True).start()
for _ in range(5): torch.ones(2)
if (child := os.fork()) == 0:
    torch.ones(2).add_(1)
    os._exit(7)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = run_script(LAUNCHING + text)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_system_that_does_not_tell_whether_a_thread_sleeps(machine, monkeypatch):
    monkeypatch.setattr(Seat, "_look", lambda self: (True, float("nan")))
    lock = _thread.allocate_lock()

    def hold() -> float:
        with lock:
            return launch()

    start = time.monotonic()
    assert run_threads(hold, hold) == [6.0, 6.0]
    assert time.monotonic() - start < 2


@pytest.mark.slow
def test_a_thread_whose_start_was_interrupted_still_gets_its_turns():
    """Its starter learns of it too late: it waits at the gate by then."""
    turns, ended = Turns(), threading.Event()

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        _thread.start_new_thread(thread.run, ())
        while not any(seat.state is State.GATE for seat in turns._seats):
            time.sleep(1e-3)
        raise KeyboardInterrupt

    thread = threading.Thread(target=ended.set, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        turns.starting(start_and_be_interrupted, nullcontext())(thread)
    assert ended.wait(QUICK)
