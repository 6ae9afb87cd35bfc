"""What the tests of races share: a machine of their own, and a second stream."""

from collections.abc import Iterator

import pytest
import torch

import virtualgpu


@pytest.fixture
def raced() -> Iterator[virtualgpu.VirtualGPUs]:
    """A machine of the test's own: one stream more, and races are looked for to its end."""
    with virtualgpu.use(gpus=2, like="H200") as machine:
        torch.cuda.init()
        yield machine


@pytest.fixture
def side(raced: object) -> torch.cuda.Stream:
    return torch.cuda.Stream()
