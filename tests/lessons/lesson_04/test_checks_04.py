"""Test the checks of lesson 04 with observations written by hand."""

import random

import pytest
import torch

from gpulessons.lesson_04 import checks as lesson_04
from gpulessons.lesson_04.checks import (
    finish,
    judge_best_cuts,
    judge_cuts,
    judge_orders,
    judge_seconds,
    judge_steps,
)
from gpulessons.lesson_04.schedules import GPIPE, ONE_F_ONE_B, order

CUT = {"device": "cpu", "weights": [2, 3, 5], "values": [1, 4], "cut": 1}
RAN = [[0, "cuda:0", "cuda:0", 2], [1, "cuda:1", "cuda:1", 2], [2, "cuda:1", "cuda:1", 2]]
RESULT = {"type": "Tensor", "device": "cuda:1", "shape": [2], "values": [30.0, 120.0]}
GOOD_CUT = {
    "type": "Module",
    "lie": ["cuda:0", "cuda:1", "cuda:1"],
    "ran": RAN,
    "result": RESULT,
    "gradients": [75.0, 50.0, 30.0, 30.0],
}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"type": "function"}, "returned function"),
        (
            {"lie": ["cuda:0", "cuda:0", "cuda:1"]},
            "on cuda:0, cuda:1, cuda:1. Your module has layers on cuda:0, cuda:0, cuda:1",
        ),
        ({"ran": [RAN[0], *RAN]}, "see the whole batch once"),
        ({"ran": [[0, "cuda:0", "cuda:0", 1], *RAN[1:]]}, "layer 0 on cuda:0 saw 1 row on cuda:0"),
        ({"lie": []}, "your module has 0. An optimizer would miss some."),
        ({"result": {"type": "tuple"}}, "your module returned tuple"),
        ({"result": RESULT | {"device": "cpu"}}, "the result is on cpu"),
        ({"result": RESULT | {"values": [30.0, 30.0]}}, "differs from the model's own output"),
        ({"gradients": [75.0, 50.0, 30.0, None]}, "autograd's graph"),
    ],
)
def test_a_cut_is_judged_by_places_values_and_gradients(change, hint):
    verdict = judge_cuts([GOOD_CUT | change], [CUT])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_a_batch_from_everywhere_is_tried_and_a_cut_away_from_the_middle():
    for seed in range(10):
        cases = lesson_04.draw_cuts(random.Random(seed))
        assert {case["device"] for case in cases} == {"cpu", "cuda:0", "cuda:1"}
        assert all(1 <= case["cut"] < len(case["weights"]) for case in cases)
        assert (
            sum(
                case["cut"] not in (len(case["weights"]) // 2, -(-len(case["weights"]) // 2))
                for case in cases
            )
            >= 2
        )


def test_seconds_are_judged_by_the_slowest_stage():
    assert judge_seconds([14.0], [[[1, 4, 1], 3]]).passed
    assert (
        "micro_batches=3, the forward pass takes 14 s. You say 18 s. Draw it."
        in judge_seconds([18.0], [[[1, 4, 1], 3]]).message
    )
    assert "returned str" in judge_seconds(["str"], [[[1], 1]]).message


def test_any_of_the_best_cuts_passes():
    assert judge_best_cuts([1], [[2, 2, 2]]).passed
    assert judge_best_cuts([2], [[2, 2, 2]]).passed
    message = judge_best_cuts([2], [[5, 1, 3]]).message
    assert "the layers take 5, 1, 3 units of time. With 2 layers in the first half" in message
    assert "the slower half takes 6 units. Another cut makes it 5." in message
    assert "leaves a GPU without work" in judge_best_cuts([0], [[5, 1]]).message
    assert "leaves a GPU without work" in judge_best_cuts([2], [[5, 1]]).message
    assert "returned float" in judge_best_cuts(["float"], [[5, 1]]).message


def test_simple_rules_fail_in_some_drawn_layers():
    for seed in range(10):
        cases = lesson_04.draw_layers(random.Random(seed))
        assert any(lesson_04._share(case, len(case) // 2) > 1 for case in cases)


# The mean of the squares 1, 4 and 9 is 14/3. With the weights 2 and 3, the loss is 36 × 14/3. The
# gradients are 2 × 14/3 × 18 and 2 × 14/3 × 12.
STEP = {"values": [1, 2, 3], "weights": [2, 3], "splits": 2}
GOOD_STEP = {
    "loss": 168.0,
    "gradients": [168.0, 112.0],
    "seen": [["cuda:0", "cuda:0"], ["cuda:1", "cuda:1"]],
    "seconds": [3.1, 3.0],
}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"loss": "NoneType"}, "returned NoneType. Expected the loss"),
        ({"seen": [["cuda:0"], ["cuda:1"]]}, "They saw 1 and 1"),
        ({"loss": 180.0}, "the mean of the squares of all outputs"),
        ({"loss": 36 * (2.5 + 9) / 2}, "the mean of their means is another number"),
        ({"loss": 36 * (2.5 + 9)}, "the mean of their means is another number"),
        ({"gradients": [None, 112.0]}, "a gradient is None. For the whole batch it is 168"),
        ({"gradients": [168.0, 336.0]}, "a gradient is 336"),
        ({"seconds": [3.9, 3.0]}, "2 micro-batches take 1.30 times as long as they need"),
        ({"seconds": [2.0, 3.0]}, None),
    ],
)
def test_a_step_is_judged_by_loss_gradients_parts_and_time(change, hint):
    verdict = judge_steps(GOOD_STEP | change, STEP)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_micro_batches_of_a_drawn_batch_are_not_equal():
    for seed in range(20):
        inputs = lesson_04.draw_steps(random.Random(seed))
        sizes = {len(part) for part in torch.tensor(inputs["values"]).chunk(inputs["splits"])}
        assert len(sizes) == 2


def test_gpipe_and_1f1b_end_at_the_same_time():
    for stages, count in ((2, 3), (4, 8), (4, 2), (3, 1)):
        ends = [
            finish([order(schedule, stage, stages, count) for stage in range(stages)])
            for schedule in (GPIPE, ONE_F_ONE_B)
        ]
        assert ends == [3 * (count + stages - 1)] * 2


GOOD_ORDERS = [["F1", "F2", "B1", "B2"], ["F1", "B1", "F2", "B2"]]


@pytest.mark.parametrize(
    ("first", "hint"),
    [
        (GOOD_ORDERS[0], None),
        ("dict", "returned dict"),
        (["F1", "B1"], "expected F1 to F2 and B1 to B2"),
        (["F1", "F1", "B1", "B2"], "each once"),
        (["F2", "F1", "B1", "B2"], "a backward pass 2 s"),
        (["F1", "B1", "F2", "B2"], "your order ends after 12 s. Expected 9 s"),
        (["B1", "F1", "F2", "B2"], "wait for each other"),
    ],
)
def test_orders_are_judged_by_what_they_keep_and_when_they_end(first, hint):
    verdict = judge_orders([[first, GOOD_ORDERS[1]]], [[2, 2]])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_an_order_that_keeps_too_many_is_reported():
    lists = [["F1", "F2", "F3", "B1", "B2", "B3"], ["F1", "B1", "F2", "B2", "F3", "B3"]]
    message = judge_orders([lists], [[2, 3]]).message
    assert "stage 0 of 2, 3 micro-batches: 3 micro-batches wait" in message
    assert "at once. The stage should keep at most 2" in message
