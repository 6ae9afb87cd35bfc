"""Numbers of a trace: memory at any moment, by device and by line, and what ran when."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
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
from gputrace.spans import (
    COPIES,
    HOST,
    KERNEL,
    KIND_GROUPS,
    WAIT,
    Execution,
    chosen,
    is_collective,
    seconds_of,
    seconds_of_both,
)
from virtualgpu.allocator import Settings
from virtualgpu.instruments import stream_name
from virtualgpu.source_lines import is_users

if TYPE_CHECKING:
    import torch

    from gputrace.holders.tensors import Census
    from gputrace.sources.this_computer import ComputerTime

Device: TypeAlias = "int | str | torch.device"  # 1, "cuda:1" or torch.device("cuda", 1)
UNFINISHED = "the recording is not finished. Its numbers exist when the `with` block has ended"


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Memory of one device over time, as arrays of equal length.

    The first entry is the start of the recording, and each further entry an event.

    Attributes:
        times: seconds from the start.
        allocated, reserved: bytes.
        used: bytes in use by all processes on the device, or -1 if that is not known.
    """

    times: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray
    used: np.ndarray


@dataclass(eq=False, repr=False, kw_only=True)
class TraceData:
    """Numbers of a `Trace`, for figures, tables and files. `Trace` describes each attribute."""

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
    computers: "list[ComputerTime]" = field(default_factory=list)

    def __post_init__(self) -> None:
        work = self.execution
        self.spans, self.waits, self.races = work.spans, work.waits, work.races
        self.lost_spans, self.no_timeline = work.lost, work.missing
        self.marks, self.hosts = work.marks, work.hosts
        self.named_streams: dict[int, str] = {}
        self._timelines: dict[int, MemoryTimeline] = {}

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error for a missing attribute. All are missing until the recording ends."""
            if "events" not in self.__dict__ and not name.startswith("_"):
                raise RuntimeError(UNFINISHED)
            raise AttributeError(f"a Trace has no attribute {name!r}")

    @property
    def is_virtual(self) -> bool:
        """Whether the GPUs are virtual, so that the clock is the model's."""
        return "virtual GPU" in self.badge

    # Memory

    @property
    def devices(self) -> list[int]:
        """The devices that had memory, on which an event happened, or on which something ran."""
        found = {device for device, nbytes in self.reserved_at_end.items() if nbytes}
        found |= set(np.unique(self.spans.device).tolist()) - {HOST}
        found |= set(np.unique(self.events.device).tolist())
        found |= {segment.device for segment in self.start}
        return sorted({0} | found)

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
        """The most bytes that were allocated on `device`. If events were lost, it may be more."""
        return self.peaks[self.device]

    @property
    def times(self) -> np.ndarray:
        """Seconds since the start, for each entry of `allocated` and `reserved`.

        The first entry is 0, and each further entry is the time of an event of `device`.
        """
        return self.timeline().times

    @property
    def allocated(self) -> np.ndarray:
        """Bytes of tensors on `device` at each of `times`. See `timeline` for other devices."""
        return self.timeline().allocated

    @property
    def reserved(self) -> np.ndarray:
        """Bytes that the allocator holds on `device` at each of `times`, in use or free."""
        return self.timeline().reserved

    @property
    def peak_line(self) -> SourceLine | None:
        """The line that made the peak of `device`. None if the peak was at the start."""
        index = self.peak_event()
        if index < 0:
            return None
        return self.line(int(self.events.stack[index]))

    def peak_event(self, device: "Device | None" = None) -> int:
        """Return the index of the event that made a device's peak, or -1 for the start."""
        device = self.device_index(device)
        at = int(self.timeline(device).allocated.argmax())
        if at == 0:
            return -1
        return int(np.flatnonzero(self.events.device == device)[at - 1])

    def timeline(self, device: "Device | None" = None) -> MemoryTimeline:
        """Return the memory of a device over time, by default of the one with the highest peak."""
        device = self.device_index(device)
        if device not in self._timelines:
            self._timelines[device] = self._make_timeline(device)
        return self._timelines[device]

    def _make_timeline(self, device: int) -> MemoryTimeline:
        """Compute a device's memory over time, backwards from the bytes at the end."""
        chosen = self.events.device == device
        times = np.concatenate([[0.0], self.events.time[chosen]])
        action = self.events.action[chosen]
        allocated = np.concatenate([[0], np.cumsum(self.events.rises[chosen])])
        allocated += self.allocated_at_end.get(device, 0) - allocated[-1]
        grows = np.isin(action, [SEGMENT_ALLOC, SEGMENT_MAP])
        shrinks = np.isin(action, [SEGMENT_FREE, SEGMENT_UNMAP])
        held = self.events.requested[chosen]
        changes = np.where(grows, held, 0) - np.where(shrinks, held, 0)
        reserved = np.concatenate([[0], np.cumsum(changes)])
        reserved += self.reserved_at_end.get(device, 0) - reserved[-1]
        return MemoryTimeline(times, allocated, reserved, self._used_at(times, device))

    def _used_at(self, times: np.ndarray, device: int) -> np.ndarray:
        """Return the bytes in use on a device at each of the times, as they were last measured."""
        seen = [(seconds, nbytes) for seconds, where, nbytes in self.used if where == device]
        if not seen:
            return np.full(len(times), -1, np.int64)
        seconds, nbytes = np.array([s for s, _ in seen]), np.array([b for _, b in seen], np.int64)
        return nbytes[np.clip(np.searchsorted(seconds, times, side="right") - 1, 0, None)]

    def layers(self, device: "Device | None" = None) -> dict[str, np.ndarray]:
        """Return the bytes allocated for each category, at the times of `timeline(device)`."""
        device = self.device_index(device)
        chosen = self.events.device == device
        category, rises = self.events.category[chosen], self.events.rises[chosen]
        base = [0] * len(CATEGORIES)
        for segment in self.start:
            if segment.device == device:
                for block in segment.blocks:
                    if block.state == "allocated":
                        base[block.category] += block.size
        layers = {}
        for index, name in enumerate(CATEGORIES):
            changes = np.where(category == index, rises, 0)
            layers[name] = np.concatenate([[base[index]], base[index] + np.cumsum(changes)])
        # The difference is 0 unless events were lost.
        layers["other"] += self.timeline(device).allocated - sum(layers.values())
        return layers

    # Lines

    def line(self, stack: int) -> SourceLine | None:
        """Return the innermost line of a stack in the user's own code, or None."""
        return next((line for line in self.stacks[stack] if is_users(line.filename)), None)

    # Blocks

    def segments(
        self, at: str | float | int = "end", device: "Device | None" = None
    ) -> list[RecordedSegment]:
        """Return a device's segments and their blocks at one moment.

        Args:
            at: "start", "peak", "end", "oom" (before the last allocation that failed), a time in
                seconds (a float), or a number of events after which to look (an int).
            device: the device, by default the one with the highest peak.

        Raises:
            ValueError: `at` is something else, or events were lost.
        """
        device = self.device_index(device)
        count = self.events_before(at, device)
        if self.lost:
            raise ValueError(
                f"{self.lost} events were lost, so the segments are not known. "
                "Record with a larger max_events"
            )
        found = replay.segments_at(self.events, self.start, self.settings, count, device)
        for segment in found:
            for block in segment.blocks:
                if block.birth >= 0:
                    block.category = int(self.events.category[block.birth])
        return found

    def events_before(self, at: str | float | int, device: "Device | None" = None) -> int:
        """Return the number of events before a moment, which is given as for `segments`.

        Raises:
            ValueError: the moment is none, or the recording does not have this device.
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
        moments = ", ".join(map(repr, named))
        expected = f"expected {moments}, a time in seconds such as 0.5, or a number of events"
        message = f"at={at!r}: {expected} from 0 to {len(self.events)}"
        if at == "oom":
            message += ". Memory did not run out in this recording"
        raise ValueError(message)

    def stream_names(self, device: "Device") -> dict[int, str]:
        """Return the names of a device's streams by their handles.

        A stream without a name gets a number. On virtual GPUs, these are the numbers that messages
        about races use. On real GPUs, where handles are addresses, the streams are numbered in the
        order in which they were used.
        """
        device = self.device_index(device)
        spans, named = self.spans, self.named_streams
        at_start = [segment.stream for segment in self.start if segment.device == device]
        allocated = _in_order(self.events.stream[self.events.device == device])
        ran = _in_order(spans.stream[spans.device == device])
        in_order = dict.fromkeys([*named, *at_start, *allocated, *ran])
        others = [stream for stream in in_order if stream]
        if all(map(stream_name, others)):
            others.sort()
        names = {0: "default stream"}
        for number, stream in enumerate(others, 1):
            names[stream] = stream_name(stream) or f"stream {number}"
        for stream in np.unique(spans.stream[is_collective(spans)]).tolist():
            if stream in others:
                names[stream] = "NCCL stream"
        return {stream: named.get(stream, name) for stream, name in names.items()}

    def device_index(self, device: "Device | None" = None) -> int:
        """Return the number of a device. None means the one with the highest peak.

        Args:
            device: a number, a text such as "cuda:1", or a torch.device.

        Raises:
            ValueError: the recording does not have this device.
        """
        if device is None:
            if len(self.devices) == 1:
                return self.devices[0]
            return self.device  # this computes the timelines of all devices
        index: Any = device
        if isinstance(device, str):
            index = None
            if re.fullmatch("cuda:[0-9]+", device):
                index = int(device[5:])
        elif getattr(device, "type", None) == "cuda":
            index = index.index
        if index not in self.totals:
            known = ", ".join(map(str, sorted(self.totals)))
            raise ValueError(f"device={device!r}: expected one of the recorded devices {known}")
        return int(index)

    # Times

    @property
    def end(self) -> float:
        """The time in seconds when the recording and all work launched in it had ended."""
        return max(self.seconds, float(self.spans.end.max(initial=0.0)))

    def busy(self, device: "Device | None" = None, kind: str | None = None) -> float:
        """Return the seconds during which a device worked.

        Args:
            device: the device, by default the one with the highest peak of memory. A copy between
                two devices is work of the device that it comes from.
            kind: the kind of work: "kernel", "copy", "h2d", "d2h", "p2p", or None for all.

        Raises:
            ValueError: there is no such kind of work, or no such device.
            RuntimeError: no timeline was recorded.
        """
        if kind is not None and kind not in KIND_GROUPS:
            kinds = ", ".join(map(repr, KIND_GROUPS))
            raise ValueError(f"kind={kind!r}: expected {kinds}, or None for all of them")
        kinds_of_spans = (KERNEL, *COPIES) if kind is None else KIND_GROUPS[kind]
        return seconds_of(self.spans, self._ran(device, kinds_of_spans))

    def idle(self, device: "Device | None" = None) -> float:
        """Return the seconds during which a device did nothing, until all work had ended.

        It raises the same errors as `busy`.
        """
        idle = self.end - self.busy(device)
        return idle if idle > 1e-12 else 0.0  # anything below a picosecond is rounding

    def overlap(self, device: "Device | None" = None) -> float:
        """Return the seconds during which a device copied and ran a kernel at the same time.

        `busy(device, "copy")` says how long it copied. This method raises the same errors.
        """
        return seconds_of_both(self.spans, self._ran(device, (KERNEL,)), self._ran(device, COPIES))

    def collectives(self, device: "Device | None" = None) -> tuple[float, float]:
        """Return the seconds of a device in collectives, and those with another kernel beside them.

        It raises the same errors as `busy`.
        """
        kernels, collective = self._ran(device, (KERNEL,)), is_collective(self.spans)
        taken = seconds_of(self.spans, kernels & collective)
        return taken, seconds_of_both(self.spans, kernels & collective, kernels & ~collective)

    def waited_for_collectives(
        self, device: "Device | None" = None, until: float = np.inf
    ) -> float:
        """Return the longest time for which a device or the host waited for a collective.

        A kernel waited if its stream was idle and the kernel began when a collective ended. The
        host waited if a collective ended during a wait. The result is in seconds. The method raises
        the same errors as `busy`.

        Args:
            until: a time in seconds. Later launches and waits of the host are left out.
        """
        kernels, spans = self._ran(device, (KERNEL,)), self.spans
        collectives = kernels & is_collective(spans)
        launched = np.where(spans.launch >= 0, spans.start[spans.launch], np.inf)
        others = kernels & ~collectives & (launched <= until)
        ended = spans.end[collectives]
        longest = 0.0
        waits = (spans.device == HOST) & (spans.kind == WAIT) & (spans.start <= until)
        for host in self.hosts:
            if host.rank != self.device_index(device):
                waits &= ~np.isin(spans.stream, host.threads)
        for index in np.flatnonzero(waits):
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
        """Whether the timeline is that of a single host.

        The trace of several ranks has several hosts, in `hosts`.
        """
        return not self.hosts and (HOST in self.spans.device or not len(self.spans))

    @property
    def host_waited(self) -> float:
        """Seconds during which a thread of the host waited for a device.

        Reading it raises RuntimeError if no timeline was recorded.
        """
        self.require_timeline()
        return seconds_of(self.spans, chosen(self.spans, HOST, (WAIT,)))

    def waited_by_host(self, threads: list[int]) -> float:
        """Return the seconds during which one of these threads of the host waited for a device."""
        waits = chosen(self.spans, HOST, (WAIT,)) & np.isin(self.spans.stream, threads)
        return seconds_of(self.spans, waits)

    def require_timeline(self) -> None:
        """Raise RuntimeError, with the reason, if no timeline was recorded."""
        if self.no_timeline:
            raise RuntimeError(f"this recording has no timeline: {self.no_timeline}")

    def _ran(self, device: "Device | None", kinds: tuple[int, ...]) -> np.ndarray:
        """Return a mask of the spans that ran on a device and are of one of these kinds."""
        self.require_timeline()
        return chosen(self.spans, self.device_index(device), kinds)


def _in_order(values: np.ndarray) -> list[int]:
    """Return the different values of an array, in the order of their first occurrence."""
    found, first = np.unique(values, return_index=True)
    return found[np.argsort(first)].tolist()
