"""The figures of a trace: what a recorded block of code did to the memory of each GPU, at any moment, and on which line."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gputrace import replay
from gputrace.events import (
    CATEGORIES,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
    SourceLine,
    Stack,
)
from gputrace.phases import Phase
from gputrace.replay import RecordedSegment
from gputrace.spans import COPIES, HOST, KERNEL, KIND_GROUPS, WAIT, Execution, chosen, is_collective, seconds_of, seconds_of_both
from virtualgpu.allocator import Settings
from virtualgpu.instruments import stream_name
from virtualgpu.source_lines import is_users

if TYPE_CHECKING:
    import torch

    from gputrace.holders.tensors import Census

Device: TypeAlias = "int | str | torch.device"  # 1, "cuda:1" or torch.device("cuda", 1)
UNFINISHED = "the recording is still under way: its figures are there when the `with` block has ended"


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """The memory of one device over time: arrays of equal length, the first entry the start of the recording and then one an event.

    `times` in seconds from the start, the rest in bytes. `used` counts everyone's on the device; -1 where that is not known.
    """

    times: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray
    used: np.ndarray


@dataclass(eq=False, repr=False, kw_only=True)
class TraceData:
    """The numbers of a `Trace`, for figures, tables and files; `Trace` describes each attribute."""

    events: Events
    stacks: list[Stack]
    start: list[RecordedSegment]
    settings: Settings
    phases: list[Phase]
    used: list[tuple[float, int, int]]
    allocated_at_end: dict[int, int]
    reserved_at_end: dict[int, int]
    totals: dict[int, int]
    seconds: float
    lost: int
    error: str
    badge: str
    origin: dict[str, str]
    census: "Census | None"
    execution: Execution

    def __post_init__(self) -> None:
        work = self.execution
        self.spans, self.waits, self.races, self.lost_spans, self.no_timeline = work.spans, work.waits, work.races, work.lost, work.missing
        self.marks = work.marks
        self.named_streams: dict[int, str] = {}
        self._timelines: dict[int, MemoryTimeline] = {}

    if not TYPE_CHECKING:  # a type checker that saw it would take any attribute for one

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes only: all of them, until the recording has ended."""
            if "events" not in self.__dict__ and not name.startswith("_"):
                raise RuntimeError(UNFINISHED)
            raise AttributeError(f"a Trace has no attribute {name!r}")

    # Memory

    @property
    def devices(self) -> list[int]:
        """The devices on which memory was held, an event happened, or something ran."""
        there = {device for device, nbytes in self.reserved_at_end.items() if nbytes}
        there |= set(np.unique(self.spans.device).tolist()) - {HOST}
        return sorted({0} | there | set(np.unique(self.events.device).tolist()) | {segment.device for segment in self.start})

    @property
    def peaks(self) -> dict[int, int]:
        """The most bytes that were allocated on each device."""
        return {device: int(self.timeline(device).allocated.max()) for device in self.devices}

    @property
    def device(self) -> int:
        """The device with the highest peak."""
        peaks = self.peaks
        return max(peaks, key=lambda device: (peaks[device], -device))

    @property
    def peak(self) -> int:
        """The most bytes that were allocated on `device`; at least that many if events were lost."""
        return self.peaks[self.device]

    @property
    def times(self) -> np.ndarray:
        """Seconds since the start, of each figure in `allocated` and `reserved`: 0, and then the time of each event of `device`."""
        return self.timeline().times

    @property
    def allocated(self) -> np.ndarray:
        """Bytes that tensors take on `device` at each of `times`; `timeline(device)` has those of another device."""
        return self.timeline().allocated

    @property
    def reserved(self) -> np.ndarray:
        """Bytes that the allocator holds of `device` at each of `times`, in use or free."""
        return self.timeline().reserved

    @property
    def peak_line(self) -> SourceLine | None:
        """The line that made the peak of `device`; None if it was there from the start."""
        index = self.peak_event()
        return None if index < 0 else self.line(int(self.events.stack[index]))

    def peak_event(self, device: "Device | None" = None) -> int:
        """The index of the event that made the device's peak; -1 if it was there from the start."""
        device = self.device_index(device)
        at = int(self.timeline(device).allocated.argmax())
        return -1 if at == 0 else int(np.flatnonzero(self.events.device == device)[at - 1])

    def timeline(self, device: "Device | None" = None) -> MemoryTimeline:
        """The memory of a device over time; by default of the one with the highest peak."""
        device = self.device_index(device)
        if device not in self._timelines:
            self._timelines[device] = self._make_timeline(device)
        return self._timelines[device]

    def _make_timeline(self, device: int) -> MemoryTimeline:
        chosen = self.events.device == device
        times = np.concatenate([[0.0], self.events.time[chosen]])
        action = self.events.action[chosen]
        allocated = np.concatenate([[0], np.cumsum(self.events.rises[chosen])])
        allocated += self.allocated_at_end.get(device, 0) - allocated[-1]
        grows, shrinks = (np.isin(action, kinds) for kinds in ([SEGMENT_ALLOC, SEGMENT_MAP], [SEGMENT_FREE, SEGMENT_UNMAP]))
        held = self.events.requested[chosen]
        reserved = np.concatenate([[0], np.cumsum(np.where(grows, held, 0) - np.where(shrinks, held, 0))])
        reserved += self.reserved_at_end.get(device, 0) - reserved[-1]
        return MemoryTimeline(times, allocated, reserved, self._used_at(times, device))

    def _used_at(self, times: np.ndarray, device: int) -> np.ndarray:
        """Bytes in use on the device at each of these times, as last measured before."""
        seen = [(seconds, nbytes) for seconds, where, nbytes in self.used if where == device]
        if not seen:
            return np.full(len(times), -1, np.int64)
        seconds, nbytes = np.array([s for s, _ in seen]), np.array([b for _, b in seen], np.int64)
        return nbytes[np.clip(np.searchsorted(seconds, times, side="right") - 1, 0, None)]

    def layers(self, device: "Device | None" = None) -> dict[str, np.ndarray]:
        """Bytes allocated for each category, at the same times as `timeline(device)`."""
        device = self.device_index(device)
        chosen = self.events.device == device
        category, rises = self.events.category[chosen], self.events.rises[chosen]
        base = [0] * len(CATEGORIES)
        for segment in self.start:
            for block in segment.blocks if segment.device == device else ():
                if block.state == "allocated":
                    base[block.category] += block.size
        layers = {
            name: np.concatenate([[base[index]], base[index] + np.cumsum(np.where(category == index, rises, 0))])
            for index, name in enumerate(CATEGORIES)
        }
        layers["other"] += self.timeline(device).allocated - sum(layers.values())  # nothing, unless events were lost
        return layers

    # Lines

    def line(self, stack: int) -> SourceLine | None:
        """The innermost line of the user's own in a stack; None if there is none."""
        return next((line for line in self.stacks[stack] if is_users(line.filename)), None)

    # Blocks

    def segments(self, at: str | float | int = "end", device: "Device | None" = None) -> list[RecordedSegment]:
        """The device's segments and their blocks at one moment: "start", "peak", "end", "oom" (before the last allocation that was
        refused), a time in seconds (a float), or after so many events (an int).

        Raises ValueError for another moment, and where events were lost.
        """
        device = self.device_index(device)
        count = self.events_before(at, device)
        if self.lost:
            raise ValueError(f"{self.lost} events were lost, so the segments are not known: record with a larger max_events")
        found = replay.segments_at(self.events, self.start, self.settings, count, device)
        for segment in found:
            for block in segment.blocks:
                if block.birth >= 0:
                    block.category = int(self.events.category[block.birth])
        return found

    def events_before(self, at: str | float | int, device: "Device | None" = None) -> int:
        """The number of events before the moment `at`, which is given as for `segments`; "peak" is that of `device`.

        Raises ValueError for another moment, or a device that the recording does not know.
        """
        refused = np.flatnonzero(self.events.action == OOM)
        named: dict[Any, Callable[[], int]] = {
            "start": lambda: 0,
            "peak": lambda: self.peak_event(device) + 1,
            "end": lambda: len(self.events),
        }
        if len(refused):
            named["oom"] = lambda: int(refused[-1])
        if isinstance(at, str) and at in named:
            return named[at]()
        if isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= len(self.events):
            return at
        if isinstance(at, float) and at >= 0:
            return int(np.searchsorted(self.events.time, at, side="right"))
        none = "memory did not run out in this recording; " if at == "oom" else ""
        raise ValueError(
            f"at={at!r}: {none}choose {', '.join(map(repr, named))}, a time in seconds such as 0.5, or a number of events from 0 to "
            f"{len(self.events)}"
        )

    def stream_names(self, device: "Device") -> dict[int, str]:
        """What to call a device's streams: their names; NCCL's where collectives ran. Others have numbers: on virtual GPUs those in the
        text of a race; on real ones, whose handles are addresses, in the order in which the recording met them."""
        device = self.device_index(device)
        met = [segment.stream for segment in self.start if segment.device == device]
        found, first = np.unique(self.events.stream[self.events.device == device], return_index=True)
        ran, begun = np.unique(self.spans.stream[self.spans.device == device], return_index=True)
        in_order = [*self.named_streams, *met, *found[np.argsort(first)].tolist(), *ran[np.argsort(begun)].tolist()]
        others = [stream for stream in dict.fromkeys(in_order) if stream]
        if all(map(stream_name, others)):
            others.sort()
        names = {0: "default stream", **{stream: stream_name(stream) or f"stream {number}" for number, stream in enumerate(others, 1)}}
        names |= {int(stream): "NCCL stream" for stream in np.unique(self.spans.stream[is_collective(self.spans)]) if stream in others}
        return {stream: self.named_streams.get(stream, name) for stream, name in names.items()}

    def device_index(self, device: "Device | None" = None) -> int:
        """The number of a device that is given as a number, as "cuda:1" or as a torch.device; None is the one with the highest peak.

        Raises ValueError for one that the recording does not know.
        """
        if device is None:
            # Not `self.device`, which makes all timelines, where there is no choice.
            return self.devices[0] if len(self.devices) == 1 else self.device
        index: Any = device
        if isinstance(device, str):
            index = int(device[5:]) if re.fullmatch("cuda:[0-9]+", device) else None
        elif getattr(device, "type", None) == "cuda":
            index = index.index
        if index not in self.totals:
            raise ValueError(f"device={device!r}: the recording knows {', '.join(map(str, sorted(self.totals)))}")
        return int(index)

    # Times

    @property
    def end(self) -> float:
        """When the last of all was done: the recording itself, or what it had launched."""
        return max(self.seconds, float(self.spans.end.max(initial=0.0)))

    def busy(self, device: "Device | None" = None, kind: str | None = None) -> float:
        """Seconds in which a device worked: on anything, or on a `kind`: "kernel", "copy", "h2d", "d2h" or "p2p".

        Without a device it is the one with the highest peak of memory. A copy between two devices is work of the one that it comes from.
        Raises ValueError for another kind or device, RuntimeError where no timeline was recorded.
        """
        if kind is not None and kind not in KIND_GROUPS:
            raise ValueError(f"kind={kind!r}: choose {', '.join(map(repr, KIND_GROUPS))}, or None for all of them")
        return seconds_of(self.spans, self._ran(device, (KERNEL, *COPIES) if kind is None else KIND_GROUPS[kind]))

    def idle(self, device: "Device | None" = None) -> float:
        """Seconds in which a device did nothing, from the start of the recording to the end of all work. Raises as `busy` does."""
        idle = self.end - self.busy(device)
        return idle if idle > 1e-12 else 0.0  # less than a picosecond is the rounding of a sum

    def overlap(self, device: "Device | None" = None) -> float:
        """Seconds in which a device copied and ran a kernel at once; `busy(device, "copy")` says how long it copied.

        Raises as `busy` does.
        """
        return seconds_of_both(self.spans, self._ran(device, (KERNEL,)), self._ran(device, COPIES))

    def collectives(self, device: "Device | None" = None) -> tuple[float, float]:
        """Seconds in which a device was in a collective between ranks, and those of them in which another kernel ran there.

        Raises as `busy` does.
        """
        kernels, collective = self._ran(device, (KERNEL,)), is_collective(self.spans)
        taken = seconds_of(self.spans, kernels & collective)
        return taken, seconds_of_both(self.spans, kernels & collective, kernels & ~collective)

    def waited_for_collectives(self, device: "Device | None" = None, until: float = np.inf) -> float:
        """Return the longest time for which a device or the host waited for a collective, in seconds.

        A kernel waited if its stream was idle and it began at the moment at which a collective ended.
        The host waited if a collective ended meanwhile. `until` leaves out what the host launched or
        waited for later in the recording. Raises as `busy` does.
        """
        kernels, spans = self._ran(device, (KERNEL,)), self.spans
        collectives = kernels & is_collective(spans)
        launched = np.where(spans.launch >= 0, spans.start[spans.launch], np.inf)
        others = kernels & ~collectives & (launched <= until)
        ended = spans.end[collectives]
        longest = 0.0
        for index in np.flatnonzero((spans.device == HOST) & (spans.kind == WAIT) & (spans.start <= until)):
            if ((ended > spans.start[index]) & (ended <= spans.end[index] + 1e-9)).any():
                longest = max(longest, spans.duration[index])
        for index in np.flatnonzero(others):
            begins = spans.start[index]
            if np.isclose(ended, begins, rtol=0.0, atol=1e-9).any():
                before = others & (spans.stream == spans.stream[index]) & (spans.end <= begins)
                idle_since = max(launched[index], spans.end[before].max(initial=0.0))
                longest = max(longest, begins - idle_since)
        return float(longest)

    @property
    def tells_of_host(self) -> bool:
        """Whether the host is part of it: of several ranks it is not."""
        return HOST in self.spans.device or not len(self.spans)

    @property
    def host_waited(self) -> float:
        """Seconds in which a thread of the host waited for a device. Raises RuntimeError where no timeline was recorded."""
        self.require_timeline()
        return seconds_of(self.spans, chosen(self.spans, HOST, (WAIT,)))

    def require_timeline(self) -> None:
        """Raises RuntimeError, which says why, where no timeline was recorded."""
        if self.no_timeline:
            raise RuntimeError(f"this recording has no timeline: {self.no_timeline}")

    def _ran(self, device: "Device | None", kinds: tuple[int, ...]) -> np.ndarray:
        self.require_timeline()
        return chosen(self.spans, self.device_index(device), kinds)
