"""A check leaves the learner's random state, GPU memory and GPUs as they were, whatever happens."""

import random

import numpy
import pytest
import torch
from torch import nn

import labkit
from labkit import checks
from labkit.checks import limits
from labkit.checks.checking import Check, not_yet, right

CHECK = Check(
    "98.1",
    draw=lambda generator: generator.randint(1, 99),
    observe=lambda student, number: student(number),
    judge=lambda observed, number: right() if observed == number else not_yet("another number."),
)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(checks, "find", lambda number: CHECK)
    labkit.use(gpus=2, virtual=True, quiet=True)
    yield
    labkit.use(None)


def draws():
    """Return the next random number of each generator."""
    on_gpus = [torch.rand(1, device=f"cuda:{index}").item() for index in range(2)]
    return [random.random(), numpy.random.rand(), torch.rand(1).item(), *on_gpus]


def seeded():
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)


def draw_and_seed(number):
    draws()
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    return number


def draw_and_raise(number):
    draws()
    raise KeyError("lost")


def draw_for_too_long(number):
    draws()
    while True:
        pass


def kept_in_a_frame(number):
    tensor = torch.ones(1 << 20, device="cuda:1")
    while len(tensor):
        pass


def learn(number):
    layers = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, num_layers=2, dropout=0.5)).cuda()
    layers(torch.ones(3, 8, device="cuda"))[0].sum().backward()
    return number


def multiply_on_a_stream(number):
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    return number


@pytest.mark.parametrize("answer", [draw_and_seed, draw_and_raise, draw_for_too_long])
def test_the_random_state_is_restored(answer, monkeypatch):
    monkeypatch.setattr(limits, "LIMIT", 0.2)
    monkeypatch.setattr(limits, "PATIENCE", 0.1)
    seeded()
    expected = draws()
    seeded()
    labkit.check("98.1", answer)
    assert draws() == expected


def test_a_judge_that_draws_changes_no_random_state(monkeypatch):
    def judge(observed, number):
        draws()
        return right()

    changed = Check("98.1", CHECK.draw, CHECK.observe, judge)
    monkeypatch.setattr(checks, "find", lambda number: changed)
    seeded()
    expected = draws()
    seeded()
    assert labkit.check("98.1", lambda number: number).passed
    assert draws() == expected


def allocated():
    return [torch.cuda.memory_allocated(index) for index in range(2)]


@pytest.mark.parametrize("answer", [learn, multiply_on_a_stream])
def test_new_workspaces_are_freed(answer):
    assert allocated() == [0, 0]
    assert labkit.check("98.1", answer).passed
    assert allocated() == [0, 0]


def test_workspaces_that_were_there_stay_and_are_used():
    ones = torch.ones(8, 8, device="cuda")
    product = ones @ ones
    before = allocated()
    assert labkit.check("98.1", learn).passed
    assert allocated() == before
    product = ones @ ones  # takes no other workspace
    assert allocated() == before
    assert product.sum().item() == 512


def test_a_freed_workspace_is_taken_again():
    labkit.check("98.1", multiply_on_a_stream)
    ones = torch.ones(8, 8, device="cuda")
    before = allocated()[0]
    ones @ ones
    assert allocated()[0] - before > 8 << 20


def test_an_answer_that_is_stopped_leaves_no_memory(monkeypatch):
    monkeypatch.setattr(limits, "LIMIT", 0.2)
    monkeypatch.setattr(limits, "PATIENCE", 0.1)
    assert "took longer" in repr(labkit.check("98.1", kept_in_a_frame))
    assert allocated() == [0, 0]
    assert torch.cuda.memory_reserved(1) == 0


def test_a_limit_of_the_notebook_s_own_changes_no_verdict_and_stays():
    """A lesson's cell may set a memory limit with which nothing more fits.

    The check ignores the limit, and restores it afterwards.
    """
    limit = 8 / 1024**2
    torch.cuda.set_per_process_memory_fraction(limit, 1)

    def answer(number):
        torch.ones(1 << 20, device="cuda:1")
        return number

    assert labkit.check("98.1", answer).passed
    assert torch.cuda.get_per_process_memory_fraction(1) == limit


@pytest.mark.parametrize("arguments", [(None,), (1,), (2, "H200")])
def test_an_answer_cannot_change_the_gpus(arguments):
    used = labkit.current()

    def answer(number):
        labkit.use(*arguments, quiet=True)
        return number

    message = repr(labkit.check("98.1", answer))
    assert "labkit.use cannot change the GPUs while labkit.check runs your answer" in message
    assert "Remove the call" in message
    assert labkit.current() is used
    assert labkit.check("98.1", lambda number: number).passed


def test_an_answer_may_ask_for_the_gpus_that_are_in_use():
    def answer(number):
        labkit.use(gpus=2, virtual=True, quiet=True)
        return number

    assert labkit.check("98.1", answer).passed


def test_the_gpus_can_be_taken_away_after_a_check():
    labkit.check("98.1", lambda number: number)
    labkit.use(None)
    assert labkit.current() is None
    labkit.use(gpus=2, virtual=True, quiet=True)
