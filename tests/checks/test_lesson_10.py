"""The judges of lesson 10 on observations written by hand, and what its text shows of the programs."""

import random
import re
from pathlib import Path

import nbformat
import pytest

from labkit.checks import lesson_10
from labkit.checks.lesson_10 import (
    judge_accumulation,
    judge_budgets,
    judge_gradients,
    judge_layers,
    judge_lives,
    judge_rows,
)
from labkit.labs import rank_program

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "10_processes_and_machines.ipynb"


def test_the_lesson_shows_lines_of_the_programs_as_they_stand():
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "markdown")
    shown = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL)
    assert {name for name, _ in shown} == {"messages", "shards", "stages", "resuming"}
    for name, lines in shown:
        there = [line.strip() for line in rank_program(name).read_text().splitlines()]
        assert [line for line in lines.splitlines() if line.strip() not in there] == []


CASE = [[[1, 2, 3], [4, 5]], [[3, 4, 5], [0, 1]]]
MEANS = [[2.0, 3.0, 4.0], [2.0, 3.0], None]
GOOD = {"gradients": MEANS, "parameters": [[1.0] * 3, [1.0] * 2, [1.0] * 2]}


@pytest.mark.parametrize(
    ("second", "hint"),
    [
        (GOOD, None),
        (GOOD | {"parameters": [[0.5] * 3, [1.0] * 2, [1.0] * 2]}, "rank 1 of 2 has changed its parameters"),
        (GOOD | {"gradients": [[4.0, 6.0, 8.0], *MEANS[1:]]}, r"the mean over all ranks is [2, 3, 4], and it has [4, 6, 8] now"),
        (GOOD | {"gradients": [MEANS[0], None, None]}, "and it has none now"),
    ],
)
def test_gradients_are_judged_on_every_rank(second, hint):
    verdict = judge_gradients([[GOOD, second]], [CASE])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


EPOCHS = {"count": 5, "ranks": 2, "epochs": [3, 8]}


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        ([[[4, 0, 2], [1, 3]], [[0, 1, 2], [4, 3]]], None),
        (["int", "int"], "returned"),
        ([[[4, 0], [1, 3]], [[0, 1, 2], [4, 3]]], "of 5 rows, 1 went to none of 2 ranks in epoch 3, and 0 came up once more"),
        ([[[4, 0, 2], [1, 4]], [[0, 1, 2], [4, 3]]], "1 went to none of 2 ranks in epoch 3, and 1 came up once more"),
        ([[[4, 0, 2, 1], [3]], [[0, 1, 2], [4, 3]]], "the ranks have [4, 1] rows"),
        ([[[4, 0, 2], [1, 3]], [[4, 0, 2], [1, 3]]], "epochs 3 and 8 give each rank the same rows"),
        ([[[0, 2, 4], [1, 3]], [[0, 1, 2], [4, 3]]], "shuffle them"),
    ],
)
def test_rows_are_judged_over_ranks_and_epochs(told, hint):
    verdict = judge_rows([told if told[0] != "int" else [["int", "int"]] * 2], [EPOCHS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


# Rows (1, 0) and (0, 2) on rank 0, (2, 0) and (0, 0) on rank 1, weights of 0.5: (row · w)² has the gradient (x0 + x1) · row.
PARTS = [[[[1, 0]], [[0, 2]]], [[[2, 0]], [[0, 0]]]]
SENT_ONCE = {"gradient": [1.25, 1.0], "messages": 1, "weight": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"weight": [0.4, 0.5]}, "the weights have changed"),
        ({"messages": 0}, "nothing was sent"),
        ({"gradient": [2.5, 2.0]}, "rank 0 has the gradient [2.5, 2]; that of all ranks' rows in one batch is [1.25, 1]"),
        ({"gradient": None}, "has the gradient none"),
        ({"messages": 2}, "it was sent 2 times; once is enough for 2 micro-batches"),
    ],
)
def test_accumulation_is_judged_by_gradient_and_messages(change, hint):
    verdict = judge_accumulation([SENT_ONCE | change] * 2, PARTS)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


# Momenta 8, 12, 14 with gradients of 8: the weight falls by an eighth of their sum.
LIVES = {"steps": 3, "dies": 1, "gradients": [8, 8, 8]}
FIRST = [{"begun": [0, 1], "weight": 0.0, "momentum": 8.0, "saved": 1}, {"begun": [0, 1], "weight": 0.0, "momentum": 8.0, "saved": 0}]
SECOND = {"begun": [1, 2], "weight": -3.25, "momentum": 14.0, "saved": 2}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"first": [FIRST[0] | {"begun": [0, 1, 2]}, FIRST[1]]}, "was to do the steps 0 to 1, where it died; it did [0, 1, 2]"),
        ({"kept": False}, "no checkpoint was there"),
        ({"first": [FIRST[0], FIRST[1] | {"saved": 1}]}, "rank 1 saved the checkpoint too"),
        (
            {"second": [SECOND | {"begun": [0, 1, 2]}] * 2},
            "1 steps were done when the ranks died; started again, rank 0 did [0, 1, 2] of 3",
        ),
        ({"second": [SECOND | {"weight": -2.0, "momentum": 12.0}] * 2}, "The momentum was not restored"),
        ({"second": [SECOND, SECOND | {"weight": -2.0}]}, "rank 1 ends with the weight -2; without a death it is -3.25. The weight"),
    ],
)
def test_lives_are_judged_by_their_steps_and_their_end(change, hint):
    verdict = judge_lives({"first": FIRST, "second": [SECOND] * 2, "kept": True} | change, LIVES)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


LAYERS = {"ranks": 2, "x": [[1, 2]], "first": [[1, 1], [-1, 0]], "first_bias": [1, 0], "second": [[2, 5]], "second_bias": [3]}


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        ({"type": "Tensor", "shape": [1, 1], "values": [11.0]}, None),
        ({"type": "tuple"}, "rank 1 of 2 returned tuple"),
        ({"type": "Tensor", "shape": [1, 2], "values": [11.0, 11.0]}, "a tensor of [1, 2]; [1, 1] was due"),
        ({"type": "Tensor", "shape": [1, 1], "values": [14.0]}, "rank 1 of 2 has [14] … where the whole layers give [11]"),
    ],
)
def test_cut_layers_are_judged_on_every_rank(answer, hint):
    good = {"type": "Tensor", "shape": [1, 1], "values": [11.0]}
    verdict = judge_layers([[good, answer]], [LAYERS])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_budgets_are_judged_by_the_fewest_gpus_that_are_enough():
    case = [100, 10, 440]  # 1,600 bytes in rooms of 400
    assert judge_budgets([4], [case]).passed
    for answer, hint in ((5, "4 GPUs are enough and fewer are not; you say 5"), (3, "you say 3"), ("float", "returned float")):
        assert hint in judge_budgets([answer], [case]).message


def test_the_whole_layer_matters_in_some_drawn_budget():
    for seed in range(20):
        cases = lesson_10.draw_budgets(random.Random(seed))
        needed = [-(-16 * parameters // (memory - 4 * layer)) for parameters, layer, memory in cases]
        assert min(needed) == 1 < max(needed)
        assert needed != [-(-16 * parameters // memory) for parameters, _, memory in cases]


def test_the_rest_of_the_rows_is_too_much_for_one_rank():
    for seed in range(20):
        cases = lesson_10.draw_epochs(random.Random(seed))
        assert all(case["count"] % case["ranks"] for case in cases)
        assert any(case["count"] % case["ranks"] > 1 for case in cases)
