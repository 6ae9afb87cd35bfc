"""What the tests of races share: a machine of their own, and a second stream."""

from collections.abc import Iterator

import pytest
import torch

import labkit


@pytest.fixture
def raced() -> Iterator[labkit.machine.MachineInUse]:
    """A machine of the test's own: one stream more, and races are looked for to its end."""
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True) as machine:
        torch.cuda.init()
        yield machine


@pytest.fixture
def side(raced: object) -> torch.cuda.Stream:
    return torch.cuda.Stream()
