"""Spans and waits from Kineto's file: work of the GPUs, the calls that launched it, and waits.

The file is a Chrome trace (libkineto/src/output_json.cpp). The `args` of each kind of entry are
described in libkineto/src/CuptiActivity.cpp.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gputrace.spans import (
    D2H,
    H2D,
    HOST,
    KERNEL,
    LAUNCH,
    P2P,
    WAIT,
    Execution,
    Moved,
    Spans,
    Waits,
)

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}
SYNC = "cuda_sync"
STREAM_WAIT = "Stream Wait Event"
EVENT_RECORD = "cudaEventRecord"
DEFAULT_STREAM = 7  # CUPTI's number of a context's default stream, which the allocator calls 0
# Other copies, such as DtoD, are done by the GPU's multiprocessors.
_COPIES = {"HtoD": H2D, "DtoH": D2H, "PtoP": P2P}


class Activity(NamedTuple):
    """Entry of the file.

    Attributes:
        start, duration: nanoseconds of the system's clock.
        device, stream: those of a GPU's work, or the process and the thread of a call.
        correlation: the number that a call and the work which it launched share.
        waits_on: the stream that a stream waits for, or -1.
        nbytes: the bytes that a copy moves, or 0 if they are not known.
    """

    kind: str
    name: str
    start: int
    duration: int
    device: int
    stream: int
    correlation: int
    waits_on: int
    nbytes: int = 0


def activities_of(file: dict[str, Any]) -> list[Activity]:
    """Return the entries of a file that become spans or waits."""
    base = int(file.get("baseTimeNanoseconds", 0))
    wanted = DEVICE_WORK | CALLS | {SYNC}
    found = []
    for entry in file["traceEvents"]:
        if entry.get("ph") == "X" and entry.get("cat") in wanted:
            args = entry.get("args", {})
            start, duration = base + round(entry["ts"] * 1000), round(entry.get("dur", 0) * 1000)
            where = int(entry["pid"]), int(entry["tid"])
            correlation, nbytes = int(args.get("correlation", 0)), int(args.get("bytes", 0))
            more = correlation, int(args.get("wait_on_stream", -1)), nbytes
            found.append(Activity(entry["cat"], entry["name"], start, duration, *where, *more))
    return found


def work_of(activities: Iterable[Activity], origin: float) -> Execution:
    """Return the spans and waits in the entries of a file.

    The host's spans have no stack, because Kineto reports none.

    Args:
        origin: the start of the recording, in nanoseconds of the system's clock.
    """
    activities = [activity for activity in activities if activity.start >= origin]
    threads: dict[int, int] = {}
    rows: list[tuple] = []
    moved: dict[int, Moved] = {}
    work = {
        activity.correlation: activity for activity in activities if activity.kind in DEVICE_WORK
    }
    launches: dict[int, int] = {}  # the indices in `rows` of calls, by correlation
    waited: set[int] = set()

    def add(
        activity: Activity, device: int, stream: int, kind: int, name: str, launch: int = -1
    ) -> None:
        """Add a span for an activity, with its device, stream, kind and name.

        `launch` is the index of the span that launched it, or -1.
        """
        start, duration = (activity.start - origin) * 1e-9, activity.duration * 1e-9
        rows.append((start, duration, device, stream, kind, name, 0, launch))

    for activity in activities:
        if activity.kind in CALLS:
            thread = threads.setdefault(activity.stream, len(threads))
            if "Synchronize" in activity.name:
                waited.add(activity.correlation)
                add(activity, HOST, thread, WAIT, activity.name)
            elif activity.correlation in work and activity.correlation not in launches:
                launches[activity.correlation] = len(rows)
                add(activity, HOST, thread, LAUNCH, work[activity.correlation].name)
    for activity in activities:
        if activity.kind in DEVICE_WORK:
            stream = _allocators_number(activity.stream)
            launch = launches.get(activity.correlation, -1)
            if activity.nbytes:
                moved[len(rows)] = Moved(activity.nbytes)
            add(activity, activity.device, stream, _kind(activity), activity.name, launch)
        elif activity.kind == SYNC and activity.name == "Event Sync":
            # Some versions leave out the call itself.
            is_new = activity.correlation not in waited
            if is_new:
                add(activity, HOST, 0, WAIT, activity.name)
    return Execution(Spans.of(rows, moved), Waits.of(_waits(activities, origin)), [])


def _allocators_number(stream: int) -> int:
    """Return the allocator's number of a CUPTI stream, which is 0 for the default stream.

    Other streams keep their numbers.
    """
    return 0 if stream == DEFAULT_STREAM else stream


def _kind(activity: Activity) -> int:
    """Return the kind of span for work of a GPU: a kind of copy, or KERNEL."""
    if activity.kind == "gpu_memcpy":
        for name, kind in _COPIES.items():
            if name in activity.name:
                return kind
    return KERNEL


def _waits(activities: list[Activity], origin: float) -> list[tuple]:
    """Return the waits of streams for events of other streams, as rows for `Waits.of`.

    CUPTI reports which stream waits and when the wait was issued, but not when the event happened.
    We assume the end of the last work that was launched on the event's stream before the wait. With
    CUDA 13, CUPTI also does not report the stream on which the event was recorded. We assume the
    other stream that had received work last when the last event was recorded.
    """
    called = {
        activity.correlation: activity.start for activity in activities if activity.kind in CALLS
    }
    # For each (device, stream), when its works were launched and when they ended.
    queued: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    homes: dict[int, int] = {}  # the device of each stream, whose number is unique in a process
    for activity in activities:
        if activity.kind in DEVICE_WORK:
            launched = called.get(activity.correlation, activity.start)
            queued[activity.device, activity.stream].append(
                (launched, activity.start + activity.duration)
            )
            homes.setdefault(activity.stream, activity.device)
    for work in queued.values():
        work.sort()
    recorded = []
    for activity in activities:
        if activity.kind in CALLS and activity.name.startswith(EVENT_RECORD):
            recorded.append(activity.start)
    recorded.sort()

    def last(queue: tuple[int, int], issued: int) -> tuple[int, int] | None:
        """Return the launch time and the end of the last work on a stream before `issued`.

        `queue` is the (device, stream), and `issued` is the time when a wait was issued.
        """
        before = bisect_right(queued[queue], (issued, 1 << 63))
        if not before:
            return None
        return queued[queue][before - 1]

    def done(queue: tuple[int, int], issued: int) -> int:
        """Return when the work that was launched on a stream before `issued` ended.

        `queue` is the (device, stream).
        """
        found = last(queue, issued)
        if found is None:
            return issued
        return found[1]

    def source_of(
        activity: Activity, waiter: tuple[int, int], issued: int
    ) -> tuple[int, int] | None:
        """Return the (device, stream) on which the event of a wait was recorded.

        `waiter` is the waiting (device, stream), and `issued` is the time when the wait was issued.
        """
        if activity.waits_on == DEFAULT_STREAM:
            return activity.device, activity.waits_on
        if activity.waits_on >= 0:
            return homes.get(activity.waits_on, activity.device), activity.waits_on
        before = bisect_right(recorded, issued)
        if not before:
            return None
        given = []
        for queue in list(queued):
            work = last(queue, recorded[before - 1])
            if queue != waiter and work is not None:
                given.append((work, queue))
        if not given:
            return None
        return max(given)[1]

    rows = []
    for activity in activities:
        if activity.kind == SYNC and activity.name == STREAM_WAIT:
            issued = called.get(activity.correlation, activity.start)
            waiter = activity.device, activity.stream
            source = source_of(activity, waiter, issued)
            if source is None:  # no other stream had work, so the stream waits for nothing
                continue
            time = done(source, issued)
            until = max(time, issued, done(waiter, issued))
            event = source[0], _allocators_number(source[1])
            waits = waiter[0], _allocators_number(waiter[1])
            rows.append(((time - origin) * 1e-9, *event, (until - origin) * 1e-9, *waits, 0))
    return rows
