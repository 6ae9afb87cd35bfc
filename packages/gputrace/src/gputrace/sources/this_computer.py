"""The time that a script takes on this computer: by line, outside torch, and for loading batches.

These are measurements of a real computer, also if the GPUs are virtual, and differ from run to run.
The commands that write a page make them. `record()` does not.
"""

import _thread
import functools
import signal
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data.dataloader import _BaseDataLoaderIter

from virtualgpu import source_lines
from virtualgpu.source_lines import SourceLine, is_users, role

INTERVAL = 0.005  # seconds between two looks at the script
# Seconds after which Python stops the script for a look. With Python's own 5 ms, nearly all looks
# would come when the script stops by itself, and lines that sleep would get the time of others.
SWITCH = 0.0002
SIGNAL: Any = getattr(signal, "SIGPROF", None)  # Windows has none
NOWHERE = SourceLine("", 0, "")


class Batch(NamedTuple):
    """One batch of a DataLoader, with the attributes of `Loading`."""

    seconds: float
    asked: float
    received: float
    workers: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The batches that a line of the user's took from a DataLoader.

    Attributes:
        seconds: the time of each call of the loader's `__next__`, on this computer's clock.
        asked, received: when each call began and ended, in seconds of the recording.
        workers: the number of the loader's worker processes.
    """

    line: SourceLine
    seconds: list[float]
    asked: list[float]
    received: list[float]
    workers: int = 0


@dataclass(frozen=True, slots=True)
class ComputerTime:
    """The distribution of this computer's time in one process.

    Attributes:
        seconds: how long the recording took.
        lines: (line, seconds outside torch), the line with the most time first.
        loading: what DataLoaders did, by line.
        rank: the rank of the process, or None.
    """

    seconds: float
    lines: list[tuple[SourceLine, float]]
    loading: list[Loading]
    rank: int | None = None


class ComputerClock:
    """Measurement of this computer's time in the main thread.

    Every 5 ms a thread asks the main thread to note the line that it runs, as a signal would. The
    time since the last note belongs to this line. Reading the main thread's frames from outside
    would keep tensors alive that a function frees when it returns. `now` returns the seconds of the
    recording. In another thread, only DataLoaders are timed.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # For each look: the moment of the recording, the number of the place, and the time since
        # the look before.
        self._looks = array("d")
        self._places: dict[tuple[CodeType, int] | None, int] = {None: 0}
        self._batches: dict[SourceLine, list[Batch]] = defaultdict(list)
        self._began = self._before = self._switch = 0.0
        self._running: Any = None  # a lock that is held while the thread asks
        self._undo: Callable[[], None] | None = None
        self._handler_before: Any = None

    def start(self) -> None:
        """Start to sample the main thread's lines, and to time DataLoaders."""
        self._switch = sys.getswitchinterval()
        self._undo = time_loaders(self._batches, self._now)
        self._began = self._before = perf_counter()
        is_main = threading.current_thread() is threading.main_thread()
        if SIGNAL is None or not is_main or signal.getsignal(SIGNAL) != signal.SIG_DFL:
            return
        sys.setswitchinterval(SWITCH)
        self._handler_before = signal.signal(SIGNAL, self._look)
        self._running = _thread.allocate_lock()  # a virtual machine replaces `threading.Lock`
        self._running.acquire()
        _thread.start_new_thread(self._ask, (self._running,))

    def stop(self) -> None:
        """Stop, even if `start` was interrupted. A second call does nothing."""
        if self._undo is not None:
            self._undo()
            self._undo = None
            sys.setswitchinterval(self._switch)
        if self._running is not None:
            self._running.release()
            self._running = None
        if self._handler_before is not None:
            if signal.getsignal(SIGNAL) == self._look:
                signal.signal(SIGNAL, self._handler_before)
            self._handler_before = None

    def finish(self, waits: np.ndarray) -> ComputerTime:
        """Return the times, without those in `waits`, which has rows of (start, end) in seconds.

        These are the host's launches and waits on real GPUs.
        """
        seconds = perf_counter() - self._began
        self.stop()
        moments, places, taken = np.array(self._looks).reshape(-1, 3).T
        waited = np.diff(_covered(waits, np.concatenate([[0.0], moments])))
        sums = np.bincount(places.astype(int), np.maximum(0.0, taken - waited), len(self._places))
        # A line may be in several functions, such as that of a comprehension.
        by_line: dict[tuple[str, int], tuple[SourceLine, float]] = {}
        for place, number in self._places.items():
            if place is not None and sums[number]:
                code, line_number = place
                key = code.co_filename, line_number
                if key not in by_line:
                    by_line[key] = SourceLine.read(*key, code.co_name), 0.0
                line, before = by_line[key]
                by_line[key] = line, before + float(sums[number])
        lines = sorted(by_line.values(), key=lambda item: -item[1])
        return ComputerTime(seconds, lines, loading_of(self._batches))

    def _ask(self, running: Any) -> None:
        """Ask the main thread every 5 ms to note its line.

        `running` is a lock. The thread ends when `stop` releases it.
        """
        while not running.acquire(timeout=INTERVAL):
            if signal.getsignal(SIGNAL) == self._look:  # the script may have set a handler
                # No signal is sent, so that no call of the system is interrupted.
                _thread.interrupt_main(SIGNAL)

    def _look(self, signum: int, frame: FrameType | None) -> None:
        """Note the line that the main thread runs. The arguments are those of a signal handler."""
        now = perf_counter()
        place = self._places.setdefault(place_of(frame), len(self._places))
        self._looks.extend((self._now(), place, now - self._before))
        self._before = now


