"""The judges of lesson 03 on observations written by hand: they see what the notebook's wrong answers leave unsaid."""

import random
import re

import pytest
import torch
from torch import nn

import labkit
from gpulessons.lesson_03 import checks as lesson_03
from gpulessons.lesson_03.checks import (
    ROW_BYTES,
    UNIT,
    WIDTH,
    chunks,
    judge_batches,
    judge_losses,
    judge_parts,
    judge_peaks,
    judge_weights,
)


@pytest.mark.parametrize(("rows", "gpus"), [(64, 4), (6, 4), (5, 4), (3, 4), (1, 2), (100, 7)])
def test_chunks_are_those_of_scatter(rows, gpus):
    assert chunks(rows, gpus) == [len(part) for part in torch.zeros(rows).chunk(gpus)]


def test_two_orders_of_devices_and_a_tiny_batch_are_tried():
    for seed in range(10):
        cases = lesson_03.draw_batches(random.Random(seed))
        orders = {tuple(case["order"]) for case in cases}
        assert len(orders) == 2 and all(sorted(order) == [0, 1, 2, 3] for order in orders)
        assert [case["each"] * 4 + case["more"] < 4 for case in cases] == [True, False, False]


def two_gpus_alone(module, x, device_ids):
    inputs = nn.parallel.scatter(x, device_ids[:2])
    outputs = nn.parallel.parallel_apply(
        nn.parallel.replicate(module, device_ids[: len(inputs)]), inputs
    )
    return nn.parallel.gather(outputs, device_ids[0])


def the_module_alone_for_few_rows(module, x, device_ids):
    if len(x) < len(device_ids):
        return module(x)
    outputs = nn.parallel.parallel_apply(
        nn.parallel.replicate(module, device_ids), nn.parallel.scatter(x, device_ids)
    )
    return nn.parallel.gather(outputs, device_ids[0])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (two_gpus_alone, "the module should see"),
        (the_module_alone_for_few_rows, "the module should see|not equal to"),
    ],
)
def test_an_answer_is_tried_on_as_many_gpus_as_there_are(answer, said):
    with labkit.use(gpus=4, virtual=True, quiet=True):
        verdict = labkit.check("03.1", answer)
    assert not verdict.passed and re.search(said, verdict.message), verdict


CASE = {"weight": 2}
RESULT = {
    "type": "Tensor",
    "device": "cuda:1",
    "shape": [3, 1],
    "values": [6 * WIDTH, 8 * WIDTH, 10 * WIDTH],
}
GIVEN = {"devices": [1, 0], "values": [3, 4, 5]}
GOOD = GIVEN | {
    "result": RESULT,
    "seen": [["cuda:0", 1], ["cuda:1", 2]],
    "gradient": 12,
    "batch": [2, 2, 2],
    "held": [2 * ROW_BYTES, 0],
}


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
        ({"batch": None}, "the gradient of the batch"),
        (
            {"held": [4 * ROW_BYTES, 0]},
            "needs 512 KiB, for weights and rows; you put 1024 KiB there",
        ),
    ],
)
def test_a_batch_is_judged_by_values_places_gradient_and_memory(change, hint):
    verdict = judge_batches([GOOD | change], [CASE])
    assert verdict.passed == (hint is None)
    assert hint is None or hint in verdict.message


def test_peaks_are_those_above_what_was_there():
    inputs = {"current": 0, "devices": [0, 1]}
    inputs |= {
        "gpus": [
            {"before": 3, "brief": [5, 2], "kept": 1},
            {"before": 1, "brief": [7, 3], "kept": 2},
        ]
    }
    observed = {"calls": 1, "current": 0}
    assert judge_peaks(observed | {"said": [5 * UNIT, 7 * UNIT + 512]}, inputs).passed
    for said in ([8 * UNIT, 8 * UNIT], [5 * UNIT], [None, 7 * UNIT], [7 * UNIT, 5 * UNIT]):
        assert (
            "Since when is a peak counted" in judge_peaks(observed | {"said": said}, inputs).message
        )
    assert judge_peaks(
        observed | {"said": [7 * UNIT, 5 * UNIT]}, inputs | {"devices": [1, 0]}
    ).passed
    assert (
        "GPU 1 afterwards"
        in judge_peaks(observed | {"said": [5 * UNIT, 7 * UNIT], "current": 1}, inputs).message
    )
    assert (
        "it ran 2 times" in judge_peaks({"said": [5 * UNIT, 7 * UNIT], "calls": 2}, inputs).message
    )


