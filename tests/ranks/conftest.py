"""What the tests of ranks share: scripts, and the proof that a job leaves nothing behind."""

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from labkit.isolation.process import started_in


def shared_segments() -> set[str]:
    """POSIX shared memory, where Linux shows it."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Fails a test that leaves a process, and with it a port, a child, a file or a shared segment. Gives the folder of temporary files."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary files lie elsewhere
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        children, segments = psutil.Process().children(), shared_segments()
        yield folder
        assert started_in(folder) == [] and psutil.Process().children() == children
        assert list(Path(folder).iterdir()) == []
        assert {name for name in shared_segments() - segments if name.startswith(("torch_", "nccl-"))} == set()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes a script."""

    def write(code: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code).lstrip("\n"), encoding="utf-8")
        return path

    return write
