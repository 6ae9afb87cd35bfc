"""Rows that an experiment measured, with named columns, units and where they come from."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Self

from gputrace import Table, units

Row = dict[str, Any]
Failure = dict[str, Any]  # the "arguments" of a call that failed, and its "error"

FAILED = "failed"


@dataclass(frozen=True, repr=False)
class ResultData:
    """The rows of a result. `Result` describes the fields, and adds figures and recordings.

    Raises ValueError for a row with other columns.
    """

    name: str
    parameters: dict[str, Any]
    columns: dict[str, str]
    rows: list[Row]
    badge: str
    origin: dict[str, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    code: str | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if set(row) != set(self.columns):
                raise ValueError(
                    f"{self.name}: a row has the columns {', '.join(row)}. "
                    f"Expected {', '.join(self.columns)}."
                )

    @property
    def arguments(self) -> list[str]:
        """The columns that are arguments of the function."""
        return [name for name in self.columns if name in self.parameters]

    @property
    def measured(self) -> list[str]:
        """The columns that the function returned."""
        return [name for name in self.columns if name not in self.parameters]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def column(self, name: str, **where: Any) -> list[Any]:
        """Return the values of one column, only from the rows with the given values.

        `result.column("seconds", memory="pinned")` is an example. Raises KeyError for a column that
        does not exist, and names the columns.
        """
        self._check_columns([name, *where])
        return [row[name] for row in self._matching(where)]

    def by(self, key: str, value: str, **where: Any) -> dict[Any, Any]:
        """Return a dictionary from the values of the column `key` to those of the column `value`.

        Only the rows with the given values count. Raises as `column` does.
        """
        return dict(zip(self.column(key, **where), self.column(value, **where), strict=True))

    def where(self, **chosen: Any) -> Self:
        """Return a result with only the rows that have the given values.

        A list chooses several values: `result.where(gpus=[1, 4], width=1024)`. Raises KeyError for
        a column that does not exist, and ValueError for a value that no row has.
        """
        self._check_columns(chosen)
        lists = {}
        for name, values in chosen.items():
            lists[name] = list(values) if isinstance(values, list | tuple) else [values]
            there = list(dict.fromkeys(row[name] for row in self.rows))
            for value in lists[name]:
                if value not in there:
                    raise ValueError(
                        f"No row has {name} {value!r}. The values are {', '.join(map(str, there))}."
                    )
        narrowed = {name: values for name, values in lists.items() if name in self.parameters}
        rows = [
            row for row in self.rows if all(row[name] in values for name, values in lists.items())
        ]
        failures = [
            failure
            for failure in self.failures
            if all(failure["arguments"].get(name) in values for name, values in narrowed.items())
        ]
        return replace(self, parameters=self.parameters | narrowed, rows=rows, failures=failures)

    def _matching(self, where: dict[str, Any]) -> list[Row]:
        return [row for row in self.rows if all(row[key] == value for key, value in where.items())]

    def _check_columns(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.columns:
                raise KeyError(
                    f"{self.name} has no column {name!r}. It has {', '.join(self.columns)}"
                )

    def table(self) -> Table:
        """Return all rows as text with units. It prints as text and as HTML.

        The name of a column has the unit if it is not one of bytes, seconds and bytes per second.
        """
        header = tuple(
            name.replace("_", " ") + units.beside_name(unit) for name, unit in self.columns.items()
        )
        rows = [
            tuple(units.text(row[name], unit) for name, unit in self.columns.items())
            for row in self.rows
        ]
        for failure in self.failures:
            arguments = failure["arguments"]
            rows.append(
                tuple(
                    units.text(arguments[name], unit) if name in arguments else FAILED
                    for name, unit in self.columns.items()
                )
            )
        return Table(header, tuple(rows), self.badge)

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *self._errors()])

    def _repr_html_(self) -> str:
        errors = "".join(f"<p>{escape(text)}</p>" for text in self._errors())
        return self.table()._repr_html_() + errors

    def _errors(self) -> list[str]:
        """Return the reasons why calls failed, each reason once."""
        return list(dict.fromkeys(failure["error"] for failure in self.failures))

    def to_json(self) -> str:
        """Return everything as JSON, with bytes and seconds unrounded."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the result that `to_json` wrote.

        Raises ValueError for text that is not JSON, and TypeError for other JSON.
        """
        return cls(**json.loads(text))

    def save(self, path: str | Path) -> None:
        """Write the result to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the result in a JSON file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def unit_of(column: str) -> str:
    """Return the unit that a column's name says, or ""."""
    for name, unit in (
        ("bytes_per_second", "bytes per second"),
        ("seconds", "seconds"),
        ("bytes", "bytes"),
    ):
        if column == name or column.endswith(f"_{name}"):
            return unit
    return ""
