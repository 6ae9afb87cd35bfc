"""Help grows with each try, and `labkit.progress()` says how far one is."""

import dataclasses

import pytest
import torch

import labkit
from labkit.checks import attempts


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(attempts, "_tries", type(attempts._tries)(list))
    with labkit.use(gpus=1, virtual=True, quiet=True):
        yield


def right(numbers):
    return torch.tensor(numbers, device="cuda")


def wrong(numbers):
    return torch.tensor(numbers)


def test_each_failed_try_helps_more(monkeypatch):
    check = dataclasses.replace(labkit.checks.find("00.1"), section="Your GPU")
    monkeypatch.setattr(labkit.checks, "find", lambda number: check)
    said = [labkit.check("00.1", wrong).message for _ in range(4)]
    assert [message.count("\n") for message in said] == [0, 1, 2, 3]
    assert all(message.startswith("Not yet: your tensor is on cpu.") for message in said)
    assert "It was tried with [" in said[1]
    assert "in its section “Your GPU”" in said[2] and "the solution is folded away" in said[3]
    labkit.check("00.1", right)
    assert labkit.check("00.1", wrong).message.count("\n") == 0  # from the beginning


def test_each_try_has_inputs_of_its_own():
    tried = []
    for _ in range(3):
        labkit.check("00.1", tried.append)
    assert len({tuple(numbers) for numbers in tried}) == 3


def test_progress_counts_tries():
    assert repr(labkit.progress()).startswith("Nothing has been checked yet")
    labkit.check("00.1", None)
    assert repr(labkit.progress("00")) == "Lesson 00: 0 of 1 right\n  00.1 not attempted"
    labkit.check("00.1", wrong)
    assert repr(labkit.progress()) == "Lesson 00: 0 of 1 right\n  00.1 not yet, 1 try"
    labkit.check("00.1", right)
    labkit.check("00.1", wrong)
    assert repr(labkit.progress()) == "Lesson 00: 1 of 1 right\n  00.1 right, at try 2"


def test_an_unknown_lesson_is_named():
    with pytest.raises(ValueError, match="there is no lesson '99' with exercises; there are 00, 01"):
        labkit.progress("99")
