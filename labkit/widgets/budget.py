"""The lab of memory budgets: a training, a GPU, whether the one fits the other, and what to change first."""

from typing import Any

import ipywidgets as widgets

from gputrace import units
from labkit import plots
from labkit.experiments import Result, Run, fit, memory_plan
from labkit.experiments.budget import MOST_ROWS, SPREADS, Setting
from labkit.experiments.networks import GPT, MLP, OPTIMIZERS, PRECISIONS, Network, ResNet
from labkit.experiments.training_memory import RAN_OUT
from labkit.widgets.base import Lab, choice

GIB = 1 << 30
GOOD = 0.2  # a prediction this near, relative to the result, is called good
NETWORKS = {
    "MLP, 8 × 2048": MLP(),
    "GPT, 6 × 512": GPT(width=512, layers=6, heads=8, tokens=512, vocabulary=8192),
    "GPT-2 small": GPT(),
    "GPT-2 medium": GPT(width=1024, layers=24, heads=16),
    "GPT-2 XL": GPT(width=1600, layers=48, heads=25),
    "ResNet-18": ResNet(),
    "ResNet, 4 × 3 blocks of 128": ResNet(width=128, blocks=3),
}
OWN = "your own"
_WIDE = {"description_width": "initial"}


class BudgetLab(Lab):
    """Choose a network and how it is trained, predict what a step takes, and see whether it fits a GPU and what to change first.

    `network` adds one of your own sizes: `BudgetLab(labkit.experiments.GPT(width=256, layers=4, heads=4))`. Where the GPU in use is
    chosen, each step of the plan is measured too, if it can be.
    """

    question = "How many GiB does this training step take at its fullest moment?"
    unit = "GiB"

    def __init__(self, network: Network | None = None, batch: int = 8) -> None:
        self.networks = ({OWN: network} if network else {}) | NETWORKS
        self.network = choice("Network:", list(self.networks), OWN if network else "GPT-2 small", "17em")
        self.batch = widgets.Text(value=str(batch), description="Batch, rows:", style=_WIDE, layout=widgets.Layout(width="10em"))
        self.precision = choice("Precision:", list(PRECISIONS), "float32", "16em")
        self.optimizer = choice("Optimizer:", list(OPTIMIZERS), "Adam", "15em")
        self.checkpointing = widgets.Checkbox(value=False, description="checkpointing", indent=False, layout=widgets.Layout(width="9em"))
        self.micro_batches = choice("Micro-batches:", [2**power for power in range(8)], 1, "11em")
        self.gpus = choice("GPUs:", [1, 2, 4, 8, 16], 1, "8em")
        self.spread = choice("by", list(SPREADS), "DDP", "10em")
        self.gpu = choice("Each is:", list(fit.models()), fit.IN_USE, "14em")
        rows = [
            [self.network, self.batch, self.micro_batches],
            [self.precision, self.optimizer, self.checkpointing],
            [self.gpus, self.spread, self.gpu],
        ]
        super().__init__(*rows)

    def setting(self) -> Setting:
        """What is chosen. Raises ValueError for a batch that is none."""
        typed = self.batch.value.strip()
        if not (typed.isascii() and typed.isdigit() and 1 <= int(typed[:9]) <= MOST_ROWS):
            raise ValueError(f"“{typed}” is no batch: type a whole number of rows from 1 to {MOST_ROWS}.")
        return Setting(
            network=self.networks[self.network.value],
            batch=int(typed),
            precision=self.precision.value,
            optimizer=self.optimizer.value,
            checkpointing=self.checkpointing.value,
            gpus=self.gpus.value,
            spread=self.spread.value,
            micro_batches=self.micro_batches.value,
        )

    def experiment(self) -> Run:
        return memory_plan(self.setting(), self.gpu.value)

    def point(self, row: dict[str, Any]) -> str:
        return f"{row['change']}: {units.byte_text(row['peak'])}"

    def draw(self, result: Result, prediction: float | None) -> plots.Figure:
        return plots.memory_plan(result, prediction)

    def verdict(self, result: Result, prediction: float) -> str:
        if not result.rows:
            return f"Nothing was worked out, so your prediction of {prediction:g} stays open. Press Run to try again."
        first = result.rows[0]
        peak = first["peak"] / GIB
        told = f"The formula says {peak:.3g} GiB, at its fullest in {first['moment']}; you predicted {prediction:g}"
        told += ". A good prediction! " if abs(prediction - peak) <= GOOD * peak else ". "
        if first["measured"] == RAN_OUT:
            told += "When it was tried, memory ran out. "
        elif first["measured"]:
            told += f"Measured: {first['measured'] / GIB:.3g} GiB. "
        return f"{told}Of {first['room'] / GIB:.3g} GiB on {result.parameters['gpu']}: {result.parameters['answer']}"
