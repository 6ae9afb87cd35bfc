"""The lab of pipelines: stages, micro-batches, schedule and link, and for how long the GPUs wait."""

from collections.abc import Sequence
from typing import Any

from gputrace import units
from labkit import machine, plots
from labkit.experiments import Result, Run, pipeline_step
from labkit.experiments.pipeline import peaks, stages, waiting_share
from labkit.experiments.schedules import ONE_BATCH, SCHEDULES, bubble
from labkit.widgets.base import Lab, choice, switches

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
LINKS = {"as it is": 1, "4 times slower": 4, "16 times slower": 16, "64 times slower": 64}
LAYERS = 2  # of each stage
GOOD = 5.0  # percent: a prediction this close is called good


class PipelineLab(Lab):
    """Cut a network into stages and its batch into micro-batches, predict for how long the GPUs wait, then see what each does when.

    `schedules` are those switched on at first. The prediction is for the last that is switched on. Raises ValueError for a schedule that
    there is not, and for a number of micro-batches that cannot be chosen.
    """

    question = "Under the last schedule that is switched on, for how many percent of the step does a GPU wait, on average?"
    unit = "%"
    zero_is_possible = True

    def __init__(self, schedules: Sequence[str] = SCHEDULES[1:], micro_batches: int = 8) -> None:
        used = machine.current()
        most = 4 if used is None else used.count
        self.stages = choice("Stages:", range(1, most + 1), most, "9em")
        self.micro_batches = choice("Micro-batches:", MICRO_BATCHES, micro_batches, "12em")
        self.link = choice("Link:", list(LINKS), next(iter(LINKS)), "14em")
        self.switches = switches(schedules, SCHEDULES, "7em")
        super().__init__([self.stages, self.micro_batches, self.link], list(self.switches.values()))

    @property
    def schedules(self) -> list[str]:
        """Those that are switched on."""
        return [name for name, switch in self.switches.items() if switch.value]

    def experiment(self) -> Run:
        """The step as it is chosen, not yet begun. Raises ValueError where no schedule is switched on."""
        if not self.schedules:
            raise ValueError("Switch at least one schedule on.")
        return pipeline_step([LAYERS] * self.stages.value, self.micro_batches.value, self.schedules, LINKS[self.link.value])

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['schedule']}, {row['work']} of micro-batch {row['micro_batch'] + 1} on cuda:{row['stage']}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.pipeline_step(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        schedule = result.parameters["schedules"][-1]
        share = waiting_share(result, schedule)
        if share is None:
            return f"{schedule} was not measured to its end, so your prediction of {prediction:g}% stays open. Press Run to try again."
        percent = 100 * share
        told = f"With {schedule} the GPUs wait {percent:.0f}% of the step; you predicted {prediction:g}%"
        off = prediction - percent
        told += ". A good prediction!" if abs(off) <= GOOD else f", {abs(off):.0f} too {'high' if off > 0 else 'low'}."
        count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
        most = max(peaks(result, schedule).values())
        return f"{told} The formula says {100 * bubble(stages(result), count):.0f}%. At most {units.byte_text(most)} on a GPU."

    def _predict(self) -> None:
        super()._predict()
        if self.prediction is not None and self.prediction >= 100 and not self.running:
            self.prediction = None
            self._say("Something is done in each step: predict less than 100%.", alert=True)
            self._set_buttons(running=False)
