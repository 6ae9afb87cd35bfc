"""Run a learner's producer of GPU tensors in its own process, and see whether it waits."""

import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, SupportsIndex

from labkit import processes
from labkit.checks.checking import Plain, describe, quote
from labkit.processes import by_value


class Watched:
    """Event that notes how the producer uses it.

    `awaited` is set when the producer waits for it, `seen` when the producer has seen it set, and
    `forged` when the producer changes it. A producer that looks a few times, or waits for a limited
    time, does not count as waiting, because it goes on even if the event is not set. Waiting means
    to look again and again. To keep this short, a limited wait ends at once, and each look takes a
    minute on the producer's clocks.
    """

    ENOUGH = 1000  # looks

    def __init__(self) -> None:
        make = processes.context()
        self._event, self.awaited = make.Event(), make.Event()
        self.seen, self.forged = make.Event(), make.Event()
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


COMING, ENDING = 60.0, 20.0  # seconds for the producer until it waits, and then until it ends
LOOK = 0.01  # seconds between two looks into the queue
NAP = 0.001  # most seconds between the producer's looks at `done`


def observe_producer(answer: Any, sizes: Plain) -> Plain:
    """Return the tensors in the queue, and whether the producer waited for `done` and ended."""
    make = processes.context()
    queue, done = make.SimpleQueue(), Watched()
    ours, theirs = make.Pipe()
    arguments = (theirs, by_value.dumps(answer), queue, done, sizes)
    with processes.children(_produce, [arguments]) as (producer,):
        theirs.close()
        try:
            came, lost = _consumed(queue, done, producer), ""
        except Exception as error:  # Tensors of an ended process can be neither opened nor read.
            came, lost = [], quote(error)
        _until(lambda: producer.exitcode is not None or done.awaited.is_set())
        done.set()
        producer.join(ENDING)
        ended = producer.exitcode is not None
        if not ended:
            producer.kill()
        raised = ""
        if ended:
            raised = _last_words(ours)
    told: dict[str, Plain] = {"waited": done.seen.is_set(), "forged": done.forged.is_set()}
    told |= {"ended": ended, "raised": raised}
    return {"came": came, "lost": lost, **told}


def _last_words(line: Connection) -> str:
    try:
        return line.recv()
    except EOFError:
        return "nothing, and ended its process"


def _produce(line: Connection, answer: bytes, queue: Any, done: Watched, sizes: list[int]) -> None:
    """Run the learner's producer in another process, and send its error, or an empty text.

    Until the producer has seen `done`, its naps are short.
    """
    sleep = time.sleep

    def nap(seconds: float | SupportsIndex) -> None:
        if not done.seen.is_set():
            seconds = min(float(seconds), NAP)
        sleep(seconds)

    time.sleep = nap
    for clock in (time.time, time.monotonic, time.perf_counter):
        setattr(time, clock.__name__, lambda clock=clock: clock() + 60 * done.looks)
    try:
        pickle.loads(answer)(queue, done, sizes)
        line.send("")
    except BaseException as error:  # also SystemExit
        line.send(quote(error))


def _consumed(queue: Any, done: Watched, producer: Any) -> Plain:
    """Receive and keep tensors until it is clear that no more will come, and describe them."""
    received: list[Any] = []

    def nothing_more() -> bool:
        # Look at the producer first. Everything that it put before is in the queue then.
        over = producer.exitcode is not None or done.awaited.is_set()
        while not queue.empty():
            received.append(queue.get())
        return over

    _until(nothing_more)
    return [describe(tensor) for tensor in received]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + COMING
    while not condition() and time.monotonic() < end:
        time.sleep(LOOK)
