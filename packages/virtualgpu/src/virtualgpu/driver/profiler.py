"""`torch.profiler` on virtual GPUs: PyTorch's profiler, with the GPUs' work and virtual times.

PyTorch's profiler (Kineto) records the operators with real times of this computer. Each step of
the virtual clock also adds an event, its *mark*, to the recording. The virtual time of a Kineto
event is the host's time at the last mark before it. The mark also shows which operator launched a
kernel. Kineto also records what an operator's Python does to compute the values. These events are
left out.

Of CUDA's calls, only those that wait are among the events. A launch is part of its operator.
`profile_memory`, the trees of events that PyTorch's memory timeline reads, and the choice of single
kinds of activity are not supported, and raise an error that names them.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler
from torch._C import _profiler
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from virtualgpu.clock.machine_clock import Span
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA
DEFAULT_STREAM = 7  # the number that CUPTI gives a context's default stream
_MARK = "[virtual clock]"
# The names that PyTorch gives to the Python of an operator.
_WITHIN = ("PythonDispatchMode", "PythonSubclass", _MARK + " within")
_COLLECTIVE = "nccl:"  # an event of NCCL's, which the Python of a collective's operator records
_COPIES = {"h2d": "Memcpy HtoD", "d2h": "Memcpy DtoH", "p2p": "Memcpy PtoP"}
_WAITS = {
    "synchronize device": "cudaDeviceSynchronize",
    "synchronize event": "cudaEventSynchronize",
}
_WAIT = "cudaStreamSynchronize"  # all other waits, such as a copy that the host waits for
_MOVES = ("to", "cuda", "cpu")  # methods of tensors that the virtual GPU replaces


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    profiler = torch.autograd.profiler
    session = _Session(machine)
    names: dict[str, Any] = {"_supported_activities": lambda: {CPU, CUDA}}
    yield torch.autograd, names
    yield (
        profiler,
        names
        | {
            "_prepare_profiler": session.prepare(profiler._prepare_profiler),
            "_enable_profiler": session.enable(profiler._enable_profiler),
            "_disable_profiler": session.disable(profiler._disable_profiler),
        },
    )
    yield profiler.profile, {"__init__": _by_kineto(profiler.profile.__init__)}
    yield profiler.emit_nvtx, {"__enter__": _begin_ranges, "__exit__": _end_ranges}


def _by_kineto(prepare: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` for the older profiler that uses Kineto on GPUs.

    `prepare` is the original `__init__`. It would measure each operator with two CUDA events. The
    table that the profiler prints is the same.
    """

    @wraps(prepare)
    def prepared(
        self: Any,
        *args: Any,
        use_cuda: bool = False,
        use_device: str | None = None,
        **options: Any,
    ) -> None:
        """Initialize the older profiler `self`, with Kineto as the source if it measures a GPU.

        Raises NotImplementedError for `profile_memory` on a GPU.
        """
        if use_cuda or use_device == "cuda":
            if options.get("profile_memory"):
                raise unsupported(
                    "profile_memory of torch.profiler "
                    "(torch.cuda.memory._record_memory_history tells of its memory)"
                )
            use_device, options["use_kineto"] = "cuda", True
        prepare(self, *args, use_device=use_device, **options)

    return prepared


def _begin_ranges(self: Any) -> Any:
    """Enter `torch.autograd.profiler.emit_nvtx`, the context manager `self`, and wait for the GPU.

    No ranges are recorded, because they are for Nsight, which cannot see virtual GPUs.
    """
    if not self.enabled:
        return None
    if self.entered:
        raise RuntimeError("NVTX annotation context manager is not reentrant")
    self.entered = True
    torch.cuda.synchronize()
    return self


def _end_ranges(self: Any, *error: object) -> bool:
    """Leave `torch.autograd.profiler.emit_nvtx`, the context manager `self`, and wait for the GPU.

    Returns False, so that an exception of the block is raised again.
    """
    if self.enabled:
        torch.cuda.synchronize()
    return False


