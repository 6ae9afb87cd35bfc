"""The checks of lesson 08: what is observed of processes, and what is said of it."""

import random
from copy import deepcopy

import pytest
import torch

import labkit
from gpulessons.lesson_08 import checks as lesson_08
from gpulessons.lesson_08 import producer
from gpulessons.lesson_08.checks import CHECKS, MIB
from labkit.checks import checking


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with labkit.use(virtual=True, quiet=True):
        yield


def check(number):
    return next(check for check in CHECKS if check.number == number)


def test_a_matrix_of_each_kind_comes_in_each_draw():
    for seed in range(20):
        cases = lesson_08.draw_tensors(random.Random(seed))
        assert {case["kind"] for case in cases} == {"whole", "transposed", "rows"}
        matrices = {case["kind"]: lesson_08.matrix(case) for case in cases}
        assert matrices["rows"].storage_offset() > 0 and matrices["whole"].is_contiguous()
        assert not any(matrix.is_shared() for matrix in matrices.values())


@pytest.mark.slow
def test_the_truth_of_what_others_hold_is_taken_beside_another_process():
    inputs = {"kept": 40, "cached": 50, "other": 60}
    found = lesson_08.observe_held(lambda: 0, inputs)
    first, second, third = (told["used"] - told["reserved"] for told in found)
    assert first == second and third - second >= 60 * MIB
    assert found[1]["reserved"] - found[1]["allocated"] >= 50 * MIB
    assert not lesson_08.judge_held(found, inputs).passed


def test_a_limit_is_put_back():
    torch.cuda.set_per_process_memory_fraction(0.5)
    checking.run(
        check("08.4"), lambda processes, context: torch.cuda.set_per_process_memory_fraction(0.1)
    )
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_sizes_that_differ_do_not_look_equal():
    total, context = 15 * 1024 * MIB, 293 * MIB
    for change, said in (
        (64 * 1024, "What does the limit count?"),
        (-64 * 1024, "The rest stays unused."),
    ):
        fraction = (total / 7 - context + change) / total
        case = {"processes": 7, "context": context}
        told = lesson_08.judge_limits([{"fraction": fraction, "total": total}], [case]).message
        assert f"take {total + 7 * change:,} bytes. The GPU has {total:,} bytes. {said}" in told


CAME = [
    {
        "type": "Tensor",
        "device": "cuda:0",
        "dtype": "torch.float32",
        "shape": [size],
        "values": [1.0] * size,
    }
    for size in (2, 3)
]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "Right."),
        ({"raised": "ValueError: no"}, "in its process, your function raised ValueError: no"),
        ({"came": [], "lost": "RuntimeError: gone"}, "The tensors that it had sent were lost"),
        ({"waited": False}, "did not wait until `done` was set"),
        ({"came": []}, "expected 2 tensors, and 0 came"),
        ({"ended": False}, "your producer still ran"),
        ({"waited": False, "ended": False}, "your producer still ran"),
        ({"forged": True}, "set or cleared `done` itself"),
        ({"came": [*CAME, {"type": "NoneType"}]}, "after the 2 tensors, more came"),
    ],
)
def test_what_a_producer_did_is_told(changed, said):
    found = {
        "came": CAME,
        "lost": "",
        "waited": True,
        "forged": False,
        "ended": True,
        "raised": "",
    } | deepcopy(changed)
    assert said in lesson_08.judge_producer(found, [2, 3]).message


@pytest.mark.slow
def test_a_producer_may_look_again_and_again():
    def produce(queue, done, sizes):
        for size in sizes:
            queue.put(torch.ones(size, device="cuda"))
        while not done.wait(0.01):
            pass

    assert checking.run(check("08.3"), produce).passed


@pytest.mark.slow
def test_an_error_in_the_producers_process_comes_home():
    def produce(queue, done, sizes):
        raise ValueError("no numbers today")

    verdict = checking.run(check("08.3"), produce)
    assert not verdict.passed
    assert "in its process, your function raised ValueError: no numbers today" in verdict.message


@pytest.mark.slow
def test_a_producer_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(producer, "ENDING", 0.5)

    def produce(queue, done, sizes):
        import time

        for size in sizes:
            queue.put(torch.ones(size, device="cuda"))
        done.wait()
        time.sleep(60)

    assert "your producer still ran" in checking.run(check("08.3"), produce).message


def test_client_0_asks_and_one_client_twice():
    for seed in range(20):
        clients = [
            request["client"]
            for request in lesson_08.draw_requests(random.Random(seed))["requests"]
        ]
        assert 0 in clients and len(set(clients)) < len(clients)


def test_a_server_is_asked_by_every_client_and_ends_with_none():
    inputs = lesson_08.draw_requests(random.Random(3))

    def serve(model, requests, replies):
        with torch.no_grad():
            while (request := requests.get()) is not None:
                replies.put((request[0], model(request[1].cuda()).cpu()))

    found = lesson_08.observe_server(serve, inputs)
    assert len(found["replies"]) == len(inputs["requests"]) == len(found["looks"]) - 1
    assert lesson_08.judge_server(found, inputs).passed
    found["looks"][-1]["allocated"] += 512
    assert "512 B more on the GPU" in lesson_08.judge_server(found, inputs).message
