"""`Run`: an experiment that yields one row after each point. `Result` is what the rows make."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit import machine
from labkit.experiments.result import Result as Result
from labkit.experiments.result import recorded_result as recorded_result
from labkit.experiments.result_data import Row


@dataclass
class Run:
    """An experiment under way: iterate over it to measure point by point; `result()` holds what was measured so far.

    `total` is the number of points in all, `rows` those measured so far; the others are as in the `Result`.
    """

    name: str
    parameters: dict[str, Any]
    columns: dict[str, str]
    badge: str
    total: int
    points: Iterator[Row]
    rows: list[Row] = field(default_factory=list)

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Row:
        row = next(self.points)
        self.rows.append(row)
        return row

    @property
    def done(self) -> int:
        """How many points were tried."""
        return len(self.rows)

    def result(self) -> Result:
        """What was measured so far."""
        return Result(self.name, self.parameters, self.columns, list(self.rows), self.badge)

    def close(self) -> None:
        """Measure no more, and let go of the tensors in use."""
        close = getattr(self.points, "close", None)
        if close is not None:
            close()


def collect(run: Run) -> Result:
    """Measure all points that `run` has left, and return the whole result. Raises what measuring raises."""
    for _ in run:
        pass
    return run.result()


def badge() -> str:
    """Where the numbers of an experiment that starts now come from. Raises RuntimeError when no GPU is in use."""
    return machine.in_use().badge


def checked_sizes(name: str, sizes: Any, largest: int) -> list[int]:
    """The sizes to vary, in rising order, each once. Raises ValueError naming what is allowed."""
    try:
        chosen = sorted(set(sizes))
    except TypeError:
        chosen = []
    if not chosen or not all(type(size) is int and 1 <= size <= largest for size in chosen):
        raise ValueError(f"{name}={sizes!r}: give one or more whole numbers from 1 to {largest}")
    return chosen


def checked_count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    return value
