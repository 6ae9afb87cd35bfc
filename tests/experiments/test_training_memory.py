"""The experiments of memory budgets: what they measure, what they leave behind, what they refuse."""

import pytest
import torch

import labkit
from labkit.experiments import MLP, Setting, collect, memory_plan, training_memory
from labkit.experiments.networks import GPT
from labkit.experiments.training_memory import NOT_MEASURED, RAN_OUT, TEN, TERMS, describe, errors

SMALL = Setting(MLP(256, 2), 512)


def test_formula_and_measurement_stand_side_by_side():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        result = collect(training_memory([SMALL]))
    assert result.column("setting") == ["MLP(width=256, depth=2, classes=10), batch 512, float32, Adam"]
    assert abs(errors(result)[describe(SMALL)]) < 0.05
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
    assert len({describe(setting) for setting in TEN}) == 10


def test_a_plan_is_measured_where_it_can_be():
    with labkit.use(gpus=1, memory="1.5GiB", virtual=True, quiet=True):
        result = collect(memory_plan(Setting(MLP(4096, 4), 8192)))
        assert result.parameters["changes"] == result.column("change")
        assert result.column("measured")[0] == RAN_OUT and result.column("peak")[0] > result.column("room")[0]
        assert result.column("measured")[-1] == pytest.approx(result.column("peak")[-1], rel=0.05)
        for row in result.rows:
            assert sum(row[name] for name in TERMS) == row["peak"]
        elsewhere = collect(memory_plan(SMALL, "L4"))
        assert elsewhere.column("measured") == [NOT_MEASURED] and elsewhere.parameters["gpu"] == "NVIDIA L4"
        assert elsewhere.badge == "by formula, for NVIDIA L4"
        assert collect(memory_plan(Setting(MLP(256, 2), 512, gpus=2))).column("measured") == [NOT_MEASURED]


def test_what_cannot_be_measured_is_refused():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="DDP: the ranks of DDP are processes of their own: choose DataParallel"):
            training_memory([Setting(MLP(), 8, gpus=2)])
        with pytest.raises(ValueError, match="it needs 4 GPUs, and 2 are in use"):
            training_memory([Setting(MLP(), 8, gpus=4, spread="DataParallel")])
        with pytest.raises(ValueError, match="give at least one"):
            training_memory([])
        with pytest.raises(ValueError, match="no profile of a GPU named"):
            memory_plan(SMALL, "K80")
        with pytest.raises(ValueError, match="choose autocast float16"):
            memory_plan(Setting(GPT(), 8, "autocast bfloat16"), "T4")
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        training_memory()
