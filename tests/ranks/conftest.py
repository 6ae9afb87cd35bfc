"""What the tests of ranks share: scripts, and the proof that a job leaves nothing behind."""

import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from labkit.processes import forkserver
from labkit.processes.supervision import processes_of


def shared_segments() -> set[str]:
    """POSIX shared memory, where Linux shows it."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def children_but_the_fork_server() -> list[psutil.Process]:
    """This process's children and the server's: the server itself stays for the next job, unless that needs one of another kind."""
    children = psutil.Process().children()
    servers = [child for child in children if child.pid in (forkserver.pid(), *(process.pid for process in forkserver._retired))]
    deadline = time.monotonic() + 5
    while any(server.children() for server in servers) and time.monotonic() < deadline:
        time.sleep(0.01)  # it may just be told that nobody waits for them any more
    return [child for child in children if child not in servers] + [child for server in servers for child in server.children()]


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Fails a test that leaves a process, and with it a port, a child, a file or a shared segment. Gives the folder of temporary files."""
    tmp_path_factory.getbasetemp()  # pytest's own temporary files lie elsewhere
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))  # the fork server outlives a test
        children, segments = children_but_the_fork_server(), shared_segments()
        yield folder
        assert processes_of(folder) == [] and [child for child in children_but_the_fork_server() if child not in children] == []
        assert list(Path(folder).iterdir()) == []
        assert {name for name in shared_segments() - segments if name.startswith(("torch_", "nccl-"))} == set()


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take gloo, also where there are GPUs: what goes wrong is told in its words."""
    monkeypatch.setenv("LABKIT_VIRTUAL", "1")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes a script."""

    def write(code: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code).lstrip("\n"), encoding="utf-8")
        return path

    return write
