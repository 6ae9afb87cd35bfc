"""What a submission replaced is named; what the kit itself replaces is not."""

import pytest
import torch

import labkit
from labcourse.integrity import Originals
from labkit import checks
from labkit.checks import checking


def of_a_cell(source: str):
    """A function as a notebook's cell defines it."""
    names: dict = {}
    exec(compile(source, "<cell>", "exec"), names)
    return names["forged"]


FORGED = "def forged(*args, **kwargs): return True"


def test_a_function_that_was_replaced_is_named(monkeypatch):
    checks.exercises()
    originals = Originals()
    assert originals.changed() == []
    monkeypatch.setattr(torch, "full", of_a_cell(FORGED))
    monkeypatch.setattr(torch, "load", of_a_cell(FORGED))  # on which no check relies
    monkeypatch.setattr(torch.Tensor, "__repr__", of_a_cell(FORGED))
    monkeypatch.setattr(torch.Tensor, "item", of_a_cell(FORGED))
    monkeypatch.setattr(checking, "observe", of_a_cell(FORGED))
    assert originals.changed() == ["labkit.checks.checking.observe", "torch.Tensor.item", "torch.full"]


@pytest.mark.slow
def test_a_machine_that_is_put_in_place_is_no_forgery():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        torch.ones(1, device="cuda").item()
    originals = Originals()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        originals.learn()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        torch.ones(1, device="cuda").item()
        assert originals.changed() == []
    assert originals.changed() == []
