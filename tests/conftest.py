"""What the tests of the kit share: a look at what processes leave behind.

Only fixtures import the kit, because the tests of platforms run where it is not installed.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import pytest


def shared_segments() -> set[str]:
    """Return the names of the segments of POSIX shared memory, if Linux shows them."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def may_be_mine(segment: str) -> bool:
    """Return whether PyTorch or NCCL of this test run made a shared memory segment.

    Segments of other processes, such as other workers of the tests, do not count.
    """
    maker = re.match(r"torch_(\d+)_", segment)
    if maker is None:
        return segment.startswith("nccl-")
    mine = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return int(maker[1]) in mine or not psutil.pid_exists(int(maker[1]))


def what_stays(left: Callable[[], Collection[object]]) -> Collection[object]:
    """Wait until `left` returns nothing or some time has passed, and return what is left.

    On a busy machine, processes take long to end.
    """
    deadline = time.monotonic() + 30
    found = left()
    while found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = left()
    return found


def command_line(process: psutil.Process) -> str:
    """Return the command of a process, empty if the process has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # ZombieProcess is one
        return ""


def children_but_the_fork_server() -> list[psutil.Process]:
    """Return this process's children and those of its fork servers.

    A server itself stays for the next job. It ends when the next job needs another one.
    """
    children = psutil.Process().children()
    servers = [child for child in children if "import forkserver" in command_line(child)]
    # it may just be told that nobody waits for them
    what_stays(lambda: [child for server in servers for child in server.children()])
    return [child for child in children if child not in servers] + [
        child for server in servers for child in server.children()
    ]


@pytest.fixture
def nothing_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Fail a test that leaves a process, a port, a file or a shared memory segment.

    The value is the folder for the test's temporary files.
    """
    from labkit.processes.supervision import processes_of

    tmp_path_factory.getbasetemp()  # pytest's own temporary files lie elsewhere
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        # the fork server outlives a test
        monkeypatch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor")
        )
        children, segments = children_but_the_fork_server(), shared_segments()
        yield folder
        assert (
            processes_of(folder) == []
            and [child for child in children_but_the_fork_server() if child not in children] == []
        )
        assert list(Path(folder).iterdir()) == []
        assert (
            what_stays(lambda: [name for name in shared_segments() - segments if may_be_mine(name)])
            == []
        )
