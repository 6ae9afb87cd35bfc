"""Puzzles, the measures by which they are scored, and where they are found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch

from gputrace import Trace
from gputrace.spans import D2H, HOST, LAUNCH, P2P, WAIT
from labkit import courses

MODEL = "H200"  # the virtual GPU on which a puzzle is scored if it names no other


@dataclass(frozen=True)
class Measure:
    """A quantity of a recording that a puzzle limits. Less is better.

    Attributes:
        name: the name of the quantity, such as "peak memory".
        read: a function that returns the quantity of a recording.
        text: a function that writes the quantity with its unit.
        picture: what the figure shows: "memory", "reserved" or "timeline".
    """

    name: str
    read: Callable[[Trace], float]
    text: Callable[[float], str]
    picture: str = "timeline"


def _mebibytes(nbytes: float) -> str:
    """Write bytes in MiB. Two digits after the point show what one small tensor changes."""
    return f"{nbytes / 2**20:,.2f} MiB"


def _milliseconds(seconds: float) -> str:
    """Write seconds in ms. Three digits after the point show what one small kernel changes."""
    return f"{seconds * 1e3:,.3f} ms"


def _whole(number: float) -> str:
    return f"{number:.0f}"


def _sent(trace: Trace) -> float:
    """Return the bytes that the GPU with most outgoing traffic sent to other GPUs."""
    spans = trace.spans
    sent = np.bincount(spans.device[spans.kind == P2P], spans.nbytes[spans.kind == P2P])
    return int(sent.max(initial=0))


def _of_host(kind: int) -> Callable[[Trace], float]:
    """Return a function that counts a trace's host spans of a kind, such as launches or waits."""
    return lambda trace: int(((trace.spans.device == HOST) & (trace.spans.kind == kind)).sum())


def _copies(kind: int) -> Callable[[Trace], float]:
    """Return a function that counts a trace's copies of one kind."""
    return lambda trace: int((trace.spans.kind == kind).sum())


PEAK = Measure("peak memory", lambda trace: max(trace.peaks.values()), _mebibytes, "memory")
RESERVED = Measure(
    "reserved memory",
    lambda trace: max(int(trace.timeline(gpu).reserved.max()) for gpu in trace.devices),
    _mebibytes,
    "reserved",
)
# In whole nanoseconds, because a difference of two clock times has a rounding error.
TIME = Measure("time", lambda trace: round(trace.end, 9), _milliseconds)
LAUNCHES = Measure("launches", _of_host(LAUNCH), _whole)
WAITS = Measure("waits of the host", _of_host(WAIT), _whole)
SENT = Measure("bytes sent", _sent, _mebibytes)
COPIES_TO_HOST = Measure("copies to the host", _copies(D2H), _whole)


@dataclass(frozen=True)
class Puzzle:
    """A correct but wasteful function, and the budget that a better one has to meet.

    Attributes:
        name: the name in `labkit.puzzle("name", function)`.
        task: one sentence that states the task.
        lesson: the number of the lesson that teaches what the puzzle needs.
        function: the wasteful function. Its values are the right ones.
        inputs: a function that makes the arguments of one call from a random generator. All
            calls have the same shapes.
        score: the measure of the score.
        budget: the highest score that solves the puzzle.
        par: the score of a good answer of the puzzle's author.
        limits: the highest values of other measures.
        gpus: how many virtual GPUs the puzzle uses.
        like: the model of the virtual GPUs.
        tolerance: how far the values may differ, relative to the largest value.
    """

    name: str
    task: str
    lesson: str
    function: Callable[..., Any]
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    score: Measure
    budget: float
    par: float
    limits: Mapping[Measure, float] = field(default_factory=lambda: {COPIES_TO_HOST: 0})
    gpus: int = 1
    like: str = MODEL
    tolerance: float = 1e-4


def puzzles() -> dict[str, Puzzle]:
    """Return the puzzles of all courses by their names, in the order of the notebook.

    A course has them in the list `PUZZLES` of its module `puzzles`.
    """
    found: dict[str, Puzzle] = {}
    for package, folder in courses.packages().items():
        if (folder / "puzzles" / "__init__.py").is_file():
            found |= {puzzle.name: puzzle for puzzle in import_module(f"{package}.puzzles").PUZZLES}
    return found


def find(name: str) -> Puzzle:
    """Return a puzzle. Raises ValueError if there is no such puzzle, with the names of all."""
    known = puzzles()
    if name not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"There is no puzzle {name!r}. Choose one of these: {names}.")
    return known[name]
