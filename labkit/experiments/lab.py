"""`labkit.Lab`: a widget made of a function. It asks for a prediction before it measures."""

from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, Self

from gputrace import units as unit_texts
from gputrace.figures.figure import Figure
from labkit import progress_file
from labkit.experiments.fingerprints import fingerprint
from labkit.experiments.grid import checked_grid, in_words, label, name_of
from labkit.experiments.measuring import Measurement, UnitsError
from labkit.experiments.plot import PER_GPU, SPEED_UP, quantity_of
from labkit.experiments.result_data import ResultData, unit_of
from labkit.labs import panel
from labkit.labs.experiment import Result, Run
from labkit.labs.predictions import (
    compared_as_factor,
    no_prediction,
    parse_prediction,
    stays_open,
    typed_number,
)

# The unit in which a learner types a prediction, and how much it is of the column's own unit.
TYPED_UNITS = {
    "seconds": ("ms", 1e-3),
    "bytes": ("MiB", 2.0**20),
    "bytes per second": ("GB/s", 1e9),
    SPEED_UP: ("times", 1.0),
}


class Lab(panel.ExperimentPanel):
    """A widget that measures a function of yours.

    It asks the question, takes a prediction, calls the function and draws the result beside the
    prediction and the recording of a real GPU::

        labkit.Lab(
            step_seconds,
            {"gpus": [1, 2, 4], "width": [1024, 4096], "rows": 8192},
            question="How many times as fast as on one GPU is a step on four?",
            predict="speed-up",
        )

    The first argument with several values is the x axis of the figure. The prediction is about its
    last value. For each other argument with several values, the widget has a list to choose from.

    Args:
        function: as for `labkit.measure`.
        grid: as for `labkit.measure`. At least one argument needs several values.
        question: what the widget asks.
        predict: the number that the learner predicts. It is a column that the function returns,
            or a quantity that `Result.plot` makes of one, such as "speed-up".
        within: a prediction is good if it is wrong by at most this factor.
        values: as for `labkit.measure`.
        units: as for `labkit.measure`.

    Raises what `labkit.measure` raises before it calls the function, and ValueError for a wrong
    question, factor or grid.
    """

    def __new__(
        cls,
        function: Callable[..., Any],
        grid: Mapping[str, Any],
        **options: Any,
    ) -> Self:
        """Make the widget, and store its function and options to recognize it later.

        A later widget with the same function and options shows what this one showed.
        """
        lab = super().__new__(cls, function, grid, **options)
        # A cell that runs again makes a new function of the same code.
        code = fingerprint(function) or repr(function)
        labels = checked_grid(function, grid).labels()
        lab._made_with = cls, repr((name_of(function), code, labels, sorted(options.items())))
        return lab

    def __init__(
        self,
        function: Callable[..., Any],
        grid: Mapping[str, Any],
        *,
        question: str,
        predict: str,
        within: float = 1.5,
        values: bool = True,
        units: Mapping[str, str] | None = None,
    ) -> None:
        """Make the widget. The class describes the arguments and the errors."""
        self.question = _checked_question(question)
        self.cells_to_run = (
            f"the set-up cell at the top of the lesson, the cell that defines {name_of(function)}, "
            "and then this cell"
        )
        self.function = function
        self.grid = checked_grid(function, grid)
        self.predicted_quantity = predict
        self.within = _checked_factor(within)
        self._values = values
        self._units = dict(units or {})
        Measurement(function, grid, values=values, units=units)  # refuses what cannot be measured
        varied = [name for name, several in self.grid.values.items() if len(several) > 1]
        if not varied:
            raise ValueError("Give at least one argument several values. It becomes the x axis.")
        self.x, *others = varied
        self.last = self.grid.labels()[self.x][-1]
        self.unit, self._size = _typed_unit(function, predict, self._units)
        labels = self.grid.labels()
        self.lists = {}
        for name in others:
            texts = [str(each) for each in labels[name]]
            self.lists[name] = panel.choice(f"{name}:", texts, texts[0], width="16em")
        super().__init__(*([[*self.lists.values()]] if self.lists else []))

    def chosen_grid(self) -> dict[str, Any]:
        """Return the grid, in which each list to choose from is replaced by the chosen value."""
        chosen: dict[str, Any] = dict(self.grid.values)
        for name, widget in self.lists.items():
            texts = [str(label(value)) for value in self.grid.values[name]]
            chosen[name] = [self.grid.values[name][texts.index(widget.value)]]
        return chosen

    def experiment(self) -> Measurement:
        """Return a measurement of the chosen grid, which has not started yet."""
        return Measurement(
            self.function,
            self.chosen_grid(),
            values=self._values,
            units=self._units or None,
        )

    def point(self, row: dict[str, Any]) -> str:
        """Return one measured row as a line of text with units."""
        units = {name: unit_of(name) for name in row} | self._units
        arguments = in_words({name: row[name] for name in row if name in self.grid.values})
        numbers = [
            f"{name.replace('_', ' ')} {unit_texts.text_with_unit(row[name], units[name])}"
            for name in row
            if name not in self.grid.values
        ]
        return f"{arguments}: {', '.join(numbers)}"

    def draw(self, result: Result, prediction: float | None) -> Figure:
        """Return the figure with the prediction and the recording."""
        point = None
        if prediction is not None and self._measured(result) is not None:
            point = (self.last, prediction * self._size)
        return result.plot(self.x, self.predicted_quantity, prediction=point)

    def verdict(self, result: Result, prediction: float) -> str:
        """Return a sentence that says how far the prediction differs from the measured value."""
        typed = f" {self.unit}".rstrip()
        measured = self._measured(result)
        if measured is None:
            return stays_open(self._why_open(result), prediction, typed) + _failures(result)
        was = f"{self._where(self.last)}: {_short(measured)}{typed}."
        was = f"{was} You predicted {_short(prediction)}"
        if measured > 0 and prediction > 0:
            said = compared_as_factor(was, prediction, measured, self.within)
        elif measured == prediction or _good(prediction, measured, self.within):
            said = f"{was}. A good prediction!"
        else:
            said = f"{was}."
        return said + _failures(result)

    def predicted(self, text: str) -> float:
        """Return the predicted number that the learner has typed.

        Raises ValueError if the text is not a number, or if a speed-up is not greater than 0.
        """
        if self.unit == TYPED_UNITS[SPEED_UP][0]:
            return parse_prediction(text, largest=inf)
        number = typed_number(text)
        if not isfinite(number):
            raise ValueError(no_prediction(text, "a number"))
        return number

    def _measured(self, result: ResultData) -> float | None:
        """Return the measured value of the predicted quantity, in the unit of the prediction.

        Return None if it was not measured. A speed-up also needs the first row, and times above 0.
        """
        rows = {row[self.x]: row for row in result.rows}
        first = self.grid.labels()[self.x][0]
        if self.last not in rows:
            return None
        quantity = quantity_of(result, self.predicted_quantity)
        if quantity.unit == SPEED_UP and first not in rows:
            return None
        value = quantity.value(rows[self.last], rows.get(first, rows[self.last])) / self._size
        if isfinite(value):
            return value
        return None

    def _why_open(self, result: ResultData) -> str:
        """Return why a result has no value with which to compare the prediction."""
        measured = result.column(self.x)
        for place in (self.last, self.grid.labels()[self.x][0]):
            if place not in measured:
                return f"{self._where(place)} was not measured"
        return f"{self._where(self.last)} has no {self.predicted_quantity}"

    def _where(self, place: Any) -> str:
        """Return the arguments at the value `place` of the x axis as text."""
        chosen = {name: widget.value for name, widget in self.lists.items()}
        return in_words({self.x: place} | chosen)

    def _show(self, run: Run) -> None:
        """Show the figure of a run, or its table if the predicted quantity cannot be drawn."""
        try:
            super()._show(run)
        except (KeyError, ValueError) as error:
            result = run.result()
            self.result = None  # a figure of it is not possible
            self.picture.value = result._repr_html_()
            self._say(
                f"There is no figure of {self.predicted_quantity!r}. {error.args[0]}", alert=True
            )

    def _fail(self, error: Exception) -> None:
        """Show an error.

        A UnitsError is shown without its class name, because its text is enough.
        """
        super()._fail(error)
        if isinstance(error, UnitsError):
            self._say(str(error), alert=True)

    def _prediction_tested(self) -> None:
        """Count a tested prediction in the learner's progress, under the name of the function."""
        progress_file.add(name_of(self.function), True)