def time_loaders(
    batches: dict[SourceLine, list[Batch]],
    now: Callable[[], float],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], None]:
    """Time each batch of every DataLoader. Return the function that ends this.

    Args:
        batches: gets the batches of each line.
        now: returns the seconds of the recording.
        around: makes a context in which a batch is loaded.
    """
    iterator: Any = _BaseDataLoaderIter
    original = iterator.__next__

    @functools.wraps(original)
    def timed(loader: Any) -> Any:
        began, asked = perf_counter(), now()
        with around():
            batch = original(loader)
        taken, received = perf_counter() - began, now()
        line = source_lines.caller() or NOWHERE
        batches[line].append(Batch(taken, asked, received, loader._num_workers))
        return batch

    iterator.__next__ = timed

    def undo() -> None:
        if iterator.__next__ is timed:  # otherwise somebody has wrapped it again
            iterator.__next__ = original

    return undo


def loading_of(batches: dict[SourceLine, list[Batch]]) -> list[Loading]:
    """Return a `Loading` for each line that took batches from a DataLoader.

    `batches` has the batches of each line.
    """
    found = []
    for line, taken in batches.items():
        seconds, asked, received, workers = map(list, zip(*taken, strict=True))
        read = SourceLine.read(line.filename, line.line, line.function)
        found.append(Loading(read, seconds, asked, received, max(workers)))
    return found


def _covered(waits: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return for each moment how many of the seconds before it are covered by waits."""
    if not len(waits):
        return np.zeros(len(moments))
    waits = waits[np.argsort(waits[:, 0], kind="stable")]
    ends = np.maximum.accumulate(waits[:, 1])
    # Where a wait begins before the one before it has ended, only the rest of it counts.
    starts = np.maximum(waits[:, 0], np.concatenate([[-np.inf], ends[:-1]]))
    lasted = np.cumsum(ends - starts)
    edges = np.stack([starts, ends], axis=1).ravel()
    sums = np.stack([lasted - (ends - starts), lasted], axis=1).ravel()
    return np.interp(moments, edges, sums)


def place_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Return the user's line (code, number) that spends time outside torch now, or None.

    The line is that of the innermost call in the user's code. None is for a call of torch or of
    the kit. A DataLoader that loads a batch belongs to the script, with the operators that it
    calls, except those on virtual GPUs.
    """
    inner: set[str] = set()  # whose code the user's line has called
    while frame is not None and not _is_in_users_file(frame):
        if frame.f_code.co_filename != __file__:  # the function that times a DataLoader
            inner.add(role(frame.f_code.co_filename))
        frame = frame.f_back
    if frame is None or "kit" in inner:
        return None
    place = frame.f_code, frame.f_lineno
    if inner & {"torch", "host"}:
        # Only a DataLoader's calls of torch count.
        outer: FrameType | None = frame
        while outer is not None and "loading" not in inner:
            inner.add(role(outer.f_code.co_filename))
            outer = outer.f_back
        if "loading" not in inner:
            return None
    return place


def _is_in_users_file(frame: FrameType) -> bool:
    """Return whether the code is in a file or cell of the user's, and not made by a library."""
    name = frame.f_code.co_filename
    return name != "<string>" and is_users(name)
