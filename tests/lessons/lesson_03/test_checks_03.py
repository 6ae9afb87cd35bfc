"""Test the checks of lesson 03 with observations written by hand."""

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
RESULT = {"type": "Tensor", "device": "cuda:1", "shape": [3, 1]}
RESULT["values"] = [6 * WIDTH, 8 * WIDTH, 10 * WIDTH]
GOOD = {"devices": [1, 0], "values": [3, 4, 5], "result": RESULT}
GOOD |= {"seen": [["cuda:0", 1], ["cuda:1", 2]], "held": [2 * ROW_BYTES, 0]}
GOOD |= {"gradient": 12, "batch": [2, 2, 2]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"result": {"type": "list"}}, "What puts the outputs together"),
        ({"result": RESULT | {"device": "cuda:0"}}, "the first of the devices"),
        ({"result": RESULT | {"values": [0.0] * 3}}, "differs from the module's own output"),
        ({"seen": [["cuda:1", 3]]}, "it saw 3 rows on cuda:1"),
        ({"seen": []}, "it saw nothing"),
        ({"gradient": 7}, "expected 12 as the gradient of the module's weight, got 7"),
        ({"batch": None}, "the gradient of the batch"),
        ({"held": [4 * ROW_BYTES, 0]}, "needs 512 KiB, for weights and rows. You put 1024 KiB"),
    ],
)
def test_a_batch_is_judged_by_values_places_gradient_and_memory(change, hint):
    verdict = judge_batches([GOOD | change], [CASE])
    assert verdict.passed == (hint is None)
    assert hint is None or hint in verdict.message


def test_peaks_are_those_above_what_was_there():
    first = {"before": 3, "brief": [5, 2], "kept": 1}
    second = {"before": 1, "brief": [7, 3], "kept": 2}
    inputs = {"current": 0, "devices": [0, 1], "gpus": [first, second]}

    def judged(said, inputs=inputs, calls=1, current=0):
        return judge_peaks({"said": said, "calls": calls, "current": current}, inputs)

    assert judged([5 * UNIT, 7 * UNIT + 512]).passed
    assert judged([7 * UNIT, 5 * UNIT], inputs | {"devices": [1, 0]}).passed
    for said in ([8 * UNIT, 8 * UNIT], [5 * UNIT], [None, 7 * UNIT], [7 * UNIT, 5 * UNIT]):
        assert "Since when is a peak counted" in judged(said).message
    right = [5 * UNIT, 7 * UNIT]
    assert "GPU 1 was the current one afterwards" in judged(right, current=1).message
    assert "It ran 2 times" in judged(right, calls=2).message


def test_copies_are_judged_by_device_values_and_gradient():
    case = {"devices": [0, 1], "values": [3, 4], "factors": [2, 5]}
    copy = {"type": "Tensor", "dtype": "torch.float32", "shape": [2, 1], "values": [3, 4]}
    first, second = copy | {"device": "cuda:0"}, copy | {"device": "cuda:1"}

    def judged(second, gradient=(7.0, 7.0)):
        observed = {"copies": [first, second], "gradient": list(gradient)}
        return judge_weights([observed], [case])

    assert judged(second).passed
    assert "Yours is [2.0, 2.0]" in judged(second, [2.0, 2.0]).message
    assert "differs from the weight in its values" in judged(second | {"values": [3, 5]}).message
    assert "its dtype" in judged(second | {"dtype": "torch.float64"}).message
    assert "expected copies on cuda:0, cuda:1, got cuda:0, int" in judged({"type": "int"}).message


def test_parts_are_judged_by_rows_gradient_and_memory():
    case = {"devices": [1, 0], "source": "cuda:1", "rows": [1, 2]}
    parts = [
        ["cuda:1", [1, WIDTH], "torch.float32", [0.0]],
        ["cuda:0", [2, WIDTH], "torch.float32", [1.0, 2.0]],
    ]
    good = {"type": "list", "parts": parts, "gradient": [1.0, 2.0, 2.0], "peak": [2 * ROW_BYTES, 0]}

    def judged(**change):
        return judge_parts([good | change], [case])

    assert judged().passed
    assert "1 on cuda:1, 2 on cuda:0. Yours are 2 on cuda:0" in judged(parts=parts[1:]).message
    assert "do not come back" in judged(gradient=None).message
    assert "cuda:0 needs at most 512 KiB" in judged(peak=[3 * ROW_BYTES, 0]).message
    assert judged(peak=[2 * ROW_BYTES, ROW_BYTES]).passed
    other = judged(peak=[2 * ROW_BYTES, 2 * ROW_BYTES]).message
    assert "cuda:1 needs at most 256 KiB" in other and "view" not in other


def test_tensors_on_another_device_are_reported():
    verdict = judge_losses({"type": "elsewhere", "on": "cuda:0", "due": "cuda:1"}, {})
    assert "for a batch on cuda:1, one of the two tensors is on cuda:0" in verdict.message


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"losses": [2.5, 9.0]}, "What does the criterion return"),
        ({"rows": [3, 0]}, "two GPUs have [2, 1] rows"),
        ({"where": ["cuda:0"]}, "ran on cuda:0."),
        ({"gradient": None}, "get no gradient"),
        ({"gradient": 1.0}, "adds up to 4. Yours adds up to 1.0"),
    ],
)
def test_losses_are_judged_by_sums_rows_and_gradient(change, hint):
    """Judge losses for the outputs 4 and the targets 3, 2 and 8 % 7 = 1.

    The sums of squares are 1 + 4 on the first GPU and 9 on the second. The gradient is
    2 × (1 + 2 + 3) / 3 = 4.
    """
    inputs = {"targets": [3, 2, 8], "shift": 4}
    observed = {"type": "losses", "losses": [5.0, 9.0], "rows": [2, 1], "gradient": 4.0}
    observed["where"] = ["cuda:0", "cuda:1"]
    verdict = judge_losses(observed | change, inputs)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message
