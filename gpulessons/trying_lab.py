"""A lab that tries one setting after another, and draws what was tried beside the last."""

from collections.abc import Hashable, Sequence
from typing import Any

import ipywidgets as widgets
from matplotlib.axes import Axes

from gputrace.figures.figure import BLACK
from labkit.labs.experiment import Result, Row
from labkit.labs.figures import hollow
from labkit.labs.panel import ExperimentPanel

LEAST = 4  # places for tries: a single bar is no wider


class TryingLab(ExperimentPanel):
    """Keeps the rows of all runs, the last one of those whose first column, the setting, is the same."""

    def __init__(self, *choices: Sequence[widgets.ValueWidget]) -> None:
        self.tried: dict[Hashable, dict[Any, Row]] = {}
        super().__init__(*choices)

    def _bring_back(self, before: ExperimentPanel | None) -> None:
        super()._bring_back(before)
        if before is not None:
            self._take_over(before, "tried")

    def with_earlier(self, result: Result, together: Hashable) -> Result:
        """The rows of this run below those of earlier ones with the same `together`: what else was chosen."""
        rows, setting = self.tried.setdefault(together, {}), next(iter(result.columns))
        for row in result.rows:
            rows.pop(row[setting], None)
            rows[row[setting]] = row
        return Result(
            result.name, result.parameters, result.columns, list(rows.values()), result.badge
        )


def place_bars(
    axes: Axes, names: Sequence[str], figures: Sequence[str], heading: str, prediction: float | None
) -> None:
    """Beside horizontal bars, one a place: their names on the left, their figures under a heading on the right, where no prediction can
    cover them. The prediction is the last one's."""
    axes.set_position((0.22, 0.19, 0.51, 0.66))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), LEAST) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    for place, text, style in (
        *((place, text, "normal") for place, text in enumerate(figures)),
        (-0.9, heading, "italic"),
    ):
        axes.text(1.03, place, text, transform=axes.get_yaxis_transform(), va="center", style=style)
    if prediction is not None and names:
        axes.plot([prediction], [len(names) - 1], marker="s", **hollow(BLACK))