def test_copies_are_judged_by_device_values_and_gradient():
    case = {"devices": [0, 1], "values": [3, 4], "factors": [2, 5]}
    made = [
        {
            "type": "Tensor",
            "device": f"cuda:{i}",
            "dtype": "torch.float32",
            "shape": [2, 1],
            "values": [3, 4],
        }
        for i in (0, 1)
    ]
    good = {"copies": made, "gradient": [7.0, 7.0]}
    assert judge_weights([good], [case]).passed
    assert "Yours is [2.0, 2.0]" in judge_weights([good | {"gradient": [2.0, 2.0]}], [case]).message
    assert (
        "other values"
        in judge_weights(
            [good | {"copies": [made[0], made[1] | {"values": [3, 5]}]}], [case]
        ).message
    )
    assert (
        "another dtype"
        in judge_weights(
            [good | {"copies": [made[0], made[1] | {"dtype": "torch.float64"}]}], [case]
        ).message
    )
    assert (
        "yours: cuda:0, int"
        in judge_weights([good | {"copies": [made[0], {"type": "int"}]}], [case]).message
    )


def test_parts_are_judged_by_rows_gradient_and_memory():
    case = {"devices": [1, 0], "source": "cuda:1", "rows": [1, 2]}
    parts = [
        ["cuda:1", [1, WIDTH], "torch.float32", [0.0]],
        ["cuda:0", [2, WIDTH], "torch.float32", [1.0, 2.0]],
    ]
    good = {"type": "list", "parts": parts, "gradient": [1.0, 2.0, 2.0], "peak": [2 * ROW_BYTES, 0]}
    assert judge_parts([good], [case]).passed
    assert (
        "1 on cuda:1, 2 on cuda:0. Yours are 2 on cuda:0"
        in judge_parts([good | {"parts": parts[1:]}], [case]).message
    )
    assert "do not come back" in judge_parts([good | {"gradient": None}], [case]).message
    assert (
        "cuda:0 needs at most 512 KiB"
        in judge_parts([good | {"peak": [3 * ROW_BYTES, 0]}], [case]).message
    )
    assert judge_parts([good | {"peak": [2 * ROW_BYTES, ROW_BYTES]}], [case]).passed
    other = judge_parts([good | {"peak": [2 * ROW_BYTES, 2 * ROW_BYTES]}], [case]).message
    assert "cuda:1 needs at most 256 KiB" in other and "view" not in other


def test_tensors_that_are_elsewhere_are_told():
    verdict = judge_losses({"type": "elsewhere", "on": "cuda:0", "due": "cuda:1"}, {})
    assert "for a batch on cuda:1, one of the two tensors is on cuda:0" in verdict.message


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"losses": [2.5, 9.0]}, "criterion gives their mean"),
        ({"rows": [3, 0]}, "two GPUs have [2, 1] rows"),
        ({"where": ["cuda:0"]}, "ran on cuda:0."),
        ({"gradient": None}, "get no gradient"),
        ({"gradient": 1.0}, "not to 4."),
    ],
)
def test_losses_are_judged_by_sums_rows_and_gradient(change, hint):
    """Outputs 4, targets 3, 2 and 8 % 7 = 1: squares 1 + 4 on the first GPU, 9 on the second; slope 2 × (1 + 2 + 3) / 3 = 4."""
    inputs = {"targets": [3, 2, 8], "shift": 4}
    observed = {
        "type": "losses",
        "losses": [5.0, 9.0],
        "rows": [2, 1],
        "gradient": 4.0,
        "where": ["cuda:0", "cuda:1"],
    } | change
    verdict = judge_losses(observed, inputs)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message
