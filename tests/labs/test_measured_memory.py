"""The memory of a training step by formula and as measured."""

import pytest
import torch

import labkit
from labkit.labs import MLP, Result, Setting, collect, plot_training_memory, training_memory
from labkit.labs.measured_memory import COLUMNS, TEN_SETTINGS, describe, formula_errors

SMALL = Setting(MLP(256, 2), 512)


def test_formula_and_measurement_stand_side_by_side():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        result = collect(training_memory([SMALL]))
    assert result.column("setting") == ["MLP(width=256, depth=2, classes=10), batch 512, float32, Adam"]
    assert abs(formula_errors(result)[describe(SMALL)]) < 0.05
    assert result.recorded() is None or result.recorded().name == "training_memory"


def test_what_others_hold_does_not_count_and_nothing_is_left():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        first = collect(training_memory([SMALL])).rows
        mine = torch.zeros(1 << 22, device="cuda")
        before = torch.cuda.memory_allocated()
        assert collect(training_memory([SMALL])).rows == first
        assert torch.cuda.memory_allocated() == before
        assert mine.sum() == 0  # values are computed again


def test_the_ten_are_ten_and_tell_apart():
    assert len({describe(setting) for setting in TEN_SETTINGS}) == 10


def test_what_cannot_be_measured_is_refused():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="DDP: the ranks of DDP are processes of their own: choose DataParallel"):
            training_memory([Setting(MLP(), 8, gpus=2)])
        with pytest.raises(ValueError, match="it needs 4 GPUs, and 2 are in use"):
            training_memory([Setting(MLP(), 8, gpus=4, spread="DataParallel")])
        with pytest.raises(ValueError, match="give at least one"):
            training_memory([])
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        training_memory()


GIB = 1 << 30


def memory(*rows: tuple[str, float, float], origin: str = "") -> Result:
    told = [dict(zip(COLUMNS, (name, round(formula * GIB), round(measured * GIB)), strict=True)) for name, formula, measured in rows]
    return Result("training_memory", {"settings": []}, COLUMNS, told, "measured on paper", {"machine": origin} if origin else {})


def test_the_formula_is_told_beside_what_was_measured():
    figure = plot_training_memory(memory(("MLP(width=8), Adam", 1.02, 1), ("GPT(width=8), SGD", 2, 2)))
    assert figure.title == "The formula is within 2 % of 2 measured training steps"
    assert "MLP(width=8), Adam: formula 1.02 GiB, measured 1 GiB." in figure.alt
    assert plot_training_memory(memory()).title.startswith("Not measured yet")


def test_a_recording_is_told():
    assert "Measured on paper: MLP()" in plot_training_memory(memory(("MLP()", 1, 1)), memory(("MLP()", 1, 1), origin="an H200")).alt
