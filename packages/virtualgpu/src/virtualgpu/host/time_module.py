"""Python's clocks on a machine's host time: what `run --virtual-time` puts in place of those of the module `time`.

Without it `time` is Python's own; but where a user's line sleeps, the machine's host sleeps as long, or a loop that asks an event now and
then whether it has happened would run for minutes.

A script that times its GPU with `time.perf_counter` then prints the model's times, the same on every computer. Python's own library
and what waits for real processes go on by the real clock: their deadlines are for things that really happen. `datetime`,
`os.times` and the processes that a script starts use the real time.
"""

import functools
import sys
import sysconfig
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

from virtualgpu import front_end
from virtualgpu.clock.machine_clock import Clock
from virtualgpu.hardware import Machine
from virtualgpu.source_lines import is_users

EPOCH = 1767225600.0  # time.time() when the host's clock is at 0: the start of 2026, in every run
READ_SECONDS = 5e-8  # a reading takes time too, or a loop that waits for a moment to come would never end
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen ")
_SITE_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    real_sleep = time.sleep

    @functools.wraps(real_sleep)  # found by this name, it can be sent to another process
    def sleep(seconds: float) -> None:
        if not is_users(sys._getframe(1).f_code.co_filename) or machine.selected.untimed:
            with machine.scheduler.blocked():  # a progress bar's thread, say: the others need not wait for it
                real_sleep(seconds)
        else:
            real_sleep(seconds)
            machine.scheduler.sleep(float(seconds), machine.clock)

    yield time, {"sleep": sleep}


class _Served:
    """A function of the module `time`, answered by `virtual` unless the standard library or a waiting module calls it.

    An object, not a function: a class may keep a clock as its attribute, and Python's own clocks do not become methods there.
    """

    def __init__(self, real: Callable[..., Any], virtual: Callable[..., Any]) -> None:
        self._real, self._virtual = real, virtual
        self.__name__, self.__doc__ = real.__name__, real.__doc__

    def __call__(self, *arguments: Any) -> Any:
        caller = sys._getframe(1)
        return (self._real if _keeps_real_time(caller.f_code.co_filename, caller.f_globals) else self._virtual)(*arguments)

    def __repr__(self) -> str:
        return f"<{self.__name__} on the virtual host's clock>"


def _keeps_real_time(file: str, names: dict[str, Any]) -> bool:
    if file.startswith(_STANDARD_LIBRARY) and not file.startswith(_SITE_PACKAGES):
        return True
    return front_end.keeps_real_time(names.get("__name__") or "")


def time_functions(clock: Clock, pause: Callable[[float], None] | None = None) -> dict[str, _Served]:
    """The functions of `time`, by name, on this clock. `pause(seconds)` is what a sleep does; the default advances the host."""
    pause = clock.advance_host if pause is None else pause
    asleep = 0.0  # seconds that took no processor time

    def now() -> float:
        clock.advance_host(READ_SECONDS)
        return clock.host

    def sleep(seconds: float) -> None:
        nonlocal asleep
        if not (hasattr(seconds, "__float__") or hasattr(seconds, "__index__")) or seconds < 0:
            return real_sleep(seconds)  # Python says what is wrong with it
        pause(float(seconds))
        asleep += float(seconds)
        real_sleep(0)  # another thread may run

    def nanoseconds(seconds: Callable[[], float]) -> Callable[[], int]:
        return lambda: round(seconds() * 1e9)

    real_sleep = time.sleep
    floats = {"perf_counter": now, "monotonic": now, "time": lambda: EPOCH + now(), "process_time": lambda: now() - asleep}
    served: dict[str, Callable[..., Any]] = {**floats, "sleep": sleep}
    served |= {f"{name}_ns": nanoseconds(function) for name, function in floats.items()}
    served["time_ns"] = lambda: round(EPOCH) * 10**9 + round(now() * 1e9)  # a float of this size is whole to some 200 ns only
    return {name: _Served(getattr(time, name), function) for name, function in served.items()}


def put_in_place(clock: Clock, pause: Callable[[float], None] | None = None) -> Callable[[], None]:
    """Let `time` use this clock until the returned function is called. `pause` is what a sleep does, so that other threads can run."""
    served = time_functions(clock, pause)
    before = {name: getattr(time, name) for name in served}
    timed: list[Any] = [timeit.timeit, timeit.repeat, timeit.Timer.__init__]  # their default arguments hold the clock
    defaults = [function.__defaults__ for function in timed]
    vars(time).update(served)
    for function in timed:
        function.__defaults__ = tuple(served["perf_counter"] if value is timeit.default_timer else value for value in function.__defaults__)
    timeit.default_timer, timer = served["perf_counter"], timeit.default_timer

    def put_back() -> None:
        vars(time).update(before)
        timeit.default_timer = timer
        for function, values in zip(timed, defaults, strict=True):
            function.__defaults__ = values

    return put_back
