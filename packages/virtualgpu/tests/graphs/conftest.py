"""A machine for each test of graphs, because a capture makes a stream."""

from collections.abc import Iterator

import pytest
import torch

import virtualgpu


@pytest.fixture
def graphed() -> Iterator[virtualgpu.VirtualGPUs]:
    with virtualgpu.use(gpus=2, like="H200") as machine:
        torch.cuda.init()
        yield machine
        torch.cuda.set_stream(torch.cuda.default_stream(0))
