"""What tests of graphs share: a machine of their own, for a capture makes a stream."""

from collections.abc import Iterator

import pytest
import torch

import labkit


@pytest.fixture
def graphed() -> Iterator[labkit.machine.MachineInUse]:
    with labkit.use(gpus=2, like="H200", virtual=True, quiet=True) as machine:
        torch.cuda.init()
        yield machine
        torch.cuda.set_stream(torch.cuda.default_stream(0))
