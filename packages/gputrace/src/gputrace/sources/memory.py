"""The memory events of a recording, from PyTorch's own memory history on CUDA or from the allocators of virtual GPUs."""

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

PERIOD = 0.5  # seconds between two readings of a real GPU's memory in use; each takes Python's lock from the program
_TAKING = (ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, OOM)
# Counts of torch.cuda.memory_stats that rise by one with each event of the history.
_COUNTS = ("allocation.all.allocated", "allocation.all.freed", "active.all.freed", "segment.all.allocated", "segment.all.freed")


@dataclass
class Recorded:
    """What a source recorded: the events, the segments before the first, and the state at the end.

    `used` holds (seconds, device, bytes held on the device by everyone); `allocated` and `reserved` are bytes by device at the end;
    `totals` the bytes that each device has; `capability` is the major number of its compute capability.
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
    """Listens to the allocators of the virtual machine in use. It drops the oldest events beyond `max_events`."""

    def __init__(self, table: StackTable, max_events: int) -> None:
        self._machine = instruments.machine()
        self._table = table
        self._events: deque[MemoryEvent] = deque(maxlen=max_events)
        self._count = itertools.count()  # of all events, from threads too
        self._used: list[tuple[float, int, int]] = []
        self._listening: list[tuple[Any, Callable[..., None]]] = []

    def start(self) -> None:
        self.origin = self._machine.clock.host
        gpus = self._machine.gpus
        self._segments = from_snapshot([segment for gpu in gpus for segment in gpu.allocator.segments()], lambda frames: 0)
        for gpu in gpus:
            self._note_used(gpu)
            listener = self._listener(gpu)
            gpu.allocator.listen(listener)
            self._listening.append((gpu.allocator, listener))

    def now(self) -> float:
        return self._machine.clock.host - self.origin

    def finish(self) -> Recorded:
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
        """Stop listening, however far `start` came."""
        while self._listening:
            allocator, listener = self._listening.pop()
            allocator.unlisten(listener)

    def _listener(self, gpu: Any) -> Callable[..., None]:
        asked: tuple[Any, int] = None, 0  # the block whose free was requested last, and where: mostly its free is complete at once

        def listen(action: str, block: Any, size: int) -> None:
            nonlocal asked
            number = ACTION_OF[action]
            known, stack = asked
            if number != FREE_COMPLETED or known is not block:
                stack = self._table.of_frame(sys._getframe(1))
            asked = (block, stack) if number == FREE_REQUESTED else (None, 0)
            if number == OOM:
                address, taken, stream = gpu.allocator.free_bytes(), 0, gpu.stream.stream_id
            else:
                address, taken, stream = block.address, block.size, block.stream
            if action.startswith("segment"):
                taken = size
                self._note_used(gpu)
            next(self._count)
            self._events.append(MemoryEvent(self.now(), gpu.index, stream, number, address, taken, size, stack))

        return listen

    def _note_used(self, gpu: Any) -> None:
        self._used.append((self.now(), gpu.index, gpu.allocator.total - gpu.allocator.free_bytes()))


class _History:
    """PyTorch's memory history, while at least one recording relies on it.

    It is switched in a thread of its own. PyTorch notes every `record_function` of the thread that switches the history on, such as an
    optimizer's, which takes time, and can end that only there (torch/csrc/cuda/memory_snapshot.cpp, setRecordFunctionCallbacks).
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.has_frees = True  # whether it takes stacks of frees
        self._lock = threading.RLock()
        self._thread: Any = None

    def join(self, most: int, frees: bool) -> bool:
        """Have it on for one more recording; returns whether a recording switched it on."""
        with self._lock:
            first = self.recordings == 0
            if first and torch._C._cuda_isHistoryEnabled():
                return False
            self.recordings += 1
            if first:
                self._thread, self.has_frees = ThreadPoolExecutor(1, "labkit history"), frees
                try:
                    self._switch("all", context="all" if frees else "alloc", stacks="python", max_entries=most).result()
                except BaseException:
                    self.leave()
                    raise
            return True

    def leave(self) -> None:
        with self._lock:
            self.recordings -= 1
            if self.recordings or torch.cuda._is_in_bad_fork():  # a forked child has neither CUDA nor the thread
                return
            try:
                switching = self._switch(None)
            except RuntimeError:  # the interpreter ends, which takes no more work, and the history with it
                return
            try:
                switching.result()
            finally:
                self._thread.shutdown()

    def _switch(self, enabled: str | None, **options: Any) -> Future[None]:
        return self._thread.submit(torch.cuda.memory._record_memory_history, enabled, **options)


