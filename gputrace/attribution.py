"""Which line of Python an event or a span belongs to, where its source does not say: that of the phase, or of what came before it."""

import bisect
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gputrace.events import ALLOC, Events, MemoryEvent, Stack
from gputrace.phases import Phase, phase_of
from gputrace.spans import Execution
from virtualgpu.source_lines import is_users


def with_stacks(events: Iterable[MemoryEvent], phases: list[Phase]) -> list[MemoryEvent]:
    """The events; those without a stack get that of the phase they lie in, for a backward pass on CUDA runs in C++ threads."""
    backward = [phase for phase in phases if phase.name == "backward"]
    starts = [phase.start for phase in backward]

    def stack(event: MemoryEvent) -> int:
        at = bisect.bisect_right(starts, event.time) - 1
        return backward[at].stack if at >= 0 and event.time <= backward[at].end else 0

    return [event if event.stack else replace(event, stack=stack(event)) for event in events]


def with_allocators_streams(work: Execution, events: Events) -> Execution:
    """The spans with each stream as PyTorch's allocator calls it, which CUPTI numbers otherwise.

    What runs on a stream takes its memory on that stream right before. So the two are the same if most launches on the one follow an
    event on the other; and no two are the same as one.
    """
    spans, waits = work.spans, work.waits
    if not len(events):
        return work
    same: dict[tuple[int, int], int] = {}
    for device in np.unique(spans.device[spans.launch >= 0]).tolist():
        mine = np.flatnonzero((spans.device == device) & (spans.launch >= 0))
        there = np.flatnonzero((events.device == device) & (events.action == ALLOC))
        if not len(there):
            continue
        before = np.searchsorted(events.time[there], spans.start[spans.launch[mine]], side="right") - 1
        streams, handles = spans.stream[mine[before >= 0]], events.stream[there[before[before >= 0]]]
        taken: set[int] = set()
        for stream in sorted(set(streams.tolist()), key=lambda stream: -np.count_nonzero(streams == stream)):
            found, votes = np.unique(handles[streams == stream], return_counts=True)
            handle = int(found[votes.argmax()])
            if 2 * votes.max() > votes.sum() and handle not in taken:
                same[device, stream] = handle
                taken.add(handle)

    def told(devices: np.ndarray, streams: np.ndarray) -> np.ndarray:
        places = zip(devices.tolist(), streams.tolist(), strict=True)
        return np.array([same.get(place, place[1]) for place in places], np.int64)

    return replace(
        work,
        spans=replace(spans, stream=told(spans.device, spans.stream)),
        waits=replace(waits, stream=told(waits.device, waits.stream), to_stream=told(waits.to_device, waits.to_stream)),
    )


def with_lines(work: Execution, events: Events, phases: list[Phase], stacks: list[Stack]) -> Execution:
    """The spans; those whose stack has no line of the user's get that of the phase in which they were launched.

    The profiler on CUDA tells of no stacks: asked for them, it costs a quarter more. There a launch gets the stack of the last event of
    the memory before it in its phase that has one. Nearly every operator allocates its result and then launches at once; one that works
    in place may be told as the line of the operator before.
    """
    if not len(work.spans) and not len(work.waits):
        return work
    spans, waits = work.spans, work.waits
    launched = np.where(spans.launch >= 0, spans.start[spans.launch], spans.start)
    known = np.flatnonzero(events.stack)
    users = np.array([any(is_users(line.filename) for line in stack) for stack in stacks], dtype=bool)

    def better(stack: np.ndarray, times: np.ndarray) -> np.ndarray:
        phase = phase_of(phases, times)
        before = np.searchsorted(events.time[known], times, side="right") - 1
        same = (before >= 0) & (phase == (phase_of(phases, events.time[known])[before] if len(known) else -1))
        near = events.stack[known][before] if len(known) else np.zeros(len(times), np.int32)
        of_phase = np.array([0, *(phase.stack for phase in phases)], np.int32)[phase + 1]
        guessed = np.where(same & users[near], near, of_phase)
        return np.where(users[stack], stack, np.where(stack == 0, guessed, np.where(phase >= 0, of_phase, stack)))

    return replace(
        work,
        spans=replace(spans, stack=better(spans.stack, launched)),
        waits=replace(waits, stack=better(waits.stack, waits.until)),
    )
