"""Phases of a recording, and the line of Python of each event and span.

If the source does not give a line, it is that of the phase, or of what happened before.
"""

import bisect
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gputrace.events import ALLOC, Events, MemoryEvent, Stack
from gputrace.phases import NotedMark, NotedPhase, Phase, broken_off, phase_of, with_forwards
from gputrace.spans import HOST, Execution, Mark, launch_times
from virtualgpu.source_lines import is_users


def with_phases(
    recorded: Iterable[MemoryEvent], noted: list[NotedPhase], end: float, stacks: list[Stack]
) -> tuple[Events, list[Phase]]:
    """Return the events, each with the number of its stack, and all phases in order of time.

    Phases in `noted` that have not ended last until `end`, in seconds.
    """
    noted = list(noted)  # a copy, because another thread may add a phase
    phases = []
    for one in noted:
        ended = end if one.end is None else one.end
        phases.append(Phase(one.name, one.start, ended, one.stack))
    events = Events.of(_with_stacks(recorded, phases))
    for index, one in enumerate(noted):
        if one.name == "step" and one.end is None:
            phases[index] = broken_off(phases[index], phases, events, stacks)
    return events, with_forwards(phases, events, stacks)


def _with_stacks(events: Iterable[MemoryEvent], phases: list[Phase]) -> list[MemoryEvent]:
    """Give events without a stack the stack of the backward pass during which they happened.

    On CUDA, C++ threads run the backward pass.
    """
    backward = [phase for phase in phases if phase.name == "backward"]
    starts = [phase.start for phase in backward]
    found = []
    for event in events:
        at = bisect.bisect_right(starts, event.time) - 1
        if not event.stack and at >= 0 and event.time <= backward[at].end:
            event = replace(event, stack=backward[at].stack)
        found.append(event)
    return found


def with_allocators_streams(execution: Execution, events: Events) -> Execution:
    """Replace the stream numbers of CUPTI with the stream handles of PyTorch's allocator.

    Work on a stream usually follows an allocation on the same stream. So a CUPTI stream gets the
    handle whose allocations precede most of its launches. No two streams get the same handle.
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
        before = (
            np.searchsorted(events.time[there], spans.start[spans.launch[mine]], side="right") - 1
        )
        # The stream of each launch, and that of the last allocation before it.
        known = before >= 0
        streams = spans.stream[mine[known]]
        handles = events.stream[there[before[known]]]
        counts = {stream: np.count_nonzero(streams == stream) for stream in set(streams.tolist())}
        taken: set[int] = set()
        for stream in sorted(counts, key=lambda stream: -counts[stream]):
            found, votes = np.unique(handles[streams == stream], return_counts=True)
            handle = int(found[votes.argmax()])
            if 2 * votes.max() > votes.sum() and handle not in taken:
                same[device, stream] = handle
                taken.add(handle)

    def handles_of(devices: np.ndarray, streams: np.ndarray) -> np.ndarray:
        """Return the allocator's handle of each span's stream, given its device and CUPTI's number.

        A stream whose handle is not known keeps CUPTI's number.
        """
        pairs = zip(devices.tolist(), streams.tolist(), strict=True)
        return np.array([same.get(pair, pair[1]) for pair in pairs], np.int64)

    to_stream = handles_of(waits.to_device, waits.to_stream)
    waits = replace(waits, stream=handles_of(waits.device, waits.stream), to_stream=to_stream)
    spans = replace(spans, stream=handles_of(spans.device, spans.stream))
    return replace(execution, spans=spans, waits=waits)


def with_lines(
    execution: Execution, events: Events, phases: list[Phase], stacks: list[Stack]
) -> Execution:
    """Give a stack to the spans and waits that have none with a line of the user's.

    They get the stack of the phase in which they were launched. On CUDA, the profiler reports no
    stacks, because these would cost a quarter more. There a launch gets the stack of the last
    memory event before it in its phase. Nearly every operator allocates its result and then
    launches. An operator that works in place may get the line of the operator before it.
    """
    spans, waits = execution.spans, execution.waits
    if not len(spans) and not len(waits):
        return execution
    launched = launch_times(spans)
    known = np.flatnonzero(events.stack)
    users = np.array(
        [any(is_users(line.filename) for line in stack) for stack in stacks], dtype=bool
    )
    stack_of_phase = np.array([0, *(phase.stack for phase in phases)], np.int32)

    def better(stack: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Replace each stack without a line of the user's by a stack that has one, if possible.

        `times` says when the work of each stack was launched.
        """
        phase = phase_of(phases, times)
        of_phase = stack_of_phase[phase + 1]
        guessed = of_phase
        if len(known):
            before = np.searchsorted(events.time[known], times, side="right") - 1
            same_phase = phase == phase_of(phases, events.time[known])[before]
            near = events.stack[known][before]
            guessed = np.where((before >= 0) & same_phase & users[near], near, of_phase)
        in_phase = np.where(phase >= 0, of_phase, stack)
        return np.where(users[stack], stack, np.where(stack == 0, guessed, in_phase))

    return replace(
        execution,
        spans=replace(spans, stack=better(spans.stack, launched)),
        waits=replace(waits, stack=better(waits.stack, waits.until)),
    )


def with_marks(
    execution: Execution, phases: list[Phase], noted: list[NotedMark], end: float
) -> Execution:
    """Note which spans a backward pass launched, and add the marks that the user's code made.

    A mark that has not ended lasts until `end`, in seconds. A mark is left out for devices on which
    nothing was launched during it.
    """
    spans = execution.spans
    launched = launch_times(spans)
    in_backward = np.array([False, *(phase.name == "backward" for phase in phases)])
    marks = []
    for one in list(noted):  # a copy, because another thread may add a mark
        until = end if one.end is None else one.end
        inside = (spans.device != HOST) & (launched >= one.start) & (launched <= until)
        for device in np.unique(spans.device[inside]).tolist():
            mine = inside & (spans.device == device)
            start, ended = float(spans.start[mine].min()), float(spans.end[mine].max())
            marks.append(Mark(one.name, device, start, ended))
    spans = replace(spans, backward=in_backward[phase_of(phases, launched) + 1])
    return replace(execution, spans=spans, marks=marks)
