"""`torch.cuda.Stream` and `torch.cuda.Event` of a virtual machine."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from virtualgpu import errors, hardware
from virtualgpu.clock.machine_clock import EventTime, StreamTime
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.processes import shared_events
from virtualgpu.processes.shared_events import HANDLE_BYTES, SharedRecord
from virtualgpu.stream_numbers import PRIORITIES, priority_of, raw_stream

CUDA = 1  # c10::DeviceType::CUDA


class Stream:
    """A queue of work on a GPU.

    Without `stream_id`, a new stream is created. With `stream_id` and `device_index`, the object
    stands for an existing stream.
    """

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
        gpu = machine.gpu(device_index if device_index is not None else device)
        if gpu is None:
            raise ValueError(f"expected a CUDA device for a CUDA stream, got {device}")
        if stream_id is None:
            machine.take_turn()
        self._gpu: Gpu = gpu
        self._time: StreamTime
        if stream_id is None:
            self._time = gpu.pool_stream(priority)
        else:
            self._time = gpu.streams[stream_id]
        # The id tells the priority (see Gpu.pool_stream).
        self.priority = priority_of(self._time.stream_id)
        self.stream_id = self._time.stream_id
        self.cuda_stream = raw_stream(gpu.index, self.stream_id)
        self.device_index = gpu.index
        self.device_type = CUDA
        self.device = gpu.device
        self._contexts: list[Any] = []  # of the `with` blocks that use this object

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because streams cannot be pickled."""
        raise TypeError("cannot pickle 'Stream' object")

    def synchronize(self) -> None:
        """Wait until all work queued on the stream is done."""
        self._gpu.machine.take_turn()
        self._gpu.machine.sync_debug.notice()
        self._gpu.notice(waits=True)
        self._gpu.machine.clock.synchronize_stream(
            self._time, self._gpu.profile.synchronize_seconds
        )

    def query(self) -> bool:
        """Return whether all work queued on the stream is done."""
        self._gpu.machine.take_turn()
        self._gpu.notice()
        clock = self._gpu.machine.clock
        return clock.query(clock.record(self._time))

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on the stream and return it. Without `event`, create one."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Make all later work on the stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """Make all later work on the stream wait for the work queued on `stream` so far."""
        self.wait_event(stream.record_event())

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority.

        PyTorch uses fewer priorities than an H200 has.
        """
        return 0, 1 - PRIORITIES

    def is_capturing(self) -> bool:
        """Return whether the stream's work is being captured into a CUDA graph."""
        return self._time.capture is not None

    def __enter__(self) -> "Stream":
        make: Any = torch.cuda.StreamContext  # its annotation names torch's own Stream
        context = make(self)
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._contexts.pop().__exit__(*exception)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Stream) and self._time is other._time

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event:
    """A marker in a stream. It has happened when all work queued before it is done."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self.external = external  # in a graph, the event happens at every replay
        self._recorded: EventTime | None = None
        self._gpu: Gpu | None = None
        self._shared: SharedRecord | None = None  # the record that other processes can see
        if interprocess:
            self._shared = SharedRecord()
        self._foreign = False  # whether another process recorded the event last

    @property
    def device(self) -> torch.device | None:
        """The device of the event, or None before the first record."""
        if self._gpu is None:
            return None
        return self._gpu.device

    @property
    def event_id(self) -> int:
        """The id of the event, or 0 before the first record."""
        if self._recorded is None:
            return 0
        return id(self)

    cuda_event = event_id

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, because events cannot be pickled."""
        raise TypeError("cannot pickle 'Event' object")

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after all work queued so far on the stream, by default the current one.

        Raises RuntimeError if the event belongs to another device.
        """
        stream = _or_current(stream)
        if self._gpu is not None and self._gpu is not stream._gpu:
            raise RuntimeError(
                f"Event device {self._gpu.index} does not match recording stream's device "
                f"{stream._gpu.index}."
            )
        gpu = self._gpu = self._created(stream._gpu)
        clock = gpu.machine.clock
        gpu.machine.take_turn()
        gpu.notice()
        event = clock.record(stream._time, gpu.profile.event_seconds, timed=self.enable_timing)
        if self.external and event.capture is not None:
            event.capture.happens(event, self)
        else:
            self._recorded = event
            self._foreign = False
            if self._shared is not None:
                self._shared.record(max(0.0, event.time - clock.host))

    def wait(self, stream: Stream | None = None) -> None:
        """Make all later work on the stream, by default the current one, wait for the event."""
        stream = _or_current(stream)
        recorded = self._last_record()
        if recorded is not None:
            stream._gpu.machine.take_turn()
            stream._gpu.machine.clock.wait(stream._time, recorded)

    def query(self) -> bool:
        """Return whether the event has happened.

        An event that was never recorded counts as happened.
        """
        if self._gpu is None:
            return True
        recorded = self._last_record()
        if recorded is None:
            return True
        self._gpu.machine.take_turn()
        self._gpu.notice()
        happened = self._gpu.machine.clock.query(recorded, self._gpu.profile.event_seconds)
        if happened and self._shared is not None:
            self._shared.note_happened()
        return happened

    def synchronize(self) -> None:
        """Block the host until the event has happened."""
        if self._gpu is None:
            return
        recorded = self._last_record()
        if recorded is None:
            return
        clock = self._gpu.machine.clock
        self._gpu.machine.take_turn()
        self._gpu.notice(waits=True)
        if self._foreign:
            # Wait in real time, so that the process that recorded the event sees it pending.
            shared_events.wait(max(0.0, recorded.time - clock.host))
        clock.synchronize_event(recorded, self._gpu.profile.synchronize_seconds)
        if self._shared is not None:
            self._shared.note_happened()

    def _last_record(self) -> EventTime | None:
        """Return the last record of this event, or None if there is none.

        Another process may have made it.
        """
        if self._shared is not None and self._gpu is not None:
            clock = self._gpu.machine.clock
            seconds = self._shared.of_another()
            if seconds is not None:
                self._recorded = EventTime(StreamTime(self._gpu.index), clock.host + seconds, {})
                self._foreign = True
            if self._recorded is not None and self._shared.happened:
                clock.synchronize_event(self._recorded, 0.0)
        return self._recorded

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`.

        Raises ValueError or RuntimeError as CUDA does, for example if one event has not
        happened.
        """
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
        """Return the bytes from which another process can create this event (`from_ipc_handle`).

        Raises AcceleratorError as CUDA does if the event was not created with `interprocess`.
        """
        current: Any = torch.cuda.current_stream
        self._gpu = self._created(current()._gpu)
        if self._shared is None:
            raise errors.invalid_resource_handle()
        return self._shared.handle

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> "Event":
        """Return the event that another process exported.

        Raises AcceleratorError, as CUDA does, if that process has ended or is this process.
        """
        if len(handle) < HANDLE_BYTES:
            raise RuntimeError(
                f"cudaIpcEventHandle_t expects byte-like object of size {HANDLE_BYTES}, "
                f"but got {len(handle)}"
            )
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
        """Return the GPU of this event, which is `gpu` if the event had none before.

        This is the first GPU that records or exports the event.
        """
        if self._shared is not None and self.enable_timing:
            raise errors.invalid_argument()
        if self._gpu is None:
            return gpu
        return self._gpu

    def __repr__(self) -> str:
        if self._recorded is None:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.event_id:#x}>"