def _good(prediction: float, measured: float, within: float) -> bool:
    """Return whether two negative numbers differ by at most the factor `within`.

    The result is False if one of the numbers is not negative.
    """
    return prediction < 0 and measured < 0 and 1 / within <= prediction / measured <= within


def _short(number: float) -> str:
    """Return a number as text: whole numbers in full, others with three significant digits."""
    if number == int(number):
        return str(int(number))
    return unit_texts.number_text(number, 3)


def _failures(result: ResultData) -> str:
    """Return sentences that say why combinations of arguments failed."""
    told = [
        f" {in_words(failure['arguments'])} failed. {failure['error']}"
        for failure in result.failures
    ]
    return "".join(told)


def _checked_question(question: str) -> str:
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question={question!r}: give the question that the widget asks")
    return question


def _checked_factor(within: float) -> float:
    if isinstance(within, bool) or not isinstance(within, int | float) or not within >= 1:
        raise ValueError(f"within={within!r}: give a factor, 1 or more")
    return within


def _typed_unit(
    function: Callable[..., Any],
    predict: str,
    units: Mapping[str, str],
) -> tuple[str, float]:
    """Return the unit in which the learner types the prediction, and its size in base units.

    `predict` is the predicted quantity, and `units` are the units of columns.
    """
    if not isinstance(predict, str):
        raise TypeError(f"predict={predict!r}: give a column or a quantity, such as 'speed-up'")
    if predict == SPEED_UP or predict.endswith(f" {SPEED_UP}"):
        return TYPED_UNITS[SPEED_UP]
    column = predict.removesuffix(PER_GPU).rstrip() or name_of(function)
    unit = units.get(column, unit_of(column))
    return TYPED_UNITS.get(unit, (unit, 1.0))
