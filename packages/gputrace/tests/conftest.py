"""What the tests of recordings share: two virtual H200s, and traces of a few rows."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import virtualgpu
from gputrace import Trace
from gputrace.events import (
    ACTION_OF,
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    Events,
    MemoryEvent,
    SourceLine,
)
from gputrace.phases import Phase
from gputrace.replay import complete
from gputrace.spans import Execution
from virtualgpu.allocator.settings import Settings

from .warm_processes import WarmProcesses

MIB = 1 << 20
LINES = (
    (),
    (SourceLine("/home/me/train.py", 11, "train", "loss = model(x)"),),
    (SourceLine("/home/me/train.py", 12, "train", "loss.backward()"),),
)


@pytest.fixture(scope="session")
def warm_processes() -> Iterator[WarmProcesses]:
    """A starter of scripts, which run as copies of a process that has imported torch."""
    warm = WarmProcesses()
    yield warm
    warm.close()


@pytest.fixture
def no_collection():
    """Switch off the garbage collector, so that objects on cycles live until the test ends."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def small_heap():
    """Two virtual GPUs, and no objects of pytest and torch to search, which makes searches quick.

    The globals of modules are still searched.
    """
    with virtualgpu.use(gpus=2, like="H200"):
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()


@pytest.fixture
def machine():
    with virtualgpu.use(gpus=2, like="H200") as used:
        yield used


def make_trace(rows, *, stacks=LINES, **more) -> Trace:
    """Return a made-up trace with events from rows.

    A row is (seconds, action, address in MiB, size in MiB). Its device, stack, category and stream
    may follow. The defaults are 0, 0, OTHER and 0.
    """
    told = [(*row, *(0, 0, OTHER, 0)[len(row) - 4 :]) for row in rows]
    events = Events.of(
        MemoryEvent(
            seconds,
            device,
            stream,
            ACTION_OF[action],
            int(address * MIB),
            0,
            int(size * MIB),
            stack,
        )
        for seconds, action, address, size, device, stack, _, stream in told
    )
    events = complete(events, [], Settings())
    events = replace(events, category=np.array([row[6] for row in told], np.uint8))
    devices = {0, *(row[4] for row in told)}

    def rise(device: int, up: str, down: str) -> int:
        mine = events.device == device
        taken = np.maximum(events.size, events.requested)
        return int(
            taken[mine & (events.action == ACTION_OF[up])].sum()
            - taken[mine & (events.action == ACTION_OF[down])].sum()
        )

    figures = {
        "start": [],
        "settings": Settings(),
        "phases": [],
        "used": [],
        "allocated_at_end": {device: rise(device, "alloc", "free_requested") for device in devices},
        "reserved_at_end": {
            device: rise(device, "segment_alloc", "segment_free") for device in devices
        },
        "totals": dict.fromkeys(devices, 1024 * MIB),
        "seconds": float(events.time[-1]) if len(events) else 0.0,
        "lost": 0,
        "error": "",
        "badge": "measured on paper",
        "origin": {},
        "census": None,
        "execution": Execution.none("only its memory was recorded"),
    }
    return Trace(events=events, stacks=list(stacks), **{**figures, **more})


@pytest.fixture
def trace_of():
    """A function that makes a trace of a few rows."""
    return make_trace


def freed(seconds: float, address: float, size: float, *more: int) -> list[tuple]:
    """Return the two rows of a free: when it is requested and when it is completed."""
    return [
        (seconds, action, address, size, *more) for action in ("free_requested", "free_completed")
    ]


@pytest.fixture
def training(trace_of):
    """A trace with parameters (10 MiB), activations (60 MiB) and gradients (20 MiB) at the peak.

    The backward pass makes the peak.
    """
    rows = [
        (0.0, "segment_alloc", 100, 200),
        (0.001, "alloc", 100, 10, 0, 1, PARAMETERS),
        (0.002, "alloc", 110, 60, 0, 1, ACTIVATIONS),
        (0.004, "alloc", 170, 20, 0, 2, GRADIENTS),
        *freed(0.006, 110, 60, 0, 2, ACTIVATIONS),
    ]
    phases = [
        Phase("forward", 0.002, 0.004, 1),
        Phase("backward", 0.004, 0.008, 2),
        Phase("step", 0.008, 0.00801, 2),
    ]
    return trace_of(rows, phases=phases, used=[(0.0, 0, 320 * MIB)], seconds=0.010)
