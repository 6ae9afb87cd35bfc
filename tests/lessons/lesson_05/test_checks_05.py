"""Test the checks of lesson 05 with observations written by hand and with used GPUs."""

import random

import pytest
import torch

import labkit
from gpulessons.lesson_05 import checks as lesson_05
from gpulessons.lesson_05.checks import (
    SCRATCH,
    judge_batches,
    judge_holes,
    judge_requests,
    judge_scattered,
    judge_work,
)
from labkit.checks import checking, find

MIB = 1 << 20


def test_requests_lie_on_both_sides_of_each_limit():
    for seed in range(10):
        sizes = lesson_05.draw_requests(random.Random(seed))
        assert {MIB, 10 * MIB} <= set(sizes) and len(sizes) == 10
        assert any(10 * MIB - 512 < size < 10 * MIB for size in sizes)
        assert any(MIB < size <= MIB + 512 for size in sizes)


def test_requests_are_judged_against_what_was_measured():
    assert judge_requests([[2 * MIB, 2 * MIB, 0]], [5]).passed
    assert (
        "Predict the result by calculation" in judge_requests([[2 * MIB, 2 * MIB, 1]], [5]).message
    )
    told = "for a request of 5 bytes PyTorch reserved "
    assert (
        told + "2,097,152 bytes. You returned 5 bytes."
        in judge_requests([[5, 2 * MIB, 0]], [5]).message
    )
    assert (
        told + "2 MiB. You returned 20 MiB."
        in judge_requests([[20 * MIB, 2 * MIB, 0]], [5]).message
    )
    assert "You returned -1 bytes" in judge_requests([[-1, 2 * MIB, 0]], [5]).message


def test_a_size_a_little_off_is_not_shown_rounded():
    message = judge_requests([[10 * MIB + 512, 10 * MIB, 0]], [10 * MIB - 295]).message
    assert "a request of 10,485,465 bytes" in message and "10,486,272" in message
    found = {"answer": 10 * MIB + 1, "free": [10 * MIB], "emptied": False}
    assert "has 10,485,760 bytes. You returned 10,485,761 bytes" in judge_holes([found], {}).message


def test_rows_are_judged_by_values_place_and_what_they_keep():
    inputs = {"dtype": "float64", "rows": [40], "columns": 8192, "count": 2}
    good = {"type": "list", "held": 2 * 8 * 8192, "difference": "", "elsewhere": ""}
    assert judge_batches(good, inputs).passed
    for change in (
        {"held": 40 * 8 * 8192},
        {"difference": "entry 0 has other values"},
        {"elsewhere": "cpu"},
        {"type": "tuple"},
    ):
        assert not judge_batches(good | change, inputs).passed


def test_the_largest_hole_is_neither_all_nor_another():
    none = {"answer": 0, "free": [], "emptied": False}
    found = none | {"free": [1, 3, 2]}
    assert judge_holes([none, found | {"answer": 3}], {}).passed
    assert "only look" in judge_holes([none, found | {"answer": 3, "emptied": True}], {}).message
    assert "expected 0" in judge_holes([none | {"answer": 2}], {}).message
    assert "A request needs one block" in judge_holes([none, found | {"answer": 6}], {}).message
    assert "Which blocks are free" in judge_holes([none, found | {"answer": 2}], {}).message


def test_work_in_pieces():
    case = {"rows": 4, "fits": 2, "fails": False}
    worked = [
        number
        for row in range(4)
        for number in (6.0 * row, 6.0 * row + 2, 6.0 * row + 4, 3.0 * row)
    ]
    result = {"shape": [4, 4], "values": worked, "device": "cuda:0", "dtype": "torch.float64"}
    good = {"result": result, "raised": None, "tries": [[4, 0], [2, 0], [2, 512]]}
    assert judge_work([good], [case]).passed
    changes = {
        "whole batch": {"tries": [[1, 0]] * 4},
        "still allocated": {"tries": [[4, 0], [2, SCRATCH], [2, SCRATCH]]},
        "the right rows in another order": {"result": result | {"values": worked[8:] + worked[:8]}},
        "the right shape, but other values": {"result": result | {"values": [1.0] * 16}},
        "Expected a tensor of shape [4, 4], as `work` makes it. Yours has shape [4, 3]": {
            "result": result | {"shape": [4, 3]}
        },
        "`work` returns torch.float64, and you returned torch.float32": {
            "result": result | {"dtype": "torch.float32"}
        },
        "is on the CPU": {"result": result | {"device": "cpu"}},
        "You returned list": {"result": {"type": "list"}},
        "Halve them": {"tries": [[4, 0], *[[1, 0]] * 5]},
        "Halve only what does not fit": {"tries": [[4, 0], [2, 0], *[[1, 0]] * 4]},
        "tried no fewer": {"tries": [[4, 0]]},
        "your function raised": {
            "raised": "OutOfMemoryError: CUDA out of memory: 1 rows do not fit"
        },
    }
    for hint, change in changes.items():
        assert hint in judge_work([good | change], [case]).message
    thirds = good | {"tries": [[8, 0], [4, 0], [3, 0], [2, 0], [2, 0]]}
    assert "You tried 3 of the 8 rows" in judge_work([thirds], [case | {"rows": 8}]).message


def test_a_row_that_does_not_fit_and_another_error_are_raised():
    one = {
        "result": None,
        "raised": "OutOfMemoryError: CUDA out of memory: 1 rows do not fit",
        "tries": [[3, 0], [1, 0]],
    }
    assert judge_work([one], [{"rows": 3, "fits": 0, "fails": False}]).passed
    assert (
        "ended with a result"
        in judge_work([one | {"raised": None}], [{"rows": 3, "fits": 0, "fails": False}]).message
    )
    other = {"result": None, "raised": "UnrelatedError: shapes", "tries": [[3, 0]]}
    assert judge_work([other], [{"rows": 3, "fits": 1, "fails": True}]).passed
    assert "not about memory" in judge_work([one], [{"rows": 3, "fits": 1, "fails": True}]).message


def test_tensors_moved_together():
    inputs = {"sizes": [4 * MIB, 5 * MIB], "values": [7, 9]}
    good = {
        "before": 40 * MIB,
        "after": 20 * MIB,
        "least": 20 * MIB,
        "difference": "",
        "elsewhere": "",
    }
    assert judge_scattered(good, inputs).passed
    for change in (
        {"after": 40 * MIB},
        {"difference": "entry 1 has other values"},
        {"elsewhere": "cuda:1"},
    ):
        assert not judge_scattered(good | change, inputs).passed


def reserved_for(nbytes):
    block = -(-nbytes // 512) * 512
    if block <= MIB:
        return 2 * MIB
    if block < 10 * MIB:
        return 20 * MIB
    return -(-block // (2 * MIB)) * 2 * MIB


def compact(tensors):
    copies = [tensor.cpu() for tensor in tensors]
    tensors.clear()
    torch.cuda.empty_cache()
    tensors.extend(copy.cuda() for copy in copies)


@pytest.mark.parametrize(("number", "answer"), [("05.1", reserved_for), ("05.3", compact)])
def test_holes_of_the_notebook_s_own_change_nothing(number, answer):
    with labkit.use(memory="2GiB", virtual=True, quiet=True):
        kept = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(12)][::4]
        streams = [torch.cuda.Stream() for _ in range(30)]
        for stream in streams:
            with torch.cuda.stream(stream):
                kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
        verdict = checking.run(find(number), answer, seed=1)
        assert verdict.passed, verdict
