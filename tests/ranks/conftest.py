"""Fixtures of the tests of ranks."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.ranks.job import TorchrunJob


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks use gloo even if there are GPUs, because the tests expect gloo's errors."""
    monkeypatch.setenv("LABKIT_VIRTUAL", "1")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes a script and returns its path."""

    def write(code: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code).lstrip("\n"), encoding="utf-8")
        return path

    return write


@pytest.fixture
def slow_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job read the ranks' messages only after a while, as on a busy machine."""
    look = TorchrunJob._look

    def late(job: TorchrunJob, seconds: float) -> bool:
        time.sleep(0.7)
        return look(job, seconds)

    monkeypatch.setattr(TorchrunJob, "_look", late)
