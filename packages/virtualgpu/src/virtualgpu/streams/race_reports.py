"""Races, two pieces of work on the same memory that nothing orders, and the warnings about them."""

import warnings
from dataclasses import dataclass

from virtualgpu.source_lines import SourceLine
from virtualgpu.stream_numbers import stream_name
from virtualgpu.streams.launches import Launch, UserLine

HOST = -1  # as a device: the host itself is one of the two

STALE, OVERWRITTEN, BOTH_WRITE = "stale read", "overwritten too early", "two writers"
_WHAT_HAPPENS = {
    STALE: "{second} may run before {first} has written what it reads: it reads the old values.",
    OVERWRITTEN: "{second} may write before {first} has read: it reads the new values.",
    BOTH_WRITE: "{second} may write before or after {first}: either may be the last.",
}
_ORDER = "Nothing orders the two: let the later stream wait (wait_stream, wait_event)"
_ADVICE = {
    STALE: f"{_ORDER}.",
    OVERWRITTEN: f"{_ORDER}, or, if the memory was freed, tell the allocator who uses it (record_stream).",
    BOTH_WRITE: f"{_ORDER}.",
}
_AS_WRITTEN = {"_local_scalar_dense": "item", "_to_copy": "to"}  # operators that go by another name in a program
_ADVICE_AFTER_NCCL = "Nothing orders the two: call `wait()` of the collective's work while the later stream is current."
_ADVICE_BEFORE_NCCL = f"{_ORDER}: a collective comes after the stream that is current when it is called."
_ADVICE_TO_HOST = "The host has not waited for it: synchronize the stream, or an event recorded after it, first."


class RaceWarning(UserWarning):
    """Two streams touch the same memory without an order."""


@dataclass(frozen=True)
class Side:
    """One of the two pieces of work. `device` is HOST for the host; `stream` its stream's handle; `line` is "train.py:12" or, in a
    notebook, "line 3", `text` its source, `filename` where that lies.

    `seconds` is the host's time at the launch, `start` and `end` that of the work, on the machine's clock.
    """

    device: int
    stream: int
    name: str
    line: str
    text: str
    seconds: float
    start: float
    end: float
    filename: str = ""
    of_nccl: bool = False  # a collective on NCCL's own stream

    @classmethod
    def of(cls, launch: Launch) -> "Side":
        line, file = _read(launch.line), launch.line[0] if launch.line else ""
        name = _as_written(launch.name)
        return cls(launch.device, launch.stream.stream_id, name, *line, launch.seconds, launch.start, launch.end, file, launch.of_nccl)

    @classmethod
    def of_host(cls, name: str, line: UserLine | None, seconds: float) -> "Side":
        return cls(HOST, 0, _as_written(name), *_read(line), seconds, seconds, seconds, line[0] if line else "")

    @property
    def queue(self) -> str:
        """The stream that it runs on, or the host, in words."""
        if self.device == HOST:
            return "the host"
        if self.of_nccl:
            return f"NCCL's stream of cuda:{self.device}"
        return f"{stream_name(self.stream) if self.stream else 'the default stream'} of cuda:{self.device}"

    def __str__(self) -> str:
        return f"`{self.name}` on {self.queue} ({self.line})"


@dataclass(frozen=True)
class Race:
    """`first` was launched before `second`, and may run after it. `kind` is "stale read", "overwritten too early" or "two writers"."""

    kind: str
    first: Side
    second: Side

    def __str__(self) -> str:
        what = _WHAT_HAPPENS[self.kind].format(first=self.first, second=self.second)
        return f"{what} {self._advice}"

    @property
    def _advice(self) -> str:
        if self.first.of_nccl:
            return _ADVICE_AFTER_NCCL
        if self.second.of_nccl:
            return _ADVICE_BEFORE_NCCL
        return _ADVICE_TO_HOST if self.second.device == HOST else _ADVICE[self.kind]

    @property
    def key(self) -> tuple:
        """Equal for the same two lines."""
        return self.kind, *((side.filename, side.line, side.name, side.device, side.stream) for side in (self.first, self.second))

    def warn(self, line: UserLine | None) -> None:
        """Warns at `line`, that of the second of the two."""
        filename, number = ("<unknown>", 0) if line is None else line[:2]
        warnings.warn_explicit(str(self), RaceWarning, filename, number)


class Races(list[Race]):
    """Races, each pair of lines once."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: set[tuple] = set()

    def note(self, race: Race) -> bool:
        """Keep it unless its lines are there. Returns whether they were not."""
        if race.key in self._keys:
            return False
        self._keys.add(race.key)
        self.append(race)
        return True


def _as_written(operator: str) -> str:
    """The name by which a program calls an operator: `softmax`, where PyTorch's own is `_softmax`."""
    return _AS_WRITTEN.get(operator, operator.removeprefix("_"))


def _read(line: UserLine | None) -> tuple[str, str]:
    """The location of a line and its text."""
    if line is None:
        return "before any stream was made", ""
    read = SourceLine.read(*line)
    return read.location, read.text
