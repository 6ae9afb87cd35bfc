"""`torch.utils.benchmark` on virtual time.

Its timer waits for the GPU and reads the host's clock, which here is the machine's clock.
"""

import inspect
from collections.abc import Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from virtualgpu.hardware import Machine
from virtualgpu.host.time_module import READ_SECONDS

MODULE = "torch.utils.benchmark.utils.timer"  # not imported early: its import takes 0.3 seconds


def replacements(machine: Machine, timers: ModuleType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object to change in torch.utils.benchmark.

    `timers` is its module of timers, which the program has just imported.
    """
    original, make = timers.timer, timers.Timer.__init__
    signature = inspect.signature(make)

    def timer() -> float:
        torch.accelerator.synchronize()
        machine.clock.advance_host(READ_SECONDS)
        return machine.clock.host

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["timer"] is original:
            given.arguments["timer"] = timer
        make(*given.args, **given.kwargs)

    yield timers, {"timer": timer}
    yield timers.Timer, {"__init__": made}
