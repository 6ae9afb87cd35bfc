"""Measure the time and the memory that the figures of a long trace take.

usage: python benchmarks/trace_plots.py [--events N ...] [--check]

The traces look like training: parameters stay, activations are allocated in the forward pass and
freed in the backward pass, and every operator allocates and frees a temporary tensor. A trace has N
memory events, and N kernels and copies on four devices with two streams each. Each size runs in a
process of its own. "memory" is the peak of the process above its memory before the figure.

With --check the exit status is 1 if a figure exceeds its limit. The memory plot may take 2 s for
100,000 events, 10 s for more, and 1 GiB. The timeline may take 3 s for 100,000 kernels and copies,
and 1 GiB.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from time import perf_counter

import numpy as np
import psutil

from gputrace import Trace, figures
from gputrace.attribution import with_marks
from gputrace.events import (
    ACTIVATIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    GRADIENTS,
    OTHER,
    SEGMENT_ALLOC,
    Events,
    SourceLine,
)
from gputrace.phases import Phase
from gputrace.spans import H2D, HOST, KERNEL, LAUNCH, Execution, Spans, Waits
from virtualgpu.allocator.settings import Settings

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS = 100
DEVICES = 4
LARGE = 20 * MIB  # a segment
SEGMENTS = LAYERS + 1
# a layer's activation or gradient, at the start of its segment; the rest is for the temporaries
BLOCK = 16 * MIB
TEMPORARY = 3 * MIB
EVENT = 1e-5  # seconds between two events


def step_of_training() -> tuple[np.ndarray, list[Phase]]:
    """Return the events and the phases of one step.

    An event is a row (action, segment, offset, size, stack, category). Phases begin and end at
    numbers of events.
    """
    rows: list[tuple[int, ...]] = []

    def alloc(segment: int, offset: int, size: int, stack: int, category: int) -> None:
        rows.append((ALLOC, segment, offset, size, stack, category))

    def free(segment: int, offset: int, size: int, stack: int, category: int) -> None:
        rows.append((FREE_REQUESTED, segment, offset, size, stack, category))
        rows.append((FREE_COMPLETED, segment, offset, size, stack, category))

    for layer in range(LAYERS):
        alloc(layer, 0, BLOCK, 1, ACTIVATIONS)
        alloc(layer, BLOCK, TEMPORARY, 1, OTHER)
        free(layer, BLOCK, TEMPORARY, 1, OTHER)
    middle = len(rows)
    for layer in reversed(range(LAYERS)):
        alloc(LAYERS, 0, BLOCK, 2, GRADIENTS)
        free(layer, 0, BLOCK, 2, ACTIVATIONS)
        free(LAYERS, 0, BLOCK, 2, GRADIENTS)
    return np.array(rows), [Phase("forward", 0, middle, 1), Phase("backward", middle, len(rows), 2)]


def make_work(count: int) -> Execution:
    """Return `count` kernels and copies. Kernels wait for copies on another stream."""
    number = np.arange(count)
    device, copies = (number // 2) % DEVICES, number % 2 == 1
    launched = number * EVENT
    draw = np.random.default_rng(0)
    duration = draw.uniform(0.2, 8, count) * EVENT
    start = launched + EVENT
    for lane in range(2 * DEVICES):  # what is queued on a stream starts when it is free
        mine = np.flatnonzero((device == lane % DEVICES) & (copies == (lane >= DEVICES)))
        taken = np.concatenate([[0.0], np.cumsum(duration[mine])])
        start[mine] = np.maximum.accumulate(start[mine] - taken[:-1]) + taken[:-1]
    host = zip(
        launched,
        [EVENT / 2] * count,
        [HOST] * count,
        [0] * count,
        [LAUNCH] * count,
        ["launch"] * count,
        number % 3,
        [-1] * count,
        strict=True,
    )
    kinds, names = (
        np.where(copies, H2D, KERNEL),
        np.where(copies, "copy", np.where(number % 4, "mm", "add")),
    )
    work = zip(
        start, duration, device, 7 * copies, kinds, names.tolist(), number % 3, number, strict=True
    )
    waits = [
        (start[i] + duration[i], device[i], 7, start[i] + duration[i], device[i], 0, 1)
        for i in np.flatnonzero(copies)[::5].tolist()
    ]
    return Execution(Spans.of([*host, *work]), Waits.of(waits), [])


def make_trace(count: int) -> Trace:
    """Return a trace of about `count` events: those of the segments, then whole steps."""
    rows, phases = step_of_training()
    steps = max(1, (count - SEGMENTS) // len(rows))
    first = np.array([(SEGMENT_ALLOC, segment, 0, LARGE, 1, OTHER) for segment in range(SEGMENTS)])
    table = np.concatenate([first, np.tile(rows, (steps, 1))])
    action, segment, offset, size, stack, category = table.T
    number = len(table)
    events = Events(
        time=np.arange(number) * EVENT,
        device=np.zeros(number, np.int16),
        stream=np.zeros(number, np.int64),
        action=action.astype(np.uint8),
        address=(segment * 4 * LARGE + LARGE + offset).astype(np.uint64),
        size=size.astype(np.int64),
        requested=size.astype(np.int64),
        stack=stack.astype(np.int32),
        birth=births(action, segment, offset),
        category=category.astype(np.uint8),
    )
    starts = [(SEGMENTS + step * len(rows)) * EVENT for step in range(steps)]
    every_phase = [
        Phase(p.name, start + p.start * EVENT, start + p.end * EVENT, p.stack)
        for start in starts
        for p in phases
    ]
    return Trace(
        events=events,
        stacks=[
            (),
            (SourceLine("train.py", 11, "train", "loss = model(x)"),),
            (SourceLine("train.py", 12, "train", "loss.backward()"),),
        ],
        start=[],
        settings=Settings(),
        phases=every_phase,
        used=[(0.0, 0, 3 * GIB)],
        allocated_at_end={0: 0},
        reserved_at_end={0: SEGMENTS * LARGE},
        totals=dict.fromkeys(range(DEVICES), 16 * GIB),
        seconds=number * EVENT,
        lost=0,
        error="",
        badge="made up",
        origin={},
        execution=with_marks(make_work(count), every_phase, [], number * EVENT),
        census=None,
    )


def births(action: np.ndarray, segment: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return for each event about a block the event that allocated the block, else -1."""
    birth = np.full(len(action), -1, np.int32)
    place = segment * LARGE + offset
    order = np.lexsort((np.arange(len(action)), place))
    allocated = np.where(action[order] == ALLOC, np.arange(len(order)), 0)
    last = np.maximum.accumulate(allocated)
    of_block = np.isin(action[order], [ALLOC, FREE_REQUESTED, FREE_COMPLETED])
    birth[order[of_block]] = order[last[of_block]]
    return birth


