"""Memory events of a recording, from PyTorch's memory history or from virtual allocators."""

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gputrace.events import (
    ACTION_OF,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_MAP,
    MemoryEvent,
    SourceLine,
    StackTable,
)
from gputrace.replay import RecordedSegment, from_snapshot
from virtualgpu import instruments
from virtualgpu.allocator import UNLIMITED, Settings

# Seconds between two readings of a real GPU's memory in use. Each takes Python's lock for a moment.
PERIOD = 0.5
_TAKING = (ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, OOM)
# The counts of torch.cuda.memory_stats that increase by one with each event of the history.
_COUNTS = (
    "allocation.all.allocated",
    "allocation.all.freed",
    "active.all.freed",
    "segment.all.allocated",
    "segment.all.freed",
)


@dataclass
class Recorded:
    """The memory data that a source recorded.

    Attributes:
        segments: the segments before the first event.
        used: (seconds, device, bytes in use by all processes).
        allocated, reserved: bytes at the end, by device.
        totals: the bytes that each device has.
        capability: the major number of the compute capability.
        lost: how many events were dropped.
    """

    events: list[MemoryEvent]
    segments: list[RecordedSegment]
    settings: Settings
    used: list[tuple[float, int, int]]
    allocated: dict[int, int]
    reserved: dict[int, int]
    totals: dict[int, int]
    capability: int
    lost: int


class VirtualSource:
    """Source that listens to the allocators of the virtual machine in use.

    It keeps the newest `max_events` events.
    """

    def __init__(self, table: StackTable, max_events: int) -> None:
        self._machine = instruments.machine()
        self._table = table
        self._events: deque[MemoryEvent] = deque(maxlen=max_events)
        self._count = itertools.count()  # counts all events, also those of other threads
        self._used: list[tuple[float, int, int]] = []
        self._listening: list[tuple[Any, Callable[..., None]]] = []

    def start(self) -> None:
        """Start to listen."""
        self.origin = self._machine.clock.host
        gpus = self._machine.gpus
        segments = [segment for gpu in gpus for segment in gpu.allocator.segments()]
        self._segments = from_snapshot(segments, lambda frames: 0)
        for gpu in gpus:
            self._note_used(gpu)
            listener = self._listener(gpu)
            gpu.allocator.listen(listener)
            self._listening.append((gpu.allocator, listener))

    def now(self) -> float:
        """Return the seconds since the start of the recording."""
        return self._machine.clock.host - self.origin

    def finish(self) -> Recorded:
        """Return the recorded data."""
        gpus = self._machine.gpus
        events = list(self._events)
        return Recorded(
            events,
            self._segments,
            gpus[0].allocator.settings,
            self._used,
            {gpu.index: gpu.allocator.allocated for gpu in gpus},
            {gpu.index: gpu.allocator.reserved for gpu in gpus},
            {gpu.index: gpu.allocator.total for gpu in gpus},
            self._machine.profile.major,
            next(self._count) - len(events),
        )

    def stop(self) -> None:
        """Stop listening, even if `start` was interrupted."""
        while self._listening:
            allocator, listener = self._listening.pop()
            allocator.unlisten(listener)

    def _listener(self, gpu: Any) -> Callable[..., None]:
        """Return the function that notes the events of a GPU's allocator."""
        # The block whose free was requested last, and the stack of the request. Usually the free is
        # completed at once, by the same call.
        asked: tuple[Any, int] = None, 0

        def listen(action: str, block: Any, size: int) -> None:
            """Note an event of the allocator: the action, the block, and the bytes."""
            nonlocal asked
            number = ACTION_OF[action]
            known, stack = asked
            if number != FREE_COMPLETED or known is not block:
                stack = self._table.of_frame(sys._getframe(1))
            asked = (None, 0)
            if number == FREE_REQUESTED:
                asked = (block, stack)
            if number == OOM:
                address, taken, stream = gpu.allocator.free_bytes(), 0, gpu.stream.stream_id
            else:
                address, taken, stream = block.address, block.size, block.stream
            if action.startswith("segment"):
                taken = size
                self._note_used(gpu)
            next(self._count)
            where = gpu.index, stream, number, address
            self._events.append(MemoryEvent(self.now(), *where, taken, size, stack))

        return listen

    def _note_used(self, gpu: Any) -> None:
        """Note the bytes in use on a GPU at this moment."""
        nbytes = gpu.allocator.total - gpu.allocator.free_bytes()
        self._used.append((self.now(), gpu.index, nbytes))


