"""Tests of this computer's time: which line gets it, what does not count, how long batches take."""

import _thread
import os
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gputrace.sources import this_computer
from gputrace.sources.this_computer import SIGNAL, ComputerClock, place_of
from virtualgpu import front_end
from virtualgpu.source_lines import role

TORCH = os.path.dirname(torch.__file__)
USER = "/home/me/train.py"
LOADER = os.path.join(TORCH, "utils", "data", "dataloader.py")
OPS = os.path.join(TORCH, "_ops.py")
MODULE = os.path.join(TORCH, "nn", "modules", "module.py")
GPU = os.path.join(front_end.HERE, "ops", "dispatch.py")
HOST = os.path.join(front_end.HERE, "host", "cpu_operators.py")
SLEEP = os.path.join(front_end.HERE, "host", "time_module.py")
TIMER = this_computer.__file__
NO_WAITS = np.empty((0, 2))


def frame_of(*files):
    """Return the innermost frame of nested calls, one per file, each at line index + 1."""
    frame = None
    for number, file in enumerate(files, 1):
        code = SimpleNamespace(co_filename=file, co_name="function")
        frame = SimpleNamespace(f_code=code, f_lineno=number, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (LOADER, "loading"),
        (os.path.join(TORCH, "multiprocessing", "queue.py"), "loading"),
        (MODULE, "torch"),
        (GPU, "kit"),
        (TIMER, "kit"),
        (HOST, "host"),
        (SLEEP, ""),
        (os.path.join(front_end.HERE, "threads", "locks.py"), ""),
        (np.__file__, ""),
        ("<frozen importlib._bootstrap>", ""),
    ],
)
def test_the_role_of_a_file(file, expected):
    assert role(file) == expected


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ((USER,), 1),
        ((USER, np.__file__), 1),  # another library
        ((USER, SLEEP), 1),
        ((USER, MODULE), None),
        ((USER, GPU), None),
        ((USER, HOST, OPS), None),  # an operator on CPU tensors
        ((USER, MODULE, USER), 3),  # a module of the user's
        ((USER, MODULE, "<string>"), None),  # code that torch has made
        ((USER, TIMER, LOADER, USER), 4),
        ((USER, TIMER, LOADER), 1),  # waits for a worker, or collates
        ((USER, TIMER, LOADER, HOST, OPS), 1),
        ((USER, TIMER, LOADER, USER, HOST, OPS), 4),
        ((USER, TIMER, LOADER, USER, HOST, GPU), None),
        ((LOADER,), None),
    ],
)
def test_the_line_that_gets_the_time(files, line):
    place = place_of(frame_of(*files))
    assert (place and place[1]) == line


@pytest.mark.usefixtures("machine")
def test_a_virtual_gpu_s_operators_do_not_count_and_a_sleep_does(machine, monkeypatch):
    seen = []

    def look(*event: object) -> None:
        seen.append(place_of(sys._getframe()))

    look_code = look.__code__
    monkeypatch.setattr(this_computer, "_is_in_users_file", users_except(look_code))
    machine.machine.gpus[0].allocator.listen(look)
    torch.ones(1, device="cuda")
    machine.machine.gpus[0].allocator.unlisten(look)
    assert seen and set(seen) == {None}
    monkeypatch.setattr(machine.machine.scheduler, "sleep", look)
    time.sleep(0)
    assert seen[-1] is not None and seen[-1][0].co_filename == __file__


def users_except(code):
    """Return a replacement of the test for users' files, for which this code is not the user's."""
    original = this_computer._is_in_users_file
    return lambda frame: frame.f_code is not code and original(frame)


def looks(clock, *rows):
    """Add looks to the clock, given as rows (moment, line, seconds)."""
    code = looks.__code__
    for moment, line, seconds in rows:
        place = None if line is None else (code, line)
        number = clock._places.setdefault(place, len(clock._places))
        clock._looks.extend((moment, number, seconds))


