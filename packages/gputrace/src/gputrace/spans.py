"""The columns of a timeline: what ran where and when, who waited for whom, and which two pieces of work raced."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

# What a span is. The first four are work of a device: a kernel, or a copy, named after the engine that does it. (A copy within a
# device and a fill are done by its multiprocessors, so they are kernels.) The last two are the host's: it launches, or it waits.
KINDS = ("kernel", "h2d", "d2h", "p2p", "launch", "wait")
KERNEL, H2D, D2H, P2P, LAUNCH, WAIT = range(len(KINDS))
KIND_OF = {name: index for index, name in enumerate(KINDS)}
COPIES = (H2D, D2H, P2P)
# The kinds of work that `Trace.busy` takes, and the kinds of span of each.
KIND_GROUPS = {"kernel": (KERNEL,), "copy": COPIES, **{name: (KIND_OF[name],) for name in ("h2d", "d2h", "p2p")}}
HOST = -1  # the device of the host's spans, whose stream is the number of the thread


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Columns of equal length, in order of `start`, in seconds from the start of the recording.

    `kind` indexes KINDS, `name` the list `names`, `stack` the trace's stacks. `launch` is, of a device's span, the index of the host's
    span that launched it, -1 if that is not known. `backward` marks the spans that a backward pass launched.
    """

    start: np.ndarray
    duration: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    kind: np.ndarray
    name: np.ndarray
    stack: np.ndarray
    launch: np.ndarray
    backward: np.ndarray
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> np.ndarray:
        return self.start + self.duration

    @classmethod
    def of(cls, rows: Iterable[tuple]) -> "Spans":
        """The columns of rows (start, duration, device, stream, kind, name, stack, launch), where `name` is a text and `launch` the
        position of a row, or -1. The phases, which come later, say what a backward pass launched."""
        unordered: list[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * (len(_SPAN_TYPES) - 1)
        unordered.append([False] * len(unordered[0]))
        names = {name: index for index, name in enumerate(dict.fromkeys(unordered[5]))}
        unordered[5] = [names[name] for name in unordered[5]]
        columns: dict[str, Any] = {name: np.array(unordered[index], kind) for index, (name, kind) in enumerate(_SPAN_TYPES.items())}
        order = np.argsort(columns["start"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        position = np.empty(len(order) + 1, np.int32)
        position[order] = np.arange(len(order))
        position[-1] = -1  # "not known" stays -1
        columns["launch"] = position[columns["launch"]]
        return cls(**columns, names=list(names))


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Columns of equal length, in order of `until`: a stream waits for another.

    The event is on `stream` of `device` and happens at `time`; what is queued next on `to_stream` of `to_device` may start at
    `until`. Seconds from the start of the recording; `stack` indexes the trace's stacks.
    """

    time: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    until: np.ndarray
    to_device: np.ndarray
    to_stream: np.ndarray
    stack: np.ndarray

    def __len__(self) -> int:
        return len(self.time)

    @classmethod
    def of(cls, rows: Iterable[tuple]) -> "Waits":
        """The columns of rows (time, device, stream, until, to_device, to_stream, stack)."""
        ordered = sorted(rows, key=lambda row: row[3])
        return cls(*(np.array([row[index] for row in ordered], kind) for index, kind in enumerate(_WAIT_TYPES.values())))


@dataclass(frozen=True, slots=True)
class RacingSpan:
    """One of two pieces of work that race: a launch called `name`, on a stream of a device, by the source line `line` ("train.py:12"),
    at `seconds` of the recording; it ran from `start` to `end`. `device` is HOST where the host itself is that side."""

    device: int
    stream: int
    name: str
    line: str
    seconds: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RecordedRace:
    """Two pieces of work that touch the same memory without an order between them; `kind` is the consequence, as in "stale read"."""

    first: RacingSpan
    second: RacingSpan
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the program that its author has named with `torch.profiler.record_function`, as a device ran it.

    `start` is when the first span that was launched in this part began, `end` when the last one ended, in seconds of the recording.
    """

    name: str
    device: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Execution:
    """What ran during a recording. `lost` counts the oldest spans that were dropped; `missing` is the reason why there are none."""

    spans: Spans
    waits: Waits
    races: list[RecordedRace]
    lost: int = 0
    missing: str = ""
    marks: list[Mark] = field(default_factory=list)

    @classmethod
    def none(cls, why: str) -> "Execution":
        return cls(Spans.of([]), Waits.of([]), [], 0, why)


_SPAN_TYPES = {
    "start": np.float64,
    "duration": np.float64,
    "device": np.int16,
    "stream": np.int64,
    "kind": np.uint8,
    "name": np.int32,
    "stack": np.int32,
    "launch": np.int32,
    "backward": np.bool_,
}
_WAIT_TYPES = {
    "time": np.float64,
    "device": np.int16,
    "stream": np.int64,
    "until": np.float64,
    "to_device": np.int16,
    "to_stream": np.int64,
    "stack": np.int32,
}
SPAN_COLUMNS, WAIT_COLUMNS = tuple(_SPAN_TYPES), tuple(column.name for column in fields(Waits))


# How long something went on, and how long two things did at once.


def chosen(spans: Spans, device: int, kinds: tuple[int, ...]) -> np.ndarray:
    """Which of the spans are a device's and of one of these kinds."""
    return (spans.device == device) & np.isin(spans.kind, kinds)


def is_collective(spans: Spans) -> np.ndarray:
    """Which of the spans are a collective of NCCL's, real or virtual."""
    of_name = np.array([name.startswith("nccl") for name in spans.names], bool)
    return of_name[spans.name] & (spans.kind == KERNEL) if len(spans) else np.zeros(0, bool)


def seconds_of(spans: Spans, *which: np.ndarray) -> float:
    """Seconds in which at least one of the spans, marked in one of `which`, went on."""
    mask = np.logical_or.reduce(which)
    start, end = spans.start[mask], spans.end[mask]
    if not len(start):
        return 0.0
    # In order of start: what is between the latest end so far and the next start is a gap.
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - latest[:-1], 0.0)
    return round(float(latest[-1] - start[0] - gaps.sum()), 12)  # to the picosecond: less is only how floats round


def seconds_of_both(spans: Spans, first: np.ndarray, second: np.ndarray) -> float:
    """Seconds in which one of the first and one of the second went on at once."""
    both = seconds_of(spans, first) + seconds_of(spans, second) - seconds_of(spans, first, second)
    return round(max(0.0, both), 11)  # each of the three is off by up to half a picosecond
