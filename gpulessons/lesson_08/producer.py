"""A learner's producer of GPU tensors in a process of its own, for lesson 08: what it sends, and whether it waits for its consumer."""

import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from labkit import processes
from labkit.checks.checking import Plain, describe, quote
from labkit.processes import by_value


class Watched:
    """An event of which is known whether the other process waits for it (`awaited`), has `seen` it set, or changed it itself (`forged`).

    Who looks a few times, or waits for a limited time, goes on whether it is set or not: to wait is to look again and again. So that this
    takes no long time, a limited wait is over at once, and for the producer's clocks each look takes a minute.
    """

    ENOUGH = 1000  # looks

    def __init__(self) -> None:
        make = processes.context()
        self._event, self.awaited, self.seen, self.forged = (
            make.Event(),
            make.Event(),
            make.Event(),
            make.Event(),
        )
        self._owner, self.looks = os.getpid(), 0

    def set(self) -> None:
        if os.getpid() != self._owner:
            self.forged.set()
        self._event.set()

    def clear(self) -> None:
        if os.getpid() != self._owner:
            self.forged.set()
        self._event.clear()

    def is_set(self) -> bool:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        if timeout is None or self.looks > self.ENOUGH:
            self.awaited.set()
        happened = self._event.wait(timeout and min(timeout, NAP))
        if happened:
            self.seen.set()
        return happened


COMING, ENDING = (
    60.0,
    20.0,
)  # seconds for the producer to come so far that it waits, and then to end
LOOK = 0.01  # seconds between two looks into the queue
NAP = 0.001  # seconds at most between two looks of the producer at `done`


def observe_producer(answer: Any, sizes: Plain) -> Plain:
    """What came through the queue, whether the producer waited for `done`, and whether it ended when that was set."""
    make = processes.context()
    queue, done = make.SimpleQueue(), Watched()
    ours, theirs = make.Pipe()
    with processes.children(_produce, [(theirs, by_value.dumps(answer), queue, done, sizes)]) as (
        producer,
    ):
        theirs.close()
        try:
            came, lost = _consumed(queue, done, producer), ""
        except Exception as error:  # what has gone with its process cannot be opened, nor read
            came, lost = [], quote(error)
        _until(lambda: producer.exitcode is not None or done.awaited.is_set())
        done.set()
        producer.join(ENDING)
        ended = producer.exitcode is not None
        if not ended:
            producer.kill()
        raised = _last_words(ours) if ended else ""
    told = {
        "waited": done.seen.is_set(),
        "forged": done.forged.is_set(),
        "ended": ended,
        "raised": raised,
    }
    return {"came": came, "lost": lost, **told}


def _last_words(line: Connection) -> str:
    try:
        return line.recv()
    except EOFError:
        return "nothing, and ended its process"


def _produce(line: Connection, answer: bytes, queue: Any, done: Watched, sizes: list[int]) -> None:
    """In another process: run the learner's producer, and send home what it raises, or nothing. Until `done` is seen, naps are short."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds if done.seen.is_set() else min(float(seconds), NAP))
    for clock in (time.time, time.monotonic, time.perf_counter):
        setattr(time, clock.__name__, lambda clock=clock: clock() + 60 * done.looks)
    try:
        pickle.loads(answer)(queue, done, sizes)
        line.send("")
    except BaseException as error:  # sys.exit too
        line.send(quote(error))


def _consumed(queue: Any, done: Watched, producer: Any) -> Plain:
    """Hold all tensors that come, until it is clear that no more will, and tell what they are."""
    received: list[Any] = []

    def nothing_more() -> bool:
        over = (
            producer.exitcode is not None or done.awaited.is_set()
        )  # what was put before is in the queue
        while not queue.empty():
            received.append(queue.get())
        return over

    _until(nothing_more)
    return [describe(tensor) for tensor in received]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + COMING
    while not condition() and time.monotonic() < end:
        time.sleep(LOOK)
