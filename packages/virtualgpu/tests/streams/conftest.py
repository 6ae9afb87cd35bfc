"""Fixtures of the tests of races: a machine for each test, with a second stream."""

from collections.abc import Iterator

import pytest
import torch

import virtualgpu


@pytest.fixture
def raced() -> Iterator[virtualgpu.VirtualGPUs]:
    """A machine with a second stream, whose races are collected until the test ends."""
    with virtualgpu.use(gpus=2, like="H200") as machine:
        torch.cuda.init()
        yield machine


@pytest.fixture
def side(raced: object) -> torch.cuda.Stream:
    return torch.cuda.Stream()
