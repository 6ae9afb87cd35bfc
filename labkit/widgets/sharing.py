"""The lab of shared models: several processes use one model, in one way or another; what do they take of the GPU?"""

from typing import Any

import ipywidgets as widgets

from gputrace import units
from labkit import plots
from labkit.experiments import Result, Run, shared_model
from labkit.experiments.shared_model import COLUMNS, WAYS, held
from labkit.widgets.base import Lab, one_of

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS = (64 * MIB, 512 * MIB, 2 * GIB, 7 * GIB)
WORK = 64 * MIB  # what a request takes for a moment
PROCESSES = range(2, 7)
GOOD = 0.1  # a prediction this close, as a share of what was measured, is called good


class SharingLab(Lab):
    """Choose how some processes share a model, predict what they take of the GPU together, and start them one by one.

    `way`, `processes` and `weights` (bytes: 64 MiB, 512 MiB, 2 GiB or 7 GiB) are chosen at first; what they mean,
    `labkit.experiments.shared_model` says.
    """

    question = "How many GiB of the GPU do these processes take together, their contexts included?"
    unit = "GiB"

    def __init__(self, way: str = WAYS[0], processes: int = 3, weights: int = 512 * MIB) -> None:
        self.choices = {
            "way": _choice("way", [(way, way) for way in WAYS], way),
            "processes": _choice("processes", [(str(count), count) for count in PROCESSES], processes),
            "weights": _choice("weights", [(units.byte_text(size), size) for size in WEIGHTS], weights),
        }
        super().__init__(list(self.choices.values()))
        told = f"A request takes {units.byte_text(WORK)} more for a moment, in the process that answers it."
        question, row, *others = self.children
        self.children = (question, row, widgets.HTML(f"<p>{told}</p>"), *others)

    def experiment(self) -> Run:
        chosen = {name: choice.value for name, choice in self.choices.items()}
        return shared_model([chosen["way"]], chosen["processes"], chosen["weights"], WORK)

    def point(self, row: dict[str, Any]) -> str:
        sizes = (f"{name} {units.byte_text(row[name])}" for name, unit in COLUMNS.items() if unit == "bytes")
        return f"{row['process']} holds {', '.join(sizes)}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.shared_model(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if len(result.rows) < result.parameters["processes"]:
            return f"Not all processes were started, so your prediction of {prediction:g} stays open. Press Run to try again."
        taken = sum(held(result).values()) / GIB
        was = f"Together they take {taken:.3g} GiB; you predicted {prediction:g}"
        if abs(prediction - taken) <= GOOD * taken:
            return f"{was}. A good prediction!"
        return f"{was}, {abs(prediction - taken):.3g} too {'high' if prediction > taken else 'low'}."


def _choice(name: str, options: list[tuple[str, Any]], value: Any) -> widgets.Dropdown:
    one_of(value, (allowed for _, allowed in options))
    return widgets.Dropdown(description=name, options=options, value=value, layout=widgets.Layout(width="17em"))
