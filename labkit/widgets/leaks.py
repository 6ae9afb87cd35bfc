"""The lab of leaks: a training loop whose leaks are switched on, and how much it keeps each step."""

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from gputrace import units
from labkit import plots
from labkit.experiments import Result, Run, leaky_training
from labkit.experiments.leaks import LEAKS, STEPS, growth, script
from labkit.widgets.base import Lab, switches

MIB = 1 << 20
NEAR = 0.02  # MiB: a prediction this close is right


class LeakLab(Lab):
    """Switch leaks of a training loop on, predict how many MiB it keeps each step, and watch it; the end names who holds them.

    `leaks` are those switched on at first and `steps` the loop's, as in `labkit.experiments.leaky_training`.
    """

    question = "How many MiB does this loop keep each step?"
    unit = "MiB a step"
    zero_is_possible = True

    def __init__(self, leaks: Sequence[str] = ("kept losses",), steps: int = STEPS) -> None:
        self.steps = steps
        self.switches = switches(leaks, LEAKS, "11em")
        self.source = widgets.HTML()
        super().__init__(list(self.switches.values()))
        question, row, *others = self.children
        self.children = (question, row, self.source, *others)
        self._show_source()

    @property
    def leaks(self) -> list[str]:
        """Those that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        return leaky_training(self.leaks, self.steps, together=True)

    def point(self, row: dict[str, Any]) -> str:
        return f"{units.byte_text(row['allocated'])} allocated, {units.byte_text(row['grown'])} more than at the start"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.leaky_training(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return f"No step was measured, so your prediction of {prediction:g} stays open. Press Run to try again."
        kept = next(iter(growth(result).values())) / MIB
        told = f"The loop keeps {kept:.4g} MiB a step; you predicted {prediction:g}"
        told += (
            ". A good prediction!" if abs(prediction - kept) <= NEAR else f", {abs(prediction - kept):.4g} too {_way(prediction, kept)}."
        )
        holder = result.rows[-1]["holder"]
        return f"{told} The largest tensor that leaked is held by {holder}." if holder else told

    def _chosen(self) -> None:
        self._show_source()
        super()._chosen()

    def _show_source(self) -> None:
        before, step = script(self.leaks)
        loop = f"for _ in range({self.steps}):\n" + "".join(f"    {line}\n" for line in step.splitlines())
        leaking = {LEAKS[name] for name in self.leaks}
        lines = [(f"<b>{escape(line)}</b>" if line.strip() in leaking else escape(line)) for line in (before + "\n" + loop).splitlines()]
        self.source.value = "<pre style='line-height: 1.3'>" + "\n".join(lines) + "</pre>"


def _way(prediction: float, kept: float) -> str:
    return "high" if prediction > kept else "low"
