"""What was allocated at the peak of a device, by the stack of calls that allocated it."""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from gputrace.events import ALLOC, FREE_REQUESTED, Events

if TYPE_CHECKING:
    from gputrace.trace_data import TraceData


def alive_at(events: Events, device: int, event: int) -> np.ndarray:
    """Return the allocations of a device that are not freed yet after an event, by their indices.

    Blocks from before the recording are not among them.
    """
    born = np.flatnonzero((events.action == ALLOC) & (events.device == device))
    born = born[born <= event]
    deaths = events.deaths[born]
    return born[(deaths < 0) | (deaths > event)]


def held_at_peak(trace: "TraceData", device: int) -> dict[int, int]:
    """Return the bytes that were allocated at the peak, by the number of the stack.

    They add up to the peak. If events were lost, some are missing.
    """
    events, peak = trace.events, trace.peak_event(device)
    alive = alive_at(events, device, peak)
    held: dict[int, int] = defaultdict(int)
    stacks, sizes = events.stack[alive].tolist(), events.size[alive].tolist()
    for stack, size in zip(stacks, sizes, strict=True):
        held[stack] += size
    # Blocks from before the recording that were not freed until the peak.
    before = (events.device == device) & (np.arange(len(events)) <= peak)
    freed = before & (events.action == FREE_REQUESTED) & (events.birth < 0)
    gone = set(events.address[freed].tolist())
    for segment in trace.start:
        for block in segment.blocks:
            is_there = block.state == "allocated" and block.address not in gone
            if segment.device == device and is_there:
                held[block.stack] += block.size
    return dict(held)
