"""The experiment `training_memory`: the peak of a training step by formula, and as measured. Lesson 9 has its recording."""

from collections.abc import Iterator

from labkit.lab_parts.budget import Setting, budget, gpu_of
from labkit.lab_parts.experiment import Row, badge
from labkit.lab_parts.measured_memory import describe, measured_peak
from labkit.labs import GPT, MLP, ResNet, Result, Run

SMALL_GPT = GPT(width=512, layers=6, heads=8, tokens=512, vocabulary=8192)
TEN_SETTINGS = (
    Setting(MLP(), 8192),
    Setting(MLP(), 8192, "autocast float16", "SGD momentum"),
    Setting(MLP(4096, 6), 512, optimizer="Adam fused"),
    Setting(MLP(), 8192, checkpointing=True, micro_batches=2),
    Setting(SMALL_GPT, 16),
    Setting(SMALL_GPT, 16, "autocast float16", "AdamW"),
    Setting(SMALL_GPT, 16, checkpointing=True),
    Setting(ResNet(), 64, optimizer="SGD momentum"),
    Setting(ResNet(), 64, "autocast float16", checkpointing=True),
    Setting(SMALL_GPT, 16, gpus=2, spread="DataParallel"),
)
COLUMNS = {"setting": "", "formula": "bytes", "measured": "bytes"}


def training_memory() -> Run:
    """The peak of a training step on the first GPU for each of the ten settings: by formula, and as measured in the third of three steps.

    Virtual GPUs compute no values meanwhile.
    """
    parameters = {"settings": [describe(setting) for setting in TEN_SETTINGS]}
    return Run("training_memory", parameters, COLUMNS, badge(), len(TEN_SETTINGS), _points())


def formula_errors(result: Result) -> dict[str, float]:
    """How far the formula is from what was measured, as a share of that, by setting."""
    columns = (result.column(name) for name in COLUMNS)
    return {setting: formula / measured - 1 for setting, formula, measured in zip(*columns, strict=True) if measured > 0}


def _points() -> Iterator[Row]:
    chip = gpu_of().chip
    for setting in TEN_SETTINGS:
        predicted = budget(setting, chip)
        yield {"setting": describe(setting), "formula": predicted.peak, "measured": measured_peak(setting, predicted)}
