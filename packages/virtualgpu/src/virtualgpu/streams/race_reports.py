"""Races and the warnings about them. A race is two unordered launches that use the same memory."""

import warnings
from dataclasses import dataclass

from virtualgpu.source_lines import SourceLine
from virtualgpu.stream_numbers import stream_name
from virtualgpu.streams.launches import Launch, UserLine

HOST = -1  # the device index of the host, if the host itself takes part in a race

STALE, OVERWRITTEN, BOTH_WRITE = "stale read", "overwritten too early", "two writers"
_WHAT_HAPPENS = {
    STALE: (
        "{second} may run before {first} has written what it reads. It then reads the old values."
    ),
    OVERWRITTEN: (
        "{second} may write before {first} has read. {first_name} then reads the new values."
    ),
    BOTH_WRITE: "{second} may write before or after {first}. Either result may remain.",
}
_ORDER = "Nothing orders the two. Let the later stream wait (wait_stream, wait_event)"
_ADVICE = {
    STALE: f"{_ORDER}.",
    OVERWRITTEN: (
        f"{_ORDER}. If the memory was freed, tell the allocator which stream uses it "
        "(record_stream)."
    ),
    BOTH_WRITE: f"{_ORDER}.",
}
_AS_WRITTEN = {"_local_scalar_dense": "item", "_to_copy": "to"}  # the names in a program
_ADVICE_AFTER_NCCL = (
    "Nothing orders the two. Call `wait()` of the collective's work while the later stream is "
    "current."
)
_ADVICE_BEFORE_NCCL = (
    f"{_ORDER}. A collective waits only for the stream that is current when it is called."
)
_ADVICE_TO_HOST = (
    "The host has not waited for this work. First synchronize the stream, or an event recorded "
    "after it."
)


class RaceWarning(UserWarning):
    """Warning about two launches that use the same memory without an order between them."""


@dataclass(frozen=True)
class RacingWork:
    """One of the two launches of a race, or work of the host.

    device: the GPU's index, or HOST
    stream: the handle of the stream
    name: the operator, as a program calls it
    line: "train.py:12", or "line 3" in a notebook
    text: the source of this line
    seconds: the host's time at the launch
    start, end: when the work runs, on the machine's clock
    filename: the file of the line
    of_nccl: whether it is a collective on NCCL's own stream
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
    of_nccl: bool = False

    @classmethod
    def of(cls, launch: Launch) -> "RacingWork":
        """Return the description of a launch for a report."""
        line, text = _read(launch.line)
        return cls(
            device=launch.device,
            stream=launch.stream.stream_id,
            name=_as_written(launch.name),
            line=line,
            text=text,
            seconds=launch.seconds,
            start=launch.start,
            end=launch.end,
            filename=_file(launch.line),
            of_nccl=launch.of_nccl,
        )

    @classmethod
    def of_host(cls, name: str, line: UserLine | None, seconds: float) -> "RacingWork":
        """Return the description of host work for a report: the operator `name` at a user's line.

        `seconds` is the host's time.
        """
        location, text = _read(line)
        return cls(
            device=HOST,
            stream=0,
            name=_as_written(name),
            line=location,
            text=text,
            seconds=seconds,
            start=seconds,
            end=seconds,
            filename=_file(line),
        )

    @property
    def queue(self) -> str:
        """The name of the stream on which the work runs, or "the host"."""
        if self.device == HOST:
            return "the host"
        if self.of_nccl:
            return f"NCCL's stream of cuda:{self.device}"
        if self.stream == 0:
            return f"the default stream of cuda:{self.device}"
        return f"{stream_name(self.stream)} of cuda:{self.device}"

    @property
    def stream_expression(self) -> str:
        """The Python expression with which a program names the stream.

        A stream that the program made is called `stream_1`, etc.
        """
        if self.stream == 0:
            return f"torch.cuda.default_stream({self.device or ''})"
        return stream_name(self.stream).replace(" ", "_")

    def __str__(self) -> str:
        return f"`{self.name}` on {self.queue} ({self.line})"


@dataclass(frozen=True)
class Race:
    """Two launches that use the same memory without an order.

    `first` was launched before `second` and may run after it. `kind` is "stale read", "overwritten
    too early" or "two writers".
    """

    kind: str
    first: RacingWork
    second: RacingWork

    def __str__(self) -> str:
        what = _WHAT_HAPPENS[self.kind].format(
            first=self.first, second=self.second, first_name=f"`{self.first.name}`"
        )
        return f"{what} {self._advice}"

    @property
    def missing(self) -> str:
        """The call that would order the two launches, to be added before the line of the second.

        At that line, the stream of the second launch is the current one.
        """
        if self.first.of_nccl:
            return "work.wait()  # what the collective returned"
        awaited = self.first.stream_expression
        if self.second.device == HOST:
            return f"{awaited}.synchronize()"
        return f"torch.cuda.current_stream().wait_stream({awaited})"

    @property
    def _advice(self) -> str:
        """Advice in one or two sentences: how to order the two launches of this race."""
        if self.first.of_nccl:
            return _ADVICE_AFTER_NCCL
        if self.second.of_nccl:
            return _ADVICE_BEFORE_NCCL
        if self.second.device == HOST:
            return _ADVICE_TO_HOST
        return _ADVICE[self.kind]

    @property
    def key(self) -> tuple:
        """Key that is equal for races of the same kind between the same two lines."""
        works = [
            (work.filename, work.line, work.name, work.device, work.stream)
            for work in (self.first, self.second)
        ]
        return self.kind, *works

    def warn(self, line: UserLine | None) -> None:
        """Emit the warning at `line`, which is the line of the second launch."""
        filename, number = "<unknown>", 0
        if line is not None:
            filename, number, _ = line
        warnings.warn_explicit(str(self), RaceWarning, filename, number)


class Races(list[Race]):
    """List of races in which each pair of lines appears once."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: set[tuple] = set()

    def note(self, race: Race) -> bool:
        """Append the race unless its lines are in the list, and return whether it was appended."""
        if race.key in self._keys:
            return False
        self._keys.add(race.key)
        self.append(race)
        return True


def _as_written(operator: str) -> str:
    """Return the name by which a program calls an operator, such as `softmax` for `_softmax`."""
    return _AS_WRITTEN.get(operator, operator.removeprefix("_"))


def _read(line: UserLine | None) -> tuple[str, str]:
    """Return (location, source text) of a line for a race report.

    None is a line from before any stream was made, and has no text.
    """
    if line is None:
        return "before any stream was made", ""
    read = SourceLine.read(*line)
    return read.location, read.text


def _file(line: UserLine | None) -> str:
    """Return the file of a line, or "" without a line."""
    if line is None:
        return ""
    return line[0]
