"""Kineto's file as spans and waits: work of the GPUs, the calls that launched it, and waits.

The file is a Chrome trace (libkineto/src/output_json.cpp); `args` of each kind are as libkineto/src/CuptiActivity.cpp writes them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from gputrace.spans import D2H, H2D, HOST, KERNEL, LAUNCH, P2P, WAIT, Execution, Spans, Waits

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}
SYNC = "cuda_sync"
STREAM_WAIT = "Stream Wait Event"
EVENT_RECORD = "cudaEventRecord"
DEFAULT_STREAM = 7  # the number that CUPTI gives a context's default stream, which PyTorch's allocator calls 0
_COPIES = {"HtoD": H2D, "DtoH": D2H, "PtoP": P2P}  # the others, as DtoD, are done by the GPU's multiprocessors


class Activity(NamedTuple):
    """One entry of the file: `start` and `duration` in nanoseconds of the system's clock; `device` and `stream` of a GPU's work, the
    process and thread of a call."""

    kind: str
    name: str
    start: int
    duration: int
    device: int
    stream: int
    correlation: int
    waits_on: int  # the stream that a stream waits for, -1 if none


def activities_of(file: dict[str, Any]) -> list[Activity]:
    """The entries of a file that matter here."""
    base = int(file.get("baseTimeNanoseconds", 0))
    wanted = DEVICE_WORK | CALLS | {SYNC}
    found = []
    for entry in file["traceEvents"]:
        if entry.get("ph") == "X" and entry.get("cat") in wanted:
            args = entry.get("args", {})
            start, duration = base + round(entry["ts"] * 1000), round(entry.get("dur", 0) * 1000)
            where = int(entry["pid"]), int(entry["tid"])
            more = int(args.get("correlation", 0)), int(args.get("wait_on_stream", -1))
            found.append(Activity(entry["cat"], entry["name"], start, duration, *where, *more))
    return found


def work_of(activities: Iterable[Activity], origin: float) -> Execution:
    """Spans and waits in seconds from `origin`, in nanoseconds. Launches and waits of the host have no stack: Kineto knows none."""
    activities = [activity for activity in activities if activity.start >= origin]
    threads: dict[int, int] = {}
    rows: list[tuple] = []
    work = {activity.correlation: activity for activity in activities if activity.kind in DEVICE_WORK}
    launches: dict[int, int] = {}  # the row of the call, by correlation
    waited: set[int] = set()

    def add(activity: Activity, device: int, stream: int, kind: int, name: str, launch: int = -1) -> None:
        rows.append(((activity.start - origin) * 1e-9, activity.duration * 1e-9, device, stream, kind, name, 0, launch))

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
            stream = 0 if activity.stream == DEFAULT_STREAM else activity.stream
            add(activity, activity.device, stream, _kind(activity), activity.name, launches.get(activity.correlation, -1))
        elif activity.kind == SYNC and activity.name == "Event Sync" and activity.correlation not in waited:
            add(activity, HOST, 0, WAIT, activity.name)  # some versions leave the call itself out
    return Execution(Spans.of(rows), Waits.of(_waits(activities, origin)), [])


def _kind(activity: Activity) -> int:
    if activity.kind != "gpu_memcpy":
        return KERNEL
    return next((kind for name, kind in _COPIES.items() if name in activity.name), KERNEL)


def _waits(activities: list[Activity], origin: float) -> list[tuple]:
    """Streams that wait for streams. CUPTI tells who waits and when that was issued, not when the event happened: that is taken for the
    end of the last work that was launched on its stream before. Nor does it tell, with CUDA 13, on which stream the event was recorded:
    that is taken for the stream, other than the one that waits, which had been given work last when an event was last recorded."""
    called = {activity.correlation: activity.start for activity in activities if activity.kind in CALLS}
    queued: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # by stream: when launched, when done
    homes: dict[int, int] = {}  # the device of a stream: CUPTI numbers those of a process
    for activity in activities:
        if activity.kind in DEVICE_WORK:
            launched = called.get(activity.correlation, activity.start)
            queued[activity.device, activity.stream].append((launched, activity.start + activity.duration))
            homes.setdefault(activity.stream, activity.device)
    for work in queued.values():
        work.sort()
    recorded = sorted(activity.start for activity in activities if activity.kind in CALLS and activity.name.startswith(EVENT_RECORD))

    def last(queue: tuple[int, int], issued: int) -> tuple[int, int] | None:
        """When the last work before `issued` was launched there, and when it was done."""
        before = bisect_right(queued[queue], (issued, 1 << 63))
        return queued[queue][before - 1] if before else None

    def done(queue: tuple[int, int], issued: int) -> int:
        found = last(queue, issued)
        return found[1] if found else issued

    def source_of(activity: Activity, waiter: tuple[int, int], issued: int) -> tuple[int, int] | None:
        if activity.waits_on >= 0:
            home = activity.device if activity.waits_on == DEFAULT_STREAM else homes.get(activity.waits_on, activity.device)
            return home, activity.waits_on
        before = recorded[: bisect_right(recorded, issued)][-1:]
        given = [(work, queue) for queue in queued if queue != waiter and before and (work := last(queue, before[0]))]
        return max(given)[1] if given else None

    rows = []
    for activity in activities:
        if activity.kind == SYNC and activity.name == STREAM_WAIT:
            issued = called.get(activity.correlation, activity.start)
            waiter = activity.device, activity.stream
            source = source_of(activity, waiter, issued)
            if source is None:  # a stream that had no work: nothing is waited for
                continue
            time = done(source, issued)
            until = max(time, issued, done(waiter, issued))
            streams = [(device, 0 if stream == DEFAULT_STREAM else stream) for device, stream in (source, waiter)]
            rows.append(((time - origin) * 1e-9, *streams[0], (until - origin) * 1e-9, *streams[1], 0))
    return rows
