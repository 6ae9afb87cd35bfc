"""The lab of number formats: type a computation, predict what float16 makes of it, see it in every format."""

from math import isinf, isnan
from typing import Any

import ipywidgets as widgets

from labkit import plots
from labkit.experiments import Result, Run, number_formats
from labkit.experiments.formats import ASKED
from labkit.plots.formats import value_text
from labkit.widgets.base import Lab

GOOD = 1e-3  # a prediction this near, relative to the result, is called good


class FormatLab(Lab):
    """Type a number or a computation, such as 0.1 + 0.2, 300**2, 1/3 or sum(0.01, 1000); predict its result in float16; see every format.

    `computation` is what stands in the field at first. The lab computes bit by bit and needs no GPU.
    """

    question = f"What does {ASKED} make of this computation?"
    unit = f"in {ASKED}"

    def __init__(self, computation: str = "0.1 + 0.2") -> None:
        self.computation = widgets.Text(
            value=computation,
            description="Computation:",
            placeholder="such as sum(0.01, 1000)",
            style={"description_width": "initial"},
            layout=widgets.Layout(width="26em"),
        )
        super().__init__([self.computation])
        self.answer.placeholder = "a number, inf or nan"

    def experiment(self) -> Run:
        return number_formats(self.computation.value)

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['format']}: {value_text(row['value'])}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.number_formats(result, prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        value = next(iter(result.column("value", format=ASKED)), None)
        if value is None:
            return f"{ASKED} was not reached, so your prediction of {prediction:g} stays open. Press Run to try again."
        was = f"{ASKED} makes {value_text(value)} of {result.parameters['computation']}; you predicted {prediction:g}"
        return f"{was}. A good prediction!" if _near(prediction, value) else f"{was}."

    def _predict(self) -> None:
        """Take any number as a prediction: results may be negative, infinite, or no number."""
        if self.running:
            return
        typed = self.answer.value.strip()
        try:
            self.prediction = float(typed)
        except ValueError:
            self.prediction = None
            found = f"“{typed}” is not a prediction" if typed else "There is no prediction yet"
            self._say(f"{found}: type a number such as 0.3, or inf, or nan, and press Predict.", alert=True)
        else:
            self._say(f"You predict: {self.prediction:g} {self.unit}. Now press Run.")
        self._set_buttons(running=False)


def _near(prediction: float, value: float) -> bool:
    if isnan(value) or isinf(value):
        return prediction == value or (isnan(prediction) and isnan(value))
    return abs(prediction - value) <= GOOD * abs(value)