def _or_current(stream: Stream | None) -> Stream:
    """Return `stream`, or the current stream if it is None."""
    if stream is not None:
        return stream
    current: Any = torch.cuda.current_stream
    return current()


class AcceleratorStream(Stream):
    """A stream made by `torch.Stream`. Its text is that of PyTorch's C++ class."""

    def __repr__(self) -> str:
        return (
            f"torch.Stream device_type=cuda, device_index={self.device_index}, "
            f"stream_id={self.stream_id}"
        )


class AcceleratorEvent(Event):
    """An event made by `torch.Event`. It knows the type of its device before the first record."""

    @property
    def device(self) -> torch.device:
        """The device of the event. It has no index before the first record."""
        return super().device or torch.device("cuda")

    def __repr__(self) -> str:
        index = -1 if self._gpu is None else self._gpu.index
        return (
            f"torch.Event device_type=cuda, device_index={index}, "
            f"event_flag={int(self.enable_timing)}, event_id={self.event_id}"
        )


class _Generic(type):
    """Metaclass of `torch.Stream` and `torch.Event`: objects of torch.cuda count as instances."""

    original: type
    cuda: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.original, cls.cuda))


class GenericStream(metaclass=_Generic):
    """Replacement of `torch.Stream`, which creates a CUDA stream unless another type is given."""

    original, cuda = torch.Stream, Stream

    def __new__(cls, device: Any = None, *args: Any, **options: Any) -> Any:
        if _is_elsewhere(device):
            return cls.original(device, *args, **options)
        return AcceleratorStream(device, *args, **options)


class GenericEvent(metaclass=_Generic):
    """Replacement of `torch.Event`, which creates a CUDA event unless another type is given."""

    original, cuda = torch.Event, Event

    def __new__(
        cls,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> Any:
        if _is_elsewhere(device):
            return cls.original(
                device, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )
        return AcceleratorEvent(enable_timing, blocking, interprocess)


def _is_elsewhere(device: Any) -> bool:
    """Return whether `device` names a device that is not a GPU."""
    return isinstance(device, (str, torch.device)) and torch.device(device).type != "cuda"


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    for module in (torch.cuda, torch.cuda.streams):
        yield module, {"Stream": Stream, "Event": Event}
    yield torch, {"Stream": GenericStream, "Event": GenericEvent}
    yield torch.Tensor, {"record_stream": _recording(torch.Tensor.record_stream)}


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `Tensor.record_stream` for CPU tensors.

    It raises PyTorch's NotImplementedError. `original` is the method of torch.
    """

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if isinstance(stream, Stream) and self.device.type == "cpu":
            stream = GenericStream.original("cpu")  # C++ knows only its own streams
        original(self, stream)

    return record_stream
