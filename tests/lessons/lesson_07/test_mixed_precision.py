"""A training in four ways, measured and drawn."""

import math

import pytest
import torch

import labkit
from gpulessons.lesson_07.labs import four_ways, plot_four_ways
from gpulessons.lesson_07.labs.mixed_precision import COLUMNS, WAYS, last_loss, step_seconds
from labkit.labs import Result, collect


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


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="steps=0: give a whole number, 1 or more"):
        four_ways(0)


def losses(**ways) -> Result:
    rows = [
        {"way": way.replace("_", " "), "step": step, "loss": loss, "seconds": 1e-3}
        for way, values in ways.items()
        for step, loss in enumerate(values, start=1)
    ]
    return Result("four_ways", {"ways": [], "steps": 2}, COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("alone", "title"),
    [
        ([0.5, math.nan], "float16 alone fails at step 2; the others end at about 0.3"),
        ([0.5, 0.1], "All four ways end at a loss of about 0.3"),
    ],
)
def test_the_curves_say_which_way_fails(alone, title):
    result = losses(float32=[0.5, 0.1], float16_alone=alone, autocast_float16=[0.5, 0.1], autocast_bfloat16=[0.5, 0.1])
    assert plot_four_ways(result, result).title == title


def test_a_training_that_was_stopped_is_drawn_as_far_as_it_came():
    assert plot_four_ways(losses(float32=[0.5, 0.1])).title == "Not measured yet: a training in four ways"
    with labkit.use(gpus=1, virtual=True, quiet=True):
        assert plot_four_ways(four_ways(2).result()).title == "Not measured yet: a training in four ways"
