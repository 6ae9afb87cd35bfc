"""`torch.profiler` on virtual GPUs: PyTorch's own, with the work of the GPUs beside it, and every time from the virtual clock.

PyTorch's profiler (Kineto) sees the operators, at the times that this computer takes. Each step of the virtual clock leaves a mark among
its events. So the host's time at every event is known: it is that of the last mark before. The same mark says which operator launched
a kernel. What Kineto saw within an operator's own Python is how a virtual GPU computes the values, and is left out.

Of CUDA's own calls only those that wait are among the events; a launch is part of its operator. `profile_memory`, the trees of events
that PyTorch's memory timeline reads, and the choice of single kinds of activity are not there, and raise an error that says so.
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
_WITHIN = ("PythonDispatchMode", "PythonSubclass", _MARK + " within")  # what PyTorch calls the Python of an operator
_COLLECTIVE = "nccl:"  # an event of NCCL's, which the Python of a collective's operator records
_COPIES = {"h2d": "Memcpy HtoD", "d2h": "Memcpy DtoH", "p2p": "Memcpy PtoP"}
_WAITS = {"synchronize device": "cudaDeviceSynchronize", "synchronize event": "cudaEventSynchronize"}
_WAIT = "cudaStreamSynchronize"  # the others, a copy that the host waits for among them
_MOVES = ("to", "cuda", "cpu")  # methods of tensors that the virtual GPU has its own of


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
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
    """The older profiler, which measures each operator with two events of CUDA's, gives the same table as the one of today."""

    @wraps(prepare)
    def prepared(self: Any, *args: Any, use_cuda: bool = False, use_device: str | None = None, **options: Any) -> None:
        if use_cuda or use_device == "cuda":
            if options.get("profile_memory"):
                raise unsupported("profile_memory of torch.profiler (torch.cuda.memory._record_memory_history tells of its memory)")
            use_device, options["use_kineto"] = "cuda", True
        prepare(self, *args, use_device=use_device, **options)

    return prepared


def _begin_ranges(self: Any) -> Any:
    """`emit_nvtx`: a range for each operator, for Nsight, which sees no virtual GPU. So it waits for the GPU, and that is all."""
    if not self.enabled:
        return None
    if self.entered:
        raise RuntimeError("NVTX annotation context manager is not reentrant")
    self.entered = True
    torch.cuda.synchronize()
    return self


def _end_ranges(self: Any, *error: object) -> bool:
    if self.enabled:
        torch.cuda.synchronize()
    return False


class _Session:
    """The one recording that can be under way in a process."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._recording: _Recording | None = None

    def prepare(self, original: Callable[..., None]) -> Callable[..., None]:
        def prepare_profiler(config: Any, activities: set, *args: Any, **options: Any) -> None:
            if CUDA in (options.get("activity_filter") or {}):
                raise unsupported("a choice among the activities of ProfilerActivity.CUDA")
            original(config, _of_host(activities), *args, **options)

        return prepare_profiler

    def enable(self, original: Callable[..., None]) -> Callable[..., None]:
        def enable_profiler(config: Any, activities: set, *args: Any) -> None:
            original(config, _of_host(activities), *args)
            if CUDA in activities:
                self._recording = _Recording(self._machine, CPU in activities)

        return enable_profiler

    def disable(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def disable_profiler() -> Any:
            recording, self._recording = self._recording, None
            if recording is not None:
                recording.stop()
            result = original()
            return result if recording is None else _Result(result, recording)

        return disable_profiler


def _of_host(activities: set) -> set:
    """What the real profiler is asked for: it sees no GPU."""
    return {CPU if activity is CUDA else activity for activity in activities}


class _Recording:
    """What the clock told while the profiler was on: each step, and the host's time after it."""

    def __init__(self, machine: Machine, with_host: bool) -> None:
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
        for name, move in self._moves.items():
            setattr(torch.Tensor, name, move)
        self._clock.call_when_host_works(None)
        self._clock.unlisten(self._step)

    def _step(self, what: Any = None) -> None:
        number = len(self.steps)
        self.steps.append((what, self._clock.host))
        with _profiler._RecordFunctionFast(f"{_MARK} {number}", [], {}):
            pass


