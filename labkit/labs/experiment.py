"""What an experiment gives: a `Run` that yields one row after each point, and the `Result` that the rows make."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from gputrace import Table, units
from labkit import courses, machine

Row = dict[str, Any]


@dataclass(frozen=True, repr=False)
class Result:
    """Rows that an experiment measured, and where.

    `columns` gives each column's unit ("" for words); the first column is what the experiment varied. `parameters` are those of
    the experiment; a list among them is what was varied, and `repeats` how often. `badge` says where the numbers come from;
    a recording has an `origin` besides: machine, date, versions. Raises ValueError for a row with other columns.
    """

    name: str
    parameters: dict[str, Any]
    columns: dict[str, str]
    rows: list[Row]
    badge: str
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if set(row) != set(self.columns):
                raise ValueError(f"{self.name}: a row has the columns {', '.join(row)}; expected {', '.join(self.columns)}")

    def __repr__(self) -> str:
        return f"Result of {self.name}: {len(self.rows)} rows, {self.badge}"

    def column(self, name: str, **where: Any) -> list[Any]:
        """The values of one column, of the rows where the named columns have the given values: `column("seconds", memory="pinned")`.

        Raises KeyError naming the columns there are.
        """
        for wanted in (name, *where):
            if wanted not in self.columns:
                raise KeyError(f"{self.name} has no column {wanted!r}; it has {', '.join(self.columns)}")
        return [row[name] for row in self.rows if all(row[key] == value for key, value in where.items())]

    def by(self, key: str, value: str, **where: Any) -> dict[Any, Any]:
        """The values of one column by those of another, of the rows where the named columns have the given values. Raises as `column`."""
        return dict(zip(self.column(key, **where), self.column(value, **where), strict=True))

    def table(self) -> Table:
        """All rows with their units; prints as text and as HTML."""
        header = tuple(name.replace("_", " ") for name in self.columns)
        rows = tuple(tuple(units.text(row[name], unit) for name, unit in self.columns.items()) for row in self.rows)
        return Table(header, rows, self.badge)

    def recorded(self, gpu: str = "H200") -> "Result | None":
        """What a real GPU of the model `gpu` gave for the same parameters, at those points that were asked for here; None if that was not
        recorded."""
        recording = recorded_result(self.name, gpu)
        if recording is None or _fixed(recording.parameters) != _fixed(self.parameters):
            return None
        varied = next(iter(self.columns))
        asked = {point for value in self.parameters.values() if isinstance(value, (list, dict)) for point in value}
        rows = [row for row in recording.rows if row[varied] in asked]
        return Result(self.name, recording.parameters, recording.columns, rows, recording.badge, recording.origin) if rows else None

    def to_json(self) -> str:
        """All of it as JSON, as the recordings are kept: bytes and seconds, unrounded."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """The result that `to_json` told. Raises ValueError for text that is not JSON, TypeError for other JSON."""
        return cls(**json.loads(text))


def _fixed(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that were neither varied nor say how often to repeat."""
    return {name: value for name, value in parameters.items() if name != "repeats" and not isinstance(value, list)}


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

    def result(self) -> Result:
        """What was measured so far."""
        return Result(self.name, self.parameters, self.columns, list(self.rows), self.badge)

    def close(self) -> None:
        """Measure no more, and let go of the tensors in use."""
        close = getattr(self.points, "close", None)
        if close is not None:
            close()


def recorded_result(name: str, gpu: str = "H200") -> Result | None:
    """What the experiment `name` gave on a real GPU of that model; None if it was not recorded there."""
    for file in courses.files(f"recordings/{name}_{gpu.lower()}.json"):
        return Result.from_json(file.read_text(encoding="utf-8"))
    return None


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
