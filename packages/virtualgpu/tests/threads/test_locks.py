"""Locks and queues of a machine's threads work like Python's and serve threads in order."""

import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import virtualgpu
from virtualgpu import hardware

from .running_threads import run_threads


@pytest.fixture(autouse=True)
def used(machine):
    return machine


@pytest.fixture
def log() -> list:
    return []


def turn() -> None:
    hardware.machine().take_turn()


def test_a_lock_is_as_pythons():
    lock = threading.Lock()
    with lock:
        assert lock.locked()
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(timeout=0.01)
        assert not lock.acquire(timeout=0)
    assert not lock.locked() and lock.acquire()
    lock.release()
    with pytest.raises(RuntimeError, match="release unlocked lock"):
        lock.release()
    with pytest.raises(ValueError, match="timeout"):
        lock.acquire(False, 1)
    assert isinstance(lock, threading.Lock)


def test_a_lock_goes_to_who_has_waited_longest(log):
    lock = threading.Lock()

    def work() -> None:
        for step in range(3):
            with lock:  # Python's own lock would mostly stay with the same thread
                turn()
                log.append((threading.current_thread().name, step))

    run_threads(work, work, work, names="abc")
    assert log == [(name, step) for step in range(3) for name in "abc"]


def test_a_queue_is_as_pythons():
    made = queue.SimpleQueue()
    assert made.empty() and made.qsize() == 0
    made.put(1)
    made.put_nowait(2)
    assert not made.empty() and made.qsize() == 2
    assert (made.get(), made.get_nowait()) == (1, 2)
    for get in (
        made.get_nowait,
        lambda: made.get(timeout=0.01),
        lambda: made.get(block=False),
        lambda: made.get(timeout=0),
    ):
        with pytest.raises(queue.Empty):
            get()
    with pytest.raises(ValueError, match="non-negative"):
        made.get(timeout=-1)
    made.put(3)  # nobody waits any more
    assert made.get() == 3


def test_a_queue_serves_who_has_waited_longest(log):
    made = queue.SimpleQueue()

    def take() -> None:
        while (item := made.get()) is not None:
            log.append((threading.current_thread().name, item))
            turn()

    def give() -> None:
        turn()
        for item in range(6):
            made.put(item)
            turn()
        for _ in range(3):
            made.put(None)

    run_threads(take, take, take, give, names="abcd")
    assert [item for _, item in log] == list(range(6))
    assert [name for name, _ in log[:3]] == ["a", "b", "c"]


def pooled() -> list[tuple]:
    log: list[tuple] = []

    def task(number: int) -> int:
        for step in range(number % 4):
            turn()
            log.append((threading.current_thread().name.rsplit("_", 1)[1], number, step))
        return number

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(task, number) for number in range(12)]:
            log.append(("result", future.result()))
        for number in range(12):
            log.append(("alone", pool.submit(task, number).result()))
    return log


def test_a_pool_hands_out_its_work_in_one_order():
    first = pooled()
    assert {name for name, *_ in first} == {"0", "1", "2", "result", "alone"}
    assert all(pooled() == first for _ in range(20))


def piped(made: Callable[[], queue.Queue]) -> list[tuple]:
    """Run a producer, a worker and a consumer, with a lock around the work and a final event."""
    log: list[tuple] = []
    there, on, lock, ended = made(), made(), threading.Lock(), threading.Event()

    def do(item: object) -> None:
        with lock:
            turn()
            log.append((threading.current_thread().name, item))

    def produce() -> None:
        for item in range(15):
            do(item)
            there.put(item)
        there.put(None)
        ended.set()

    def work() -> None:
        while (item := there.get()) is not None:
            do(item)
            on.put(item)
        on.put(None)

    def consume() -> None:
        while (item := on.get()) is not None:
            do(item)
        ended.wait()
        do("end")

    run_threads(produce, work, consume, names="pwc")
    return log


@pytest.mark.parametrize(
    "made", [lambda: queue.Queue(2), lambda: queue.SimpleQueue()], ids=["Queue", "SimpleQueue"]
)
def test_a_pipeline_runs_in_one_order(made):
    first = piped(made)
    assert len(first) == 46
    assert all(piped(made) == first for _ in range(20))


def test_locks_outlive_their_machine():
    lock, made = threading.Lock(), queue.SimpleQueue()
    virtualgpu.use(None)
    assert type(threading.Lock()) is not type(lock)
    thread = threading.Thread(target=lambda: made.put(lock.acquire()))
    with lock:
        thread.start()
    assert made.get() is True
    thread.join()
    virtualgpu.use(gpus=4, like="H200")


def test_pickle_finds_the_classes():
    """A manager of spawned processes sends them to its server."""
    for kind in (threading.Lock, queue.SimpleQueue):
        assert pickle.loads(pickle.dumps(kind)) is kind
