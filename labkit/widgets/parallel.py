"""The lab of data parallelism: how much faster is a training step when four GPUs share the batch?"""

from collections.abc import Mapping, Sequence
from typing import Any

from gputrace import units
from labkit import plots
from labkit.experiments import Result, Run, data_parallel_step
from labkit.experiments.data_parallel import LAYERS, MODELS, parallel_gain
from labkit.widgets.base import Lab

GOOD = 1.25  # a prediction within this factor is called good


class DataParallelLab(Lab):
    """Predict how many times faster a training step of the last of the `models` is under `nn.DataParallel` on all `gpus`; then measure.

    `gpus`, `models` and `repeats` are those of `labkit.experiments.data_parallel_step`. Raises ValueError without a number of GPUs or a
    model.
    """

    unit = "times"

    def __init__(self, gpus: Sequence[int] = (1, 2, 4), models: Mapping[str, Sequence[int]] = MODELS, repeats: int = 3) -> None:
        if not gpus or not models:
            raise ValueError("give at least one number of gpus, such as (1, 2), and one of models, such as {'small': (1024, 512)}")
        self.gpus, self.models, self.repeats = gpus, models, repeats
        self.asked, self.most = list(models)[-1], max(gpus)
        width, batch = models[self.asked]
        self.question = (
            f"{LAYERS} linear layers, {width} neurons wide, a batch of {batch} rows: how many times faster is a training step on "
            f"{self.most} GPUs than on one? (0.5 means twice as slow.)"
        )
        super().__init__()

    def experiment(self) -> Run:
        return data_parallel_step(self.gpus, self.models, self.repeats)

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['model']} model on {row['gpus']} GPU{'s' * (row['gpus'] > 1)}: {units.time_text(row['seconds'])}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.data_parallel_step(result, result.recorded(), prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        gain = parallel_gain(result, self.asked).get(self.most)
        if gain is None:
            missing = f"The {self.asked} model was not measured on {self.most} GPUs"
            return f"{missing}, so your prediction of {prediction:g} stays open. Press Run to try again."
        was = f"The step was {gain:.2g} times as fast on {self.most} GPUs; you predicted {prediction:g}"
        off = prediction / gain
        if 1 / GOOD <= off <= GOOD:
            return f"{was}. A good prediction!"
        return f"{was}, which is {off:.1f} times too high." if off > 1 else f"{was}, which is {1 / off:.1f} times too low."
