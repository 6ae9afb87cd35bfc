"""Columns of a timeline: what ran where and when, which stream waited for which, and races."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gputrace.phases import Phase

# The kinds of spans. The first four are work of a device: a kernel, or a copy by one of the copy
# engines. (The multiprocessors copy within a device and fill memory, so these are kernels.) The
# last two are the host's: it launches work, or it waits.
KINDS = ("kernel", "h2d", "d2h", "p2p", "launch", "wait")
KERNEL, H2D, D2H, P2P, LAUNCH, WAIT = range(len(KINDS))
KIND_OF = {name: index for index, name in enumerate(KINDS)}
COPIES = (H2D, D2H, P2P)
# The kinds of spans that each argument of `Trace.busy` stands for.
KIND_GROUPS = {
    "kernel": (KERNEL,),
    "copy": COPIES,
    "h2d": (H2D,),
    "d2h": (D2H,),
    "p2p": (P2P,),
}
HOST = -1  # the device of the host's spans. Their stream is the number of the thread.


class Moved(NamedTuple):
    """The `nbytes`, `ready` and `meeting` of a copy or a collective, as in `Spans`.

    `ready` is None if it started at once.
    """

    nbytes: int
    ready: float | None = None
    meeting: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Spans as columns of equal length, in order of `start`.

    Attributes:
        start, duration: in seconds. `start` counts from the beginning of the recording.
        device, stream: where the span ran, as numbers.
        kind: an index of `KINDS`.
        name: an index of `names`.
        stack: an index of the trace's stacks.
        launch: for a device's span, the index of the host's span that launched it. -1 if it is not
            known.
        backward: whether a backward pass launched the span.
        nbytes: the bytes that a copy or a collective moved. 0 for other spans, or if not known.
        ready: when the span's own stream could have started it, in seconds. A virtual collective
            starts later if another rank comes later. A real one starts and waits.
        meeting: a number that the spans of one collective share on all ranks. 0 if not known.
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
    nbytes: np.ndarray
    ready: np.ndarray
    meeting: np.ndarray
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> np.ndarray:
        """When each span ended, in seconds."""
        return self.start + self.duration

    @classmethod
    def of(cls, rows: Iterable[tuple], moved: "Mapping[int, Moved] | None" = None) -> "Spans":
        """Make columns from rows (start, duration, device, stream, kind, name, stack, launch).

        `name` is a text, and `launch` is the index of a row, or -1. What a backward pass launched
        is not known yet. `moved` says more about some rows, by their index.
        """
        unordered: list[Sequence[Any]] = list(zip(*rows, strict=True))
        unordered = unordered or [()] * _ROW
        unordered.append([False] * len(unordered[0]))
        nbytes, meeting = [0] * len(unordered[0]), [0] * len(unordered[0])
        ready = list(unordered[0])
        for index, one in (moved or {}).items():
            nbytes[index], meeting[index] = one.nbytes, one.meeting
            if one.ready is not None:
                ready[index] = one.ready
        unordered += [nbytes, ready, meeting]
        names = {name: index for index, name in enumerate(dict.fromkeys(unordered[5]))}
        unordered[5] = [names[name] for name in unordered[5]]
        columns: dict[str, Any] = {
            name: np.array(unordered[index], kind)
            for index, (name, kind) in enumerate(_SPAN_TYPES.items())
        }
        order = np.argsort(columns["start"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        position = np.empty(len(order) + 1, np.int32)
        position[order] = np.arange(len(order))
        position[-1] = -1  # a launch that is not known is still -1
        columns["launch"] = position[columns["launch"]]
        return cls(**columns, names=list(names))


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """Waits of streams for other streams, as columns of equal length, in order of `until`.

    Attributes:
        time, device, stream: when and where the awaited event happens, in seconds.
        until, to_device, to_stream: when and where the next work may start.
        stack: an index of the trace's stacks.
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
        """Make columns from rows (time, device, stream, until, to_device, to_stream, stack)."""
        ordered = sorted(rows, key=lambda row: row[3])
        columns = []
        for index, kind in enumerate(_WAIT_TYPES.values()):
            columns.append(np.array([row[index] for row in ordered], kind))
        return cls(*columns)


