"""`torch.cuda.Stream` and `torch.cuda.Event` of a virtual machine."""

from collections.abc import Iterator
from typing import Any

import torch

from virtualgpu import errors, hardware
from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.processes import shared_events
from virtualgpu.processes.shared_events import HANDLE_BYTES, SharedRecord
from virtualgpu.stream_numbers import PRIORITIES, priority_of, raw_stream

CUDA = 1  # c10::DeviceType::CUDA


class Stream:
    """A queue of work on a GPU. Named by `stream_id` and `device_index`, as torch.cuda asks for one that exists, or new."""

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = CUDA,
    ) -> None:
        machine = hardware.machine()
        gpu = machine.gpu(device if device_index is None else device_index)
        if gpu is None:
            raise ValueError(f"a CUDA stream lives on a CUDA device, not on {device}")
        if stream_id is None:
            machine.take_turn()
        self._gpu: Gpu = gpu
        self._time: StreamTime = gpu.pool_stream(priority) if stream_id is None else gpu.streams[stream_id]
        # See Gpu.pool_stream; the streams that a program makes itself have even numbers.
        self.priority = priority_of(self._time.stream_id)
        self.stream_id = self._time.stream_id
        self.cuda_stream = raw_stream(gpu.index, self.stream_id)
        self.device_index = gpu.index
        self.device_type = CUDA
        self.device = gpu.device

    def synchronize(self) -> None:
        """Wait until all that is queued on the stream is done."""
        self._gpu.machine.take_turn()
        self._gpu.machine.sync_debug.notice()
        self._gpu.notice(waits=True)
        self._gpu.machine.clock.synchronize_stream(self._time, self._gpu.profile.synchronize_seconds)

    def query(self) -> bool:
        """Whether all that was queued on the stream is done."""
        self._gpu.machine.take_turn()
        self._gpu.notice()
        clock = self._gpu.machine.clock
        return clock.query(clock.record(self._time))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority for which PyTorch has streams, fewer than an H200 has."""
        return 0, 1 - PRIORITIES

    def is_capturing(self) -> bool:
        return self._time.capture is not None

    def __enter__(self) -> "Stream":
        make: Any = torch.cuda.StreamContext  # its annotation names torch's own Stream
        self._context = make(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        context, self._context = self._context, None  # which holds the stream
        context.__exit__(*exception)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and self._time is other._time

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event:
    """A mark in a stream: it has happened when all that was queued before it is done."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False) -> None:
        self.enable_timing = enable_timing
        self.external = external  # to a graph that records it: it happens at each replay
        self._recorded: EventTime | None = None
        self._gpu: Gpu | None = None
        self._shared = SharedRecord() if interprocess else None  # with other processes
        self._foreign = False  # was the last record another process's?

    @property
    def device(self) -> torch.device | None:
        return None if self._gpu is None else self._gpu.device

    @property
    def event_id(self) -> int:
        """0 until it is recorded."""
        return 0 if self._recorded is None else id(self)

    cuda_event = event_id

    def record(self, stream: Stream | None = None) -> None:
        stream = _or_current(stream)
        if self._gpu is not None and self._gpu is not stream._gpu:
            raise RuntimeError(f"Event device {self._gpu.index} does not match recording stream's device {stream._gpu.index}.")
        self._gpu = self._created(stream._gpu)
        self._gpu.machine.take_turn()
        self._gpu.notice()
        event = self._gpu.machine.clock.record(stream._time, self._gpu.profile.event_seconds, timed=self.enable_timing)
        if self.external and event.capture is not None:
            event.capture.happens(event, self)
        else:
            self._recorded, self._foreign = event, False
            if self._shared is not None:
                self._shared.record(max(0.0, event.time - self._gpu.machine.clock.host))

    def wait(self, stream: Stream | None = None) -> None:
        """Work queued on the stream from now on starts after the event."""
        stream = _or_current(stream)
        if (recorded := self._last_record()) is not None:
            stream._gpu.machine.take_turn()
            stream._gpu.machine.clock.wait(stream._time, recorded)

    def query(self) -> bool:
        if self._gpu is None or (recorded := self._last_record()) is None:
            return True
        self._gpu.machine.take_turn()
        self._gpu.notice()
        happened = self._gpu.machine.clock.query(recorded, self._gpu.profile.event_seconds)
        if happened and self._shared is not None:
            self._shared.note_happened()
        return happened

    def synchronize(self) -> None:
        if self._gpu is not None and (recorded := self._last_record()) is not None:
            self._gpu.machine.take_turn()
            self._gpu.notice(waits=True)
            if self._foreign:  # so that whoever recorded it finds it under way until then, as on a GPU
                shared_events.wait(max(0.0, recorded.time - self._gpu.machine.clock.host))
            self._gpu.machine.clock.synchronize_event(recorded, self._gpu.profile.synchronize_seconds)
            if self._shared is not None:
                self._shared.note_happened()

    def _last_record(self) -> EventTime | None:
        """The event's last record, which may be another process's."""
        if self._shared is not None and self._gpu is not None:
            clock = self._gpu.machine.clock
            if (seconds := self._shared.of_another()) is not None:
                self._recorded, self._foreign = EventTime(StreamTime(self._gpu.index), clock.host + seconds, {}), True
            if self._recorded is not None and self._shared.happened:
                clock.synchronize_event(self._recorded, 0.0)
        return self._recorded

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`. Raises ValueError or RuntimeError as CUDA does."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._gpu is None or self._recorded is None or end._recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if end._gpu is not self._gpu:
            raise errors.invalid_resource_handle()
        clock = self._gpu.machine.clock
        if not (clock.query(self._recorded, 0.0) and clock.query(end._recorded, 0.0)):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._recorded.time - self._recorded.time) * 1e3

    def ipc_handle(self) -> bytes:
        """What another process makes this event of, by `from_ipc_handle`. Raises AcceleratorError as CUDA does."""
        current: Any = torch.cuda.current_stream
        self._gpu = self._created(current()._gpu)
        if self._shared is None:
            raise errors.invalid_resource_handle()
        return self._shared.handle

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> "Event":
        """The event of another process. Raises AcceleratorError, as CUDA does, if that has ended, or is this very process."""
        if len(handle) < HANDLE_BYTES:
            raise RuntimeError(f"cudaIpcEventHandle_t expects byte-like object of size {HANDLE_BYTES}, but got {len(handle)}")
        event = cls()
        event._gpu = hardware.machine().gpu(device)
        try:
            event._shared = SharedRecord(handle)
        except ValueError:
            raise errors.invalid_device_context() from None
        except OSError:
            raise errors.invalid_resource_handle() from None
        return event

    def _created(self, gpu: Gpu) -> Gpu:
        """The event's GPU: that on which it is recorded or exported first."""
        if self._shared is not None and self.enable_timing:
            raise errors.invalid_argument()
        return gpu if self._gpu is None else self._gpu

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self._recorded is None else f"<torch.cuda.Event {self.event_id:#x}>"


def _or_current(stream: Stream | None) -> Stream:
    current: Any = torch.cuda.current_stream
    return current() if stream is None else stream


class _Generic(type):
    """`torch.Stream` and `torch.Event`, which make CUDA's own and know them as theirs."""

    original: type
    cuda: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.original, cls.cuda))


class GenericStream(metaclass=_Generic):
    original, cuda = torch.Stream, Stream

    def __new__(cls, device: Any = None, *, priority: int = 0, **identity: Any) -> Any:
        return Stream(device, priority, **identity)


class GenericEvent(metaclass=_Generic):
    original, cuda = torch.Event, Event

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return Event(enable_timing, blocking, interprocess)


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    for module in (torch.cuda, torch.cuda.streams):
        yield module, {"Stream": Stream, "Event": Event}
    yield torch, {"Stream": GenericStream, "Event": GenericEvent}
