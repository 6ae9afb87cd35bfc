"""A training in four ways: what each learns, and that it disturbs nothing."""

import math

import pytest
import torch

import labkit
from labkit.experiments import collect, four_ways
from labkit.experiments.four_ways import WAYS, last_loss, step_seconds


def test_float16_alone_fails_and_the_others_learn_alike():
    state = torch.get_rng_state()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        collect(four_ways(1))
        held = torch.cuda.memory_allocated()  # the workspaces of products stay
        result = collect(four_ways(3))
        assert torch.cuda.memory_allocated() == held
    assert torch.equal(torch.get_rng_state(), state)
    last = last_loss(result)
    assert math.isnan(last.pop("float16 alone"))
    first = result.column("loss", way="float32", step=1)[0]
    assert all(loss == pytest.approx(last["float32"], rel=0.02) and loss < first for loss in last.values())
    seconds = step_seconds(result)
    assert seconds["autocast float16"] > seconds["autocast bfloat16"] > seconds["float32"]


def test_a_stopped_run_holds_what_was_measured():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        run = four_ways(2)
        assert run.total == 2 * len(WAYS)
        next(run)
        run.close()
    assert list(last_loss(run.result())) == list(step_seconds(run.result())) == ["float32"]


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        four_ways()
    with pytest.raises(ValueError, match="steps=0: give a whole number, 1 or more"):
        four_ways(0)