class _History:
    """PyTorch's memory history, which is on while at least one recording relies on it.

    A thread of its own switches it. PyTorch notes every `record_function`, such as that of an
    optimizer, of the thread that switches the history on. This takes time, and only the same thread
    can end it (setRecordFunctionCallbacks in torch/csrc/cuda/memory_snapshot.cpp).
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.has_frees = True  # whether it records the stacks of frees
        self._lock = threading.RLock()
        self._thread: Any = None

    def join(self, most: int, frees: bool) -> bool:
        """Keep the history on for one more recording.

        Return False if it was on already, but not because of a recording. If this call switches it
        on, it keeps `most` events, and with `frees` also the stacks of frees.
        """
        with self._lock:
            first = self.recordings == 0
            if first and torch._C._cuda_isHistoryEnabled():
                return False
            self.recordings += 1
            if first:
                self._thread, self.has_frees = ThreadPoolExecutor(1, "labkit history"), frees
                context = "all" if frees else "alloc"
                try:
                    self._switch("all", context=context, stacks="python", max_entries=most).result()
                except BaseException:
                    self.leave()
                    raise
            return True

    def leave(self) -> None:
        """End one recording's use of the history. After the last one, switch the history off."""
        with self._lock:
            self.recordings -= 1
            # A forked process has neither CUDA nor the thread.
            if self.recordings or torch.cuda._is_in_bad_fork():
                return
            try:
                switching = self._switch(None)
            except (
                RuntimeError
            ):  # the interpreter exits, accepts no more work, and ends the history
                return
            try:
                switching.result()
            finally:
                self._thread.shutdown()

    def _switch(self, enabled: str | None, **options: Any) -> Future[None]:
        """Switch the history on (`enabled="all"`) or off (None) in its own thread.

        `options` are further arguments of PyTorch's function.
        """
        return self._thread.submit(torch.cuda.memory._record_memory_history, enabled, **options)


_history = _History()


