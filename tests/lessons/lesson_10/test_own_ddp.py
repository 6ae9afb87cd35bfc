"""The judge of exercise 10.5, a DDP of one's own, on observations written by hand."""

import random

import pytest

from gpulessons.lesson_10.own_ddp import GRADIENT, MESSAGE, draw, judge

INPUTS = {"width": 8, "layers": 3, "seed": 1, "bucket_bytes": 512}
LAYER = 256  # bytes
READY = [GRADIENT, LAYER]
EVENTS = [READY, READY, [MESSAGE, 2 * LAYER], READY, [MESSAGE, LAYER]]
LATE = [READY, READY, READY, READY, [MESSAGE, 2 * LAYER], [MESSAGE, 2 * LAYER]]
RIGHT = {
    "start": 0.0,
    "gradients": [[0.0, 1e-7]] * 2,
    "events": [EVENTS] * 2,
    "types": ["torch.float32"],
    "overlapped": 1e-4,
    "waited": 0.0,
    "races": [],
    "own": [2e-3, 3.0 * (1 << 20)],
    "torch": [1e-3, 2.0 * (1 << 20)],
}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({}, None),
        ({"returned": "NoneType"}, "returned NoneType"),
        (
            {"start": 0.3},
            "rank 1 does not begin with rank 0's parameters and buffers, but 0.3 away",
        ),
        (
            {"gradients": [[0.0, 0.0], [0.0, 0.5]]},
            "after `finish()` in step 2, the gradients of 1 of 2 parameters are not the mean",
        ),
        ({"gradients": [["none", 0.0]] * 2}, "in step 1, rank 1 has lost the gradient"),
        (
            {"gradients": [["one", 0.0]] * 2},
            "in step 1, rank 1 has a gradient for a parameter that the forward pass",
        ),
        ({"gradients": [[float("nan"), 0.0]] * 2}, "not the mean of all ranks'"),
        (
            {"events": [EVENTS, [READY, [MESSAGE, 4 * LAYER]]]},
            "in step 2, one message took 1,024 bytes. A bucket is full at 512",
        ),
        (
            {"events": [[*EVENTS, [MESSAGE, LAYER]]] * 2},
            "in step 1, 3 messages took 768 bytes of gradients. A bucket is full at 512",
        ),
        (
            {"events": [LATE] * 2},
            "in step 1, 768 bytes of complete gradients had not been sent when another gradient "
            "was complete. A bucket is full at 512 bytes",
        ),
        (
            {"events": [[*EVENTS[:3], *LATE[:-1]]] * 2},
            "in step 1, 768 bytes of complete gradients had not been sent",
        ),
        ({"events": [[*EVENTS, [MESSAGE, 4]]] * 2}, None),  # a message about messages
        ({"overlapped": 0.0}, "What is `async_op`?"),
        (
            {"waited": 2e-4},
            "on rank 1 the backward pass stood still for 200 µs, until a message had arrived",
        ),
        (
            {"races": [["cat", "all_reduce"]]},
            "on rank 1 nothing orders `all_reduce` after `cat`, which touched the same memory",
        ),
        (
            {"gradients": [[0.0, 0.5]], "events": [EVENTS[:4]], "stopped": [2, "backward pass"]},
            "in step 1, 512 of 768 bytes of gradients were sent on rank 1. What sends a bucket "
            "that is not full when the backward pass is over?",
        ),
        (
            {"gradients": [], "events": [], "stopped": [1, "backward pass"]},
            "in the backward pass of step 1, rank 1 read a gradient that was None. Is",
        ),
        (
            {"gradients": [], "events": [], "stopped": [1, "`finish()`"]},
            "in the `finish()` of step 1, rank 1 read a gradient that was None",
        ),
    ],
)
def test_each_rank_is_judged_by_values_messages_and_time(change, hint):
    verdict = judge([RIGHT, RIGHT | change], INPUTS)
    assert verdict.passed == (hint is None), verdict
    assert hint is None or hint in verdict.message


def test_a_right_answer_is_told_its_time_and_memory_beside_pytorch_s():
    told = judge([RIGHT] * 2, INPUTS).message
    assert (
        "take 2 ms and hold at most 3 MiB. With PyTorch's DDP they take 1 ms and hold 2 MiB" in told
    )
    kept = judge([RIGHT | {"own": [2e-3, 4.0 * (1 << 20)]}, RIGHT], INPUTS)
    assert not kept.passed and "a rank holds 4 MiB where PyTorch's DDP holds 2 MiB" in kept.message


def test_a_bucket_holds_four_layers_and_who_counts_to_three_sends_more_messages():
    for seed in range(10):
        inputs = draw(random.Random(seed))
        assert inputs["bucket_bytes"] == 4 * 4 * inputs["width"] ** 2
        assert -(-inputs["layers"] // 3) > inputs["layers"] // 4 + 1
