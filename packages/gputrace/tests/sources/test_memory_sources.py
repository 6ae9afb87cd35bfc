"""Recordings that fail to begin or to end switch everything off and lose no other events."""

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

import gputrace
from gputrace import events, phases
from gputrace.events import SourceLine, StackTable
from gputrace.sources.memory import CudaSource, _history
from virtualgpu import hardware


def fail(*args, **kwargs):
    raise ZeroDivisionError


def test_a_start_that_fails_leaves_nothing_listening(machine, monkeypatch):
    first, second = (gpu.allocator for gpu in hardware.machine().gpus)
    monkeypatch.setattr(second, "listen", fail)
    with pytest.raises(ZeroDivisionError), gputrace.record():
        pass
    assert first._listeners == () and phases._notes == [] and phases._undo is None


@pytest.fixture
def switched(machine, monkeypatch) -> list[bool]:
    """A list that gets True or False each time CUDA's memory history is switched on or off.

    The content of the history is that of the virtual GPUs.
    """
    states = [False]
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: states[-1])
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled=None, **options: states.append(enabled is not None),
    )
    return states


@pytest.mark.parametrize(
    ("module", "name"), [(torch.cuda.memory, "_snapshot"), (torch.cuda, "memory_stats")]
)
@pytest.mark.parametrize("when", ["start", "finish"])
def test_a_history_that_cannot_be_read_is_switched_off(switched, monkeypatch, module, name, when):
    source = CudaSource(StackTable(), 100)
    if when == "finish":
        source.start()
    monkeypatch.setattr(module, name, fail)
    with pytest.raises(ZeroDivisionError):
        getattr(source, when)()
    source.stop()
    source.stop()
    assert switched == [False, True, False] and _history.recordings == 0


def test_the_last_of_several_recordings_switches_the_history_off(switched):
    first, second = CudaSource(StackTable(), 100), CudaSource(StackTable(), 100)
    first.start()
    second.start()
    first.stop()
    assert switched == [False, True]
    second.stop()
    assert switched == [False, True, False]


def test_a_history_that_was_on_before_stays_on(switched):
    switched[:] = [True]
    source = CudaSource(StackTable(), 100)
    source.start()
    source.stop()
    assert switched == [True] and _history.recordings == 0


def test_the_history_is_switched_on_and_off_in_one_thread_that_is_not_the_learners(
    switched, monkeypatch
):
    """PyTorch notes what happens in the thread that switches the history on.

    Only the same thread can stop this.
    """
    threads = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda *args, **options: threads.append(threading.current_thread()),
    )
    source = CudaSource(StackTable(), 100)
    source.start()
    ending = threading.Thread(target=source.stop)
    ending.start()
    ending.join()
    on, off = threads
    assert on is off and on not in (threading.current_thread(), ending) and not on.is_alive()


def test_a_history_that_cannot_be_switched_on_leaves_no_thread(switched, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fail)
    source = CudaSource(StackTable(), 100)
    with pytest.raises(ZeroDivisionError):
        source.start()
    source.stop()
    assert _history.recordings == 0 and not any(
        thread.name.startswith("labkit history") for thread in threading.enumerate()
    )


@pytest.fixture
def contexts(switched, monkeypatch) -> list[str]:
    """A list that gets an entry for each start of CUDA's memory history.

    The entry names the events whose stacks were requested. It is "alloc" for allocations only.
    """
    asked: list[str] = []

    def record(enabled=None, *, context="", **options):
        if enabled is not None:
            asked.append(context)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    return asked


def entry(action: str, line: int, time_us: float) -> dict:
    """Return an event of 512 bytes in the format of PyTorch's history."""
    frames = [{"filename": __file__, "line": line, "name": "f"}]
    return {
        "action": action,
        "addr": 512,
        "size": 512,
        "stream": 0,
        "time_us": time_us,
        "frames": frames,
    }


@pytest.mark.parametrize(
    ("frees", "context", "stacks"), [(True, "all", [1, 2, 1, 1]), (False, "alloc", [1, 0, 0, 1])]
)
def test_a_history_without_stacks_of_frees_tells_of_none(contexts, frees, context, stacks):
    """PyTorch gives a free without a stack the stack of the block's allocation.

    The source must not report this stack for the free.
    """
    source = CudaSource(StackTable(), 100, frees)
    source.start()
    told = [
        entry("alloc", 1, 1),
        entry("free_requested", 2, 2),
        entry("free_completed", 1, 3),
        entry("segment_alloc", 1, 4),
    ]
    assert [source._event(0, one).stack for one in told] == stacks
    inner = CudaSource(StackTable(), 100)  # which shares the outer one's history
    inner.start()
    assert [inner._event(0, one).stack for one in told] == stacks
    inner.stop()
    source.stop()
    assert contexts == [context]
    after = CudaSource(StackTable(), 100)
    after.start()
    assert after._event(0, told[1]).stack == 1
    after.stop()


