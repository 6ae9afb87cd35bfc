"""What the tests of isolated runs share: a machine, and the proof that a run leaves nothing behind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit.machine import Machine
from labkit.processes.supervision import processes_of


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves a process, a child or a file."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary files lie elsewhere
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        children = psutil.Process().children()
        yield
        assert list(Path(folder).iterdir()) == []
        assert processes_of(folder) == [] and psutil.Process().children() == children


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with labkit.use(2, like="H200", memory="16GiB", virtual=True, quiet=True) as used:
        yield used


@pytest.fixture
def on_virtual(machine: Machine, nothing_left: None) -> Iterator[None]:
    """Two virtual GPUs, which still work when a run has ended."""
    x = torch.ones(3, device="cuda:1")
    yield
    assert (x * 2).sum().item() == 6
