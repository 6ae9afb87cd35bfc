"""What a program does again and again: how often, and how many bytes more are allocated each time."""

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gputrace.events import ALLOC
from virtualgpu.source_lines import is_users

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

FEWEST = 3  # times that something is done before it is called a step
ALIKE = 0.9  # of a step's allocations come again in the next: a program prints, or saves, now and then
MOST_TRIED = 200  # distances between two allocations that are alike


class Steps(NamedTuple):
    """How many steps there were, and how many bytes each left behind."""

    repeats: int
    growth: int


def steps_of(trace: "TraceData", device: int) -> Steps | None:
    """The steps of a loop of the user's, known by allocations of the same sizes from the same lines in the same order; None without one.

    The first third of the recording is left out of the comparison: a first step makes what the others find. One allocation again and
    again is no step: it fills a list.
    """
    events, mine = trace.events, trace.events.device == device
    allocations = np.flatnonzero(mine & (events.action == ALLOC))
    alike = (events.stack[allocations].astype(np.int64) << 44) ^ events.requested[allocations]
    steady = alike[len(alike) // 3 :]
    middle = len(steady) // 2
    again = np.flatnonzero(steady[middle + 1 :] == steady[middle])[:MOST_TRIED] + 1 if len(steady) else np.zeros(0, int)
    shares = [float(np.mean(steady[length:] == steady[:-length])) for length in again.tolist()]
    if not shares or max(shares) < ALIKE:
        return None
    length = int(again[int(np.argmax(shares))])  # in allocations; of equals the first, which is the shortest
    step = steady[middle : middle + length]
    kinds, times = np.unique(step, return_counts=True)
    count = int(np.median([np.count_nonzero(alike == kind) for kind in kinds] / times))
    if count < FEWEST or length == 1 or not _in_users_loop(trace, events.stack[allocations][-len(steady) :][middle : middle + length]):
        return None
    after = trace.timeline(device).allocated[np.cumsum(mine)[allocations]][-len(steady) :]
    return Steps(count, int(np.median(after[length:] - after[:-length])))


def _in_users_loop(trace: "TraceData", stacks: np.ndarray) -> bool:
    """Is the function that these stacks have in common, the one that loops, the user's own? PyTorch's own loops over layers."""
    calls = [[(line.filename, line.function) for line in reversed(trace.stacks[stack])] for stack in set(stacks.tolist())]
    common = list(takewhile(lambda at: len(set(at)) == 1, zip(*calls, strict=False)))
    return bool(common) and is_users(common[-1][0][0])
