"""A lab whose figure also shows the settings that were tried before."""

from collections.abc import Hashable, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes

from gputrace.figures.figure import BLACK
from labkit.labs.experiment import Result, Row
from labkit.labs.figures import hollow
from labkit.labs.panel import ExperimentPanel

FEWEST_ROWS = 4  # A figure has space for this many bars, so that a single bar is not too thick.


class TryingLab(ExperimentPanel):
    """Lab that keeps the rows of all its runs. The first column is the setting.

    A new row replaces the earlier row that has the same setting.
    """

    def __init__(self, *choices: Sequence[widgets.ValueWidget]) -> None:
        self.tried: dict[Hashable, dict[Any, Row]] = {}
        super().__init__(*choices)

    def _bring_back(self, before: ExperimentPanel | None) -> None:
        super()._bring_back(before)
        if before is not None:
            self._take_over(before, "tried")

    def with_earlier(self, result: Result, together: Hashable) -> Result:
        """Return the rows of earlier runs, followed by the rows of this run.

        Only runs with the same `together` (the other choices) are combined.
        """
        rows = self.tried.setdefault(together, {})
        setting = next(iter(result.columns))
        for row in result.rows:
            rows.pop(row[setting], None)
            rows[row[setting]] = row
        return Result(
            result.name, result.parameters, result.columns, list(rows.values()), result.badge
        )


def place_bars(
    axes: Axes, names: Sequence[str], figures: Sequence[str], heading: str, prediction: float | None
) -> None:
    """Label horizontal bars with names on the left, and figures under a heading on the right.

    The prediction for the last bar is drawn as a hollow marker, which cannot cover the figures.
    """
    axes.set_position((0.22, 0.19, 0.51, 0.66))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), FEWEST_ROWS) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    right: Any = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(1.03, -0.9, heading, style="italic", **right)
    for place, text in enumerate(figures):
        axes.text(1.03, place, text, **right)
    if prediction is not None and names:
        axes.plot([prediction], [len(names) - 1], marker="s", **hollow(BLACK))
