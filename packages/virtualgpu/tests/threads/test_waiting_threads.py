"""Threads of one machine that wait for each other in any way do not wait for ever."""

import _thread
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from virtualgpu import front_end, hardware
from virtualgpu.host.threading_module import starting
from virtualgpu.threads.scheduler import Scheduler
from virtualgpu.threads.thread_state import State, ThreadState

from .running_threads import fresh, launch, run_threads

QUICK = 200.0  # seconds, on a busy computer


@pytest.fixture
def quick() -> Iterator[None]:
    """Fail a test that does not end within some seconds."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < QUICK


def test_a_lock_held_while_waiting_for_a_turn(machine, quick):
    lock = threading.Lock()

    def hold() -> float:
        with lock:
            return launch(20)

    assert run_threads(hold, hold, hold) == [40.0] * 3


def test_conditions_events_and_barriers(machine, quick):
    barrier, event, condition, ready = (
        threading.Barrier(3),
        threading.Event(),
        threading.Condition(),
        [],
    )

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
        assert not threading.Event().wait(0.01)  # nobody comes, so the wait times out
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
        assert launch() == 6.0  # the idle threads delay nobody


def test_backwards_that_meet_at_one_leaf(machine, quick):
    """Check this because C++ holds a lock around a leaf's gradient while it runs operators."""
    leaf = torch.ones(4, device="cuda", requires_grad=True)

    def back() -> None:
        for _ in range(10):
            (leaf * 2).sum().backward()

    run_threads(back, back, back)
    assert leaf.grad.tolist() == [60.0] * 4


def test_who_asks_again_and_again(machine):
    """Check that a loop without operators, with or without a pause, lets other threads continue."""
    for pause in (0.01, 0.001, None):
        done: list[float] = []
        thread = threading.Thread(target=lambda done=done: done.append(launch()))
        thread.start()
        while not done:
            if pause is not None:
                time.sleep(pause)
        thread.join()  # otherwise pytest's time limit ends it


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_that_pins(machine):
    data = TensorDataset(torch.arange(64.0))
    for _ in range(2):
        seen = sum(
            x.cuda(non_blocking=True).sum().item()
            for (x,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
        )
        assert seen == 2016


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_how_far_a_loader_has_pinned_ahead_takes_no_host_time():
    def host_time() -> float:
        with fresh() as machine:
            for (x,) in DataLoader(
                TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=2, pin_memory=True
            ):
                x.cuda(non_blocking=True).mul_(2)
            return machine.host_time()

    assert host_time() == host_time()


def test_an_interrupt_comes_through(machine, quick):
    def waits(launched: list[float], release: threading.Event) -> None:
        launched.append(launch(10))
        release.wait()

    def computes(launched: list[float], release: threading.Event) -> None:
        launched.append(launch(10))
        while not release.is_set():
            pass

    # The interrupt comes while waiting for a turn and in a join. Elsewhere, for example while a
    # tensor is freed, Python may drop it.
    for keeps, wait in ((computes, lambda thread: launch(100)), (waits, threading.Thread.join)):
        launched: list[float] = []
        release = threading.Event()
        thread = threading.Thread(target=keeps, args=(launched, release))
        thread.start()
        while not launched:
            # With an event, this thread would wait for its turn here.
            select.select([], [], [], 1e-3)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
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


def test_a_thread_that_cannot_start_takes_no_turns(machine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            threading,
            "_start_new_thread",
            lambda *args: (_ for _ in ()).throw(RuntimeError("can't start new thread")),
        )
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=launch).start()
    assert not hardware.machine().scheduler.several
    assert run_threads(launch) == [6.0]


def run_script(text: str) -> subprocess.CompletedProcess:
    setup = "import os, sys, threading, time, torch, virtualgpu\nvirtualgpu.use(gpus=1)\n"
    return subprocess.run(
        [sys.executable, "-c", setup + text], capture_output=True, text=True, timeout=240
    )


LAUNCHING = """
def launch():
    while True:
        torch.ones(2, device="cuda").add_(1)
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_daemon_threads_launch():
    start = (
        "for _ in range(3): threading.Thread(target=launch, daemon=True).start()\n"
        "torch.ones(2).sum()\n"
        "print('end')"
    )
    ended = run_script(LAUNCHING + start)
    # The exit status depends on PyTorch, whose C++ may abort under daemon threads, also without a
    # machine.
    assert ended.stdout == "end\n"


@pytest.mark.slow
def test_the_interpreter_waits_for_the_others():
    text = (
        "def work():\n"
        "    for _ in range(20): torch.ones(2, device='cuda').add_(1)\n"
        "    print('done')\n"
    )
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


def test_a_system_that_does_not_tell_whether_a_thread_sleeps(machine, quick, monkeypatch):
    monkeypatch.setattr(ThreadState, "_sample", lambda self: (True, float("nan")))
    lock = _thread.allocate_lock()

    def hold() -> float:
        with lock:
            return launch()

    assert run_threads(hold, hold) == [6.0, 6.0]


@pytest.mark.slow
def test_a_thread_whose_start_was_interrupted_still_gets_its_turns():
    """Check a thread whose starter learns about the interrupt only while it waits for its turn."""
    scheduler, ended = Scheduler(), threading.Event()

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        _thread.start_new_thread(thread.run, ())
        while not any(state.state is State.WAITING for state in scheduler._threads):
            time.sleep(1e-3)
        raise KeyboardInterrupt

    thread = threading.Thread(target=ended.set, daemon=True)
    with pytest.raises(KeyboardInterrupt):
        starting(scheduler, start_and_be_interrupted, nullcontext())(thread)
    assert ended.wait(QUICK)


def test_an_exception_in_a_thread_is_told_without_the_kits_calls(machine, capsys, monkeypatch):
    # Pytest has a hook of its own.
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    told = capsys.readouterr().err
    assert told.startswith("Exception in thread Thread-") and told.endswith(
        "ZeroDivisionError: division by zero\n"
    )
    assert os.path.basename(__file__) in told and front_end.HERE not in told
