"""Test what the checks of lesson 06 measure and say."""

import gc
import random
from copy import deepcopy

import pytest
import torch

import labkit
from gpulessons.lesson_06 import checks as lesson_06
from gpulessons.lesson_06.checks import STEPS, draw, judge
from labkit import checks
from labkit.checks import checking


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        yield


BAD = [6]  # a batch


def verdict(answer=(), expected=()) -> str:
    """Return the check's message for a perfect answer that is changed by `answer`.

    The script kept 1 KiB per step, and has the changes `expected`.
    """
    script = {"returned": [0.5, "text"], "model": [[1.0]], "left": 0}
    script["held"] = [1024 * step for step in range(STEPS + 1)]
    script |= {"graphs": [0] * (STEPS + 1), "retained": 0, "backwards": STEPS}
    script |= {"hooks": [1] * (STEPS + 1), "own hook": True}
    good = {**deepcopy(script), "held": [512] * (STEPS + 1)}
    both = {"answer": {**good, **dict(answer)}, "expected": {**script, **dict(expected)}}
    return judge({"raised": True, **both}, {"bad": BAD}, "Who?").message


def test_a_fixed_script_keeps_nothing():
    kept = "In the steps compared, the script kept 6 KiB, and your function kept nothing."
    assert verdict() == f"Right. {kept}"
    assert verdict({"returned": [0.500001, "text"], "model": [[1.000001]]}).startswith("Right.")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"held": [512 * step for step in range(STEPS + 1)]},
            "still held 3 KiB more after 6 more steps. The script held 6 KiB more. Who?",
        ),
        ({"held": [0] * 5}, "took 5 of 12 batches, and did not ask for more"),
        (
            {"returned": [0.6, "text"]},
            "returned, [0.5, 'text'] (2 entries). Yours returned [0.6, 'text'] (2 entries)",
        ),
        ({"returned": None}, "Yours returned None"),
        ({"returned": [0.5, "text", 1]}, "(3 entries)"),
        ({"model": [[2.0]]}, "the model's weights differ from those of the script"),
        ({"left": 2048}, "2 KiB were still in memory after your function had returned. Who?"),
        ({"retained": 3}, "Which argument asks for that?"),
        ({"backwards": 2 * STEPS}, "ran 24 backward passes, the script 12"),
        ({"own hook": False}, "Remove only your own hooks"),
        ({"hooks": list(range(1, STEPS + 2))}, "11 more hooks than after the first. Who?"),
        ({"graphs": list(range(STEPS + 1))}, "in the computer's memory. Who?"),
        ({"graphs": [0, 1] + [2] * (STEPS - 1)}, "in the computer's memory. Who?"),
        (
            {"held": [512, 512] + [4608] * (STEPS - 1)},
            "still held 4 KiB of the first step during all other steps. Who?",
        ),
        (
            {"held": [1024 * (step % 4) for step in range(STEPS + 1)]},
            "after step 3, the GPU held 2 KiB more than after the first step. Who?",
        ),
        ({"graphs": [step % 3 for step in range(STEPS + 1)]}, "in the computer's memory. Who?"),
    ],
)
def test_what_is_wrong_is_said(answer, said):
    assert said in verdict(answer)


def test_a_tensor_of_the_same_shape_has_other_values():
    tensor = {"type": "Tensor", "device": "cpu", "dtype": "torch.float32", "shape": [2]}
    tensor["values"] = [1.0, 2.0]
    told = verdict({"returned": tensor | {"values": [1.0, 3.0]}}, {"returned": tensor})
    assert "Yours returned a tensor of shape [2] on cpu with other values." in told


def test_memory_that_comes_and_goes_between_steps_is_no_leak():
    assert verdict({"held": [512 * (step % 3) for step in range(STEPS + 1)]}).startswith("Right.")


def test_a_bad_batch_may_leave_its_tensors_until_the_next_step():
    held, graphs = [512] * (STEPS + 1), [1] * (STEPS + 1)
    held[BAD[0] + 1], graphs[BAD[0] + 1] = 8192, 2
    assert verdict({"held": held, "graphs": graphs}).startswith("Right.")
    held[BAD[0] + 2] = 8192
    assert "after step 8, the GPU held 7.5 KiB more" in verdict({"held": held})


@pytest.mark.parametrize("check", lesson_06.CHECKS, ids=lambda check: check.number)
def test_each_script_leaks_as_it_is_handed_out(check):
    inputs = check.draw(random.Random(5))
    told = lesson_06.observe(check.script, inputs, check.script)
    grown, again = (lesson_06._grown(told[run].pop("held")) for run in ("answer", "expected"))
    assert grown == again > 0
    assert told["answer"] == told["expected"] and told["raised"]


def test_bad_batches_lie_between_the_looks_that_are_compared():
    for seed in range(20):
        bad = draw(random.Random(seed), bad=3)["bad"]
        assert len(set(bad)) == 3
        assert min(bad) >= lesson_06.EARLY.stop - 1
        assert max(bad) < STEPS + lesson_06.LATE.start + 1


def test_the_collector_is_left_as_it_was():
    check = checks.find("06.5")
    for switch in (gc.disable, gc.enable):
        switch()
        was_on = gc.isenabled()
        checking.run(check, lambda model, optimizer, batches: torch.zeros(0))
        assert gc.isenabled() == was_on
