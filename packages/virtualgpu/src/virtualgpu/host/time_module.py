"""Python's clocks on a machine's host time.

With `run --virtual-time` the functions of the module `time` read the machine's clock. A script that
times its GPU with `time.perf_counter` then prints the model's times, the same on every computer.
Python's own library and code that waits for real processes keep the real clock, because their
deadlines are real. `datetime`, `os.times` and the processes that a script starts keep it, too.

Without this option `time` is Python's own. When a line of the user sleeps, the machine's host also
sleeps as long. Otherwise a loop that asks now and then whether an event has happened would run for
minutes.
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
READ_SECONDS = 5e-8  # time of a reading; without it, a loop that waits for a time would never end
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen ")
_SITE_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of Python's library to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    real_sleep = time.sleep

    @functools.wraps(real_sleep)  # pickle finds the function by this name
    def sleep(seconds: float) -> None:
        if not is_users(sys._getframe(1).f_code.co_filename) or machine.selected.untimed:
            with machine.scheduler.blocked():  # for example a progress bar's thread
                real_sleep(seconds)
        else:
            real_sleep(seconds)
            machine.scheduler.sleep(float(seconds), machine.clock)

    yield time, {"sleep": sleep}


class _Served:
    """A function of the module `time` that reads the virtual clock for the user's code.

    It calls `virtual` there, and `real`, Python's own function, for all other code. It is an object
    and not a function, because a class may keep a clock as an attribute, and Python's own clocks do
    not become methods there.
    """

    def __init__(self, real: Callable[..., Any], virtual: Callable[..., Any]) -> None:
        self._real, self._virtual = real, virtual
        self.__name__, self.__doc__ = real.__name__, real.__doc__

    def __call__(self, *arguments: Any) -> Any:
        caller = sys._getframe(1)
        real = _keeps_real_time(caller.f_code.co_filename, caller.f_globals)
        return self._real(*arguments) if real else self._virtual(*arguments)

    def __repr__(self) -> str:
        return f"<{self.__name__} on the virtual host's clock>"


def _keeps_real_time(file: str, names: dict[str, Any]) -> bool:
    """Return whether code needs the real clock.

    `file` is the code's file, and `names` are its global names.
    """
    if file.startswith(_STANDARD_LIBRARY) and not file.startswith(_SITE_PACKAGES):
        return True
    return front_end.keeps_real_time(names.get("__name__") or "")


def time_functions(
    clock: Clock, pause: Callable[[float], None] | None = None
) -> dict[str, _Served]:
    """Return functions for the module `time`, by name, that read this clock.

    `sleep` calls `pause(seconds)`, which by default advances the host's clock.
    """
    pause = clock.advance_host if pause is None else pause
    asleep = 0.0  # seconds of sleep, which take no processor time

    def now() -> float:
        clock.advance_host(READ_SECONDS)
        return clock.host

    def sleep(seconds: float) -> None:
        nonlocal asleep
        if not (hasattr(seconds, "__float__") or hasattr(seconds, "__index__")) or seconds < 0:
            return real_sleep(seconds)  # Python reports what is wrong with the argument
        pause(float(seconds))
        asleep += float(seconds)
        real_sleep(0)  # another thread may run

    def nanoseconds(seconds: Callable[[], float]) -> Callable[[], int]:
        return lambda: round(seconds() * 1e9)

    real_sleep = time.sleep
    floats = {
        "perf_counter": now,
        "monotonic": now,
        "time": lambda: EPOCH + now(),
        "process_time": lambda: now() - asleep,
    }
    served: dict[str, Callable[..., Any]] = {**floats, "sleep": sleep}
    served |= {f"{name}_ns": nanoseconds(function) for name, function in floats.items()}
    # A float of this size would be precise only to about 200 ns.
    served["time_ns"] = lambda: round(EPOCH) * 10**9 + round(now() * 1e9)
    return {name: _Served(getattr(time, name), function) for name, function in served.items()}


def put_in_place(clock: Clock, pause: Callable[[float], None] | None = None) -> Callable[[], None]:
    """Let the module `time` use this clock, until the returned function is called.

    `sleep` calls `pause`, which lets other threads run.
    """
    served = time_functions(clock, pause)
    before = {name: getattr(time, name) for name in served}
    # The default arguments of these functions contain the clock.
    timed: list[Any] = [timeit.timeit, timeit.repeat, timeit.Timer.__init__]
    defaults = [function.__defaults__ for function in timed]
    vars(time).update(served)
    for function in timed:
        function.__defaults__ = tuple(
            served["perf_counter"] if value is timeit.default_timer else value
            for value in function.__defaults__
        )
    timeit.default_timer, timer = served["perf_counter"], timeit.default_timer

    def put_back() -> None:
        vars(time).update(before)
        timeit.default_timer = timer
        for function, values in zip(timed, defaults, strict=True):
            function.__defaults__ = values

    return put_back