class _Session:
    """Replacements of PyTorch's profiler functions, and the recording that they start and stop."""

    def __init__(self, machine: Machine) -> None:
        """Keep the machine to record. No recording is under way yet."""
        self._machine = machine
        self._recording: _Recording | None = None

    def prepare(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a replacement of `_prepare_profiler`, which is the function `original`.

        The real profiler is asked for the activities of the host only.
        """

        def prepare_profiler(config: Any, activities: set, *args: Any, **options: Any) -> None:
            """Prepare the real profiler. Raises NotImplementedError for a filter of activities."""
            if CUDA in (options.get("activity_filter") or {}):
                raise unsupported("a choice among the activities of ProfilerActivity.CUDA")
            original(config, _of_host(activities), *args, **options)

        return prepare_profiler

    def enable(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a replacement of `_enable_profiler`, which is the function `original`.

        It starts the real profiler and also a recording of the virtual clock.
        """

        def enable_profiler(config: Any, activities: set, *args: Any) -> None:
            """Start the real profiler, and a recording if CUDA is among the activities."""
            original(config, _of_host(activities), *args)
            if CUDA in activities:
                self._recording = _Recording(self._machine, CPU in activities)

        return enable_profiler

    def disable(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Return a replacement of `_disable_profiler`, which is the function `original`.

        It also stops the recording of the virtual clock.
        """

        def disable_profiler() -> Any:
            """Stop the recording and the real profiler, and return both results as one."""
            recording, self._recording = self._recording, None
            if recording is not None:
                recording.stop()
            result = original()
            if recording is None:
                return result
            return _Result(result, recording)

        return disable_profiler


def _of_host(activities: set) -> set:
    """Return the activities to request from the real profiler: those given, with CPU for CUDA.

    There is no real GPU whose activities it could record.
    """
    return {CPU if activity is CUDA else activity for activity in activities}


class _Recording:
    """The steps of the virtual clock while the profiler is on.

    Each step is a launch or a wait, with the host's time after it.
    """

    def __init__(self, machine: Machine, with_host: bool) -> None:
        """Start to record the clock of `machine`.

        With `with_host`, moves of tensors appear as operators in the real profiler.
        """
        self.with_host = with_host
        self.begin = machine.clock.host
        self.steps: list[tuple[Any, float]] = []
        self._clock = machine.clock
        self._moves = {name: vars(torch.Tensor)[name] for name in _MOVES}
        self._clock.listen(self._step)
        self._clock.call_when_host_works(self._step)
        for name, move in self._moves.items():
            setattr(torch.Tensor, name, _as_operator("aten::to", move))

    def stop(self) -> None:
        """Stop listening to the clock, and undo the changes that `__init__` made to PyTorch."""
        for name, move in self._moves.items():
            setattr(torch.Tensor, name, move)
        self._clock.call_when_host_works(None)
        self._clock.unlisten(self._step)

    def _step(self, what: Any = None) -> None:
        """Store a step of the clock, and add its mark to the real profiler's events.

        `what` is the launch (`Span`) or the wait (`Wait`), or None for the host's own work.
        """
        number = len(self.steps)
        self.steps.append((what, self._clock.host))
        with _profiler._RecordFunctionFast(f"{_MARK} {number}", [], {}):
            pass


def _as_operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which the profiler then shows as the PyTorch operator `name`.

    The profile has one event for a call, and leaves out what the function calls.
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        """Call the function inside an event for the operator and an event that hides its calls."""
        operator = _profiler._RecordFunctionFast(name, [], {})
        with operator, _profiler._RecordFunctionFast(_WITHIN[-1], [], {}):
            return function(*args, **kwargs)

    return called


class _Mark(NamedTuple):
    """Mark of a clock step among Kineto's events.

    real: Kineto's time of the mark, in nanoseconds
    number: the index of the step in the recording
    event: Kineto's event
    operator: the innermost operator's event around the mark, or None
    """

    real: int
    number: int
    event: Any
    operator: Any


class _HostTimes:
    """The virtual host's times, in nanoseconds from the start of the recording."""

    def __init__(self, recording: _Recording, marks: list[tuple[int, int]]) -> None:
        """Map Kineto's times to the virtual times of `recording`.

        `marks` has (Kineto time in nanoseconds, index of the step) for each mark.
        """
        marks = sorted(marks)
        self._real = [real for real, _ in marks]
        self._virtual = [0]
        for _, number in marks:
            self._virtual.append(_nanoseconds(recording.steps[number][1] - recording.begin))

    def at(self, real: int) -> int:
        """Return the virtual time in nanoseconds for `real`, a Kineto time in nanoseconds."""
        return self._virtual[bisect_right(self._real, real)]


def _nanoseconds(seconds: float) -> int:
    """Convert seconds to nanoseconds, rounded to an integer."""
    return round(seconds * 1e9)


class _Event:
    """A Kineto event whose start and end are virtual times."""

    def __init__(self, event: Any, start: int, end: int) -> None:
        """Wrap a Kineto event. `start` and `end` are in nanoseconds."""
        self._event, self._start, self._end = event, start, end

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the wrapped Kineto event."""
        return getattr(self._event, name)

    def start_ns(self) -> int:
        """Return the virtual start of the event, in nanoseconds."""
        return self._start

    def end_ns(self) -> int:
        """Return the virtual end of the event, in nanoseconds."""
        return self._end

    def duration_ns(self) -> int:
        """Return the virtual duration of the event, in nanoseconds."""
        return self._end - self._start


class _Step(_Event):
    """Profiler event for a step of the virtual clock: work of a GPU, or a CUDA call that waits.

    The step has a mark in Kineto's recording. Attributes that are not defined here are those of the
    mark's event.
    """

    def __init__(self, mark: _Mark, what: Any, name: str, start: int, end: int) -> None:
        """Make the event for `what`, the step of the clock that belongs to `mark`.

        `start` and `end` are virtual times in nanoseconds.
        """
        super().__init__(mark.event, start, end)
        self.what, self._name = what, name
        self._operator = 0 if mark.operator is None else mark.operator.correlation_id()
        self.on_device = isinstance(what, Span)

    def name(self) -> str:
        """Return the name of the kernel, of the copy or of the CUDA call."""
        return self._name

    def linked_correlation_id(self) -> int:
        """Return the correlation id of the operator that launched this work, or 0."""
        return self._operator

    def device_type(self) -> DeviceType:
        """Return DeviceType.CUDA for work of a GPU, and DeviceType.CPU for a call that waits."""
        return DeviceType.CUDA if self.on_device else DeviceType.CPU

    def device_index(self) -> int:
        """Return the GPU's index for work of a GPU, and the process's id for a call that waits."""
        if self.on_device:
            return self.what.device
        return self._event.device_index()

    def device_resource_id(self) -> int:
        """Return the stream's id for work of a GPU, and the thread's id for a call that waits."""
        if self.on_device:
            return self.what.stream or DEFAULT_STREAM
        return self._event.device_resource_id()

    def activity_type(self) -> str:
        """Return Kineto's name for this kind of event: "kernel", "gpu_memcpy" or "cuda_runtime"."""
        if not self.on_device:
            return "cuda_runtime"
        return "kernel" if self.what.kind == "kernel" else "gpu_memcpy"


class _Result:
    """The profiler's result, like Kineto's `_ProfilerResult`.

    It has virtual times and the GPUs' events.
    """

    def __init__(self, result: Any, recording: _Recording) -> None:
        """Combine the real profiler's `result` with the `recording` of the virtual clock."""
        self._result, self._recording = result, recording
        self._events: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Raise NotImplementedError for the attribute `name`, which this result does not have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"{name} of torch.profiler's results")

    def trace_start_ns(self) -> int:
        """Return the virtual time at which the recording starts, in nanoseconds."""
        return self._result.trace_start_ns()

    def events(self) -> list[Any]:
        """Return all profiler events: those of the host at virtual times, and those of the GPUs."""
        if self._events is None:
            host, marks = _sorted_out(self._result.events())
            times = _HostTimes(self._recording, [(mark.real, mark.number) for mark in marks])
            origin = self.trace_start_ns()
            events: list[Any] = []
            if self._recording.with_host:
                for event in host:
                    start, end = times.at(event.start_ns()), times.at(event.end_ns())
                    events.append(_Event(event, origin + start, origin + end))
            for mark in marks:
                step = self._step(mark, origin)
                if step is not None:
                    events.append(step)
            self._events = events
        return self._events

    def _step(self, mark: _Mark, origin: int) -> _Step | None:
        """Return the profiler event for the clock step of `mark`.

        Returns None if the step is neither work of a GPU nor a CUDA call that waits. `origin` is
        the virtual time in nanoseconds that is subtracted from all times.
        """
        what = self._recording.steps[mark.number][0]
        if isinstance(what, Span):
            name, start, end = _COPIES.get(what.kind, what.name), what.start, what.end
        elif what is not None and what.waiter is None:
            name, start, end = _WAITS.get(what.name, _WAIT), what.asked, what.until
        else:
            return None
        first = origin + _nanoseconds(start - self._recording.begin)
        last = origin + _nanoseconds(end - self._recording.begin)
        return _Step(mark, what, name, first, last)

    def save(self, path: str) -> None:
        """Write a trace for chrome://tracing and Perfetto to `path`, with the GPUs' work."""
        self._result.save(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        base = int(trace.get("baseTimeNanoseconds", 0))
        trace["traceEvents"] = list(self._entries(trace["traceEvents"], base))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def _entries(self, entries: list[dict[str, Any]], base: int) -> Iterator[dict[str, Any]]:
        """Yield the entries of the trace file at virtual times, and those of the GPUs' work.

        `entries` are Kineto's entries. Their `ts` and `dur` are in microseconds. `ts` counts from
        `base`, which is in nanoseconds.
        """
        marks: dict[int, dict[str, Any]] = {}
        for entry in entries:
            number = _number(entry["name"])
            if number is not None:
                marks[int(number)] = entry
        placed = [(round(entry["ts"] * 1000), number) for number, entry in marks.items()]
        times = _HostTimes(self._recording, placed)
        kept = {event.correlation_id() for event in self.events()}
        origin = self.trace_start_ns() - base
        for entry in entries:
            if _number(entry["name"]) is not None or entry["name"] in _WITHIN:
                continue
            is_operator = entry.get("cat") in ("cpu_op", "user_annotation")
            if is_operator and entry.get("args", {}).get("External id") not in kept:
                continue
            if "ts" in entry and entry["ph"] != "M":
                start = times.at(round(1000 * entry["ts"]))
                end = times.at(round(1000 * (entry["ts"] + entry.get("dur", 0))))
                entry["ts"] = (origin + start) / 1000
                if "dur" in entry:
                    entry["dur"] = (end - start) / 1000
            yield entry
        steps = [event for event in self.events() if isinstance(event, _Step)]
        yield from _of_steps(steps, marks, base)


def _number(name: str) -> str | None:
    """Return the number in an event's name if the event is the mark of a clock step, else None."""
    number = name.removeprefix(_MARK).strip()
    if name.startswith(_MARK) and number.isdigit():
        return number
    return None


def _of_steps(
    steps: list[_Step], marks: dict[int, dict[str, Any]], base: int
) -> Iterator[dict[str, Any]]:
    """Yield trace entries for clock steps: a slice each, and an arrow from the launching operator.

    `marks` has Kineto's entry of the mark for each step number. `base` is in nanoseconds.
    """
    for device in sorted({step.device_index() for step in steps if step.on_device}):
        process = {"ph": "M", "pid": device, "tid": 0}
        yield process | {"name": "process_name", "args": {"name": "python"}}
        yield process | {"name": "process_labels", "args": {"labels": f"GPU {device}"}}
    for step in steps:
        number = int(_number(step._event.name()) or 0)
        host = {key: marks[number][key] for key in ("pid", "tid")}
        lane = host
        if step.on_device:
            lane = {"pid": step.device_index(), "tid": step.device_resource_id()}
        at, category = (step.start_ns() - base) / 1000, step.activity_type()
        known = {"External id": step.linked_correlation_id(), "correlation": number}
        if step.on_device:
            known |= {"device": step.device_index(), "stream": step.device_resource_id()}
            arrow = {"name": "ac2g", "cat": "ac2g", "id": number}
            launched = at - (step.what.start - step.what.launched + step.what.overhead) * 1e6
            yield {"ph": "s", **arrow, **host, "ts": launched}
            yield {"ph": "f", "bp": "e", **arrow, **lane, "ts": at}
        work = {"ph": "X", "cat": category, "name": step.name(), **lane, "ts": at}
        yield work | {"dur": step.duration_ns() / 1000, "args": known}


def _sorted_out(events: list[Any]) -> tuple[list[Any], list[_Mark]]:
    """Separate the marks of clock steps from Kineto's other events, and return (events, marks).

    Events inside an operator's own Python code are left out. The operator of a mark is the
    innermost remaining event around it.
    """
    host: list[Any] = []
    marks: list[_Mark] = []
    # The events that have begun, by thread: None for an operator's own Python.
    around: dict[int, list[tuple[int, Any]]] = {}
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        outer = around.setdefault(event.start_thread_id(), [])
        while outer and outer[-1][0] < event.end_ns():
            outer.pop()
        inside = any(other is None for _, other in outer)
        number = _number(event.name())
        if number is not None:
            operators = [other for _, other in outer if other is not None]
            innermost = operators[-1] if operators else None
            marks.append(_Mark(event.start_ns(), int(number), event, innermost))
            continue
        within = event.name() in _WITHIN
        if not (within or inside) or event.name().startswith(_COLLECTIVE):
            host.append(event)
        outer.append((event.end_ns(), None if within or inside else event))
    return host, marks
