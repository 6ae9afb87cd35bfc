"""Steps: what a program does repeatedly, how often, and how many bytes each time leaves behind."""

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gputrace.events import ALLOC
from virtualgpu.source_lines import is_users

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData

FEWEST = 3  # repetitions that count as steps
# The share of a step's allocations that the next step repeats. A step may print or save something.
ALIKE = 0.9
MOST_TRIED = 200  # possible lengths of a step that are compared


class Steps(NamedTuple):
    """The number of a loop's steps (`repeats`), and the bytes that each left (`growth`)."""

    repeats: int
    growth: int


def steps_of(trace: "TraceData", device: int) -> Steps | None:
    """Find the steps of a loop in the user's code, or return None.

    A step repeats the allocations of the one before: the same sizes from the same lines in the same
    order. The first third of the recording is not compared, because a first step allocates what the
    others use. A single allocation that is repeated is not a step, because it fills a list.
    """
    events, mine = trace.events, trace.events.device == device
    allocations = np.flatnonzero(mine & (events.action == ALLOC))
    # One number stands for the line and the size of an allocation.
    alike = (events.stack[allocations].astype(np.int64) << 44) ^ events.requested[allocations]
    steady = alike[len(alike) // 3 :]
    if not len(steady):
        return None
    middle = len(steady) // 2
    again = np.flatnonzero(steady[middle + 1 :] == steady[middle])[:MOST_TRIED] + 1
    shares = [float(np.mean(steady[length:] == steady[:-length])) for length in again.tolist()]
    if not shares or max(shares) < ALIKE:
        return None
    # The length of a step in allocations. `argmax` returns the first and so the shortest of equals.
    length = int(again[int(np.argmax(shares))])
    step = steady[middle : middle + length]
    kinds, times = np.unique(step, return_counts=True)
    count = int(np.median([np.count_nonzero(alike == kind) for kind in kinds] / times))
    stacks = events.stack[allocations][-len(steady) :][middle : middle + length]
    if count < FEWEST or length == 1 or not _in_users_loop(trace, stacks):
        return None
    after = trace.timeline(device).allocated[np.cumsum(mine)[allocations]][-len(steady) :]
    return Steps(count, int(np.median(after[length:] - after[:-length])))


def _in_users_loop(trace: "TraceData", stacks: np.ndarray) -> bool:
    """Return whether the repeated allocations come from a loop in a function of the user.

    Loops over layers in PyTorch's functions do not count. The function with the loop is the
    innermost one that all stacks have in common.
    """
    calls = []
    for stack in set(stacks.tolist()):
        calls.append([(line.filename, line.function) for line in reversed(trace.stacks[stack])])
    common = list(takewhile(lambda at: len(set(at)) == 1, zip(*calls, strict=False)))
    return bool(common) and is_users(common[-1][0][0])