@dataclass(frozen=True, slots=True)
class RacingSpan:
    """One of the two launches that race.

    Attributes:
        device: the device, or HOST if the host itself accesses the memory.
        line: the source line, such as "train.py:12".
        seconds: when it was launched.
        start, end: when it ran, in seconds.
        text: the source of the line.
        queue: the stream in words, such as "stream 1 of cuda:0", or "the host".
    """

    device: int
    stream: int
    name: str
    line: str
    seconds: float
    start: float
    end: float
    text: str = ""
    queue: str = ""


@dataclass(frozen=True, slots=True)
class RecordedRace:
    """Two launches that access the same memory without an order between them.

    Attributes:
        kind: the consequence, such as "stale read".
        story: what may happen and what to do, in sentences.
        missing: the call that would order the two, to be added before the line of the second.
    """

    first: RacingSpan
    second: RacingSpan
    kind: str = ""
    story: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Part of the program that its author has named with `torch.profiler.record_function`.

    Attributes:
        device: the device that ran it.
        start: when the first span that was launched in this part began, in seconds.
        end: when the last such span ended.
    """

    name: str
    device: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankHost:
    """Host of one rank, in the joined trace of several ranks.

    Attributes:
        threads: the numbers of its threads, which are the streams of its spans.
        phases: its forward passes, backward passes and optimizer steps.
    """

    rank: int
    threads: list[int]
    phases: "list[Phase]"


@dataclass(frozen=True, slots=True)
class Execution:
    """The work of GPUs and hosts during a recording.

    Attributes:
        lost: how many of the oldest spans were dropped.
        missing: why there are no spans, or "".
        hosts: the hosts of the ranks, if these are the joined spans of several.
    """

    spans: Spans
    waits: Waits
    races: list[RecordedRace]
    lost: int = 0
    missing: str = ""
    marks: list[Mark] = field(default_factory=list)
    hosts: list[RankHost] = field(default_factory=list)

    @classmethod
    def none(cls, why: str) -> "Execution":
        """Return an execution without spans. `why` is the reason."""
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
    "nbytes": np.int64,
    "ready": np.float64,
    "meeting": np.int64,
}
_ROW = 8  # numbers and texts in a row of `Spans.of`
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


# How long spans lasted, and how long two kinds of spans overlapped.


def chosen(spans: Spans, device: int, kinds: tuple[int, ...]) -> np.ndarray:
    """Return a mask of the spans that ran on a device and are of one of these kinds."""
    return (spans.device == device) & np.isin(spans.kind, kinds)


def launch_times(spans: Spans) -> np.ndarray:
    """Return when each span was launched, or when it started if the launch is not known."""
    return np.where(spans.launch >= 0, spans.start[spans.launch], spans.start)


def is_collective(spans: Spans) -> np.ndarray:
    """Return a mask of the spans that are collectives of NCCL, real or virtual."""
    if not len(spans):
        return np.zeros(0, bool)
    of_name = np.array([name.startswith("nccl") for name in spans.names], bool)
    return of_name[spans.name] & (spans.kind == KERNEL)


def seconds_of(spans: Spans, *which: np.ndarray) -> float:
    """Return the seconds during which at least one span ran. `which` are masks of the spans."""
    mask = np.logical_or.reduce(which)
    start, end = spans.start[mask], spans.end[mask]
    if not len(start):
        return 0.0
    # Between the latest end so far and the next start is a gap.
    latest = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - latest[:-1], 0.0)
    # Anything below a picosecond is rounding.
    return round(float(latest[-1] - start[0] - gaps.sum()), 12)


def seconds_of_both(spans: Spans, first: np.ndarray, second: np.ndarray) -> float:
    """Return the seconds during which a span of `first` and a span of `second` ran together.

    Both are masks of the spans.
    """
    both = seconds_of(spans, first) + seconds_of(spans, second) - seconds_of(spans, first, second)
    return round(max(0.0, both), 11)  # each of the three may be off by half a picosecond
