"""The judges of lesson 12 on observations written by hand."""

import random

import pytest

from labkit.checks import lesson_12, rank_programs
from labkit.checks.lesson_12 import judge_budgets, judge_layers

LAYERS = {"ranks": 2, "x": [[1, 2]], "first": [[1, 1], [-1, 0]], "first_bias": [1, 0], "second": [[2, 5]], "second_bias": [3]}


def test_what_an_answer_changes_of_its_layers_is_told():
    def two_layers(x, first, first_bias, second, second_bias):
        second_bias /= 2
        return x

    assert rank_programs.cut_layers(two_layers, LAYERS | {"rank": 0})["changed"] == ["second_bias"]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({"type": "Tensor", "shape": [1, 1], "values": [11.0]}, None),
        ({"type": "tuple"}, "rank 1 of 2 returned tuple"),
        ({"type": "Tensor", "shape": [1, 2], "values": [11.0, 11.0]}, "a tensor of [1, 2]; [1, 1] was due"),
        ({"type": "Tensor", "shape": [1, 1], "values": [14.0]}, "rank 1 of 2 has [14] … where the whole layers give [11]"),
        ({"changed": ["second_bias"]}, "rank 1 of 2 has changed second_bias"),
    ],
)
def test_cut_layers_are_judged_on_every_rank(answer, hint):
    good = {"type": "Tensor", "shape": [1, 1], "values": [11.0], "changed": []}
    verdict = judge_layers([[good, good | answer]], [LAYERS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_budgets_are_judged_by_the_fewest_gpus_that_are_enough():
    case = [100, 10, 480]  # 1,600 bytes in rooms of 400
    assert judge_budgets([4], [case]).passed
    for answer, hint in ((5, "4 GPUs are enough and fewer are not; you say 5"), (3, "you say 3"), ("float", "returned float")):
        assert hint in judge_budgets([answer], [case]).message


def test_the_whole_layer_matters_in_some_drawn_budget():
    for seed in range(20):
        cases = lesson_12.draw_budgets(random.Random(seed))
        needed = [-(-16 * parameters // (memory - 8 * layer)) for parameters, layer, memory in cases]
        assert min(needed) == 1 < max(needed)
        assert needed != [-(-16 * parameters // memory) for parameters, _, memory in cases]
