"""`Run`, an experiment that measures one point after the other.

Its rows make a `Result`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit import machine
from labkit.experiments.result import Result as Result
from labkit.experiments.result import recorded_result as recorded_result
from labkit.experiments.result_data import Row


@dataclass
class Run:
    """An experiment that is running.

    Each step of an iteration measures one point and returns its row. `result()` returns what was
    measured so far.

    Attributes:
        name: the name of the experiment, as in `Result`.
        parameters: the arguments of the experiment, as in `Result`.
        columns: the unit of each column, as in `Result`.
        badge: where the numbers come from, as in `Result`.
        total: the total number of points.
        points: an iterator that measures the points.
        rows: the rows that were measured so far.
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
        """The number of points that were measured so far."""
        return len(self.rows)

    def result(self) -> Result:
        """Return what was measured so far."""
        return Result(self.name, self.parameters, self.columns, list(self.rows), self.badge)

    def close(self) -> None:
        """Stop measuring, and free the tensors in use."""
        close = getattr(self.points, "close", None)
        if close is not None:
            close()


def collect(run: Run) -> Result:
    """Measure the remaining points, and return the whole result. Raises the errors of measuring."""
    for _ in run:
        pass
    return run.result()


def badge() -> str:
    """Return where the numbers of an experiment that starts now come from.

    Raises RuntimeError if no GPU is in use.
    """
    return machine.in_use().badge


def checked_sizes(name: str, sizes: Any, largest: int) -> list[int]:
    """Return the sizes to vary in ascending order, without duplicates.

    Raises ValueError if the sizes are not whole numbers from 1 to `largest`. `name` is the
    argument's name in the message.
    """
    try:
        chosen = sorted(set(sizes))
    except TypeError:
        chosen = []
    if not chosen or not all(type(size) is int and 1 <= size <= largest for size in chosen):
        raise ValueError(f"{name}={sizes!r}: give one or more whole numbers from 1 to {largest}")
    return chosen


def checked_count(name: str, value: Any) -> int:
    """Return the value, or raise ValueError if it is not a whole number from 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    return value