def _as_operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the kit's that is an operator of PyTorch's elsewhere: one event, without what it calls."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _profiler._RecordFunctionFast(name, [], {}), _profiler._RecordFunctionFast(_WITHIN[-1], [], {}):
            return function(*args, **kwargs)

    return called


class _Mark(NamedTuple):
    """A step of the clock among Kineto's events: its time there, its number, its event and the event of the operator that it fell into."""

    real: int
    number: int
    event: Any
    operator: Any


class _HostTimes:
    """The virtual host's time, in nanoseconds from the start of the recording, at a time of Kineto's."""

    def __init__(self, recording: _Recording, marks: list[tuple[int, int]]) -> None:
        marks = sorted(marks)
        self._real = [real for real, _ in marks]
        self._virtual = [0, *(_nanoseconds(recording.steps[number][1] - recording.begin) for _, number in marks)]

    def at(self, real: int) -> int:
        return self._virtual[bisect_right(self._real, real)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class _Event:
    """An event of Kineto's at other times."""

    def __init__(self, event: Any, start: int, end: int) -> None:
        self._event, self._start, self._end = event, start, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def start_ns(self) -> int:
        return self._start

    def end_ns(self) -> int:
        return self._end

    def duration_ns(self) -> int:
        return self._end - self._start


class _Step(_Event):
    """A step of the clock as an event: work of a GPU, or a call of CUDA's that waits. The mark's own event answers the rest."""

    def __init__(self, mark: _Mark, what: Any, name: str, start: int, end: int) -> None:
        super().__init__(mark.event, start, end)
        self.what, self._name = what, name
        self._operator = 0 if mark.operator is None else mark.operator.correlation_id()
        self.on_device = isinstance(what, Span)

    def name(self) -> str:
        return self._name

    def linked_correlation_id(self) -> int:
        return self._operator

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.on_device else DeviceType.CPU

    def device_index(self) -> int:
        return self.what.device if self.on_device else self._event.device_index()

    def device_resource_id(self) -> int:
        return (self.what.stream or DEFAULT_STREAM) if self.on_device else self._event.device_resource_id()

    def activity_type(self) -> str:
        if not self.on_device:
            return "cuda_runtime"
        return "kernel" if self.what.kind == "kernel" else "gpu_memcpy"


class _Result:
    """What the profiler found, as PyTorch's `_ProfilerResult`."""

    def __init__(self, result: Any, recording: _Recording) -> None:
        self._result, self._recording = result, recording
        self._events: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported(f"{name} of torch.profiler's results")

    def trace_start_ns(self) -> int:
        return self._result.trace_start_ns()

    def events(self) -> list[Any]:
        if self._events is None:
            host, marks = _sorted_out(self._result.events())
            times = _HostTimes(self._recording, [(mark.real, mark.number) for mark in marks])
            origin = self.trace_start_ns()
            placed = [_Event(event, origin + times.at(event.start_ns()), origin + times.at(event.end_ns())) for event in host]
            steps = [step for mark in marks if (step := self._step(mark, origin)) is not None]
            self._events = [*(placed if self._recording.with_host else ()), *steps]
        return self._events

    def _step(self, mark: _Mark, origin: int) -> _Step | None:
        what = self._recording.steps[mark.number][0]
        if isinstance(what, Span):
            name, start, end = _COPIES.get(what.kind, what.name), what.start, what.end
        elif what is not None and what.waiter is None:
            name, start, end = _WAITS.get(what.name, _WAIT), what.asked, what.until
        else:
            return None
        start, end = (origin + _nanoseconds(seconds - self._recording.begin) for seconds in (start, end))
        return _Step(mark, what, name, start, end)

    def save(self, path: str) -> None:
        """Write Kineto's file for chrome://tracing and Perfetto, with the GPUs' work."""
        self._result.save(path)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        trace["traceEvents"] = list(self._entries(trace["traceEvents"], int(trace.get("baseTimeNanoseconds", 0))))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def _entries(self, entries: list[dict[str, Any]], base: int) -> Iterator[dict[str, Any]]:
        """Entries of the file; `ts` and `dur` are µs, `ts` from `base`, in nanoseconds."""
        marks = {int(number): entry for entry in entries if (number := _number(entry["name"])) is not None}
        times = _HostTimes(self._recording, [(round(entry["ts"] * 1000), number) for number, entry in marks.items()])
        kept = {event.correlation_id() for event in self.events()}
        origin = self.trace_start_ns() - base
        for entry in entries:
            if _number(entry["name"]) is not None or entry["name"] in _WITHIN:
                continue
            if entry.get("cat") in ("cpu_op", "user_annotation") and entry.get("args", {}).get("External id") not in kept:
                continue
            if "ts" in entry and entry["ph"] != "M":
                start, end = (times.at(round(1000 * time)) for time in (entry["ts"], entry["ts"] + entry.get("dur", 0)))
                entry["ts"] = (origin + start) / 1000
                if "dur" in entry:
                    entry["dur"] = (end - start) / 1000
            yield entry
        yield from _of_steps([event for event in self.events() if isinstance(event, _Step)], marks, base)


def _number(name: str) -> str | None:
    """The number of the step that a mark of this name stands for."""
    number = name.removeprefix(_MARK).strip()
    return number if name.startswith(_MARK) and number.isdigit() else None


def _of_steps(steps: list[_Step], marks: dict[int, dict[str, Any]], base: int) -> Iterator[dict[str, Any]]:
    """The entries of steps: a slice, and an arrow from the operator to what it launched."""
    for device in sorted({step.device_index() for step in steps if step.on_device}):
        yield {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": {"name": "python"}}
        yield {"ph": "M", "name": "process_labels", "pid": device, "tid": 0, "args": {"labels": f"GPU {device}"}}
    for step in steps:
        number = int(_number(step._event.name()) or 0)
        host = {key: marks[number][key] for key in ("pid", "tid")}
        lane = {"pid": step.device_index(), "tid": step.device_resource_id()} if step.on_device else host
        at, category = (step.start_ns() - base) / 1000, step.activity_type()
        known = {"External id": step.linked_correlation_id(), "correlation": number}
        if step.on_device:
            known |= {"device": step.device_index(), "stream": step.device_resource_id()}
            arrow = {"name": "ac2g", "cat": "ac2g", "id": number}
            launched = at - (step.what.start - step.what.launched + step.what.overhead) * 1e6
            yield {"ph": "s", **arrow, **host, "ts": launched}
            yield {"ph": "f", "bp": "e", **arrow, **lane, "ts": at}
        yield {"ph": "X", "cat": category, "name": step.name(), **lane, "ts": at, "dur": step.duration_ns() / 1000, "args": known}


def _sorted_out(events: list[Any]) -> tuple[list[Any], list[_Mark]]:
    """The events without what is within an operator's own Python; and the marks, each with the innermost of these events around it."""
    host: list[Any] = []
    marks: list[_Mark] = []
    around: dict[int, list[tuple[int, Any]]] = {}  # by thread, the events that have begun, None for an operator's own Python
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.end_ns())):
        outer = around.setdefault(event.start_thread_id(), [])
        while outer and outer[-1][0] < event.end_ns():
            outer.pop()
        inside = any(other is None for _, other in outer)
        number = _number(event.name())
        if number is not None:
            operators = [other for _, other in outer if other is not None]
            marks.append(_Mark(event.start_ns(), int(number), event, operators[-1] if operators else None))
            continue
        within = event.name() in _WITHIN
        if not (within or inside) or event.name().startswith(_COLLECTIVE):
            host.append(event)
        outer.append((event.end_ns(), None if within or inside else event))
    return host, marks