def test_the_time_of_a_line_is_the_time_since_the_look_before():
    clock = ComputerClock(lambda: 0.0)
    looks(clock, (0.1, 7, 0.5), (0.2, 8, 1.0), (0.3, None, 4.0), (0.4, 7, 1.0))
    found = clock.finish(NO_WAITS)
    assert [(line.line, seconds) for line, seconds in found.lines] == [(7, 1.5), (8, 1.0)]


def test_the_host_s_launches_and_waits_on_real_gpus_do_not_count():
    clock = ComputerClock(lambda: 0.0)
    looks(clock, (1.0, 7, 1.0), (2.0, 8, 1.0), (3.0, 9, 1.0), (4.0, 7, 1.0))
    # The long wait covers a short one, and the last one has not ended.
    found = clock.finish(np.array([[2.1, 2.2], [1.5, 3.0], [2.9, 3.25], [3.75, 6.0]]))
    assert [(line.line, seconds) for line, seconds in found.lines] == [(7, 1.5), (8, 0.5)]


def test_a_line_in_two_functions_is_one_line():
    # In Python 3.11, a list comprehension is a function of its own.
    codes = [compile(text, "/home/me/train.py", "exec") for text in ("x", "x + 1")]
    clock = ComputerClock(lambda: 0.0)
    for number, code in enumerate(codes):
        clock._places[code, 1] = number + 1
        clock._looks.extend((0.0, number + 1, 1.0))
    ((line, seconds),) = clock.finish(NO_WAITS).lines
    assert (line.location, seconds) == ("train.py:1", 2.0)


def test_nothing_was_seen():
    assert ComputerClock(lambda: 0.0).finish(NO_WAITS).lines == []


class Slow(Dataset):
    """Data set whose items take 0.25 s each, on a clock that replaces this computer's."""

    def __init__(self, now):
        self.now = now

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.now[0] += 0.25
        return index


def test_a_batch_takes_the_time_of_next(monkeypatch):
    now, recording = [0.0], [10.0]
    monkeypatch.setattr(this_computer, "perf_counter", lambda: now[0])
    clock = ComputerClock(lambda: recording[0])
    original = this_computer._BaseDataLoaderIter.__next__
    clock.start()
    for _ in DataLoader(Slow(now), batch_size=2):
        recording[0] += 1.0
    found = clock.finish(NO_WAITS)
    (loading,) = found.loading
    assert loading.line.text == "for _ in DataLoader(Slow(now), batch_size=2):"
    assert loading.seconds == [0.5, 0.5]
    assert loading.asked == loading.received == [10.0, 11.0]
    assert loading.workers == 0
    assert found.seconds == 1.0
    assert this_computer._BaseDataLoaderIter.__next__ is original


def test_the_main_thread_notes_its_own_line_and_python_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(this_computer, "INTERVAL", 1e9)  # only this test asks
    before = sys.getswitchinterval(), signal.getsignal(SIGNAL)
    clock = ComputerClock(lambda: 0.0)
    clock.start()
    _thread.interrupt_main(SIGNAL)
    found = clock.finish(NO_WAITS)
    clock.stop()
    assert (sys.getswitchinterval(), signal.getsignal(SIGNAL)) == before
    ((line, _),) = found.lines
    assert line.text in ("_thread.interrupt_main(SIGNAL)", "found = clock.finish(NO_WAITS)")


def test_a_look_keeps_nothing_alive():
    class Kept:
        pass

    def function():
        local = Kept()
        clock._look(SIGNAL, sys._getframe())
        return weakref.ref(local)

    clock = ComputerClock(lambda: 0.0)
    assert function()() is None


@pytest.mark.parametrize("taken", ["by a handler of the script", "because the thread is another"])
def test_lines_are_not_measured_if_that_would_disturb(taken):
    clock = ComputerClock(lambda: 0.0)
    if taken.startswith("by"):
        before = signal.signal(SIGNAL, lambda signum, frame: None)
        handler = signal.getsignal(SIGNAL)
        clock.start()
        assert signal.getsignal(SIGNAL) is handler
        signal.signal(SIGNAL, before)
    else:
        thread = threading.Thread(target=clock.start)
        thread.start()
        thread.join()
        assert signal.getsignal(SIGNAL) == signal.SIG_DFL
    assert clock._running is None
    clock.stop()
