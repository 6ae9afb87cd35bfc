"""The phases of a recording, and the line of Python for each event and span whose source does not give one: that of its phase, or of
what came before it."""

import bisect
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gputrace.events import ALLOC, Events, MemoryEvent, Stack
from gputrace.phases import NotedMark, NotedPhase, Phase, broken_off, phase_of, with_forwards
from gputrace.spans import HOST, Execution, Mark, Spans
from virtualgpu.source_lines import is_users


def with_phases(recorded: Iterable[MemoryEvent], noted: list[NotedPhase], end: float, stacks: list[Stack]) -> tuple[Events, list[Phase]]:
    """The columns of the events, each with a stack, and all phases; those noted and not ended last until `end`."""
    noted = list(noted)  # another thread may add to it
    phases = [Phase(one.name, one.start, end if one.end is None else one.end, one.stack) for one in noted]
    events = Events.of(_with_stacks(recorded, phases))
    for index, one in enumerate(noted):
        if one.name == "step" and one.end is None:
            phases[index] = broken_off(phases[index], phases, events, stacks)
    return events, with_forwards(phases, events, stacks)


def _with_stacks(events: Iterable[MemoryEvent], phases: list[Phase]) -> list[MemoryEvent]:
    """Events without a stack get that of the backward in which they lie: on CUDA it runs in C++ threads."""
    backward = [phase for phase in phases if phase.name == "backward"]
    starts = [phase.start for phase in backward]

    def stack(event: MemoryEvent) -> int:
        at = bisect.bisect_right(starts, event.time) - 1
        return backward[at].stack if at >= 0 and event.time <= backward[at].end else 0

    return [event if event.stack else replace(event, stack=stack(event)) for event in events]


def with_allocators_streams(execution: Execution, events: Events) -> Execution:
    """The spans with the stream handles that PyTorch's allocator uses; CUPTI numbers streams differently.

    What runs on a stream allocates its memory on that stream right before. A CUPTI stream is the handle whose allocations most of its
    launches follow, and no two streams get the same handle.
    """
    spans, waits = execution.spans, execution.waits
    if not len(events):
        return execution
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

    def handles_of(devices: np.ndarray, streams: np.ndarray) -> np.ndarray:
        pairs = zip(devices.tolist(), streams.tolist(), strict=True)
        return np.array([same.get(pair, pair[1]) for pair in pairs], np.int64)

    return replace(
        execution,
        spans=replace(spans, stream=handles_of(spans.device, spans.stream)),
        waits=replace(waits, stream=handles_of(waits.device, waits.stream), to_stream=handles_of(waits.to_device, waits.to_stream)),
    )


def with_lines(execution: Execution, events: Events, phases: list[Phase], stacks: list[Stack]) -> Execution:
    """The spans; those whose stack has no line of the user's get that of the phase in which they were launched.

    The profiler on CUDA reports no stacks: with them it costs a quarter more. There a launch gets the stack of the last memory event
    before it in its phase. Nearly every operator allocates its result and launches right after; one that works in place may get the
    line of the operator before.
    """
    spans, waits = execution.spans, execution.waits
    if not len(spans) and not len(waits):
        return execution
    launched = _launched(spans)
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
        execution,
        spans=replace(spans, stack=better(spans.stack, launched)),
        waits=replace(waits, stack=better(waits.stack, waits.until)),
    )


def with_marks(execution: Execution, phases: list[Phase], noted: list[NotedMark], end: float) -> Execution:
    """The execution with what the program's phases and marks say: which spans a backward pass launched, and what its author has named.

    A mark that has not ended lasts until `end`. It is left out for a device for which nothing was launched in it.
    """
    spans = execution.spans
    launched = _launched(spans)
    in_backward = np.array([False, *(phase.name == "backward" for phase in phases)])
    marks = []
    for one in list(noted):  # another thread may add to it
        until = end if one.end is None else one.end
        inside = (spans.device != HOST) & (launched >= one.start) & (launched <= until)
        for device in np.unique(spans.device[inside]).tolist():
            mine = inside & (spans.device == device)
            marks.append(Mark(one.name, device, float(spans.start[mine].min()), float(spans.end[mine].max())))
    spans = replace(spans, backward=in_backward[phase_of(phases, launched) + 1])
    return replace(execution, spans=spans, marks=marks)


def _launched(spans: Spans) -> np.ndarray:
    """When each span was launched; its start where the launch is not known."""
    return np.where(spans.launch >= 0, spans.start[spans.launch], spans.start)