_history = _History()


class CudaSource:
    """Reads PyTorch's memory history, which it switches on unless somebody else has, and off again with the last recording.

    The history holds the last `max_events` events of each device. A thread looks at the memory in use on each device. Without
    `frees` the history takes no stacks of frees, which are half of what it costs; nor has a recording inside such a one any.
    """

    def __init__(self, table: StackTable, max_events: int, frees: bool = True) -> None:
        self._table = table
        self._most = max_events
        self._wants_frees = frees
        self._used: list[tuple[float, int, int]] = []
        self._relies = False  # on the history that a recording switched on
        self._ended = threading.Event()
        self._watching = ExitStack()  # what ends the thread and its session with NVML

    def start(self) -> None:
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
        return (time.time_ns() - self._start) * 1e-9

    def finish(self) -> Recorded:
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
        return Recorded(
            events,
            self._segments,
            _settings(snapshot["allocator_settings"]),
            self._used,
            {device: torch.cuda.memory_allocated(device) for device in devices},
            {device: torch.cuda.memory_reserved(device) for device in devices},
            {device: torch.cuda.get_device_properties(device).total_memory for device in devices},
            torch.cuda.get_device_capability(0)[0],
            lost,
        )

    def stop(self) -> None:
        """Leave nothing switched on, however far `start` came."""
        self._watching.close()
        if self._relies:
            self._relies = False
            _history.leave()

    def _since_start(self, device: int, entries: list[dict]) -> list[MemoryEvent]:
        """The device's events since the snapshot that began this recording, which the history itself notes."""
        kept = self._kept[device]
        whole = kept < len(entries) and entries[kept]["action"] == "snapshot"
        chosen = entries[kept + 1 :] if whole else [entry for entry in entries if entry["time_us"] * 1000 >= self._start]
        return [self._event(device, entry) for entry in chosen if entry["action"] in ACTION_OF and entry["action"] != "snapshot"]

    def _event(self, device: int, entry: dict) -> MemoryEvent:
        action = ACTION_OF[entry["action"]]
        address = entry["device_free"] if action == OOM else entry["addr"]
        seconds = max(0.0, entry["time_us"] * 1e-6 - self._start * 1e-9)
        # Where the history takes no stacks of frees, PyTorch gives a free the stack of the allocation.
        known = action in _TAKING or not self._relies or _history.has_frees
        stack = self._stack(entry.get("frames") or []) if known else 0
        return MemoryEvent(seconds, device, entry["stream"], action, address, 0, entry["size"], stack)

    def _stack(self, frames: list[dict]) -> int:
        """The number of a stack in PyTorch's format."""
        return self._table.of_lines(tuple(_source_line(frame["filename"], frame["line"], frame["name"]) for frame in frames))

    def _counted(self) -> list[dict[str, int]]:
        return [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]

    def _watch_used(self) -> None:
        """Look at the bytes in use on each device from a thread; where NVML does not answer there is nothing to see."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._watching.callback(_shut_nvml_down)
            devices = range(torch.cuda.device_count())
            handles = [pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device)) for device in devices]
        except Exception:  # no NVML, or one that does not know this GPU: the recording goes without
            return

        def look() -> None:
            for device, handle in enumerate(handles):
                with suppress(pynvml.NVMLError):
                    self._used.append((self.now(), device, pynvml.nvmlDeviceGetMemoryInfo(handle).used))

        def watch() -> None:
            while not self._ended.wait(PERIOD):
                look()
            look()

        look()
        thread = threading.Thread(target=watch, name="labkit recording", daemon=True)
        thread.start()
        self._watching.callback(thread.join)
        self._watching.callback(self._ended.set)


def _shut_nvml_down() -> None:
    """A driver that has gone away by now has nothing to shut down."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


_lines: dict[tuple[str, int, str], SourceLine] = {}


def _source_line(*key: Any) -> SourceLine:
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = SourceLine.read(*key)
    return line


def _settings(settings: dict[str, Any]) -> Settings:
    """The allocator's settings, from those of a snapshot."""
    most = settings.get("max_split_size", -1)
    divisions = settings.get("roundup_power2_divisions") or {}
    rising = tuple(value for _, value in sorted(((int(size), value) for size, value in divisions.items())))
    return Settings(
        max_split_size=UNLIMITED if most in (-1, None) or most >= 1 << 62 else most,
        divisions=rising or Settings().divisions,
        expandable_segments=bool(settings.get("expandable_segments")),
    )
