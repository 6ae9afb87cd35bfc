"""The lab of copy speed: how much faster does the GPU's copy engine read page-locked memory?"""

from collections.abc import Sequence
from typing import Any

from gputrace import units
from labkit import plots
from labkit.experiments import Result, Run, copy_speed
from labkit.experiments.copies import PREDICTED_SIZE, SIZES, pinned_gain
from labkit.widgets.base import Lab

GOOD = 1.15  # a prediction within this factor is called good


class CopySpeedLab(Lab):
    """Predict how many times faster 16 MiB are copied to the GPU from pinned than from pageable memory; then measure it.

    `sizes` and `repeats` are those of `labkit.experiments.copy_speed`; where 16 MiB are not among the sizes, the question is for the
    largest. Raises ValueError without a size.
    """

    unit = "times"

    def __init__(self, sizes: Sequence[int] = SIZES, repeats: int = 5) -> None:
        if not sizes:
            raise ValueError("sizes: give at least one, in bytes, such as 1 << 20")
        self.sizes, self.repeats = sizes, repeats
        self.asked = PREDICTED_SIZE if PREDICTED_SIZE in sizes else max(sizes)
        size = units.byte_text(self.asked)
        self.question = f"How many times faster is it to copy {size} to the GPU from pinned than from pageable memory?"
        super().__init__()

    def experiment(self) -> Run:
        return copy_speed(self.sizes, self.repeats)

    def point(self, row: dict[str, Any]) -> str:
        way = "to the GPU" if row["direction"] == "h2d" else "to the host"
        return f"{units.byte_text(row['size'])}, {row['memory']}, {way}: {units.time_text(row['seconds'])}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.copy_speed(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        gain = pinned_gain(result).get(self.asked)
        size = units.byte_text(self.asked)
        if gain is None:
            return f"Copies of {size} were not measured, so your prediction of {prediction:g} stays open. Press Run to try again."
        was = f"From pinned memory {size} were copied {gain:.1f} times faster; you predicted {prediction:g}"
        off = prediction / gain
        if 1 / GOOD <= off <= GOOD:
            return f"{was}. A good prediction!"
        return f"{was}, which is {off:.1f} times too high." if off > 1 else f"{was}, which is {1 / off:.1f} times too low."