def chrome_trace(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace.export_chrome(f"{folder}/trace.json")


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of a call, and the bytes of peak memory above those before it."""
    process, done = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = perf_counter()
    try:
        call()
    finally:
        seconds = perf_counter() - started
        done.set()
        watcher.join()
    return seconds, most - before


def report(count: int) -> bool:
    """Print the figures of one size. Return whether the memory plot keeps its limits."""
    small = make_trace(1000)
    small.plot_memory()  # the first picture of a process loads fonts
    small.plot_segments()
    small.plot_timeline()
    trace = make_trace(count)
    calls: dict[str, Callable[[], object]] = {
        "plot_memory": trace.plot_memory,
        "plot_timeline": trace.plot_timeline,
        "plot_timeline, a part": lambda: trace.plot_timeline(
            0, memory=True, start=0.4 * trace.end, end=0.401 * trace.end
        ),
        "export_chrome": lambda: chrome_trace(trace),
        "figures.trace_devices": lambda: figures.trace_devices(trace),
        "plot_segments": trace.plot_segments,
        "segments": trace.segments,
        "peaks": lambda: trace.peaks,
        "lines": trace.lines,
    }
    good = True
    for name, call in calls.items():
        seconds, nbytes = measured(call)
        print(
            f"{len(trace.events):>9,} events  {name:<22} {seconds:6.2f} s  {nbytes / MIB:6.0f} MiB",
            flush=True,
        )
        if name == "plot_memory":
            good &= seconds < (2 if count <= 100_000 else 10) and nbytes < GIB
        if name == "plot_timeline":
            good &= (seconds < 3 or count > 100_000) and nbytes < GIB
    print(
        f"{len(trace.events):>9,} events  the process held at most "
        f"{peak_of_process() / MIB:.0f} MiB, imports and trace included"
    )
    return good


def peak_of_process() -> int:
    """Return the most bytes that this process has held."""
    try:
        import resource
    except ImportError:  # Windows keeps it elsewhere
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else KIB
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    asked = parser.parse_args()
    if asked.here:
        good = all([report(count) for count in asked.events])
    else:
        good = True
        for count in asked.events:
            good &= (
                subprocess.run(
                    [sys.executable, __file__, "--here", "--check", "--events", str(count)]
                ).returncode
                == 0
            )
    return 0 if good or not asked.check else 1


if __name__ == "__main__":
    sys.exit(main())
