"""How a network is trained, and how much memory a training step takes on a model of GPU."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

from gpulessons.networks import OPTIMIZERS, PRECISIONS, Network
from gpulessons.rank_programs import rank_program
from virtualgpu import profiles

SPREADS = ("DataParallel", "DDP")
MOST_GPUS, MOST_ROWS = 16, 1 << 20
# The share of the GPU's memory that a step may take. The cache keeps blocks of sizes that no tensor
# needs again.
SHARE = 0.95
UNLIMITED = "1000000GiB"  # memory of the GPU on which a step is measured


@dataclass(frozen=True)
class Setting:
    """How a network is trained.

    `batch` counts the rows of one optimizer step, over all GPUs and micro-batches.

    Raises ValueError naming the choices.
    """

    network: Network
    batch: int
    precision: str = "float32"
    optimizer: str = "Adam"
    checkpointing: bool = False
    gpus: int = 1
    spread: str = "DDP"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "precision": tuple(PRECISIONS),
            "optimizer": tuple(OPTIMIZERS),
            "spread": SPREADS,
            "checkpointing": (False, True),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
        for name, most in (("batch", MOST_ROWS), ("gpus", MOST_GPUS), ("micro_batches", MOST_ROWS)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: give a whole number from 1 to {most}")
        if self.gpus * self.micro_batches > self.batch:
            parts = f"{self.gpus} GPU(s) and {self.micro_batches} micro-batch(es)"
            raise ValueError(f"batch={self.batch}: {parts} need a row each")

    @property
    def rows(self) -> int:
        """Rows of the largest part that a GPU computes at once."""
        return -(-self.micro_rows // self.gpus)

    @property
    def micro_rows(self) -> int:
        """Rows of the largest micro-batch, over all GPUs."""
        return -(-self.batch // self.micro_batches)

    def __str__(self) -> str:
        """Describe the setting in one line: "MLP(width=2048, …), batch 8192, float32, Adam"."""
        parts = [f"{self.network}, batch {self.batch}", self.precision, self.optimizer]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.checkpointing:
            parts.append("checkpointing")
        if self.gpus > 1:
            parts.append(f"{self.gpus} GPUs, {self.spread}")
        return ", ".join(parts)


class StepMemory(NamedTuple):
    """The fullest moment of a step on the first GPU: the step's phase, and bytes by category."""

    phase: str
    terms: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.terms.values())


@cache
def measured(setting: Setting, model: str) -> StepMemory:
    """Train for some steps on virtual GPUs of this model, and return the last step's memory.

    The GPUs are in a process of their own, compute no values, and have as much memory as the steps
    take. Raises ValueError for a model that has no profile.
    """
    from gpulessons.simulated_worlds import results

    arguments = [type(setting.network).__name__, json.dumps(asdict(setting))]
    gpus = {"world": setting.gpus, "like": profiles.load(model).name, "memory": UNLIMITED}
    [found] = results(rank_program("training"), [gpus | {"arguments": arguments}])
    return StepMemory(**found)


def room(model: str) -> int:
    """Bytes that PyTorch can have of a GPU of this model: all but the CUDA context.

    Raises ValueError for an unknown model.
    """
    profile = profiles.load(model)
    return profile.total_memory - profile.context_bytes


def fits(memory: StepMemory, model: str) -> bool:
    """Whether a training with this memory runs, with some room for what the cache wastes."""
    return memory.peak <= SHARE * room(model)