class FakeDriver:
    """Replacement of NVML that answers as for `gpus` H200s.

    `broken` has the code of an error by function, or by (function, index).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
        # PyTorch's numbers of GPUs are the driver's
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.used = 10 << 20
        self.broken: dict[Any, str] = {}
        self.started = 0  # how many sessions are open
        answers = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlDeviceGetCount": lambda: gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                total=1000 << 20, used=self.used
            ),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._served(name, answer))

    def _count(self, sessions: int) -> None:
        self.started += sessions

    def _served(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            code = self.broken.get(name) or self.broken.get((name, *args[:1]))
            if not code and name != "nvmlInit" and not self.started:
                code = "UNINITIALIZED"
            if code:
                raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
            return answer(*args)

        return call


@pytest.mark.parametrize(
    "broken", ["nvmlInit", ("nvmlDeviceGetHandleByIndex", 1), "nvmlDeviceGetMemoryInfo", None]
)
@pytest.mark.parametrize("end", ["finish", "stop"])
def test_nvml_is_left_as_it_was_whatever_it_refuses(switched, monkeypatch, broken, end):
    driver = FakeDriver(monkeypatch, gpus=2)
    driver.broken = {broken: "UNKNOWN"}
    source = CudaSource(StackTable(), 100)
    source.start()
    ended = getattr(source, end)()
    assert driver.started == 0
    assert "labkit recording" not in [thread.name for thread in threading.enumerate()]
    if end == "finish":
        assert {(device, used) for _, device, used in ended.used} == (
            set() if broken else {(0, driver.used), (1, driver.used)}
        )
    source.stop()
    assert driver.started == 0


def test_a_driver_that_goes_away_ends_no_recording(switched, monkeypatch):
    driver = FakeDriver(monkeypatch, gpus=2)
    source = CudaSource(StackTable(), 100)
    source.start()
    driver.broken = {"nvmlDeviceGetMemoryInfo": "UNINITIALIZED", "nvmlShutdown": "UNINITIALIZED"}
    assert source.finish().lost == 0
    source.stop()
    assert switched == [False, True, False]


def test_phases_are_noted_only_once_there_is_a_clock(machine, monkeypatch):
    """Another thread may already be training while the recording starts."""
    module = sys.modules["gputrace.recording"]
    look = module.held

    def busy(*args):
        torch.zeros(1, requires_grad=True).sum().backward()
        return look(*args)

    monkeypatch.setattr(module, "held", busy)
    with gputrace.record():
        pass


def slowly(numbers):
    for number in numbers:
        time.sleep(1e-4)
        yield number


# between a look for a stack and its number anything may run
@pytest.mark.parametrize("numbers", [lambda numbers: numbers, slowly])
def test_threads_give_each_stack_a_number_of_its_own(numbers):
    table = StackTable()
    table._next = numbers(table._next)
    kept = [{} for _ in range(4)]

    def number(mine, depth=0):
        mine[depth] = table.of_frame(sys._getframe())
        if depth < 200:
            number(mine, depth + 1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=number, args=(mine,)) for mine in kept]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert kept[0] == kept[1] == kept[2] == kept[3]
    stacks = table.stacks()
    lengths = [len(stacks[kept[0][depth]]) for depth in range(201)]
    assert lengths == list(range(lengths[0], lengths[0] + 201))


def number_in_code_of_its_own(table, name):
    """Return the number that `table` gives a stack whose innermost code object is then deleted."""
    found = []
    exec(
        compile("found.append(table.of_frame(sys._getframe()))", name, "exec"),
        {"found": found, "table": table, "sys": sys},
    )
    return found[0]


def test_code_that_has_gone_leaves_its_number_to_no_other():
    table = StackTable()
    numbers = [number_in_code_of_its_own(table, f"{index}.py") for index in range(100)]
    assert len(set(numbers)) == 100
    assert [table.stacks()[number][0].filename for number in numbers] == [
        f"{index}.py" for index in range(100)
    ]


def test_stacks_are_listed_while_another_thread_meets_new_ones(monkeypatch):
    table = StackTable()
    line = SourceLine("a.py", 1, "f")
    table.of_lines((line,))
    resolve = events._resolved

    def meet_another(key, *args):
        table.of_lines((*key, line, line))
        return resolve(key, *args)

    monkeypatch.setattr(events, "_resolved", meet_another)
    assert table.stacks() == [(), (line,)]