class CudaSource:
    """Source that reads PyTorch's memory history.

    It switches the history on unless somebody else has done so. It keeps the newest `max_events`
    events of each device. A thread measures the memory in use on each device.

    Args:
        frees: whether to record the stacks of frees, which are half of the history's cost. Without
            them, a recording inside this one has none either.
    """

    def __init__(self, table: StackTable, max_events: int, frees: bool = True) -> None:
        self._table = table
        self._most = max_events
        self._wants_frees = frees
        self._used: list[tuple[float, int, int]] = []
        self._relies = False  # whether it needs the history that a recording has switched on
        self._ended = threading.Event()
        self._watching = ExitStack()  # ends the thread, and its session with NVML

    def start(self) -> None:
        """Start to record."""
        torch.cuda.init()
        self._relies = _history.join(self._most, self._wants_frees)
        before = torch.cuda.memory._snapshot()
        self._segments = from_snapshot(before["segments"], self._stack)
        self._kept = [len(entries) for entries in before["device_traces"]]
        self._counts = self._counted()
        self._start = time.time_ns()
        self.origin = self._start
        self._watch_used()

    def now(self) -> float:
        """Return the seconds since the start of the recording."""
        return (time.time_ns() - self._start) * 1e-9

    def finish(self) -> Recorded:
        """Return the recorded data."""
        self._watching.close()
        counts = self._counted()
        snapshot = torch.cuda.memory._snapshot()
        events: list[MemoryEvent] = []
        lost = 0
        for device, entries in enumerate(snapshot["device_traces"]):
            mine = self._since_start(device, entries)
            events += mine
            happened = sum(counts[device][key] - self._counts[device][key] for key in _COUNTS)
            lost += max(0, happened - sum(event.action != OOM for event in mine))
        devices = range(len(snapshot["device_traces"]))
        properties = torch.cuda.get_device_properties
        return Recorded(
            events,
            self._segments,
            _settings(snapshot["allocator_settings"]),
            self._used,
            {device: torch.cuda.memory_allocated(device) for device in devices},
            {device: torch.cuda.memory_reserved(device) for device in devices},
            {device: properties(device).total_memory for device in devices},
            torch.cuda.get_device_capability(0)[0],
            lost,
        )

    def stop(self) -> None:
        """Switch off everything, even if `start` was interrupted."""
        self._watching.close()
        if self._relies:
            self._relies = False
            _history.leave()

    def _since_start(self, device: int, entries: list[dict]) -> list[MemoryEvent]:
        """Return a device's events since the start of this recording.

        The start took a snapshot, which is itself an entry of the history. If that entry was
        dropped, the times of the entries decide.
        """
        kept = self._kept[device]
        if kept < len(entries) and entries[kept]["action"] == "snapshot":
            chosen = entries[kept + 1 :]
        else:
            chosen = [entry for entry in entries if entry["time_us"] * 1000 >= self._start]
        wanted = ACTION_OF.keys() - {"snapshot"}
        return [self._event(device, entry) for entry in chosen if entry["action"] in wanted]

    def _event(self, device: int, entry: dict) -> MemoryEvent:
        """Convert an entry of the history to a memory event."""
        action = ACTION_OF[entry["action"]]
        address = entry["device_free"] if action == OOM else entry["addr"]
        seconds = max(0.0, entry["time_us"] * 1e-6 - self._start * 1e-9)
        # If the history has no stacks of frees, PyTorch gives a free the stack of the allocation.
        stack = 0
        if action in _TAKING or not self._relies or _history.has_frees:
            stack = self._stack(entry.get("frames") or [])
        return MemoryEvent(
            seconds, device, entry["stream"], action, address, 0, entry["size"], stack
        )

    def _stack(self, frames: list[dict]) -> int:
        """Return the number of a stack, given its frames in PyTorch's format."""
        lines = (_source_line(frame["filename"], frame["line"], frame["name"]) for frame in frames)
        return self._table.of_lines(tuple(lines))

    def _counted(self) -> list[dict[str, int]]:
        """Return PyTorch's memory statistics of each device, which count its events."""
        return [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]

    def _watch_used(self) -> None:
        """Start a thread that measures the memory in use on each device, if NVML can do that."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._watching.callback(_shut_nvml_down)
            handles = []
            for device in range(torch.cuda.device_count()):
                index = torch.cuda._get_nvml_device_index(device)
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except Exception:  # there is no NVML, or it does not know this GPU
            return

        def look() -> None:
            """Measure the memory in use on each device."""
            for device, handle in enumerate(handles):
                with suppress(pynvml.NVMLError):
                    used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
                    self._used.append((self.now(), device, used))

        def watch() -> None:
            """Measure the memory in use again and again until the recording ends."""
            while not self._ended.wait(PERIOD):
                look()
            look()

        look()
        thread = threading.Thread(target=watch, name="labkit recording", daemon=True)
        thread.start()
        self._watching.callback(thread.join)
        self._watching.callback(self._ended.set)


def _shut_nvml_down() -> None:
    """Shut NVML down, unless the driver has been removed in the meantime."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


_lines: dict[tuple[str, int, str], SourceLine] = {}


def _source_line(*key: Any) -> SourceLine:
    """Return the source line for (file, line, function). Each line is read only once."""
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = SourceLine.read(*key)
    return line


def _settings(settings: dict[str, Any]) -> Settings:
    """Convert the allocator's settings in a snapshot of PyTorch to `Settings`."""
    most = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions") or {}
    rising = sorted((int(size), value) for size, value in divisions.items())
    if most in (-1, None) or most >= 1 << 62:
        most = UNLIMITED
    return Settings(
        max_split_size=most,
        divisions=tuple(value for _, value in rising) or Settings().divisions,
        expandable_segments=bool(settings.get("expandable_segments")),
    )
