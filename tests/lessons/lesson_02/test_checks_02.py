"""Test the checks of lesson 02 with observations written by hand."""

import random

import pytest

from gpulessons.lesson_02 import checks as lesson_02
from gpulessons.lesson_02.checks import (
    BATCHES,
    SIZE,
    judge_batches,
    judge_durations,
    judge_losses,
    judge_values,
    judge_work,
)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (0.0101, None),
        (0.0091, None),
        (0.0, "Did you wait until the GPU had finished"),
        (0.030, "in the stream before"),
        (10.0, "Return seconds"),
        (10e3, "Return seconds"),
        (-0.010, "Which of the two times comes first"),
        ("str", "returned str"),
    ],
)
def test_a_measured_time_is_compared_with_that_of_events(said, hint):
    verdict = judge_durations([[said, 0.010, 1]], [{"pieces": [10.0], "queued": 20.0}])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_work_that_is_called_twice_is_reported():
    verdict = judge_durations([[0.0101, 0.010, 2]], [{"pieces": [10.0], "queued": 0.0}])
    assert not verdict.passed and "called work 2 times" in verdict.message


def test_some_work_is_asked_for_with_a_full_queue_and_some_with_an_empty_one():
    for seed in range(10):
        queued = [case["queued"] > 0 for case in lesson_02.draw_durations(random.Random(seed))]
        assert sorted(queued) == [False, False, True, True]


LOSS = {"type": "Tensor", "device": "cuda:0", "shape": [], "values": [20.0]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"waited": True}, "your function waited"),
        ({"result": {"type": "float"}}, "returned float"),
        ({"result": LOSS | {"device": "cpu"}}, "got one on cpu"),
        ({"result": LOSS | {"values": [21.0]}}, "is 20. Your result is 21"),
        ({"graph": True}, "requires a gradient"),
        ({"backward": True}, "has a gradient"),
        ({"modes": [False]}, "ran it in another mode"),
        ({"modes": [False, True]}, "ran it in another mode"),
        ({"training": False}, "the model was in evaluation mode"),
    ],
)
def test_a_loss_is_judged_by_its_value_its_place_and_who_waited(change, hint):
    """Judge the losses of the values 1 and 3, which are doubled: 4 and 36."""
    observed = {"result": LOSS, "waited": False, "graph": False, "backward": False}
    observed |= {"training": True, "modes": [True]}
    verdict = judge_losses([observed | change], [[[1, 5], [3, 2]]])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"seen": []}, "It ran 0 times"),
        ({"seen": [False]}, "called on another stream"),
        ({"sum": None, "type": "NoneType"}, "returned NoneType"),
        ({"left": True}, "no longer the current one"),
        ({"waited": True}, "the host waited"),
        ({"sum": -float(SIZE)}, "was overwritten"),
        ({"sum": 0.0}, "Work read numbers that were not there yet"),
        ({"kept": True}, "What else holds the result"),
        ({"sum": 2.0 * SIZE}, "that of `x`"),
    ],
)
def test_work_on_a_stream_is_judged_by_what_was_read(change, hint):
    observed = {"type": "Tensor", "seen": [True], "waited": False}
    observed |= {"left": False, "sum": 6.0 * SIZE, "kept": False}
    verdict = judge_work([observed | change], [{"value": 2, "factor": 3}])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


FETCHED = {"waited": False, "too long": False, "before": False, "type": "Tensor", "device": "cpu"}
FETCHED |= {"dtype": "torch.float32", "shape": [2, SIZE], "values": [3.0, 4.0]}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"waited": True}, "fetch itself waited"),
        ({"too long": True}, "launched after the copy"),
        ({"values": [0.0, 4.0]}, "Had the copy arrived"),
        ({"values": [-2.0, 4.0]}, "does it wait for the caller's stream"),
        ({"device": "cuda:0"}, "got a tensor on cuda:0"),
        ({"dtype": "torch.int32"}, "of torch.int32"),
        ({"before": True}, "Each result needs its own memory"),
    ],
)
def test_a_fetched_tensor_is_judged_by_values_and_waits(change, hint):
    verdict = judge_values([FETCHED | change], [{"rows": [3, 4], "dtype": "torch.float32"}])
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_what_is_no_tensor_is_named():
    verdict = judge_values([{"waited": False, "type": "dict"}], [{"rows": [3, 4]}])
    assert "It returned dict" in verdict.message


VALUES = list(range(1, BATCHES + 1))
LOADED = {"means": [float(value) for value in VALUES], "devices": ["cuda:0"] * BATCHES}
LOADED |= {"ahead": 1, "kept": 1, "waited": False, "moved": False}
LOADED |= {"alone": 1, "none": 0, "reused": []}
SECONDS = {"copies": 0.010, "work": 0.020, "both": 0.021, "held": 0.0001, "first": 0.0001}
LOADED["seconds"] = SECONDS


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"means": LOADED["means"][:-1]}, "gave 7"),
        ({"devices": ["cpu"] * BATCHES}, "expected batches on the GPU"),
        ({"means": [2.0, *LOADED["means"][1:]]}, "batch 0 read values of another batch"),
        ({"means": [0.0, *LOADED["means"][1:]]}, "batch 0 read values of no batch"),
        ({"moved": True}, "Yield outside of"),
        ({"reused": [7]}, "batch 7 read values of another batch"),
        ({"none": 1}, "for none it gave 1"),
        ({"ahead": 3}, "took 3 batches that the loop had not asked for"),
        ({"kept": 8}, "still held 8 batches"),
        ({"seconds": SECONDS | {"both": 0.030}}, "0% of the copying is hidden. Expected 60%"),
        ({"seconds": SECONDS | {"both": 0.025}}, "50% of the copying is hidden"),
        ({"seconds": SECONDS | {"held": 0.001}}, "it waits there"),
        ({"waited": True}, "the host waited in your loader"),
        ({"seconds": SECONDS | {"first": 0.0025}}, "after the second batch had been copied"),
    ],
)
def test_a_loader_is_judged_by_values_reach_and_overlap(change, hint):
    verdict = judge_batches(LOADED | change, {"values": VALUES, "longer": 2.0})
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_the_message_says_how_much_copying_is_hidden():
    verdict = judge_batches(LOADED, {"values": VALUES, "longer": 2.0})
    assert "90% of the copying is hidden" in verdict.message
