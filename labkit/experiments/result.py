"""`Result`: a table of what an experiment measured, which draws itself and finds recordings."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from labkit import courses
from labkit.experiments.result_data import ResultData, Row

if TYPE_CHECKING:
    from gputrace.figures.figure import Figure  # it loads matplotlib and torch


@dataclass(frozen=True, repr=False)
class Result(ResultData):
    """Rows of named numbers that an experiment measured.

    Attributes:
        name: the experiment, which is the name of the function that was measured.
        parameters: what the experiment was called with. A list has the values that were varied.
        columns: the unit of each column, "" for none.
        rows: one dictionary for each combination of arguments, with bytes and seconds unrounded.
        badge: where the numbers come from. They are measured, virtual or recorded.
        origin: the machine, the versions and the date of a recording.
        failures: the arguments of each call that failed, and its error.
        code: the fingerprint of the function that was measured, "" if its source is not known. It
            is None for an experiment of a library.

    Raises ValueError for a row with other columns.
    """

    def plot(
        self,
        x: str,
        y: str,
        by: str | None = None,
        *,
        title: str | None = None,
        prediction: tuple[Any, float] | None = None,
        recorded: bool = True,
    ) -> "Figure":
        """Draw `y` over `x`, with a line for each value of `by`.

        A point without a finite number is left out, and the figure says so.

        Args:
            x: a column, usually an argument. A column of texts gives points without a line.
            y: a column that was measured, or a quantity made of one. "speed-up" is the time at the
                first `x` over the time at each `x`, and a line without the first `x` is left out.
                "per GPU" is the number over the number of GPUs in the column `gpus`. If several
                columns were measured, write "forward_seconds speed-up".
            by: a column with at most 7 values. It may be left out if only one argument besides `x`
                was varied.
            title: the finding of the figure. Without it, the figure computes one.
            prediction: a point (x, y), drawn as a hollow marker.
            recorded: draw a dashed line with what a real GPU gave for the same code, if there is a
                recording.

        Raises KeyError for a column that does not exist, and ValueError for a figure that is not
        possible.
        """
        from labkit.experiments.plot import plotted

        other = self.recorded() if recorded else None
        return plotted(self, other, x, y, by, title=title, prediction=prediction)

    def recorded(self, gpu: str | None = None) -> "Result | None":
        """Return the recording of a real GPU for the same function and arguments, or None.

        `gpu` is a model, such as "H200". Without it, a recording of an H200 is preferred. A
        recording of another version of the function is not used.
        """
        for recording in recordings(self.name, gpu):
            rows = recording.rows_as_in(self)
            if rows:
                return replace(recording, rows=rows)
        return None

    def rows_as_in(self, other: "Result") -> list[Row]:
        """Return this recording's rows with the arguments of `other`, or [] if the code differs."""
        if self.code != other.code or self.code == "":
            return []
        if self.code is not None:
            if set(self.columns) != set(other.columns):
                return []
            if set(self.arguments) != set(other.arguments):
                return []
            lists = other.parameters
            rows = [row for row in self.rows if all(row[name] in lists[name] for name in lists)]
            return sorted(rows, key=lambda row: [lists[name].index(row[name]) for name in lists])
        if _fixed(self.parameters) != _fixed(other.parameters):
            return []
        varied = next(iter(other.columns))
        varied_lists = [each for each in other.parameters.values() if isinstance(each, list | dict)]
        asked = {point for values in varied_lists for point in values}
        return [row for row in self.rows if row[varied] in asked]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame. Its `attrs` have the name, the units and the badge.

        Raises ImportError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas needs pandas, which is not installed: `pip install pandas`"
            ) from error
        frame = pandas.DataFrame(self.rows, columns=list(self.columns))
        frame.attrs.update(name=self.name, units=dict(self.columns), badge=self.badge)
        return frame


def _fixed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that were not varied and do not say how often to repeat."""
    return {
        name: value
        for name, value in parameters.items()
        if name != "repeats" and not isinstance(value, list)
    }


def recordings(name: str, gpu: str | None = None) -> list[Result]:
    """Return the recordings of the experiment `name`, those on an H200 first."""
    model = "[a-z0-9.-]+" if gpu is None else re.escape(gpu.lower())
    pattern = re.compile(rf"{re.escape(name)}_{model}\.json")
    files = [file for file in courses.files("recordings/*.json") if pattern.fullmatch(file.name)]
    files.sort(key=lambda file: not file.stem.endswith("_h200"))
    return [Result.from_json(file.read_text(encoding="utf-8")) for file in files]


def recorded_result(name: str, gpu: str = "H200") -> Result | None:
    """Return what the experiment `name` gave on a real GPU of that model, or None."""
    for recording in recordings(name, gpu):
        return recording
    return None
