"""The judges of lesson 03 on observations written by hand: they see what the notebook's wrong answers leave unsaid."""

import random

import pytest
import torch

from labkit.checks import lesson_03
from labkit.checks.lesson_03 import ROW_BYTES, WIDTH, chunks, judge_batches, judge_losses, judge_rows, judge_states, judge_weights


@pytest.mark.parametrize(("rows", "gpus"), [(64, 4), (6, 4), (5, 4), (3, 4), (1, 2), (100, 7)])
def test_chunks_are_those_of_scatter(rows, gpus):
    assert chunks(rows, gpus) == [len(part) for part in torch.zeros(rows).chunk(gpus)]


def test_both_orders_of_devices_and_a_tiny_batch_are_tried():
    for seed in range(10):
        cases = lesson_03.draw_batches(random.Random(seed))
        assert {tuple(case["devices"]) for case in cases} == {(0, 1), (1, 0)}
        assert min(len(case["values"]) for case in cases) == 1


CASE = {"devices": [1, 0], "weight": 2, "values": [3, 4, 5]}
RESULT = {"type": "Tensor", "device": "cuda:1", "shape": [3], "values": [6 * WIDTH, 8 * WIDTH, 10 * WIDTH]}
GOOD = {"result": RESULT, "seen": [["cuda:0", 1], ["cuda:1", 2]], "gradient": 12, "held": [2 * ROW_BYTES, 0]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"result": {"type": "list"}}, "What puts the outputs together"),
        ({"result": RESULT | {"device": "cuda:0"}}, "on the first of the devices"),
        ({"result": RESULT | {"values": [0.0] * 3}}, "not what the module itself gives"),
        ({"seen": [["cuda:1", 3]]}, "it saw 3 rows on cuda:1"),
        ({"seen": []}, "it saw nothing"),
        ({"gradient": 7}, "is 7, not 12"),
        ({"held": [4 * ROW_BYTES, 0]}, "needs 512 KiB, for weights and rows; you put 1024 KiB there"),
    ],
)
def test_a_batch_is_judged_by_values_places_gradient_and_memory(change, hint):
    verdict = judge_batches([GOOD | change], [CASE])
    assert verdict.passed == (hint is None)
    assert hint is None or hint in verdict.message


def test_rows_are_judged_by_what_scatter_does():
    assert judge_rows([[2, 2, 1]], [[5, 4]]).passed
    assert "into [2, 2, 1]; you say [2, 1, 1, 1]" in judge_rows([[2, 1, 1, 1]], [[5, 4]]).message
    assert "returned int" in judge_rows(["int"], [[5, 4]]).message


def test_drawn_rows_leave_a_gpu_without_work():
    for seed in range(10):
        assert any(len(chunks(rows, gpus)) < gpus for rows, gpus in lesson_03.draw_rows(random.Random(seed)))


def test_copies_are_judged_by_device_values_and_gradient():
    case = {"devices": [0, 1], "values": [3, 4], "factors": [2, 5]}
    made = [{"type": "Tensor", "device": f"cuda:{i}", "values": [3, 4]} for i in (0, 1)]
    good = {"copies": made, "gradient": [7.0, 7.0]}
    assert judge_weights([good], [case]).passed
    assert "Yours is [2.0, 2.0]" in judge_weights([good | {"gradient": [2.0, 2.0]}], [case]).message
    assert "other values" in judge_weights([good | {"copies": [made[0], made[1] | {"values": [3, 5]}]}], [case]).message
    assert "yours: cuda:0, int" in judge_weights([good | {"copies": [made[0], {"type": "int"}]}], [case]).message


def test_a_state_is_judged_by_the_parameters_after_it():
    case = {"model": "plain", "saved": "bare", "loads": "wrapped", "value": 5}
    assert judge_states([[5.0, 5.0, 5.0]], [case]).passed
    assert "saved from a bare model, loaded into a wrapped one (plain)" in judge_states([[0.0, 5.0, 5.0]], [case]).message


def test_every_pair_of_wrapped_and_bare_is_tried():
    cases = lesson_03.draw_states(random.Random(0))
    assert len({(case["model"], case["saved"], case["loads"]) for case in cases}) == 8


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"losses": [2.5, 9.0]}, "criterion gives their mean"),
        ({"rows": [3, 0]}, "two GPUs have [2, 1] rows"),
        ({"gradient": None}, "adds up to None"),
        ({"gradient": 1.0}, "not to 4."),
    ],
)
def test_losses_are_judged_by_sums_rows_and_gradient(change, hint):
    """Outputs 4, targets 3, 2 and 8 % 7 = 1: squares 1 + 4 on the first GPU, 9 on the second; slope 2 × (1 + 2 + 3) / 3 = 4."""
    inputs = {"targets": [3, 2, 8], "shift": 4}
    observed = {"type": "losses", "losses": [5.0, 9.0], "rows": [2, 1], "gradient": 4.0} | change
    verdict = judge_losses(observed, inputs)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message
