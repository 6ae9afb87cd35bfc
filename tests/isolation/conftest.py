"""What the tests of isolated functions share: a machine, which still works when they have ended."""

from collections.abc import Iterator

import pytest
import torch

import labkit
from labkit.machine import MachineInUse


@pytest.fixture(scope="module")
def machine() -> Iterator[MachineInUse]:
    with labkit.use(2, like="H200", memory="16GiB", virtual=True, quiet=True) as used:
        yield used


@pytest.fixture
def on_virtual(machine: MachineInUse, nothing_left: str) -> Iterator[None]:
    """Two virtual GPUs, which still work when a run has ended."""
    x = torch.ones(3, device="cuda:1")
    yield
    assert (x * 2).sum().item() == 6
