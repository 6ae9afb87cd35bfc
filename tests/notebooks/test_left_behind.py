"""Lessons that start processes leave nothing behind, whether they end or are interrupted."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "notebooks"
PATIENCE = 120  # seconds for a cell, many times what it takes
SOON = 60  # seconds in which a process ends that was told to
SHARED = Path("/dev/shm")

# The cells of each lesson that start processes. Each is interrupted twice: as soon as a process has
# started, and a little later.
STARTING = {
    "08_sharing_memory": ("held", "child", "handle", "free", "stay", "model"),
    "10_ddp_from_the_inside": ("hello", "buckets", "overlap"),
    "11_sharding": ("two",),
    "12_several_machines": ("hello", "dies"),
    "13_articles_on_trial": ("all",),
}
LATER = 0.3  # seconds
# Bytes of the GPU that are not this process's cache: contexts, and what others hold.
OUTSIDE = (
    "def outside():\n    free, total = torch.cuda.mem_get_info()\n"
    "    return total - free - torch.cuda.memory_reserved()"
)


class Kernel:
    """A kernel with virtual GPUs, and with a folder of its own for temporary files."""

    def __init__(self, temporary: str, settings: Path) -> None:
        environment = os.environ | {
            "LABKIT_VIRTUAL": "1",
            "TMPDIR": temporary,
            "IPYTHONDIR": str(settings),
        }
        self._manager, self._client = start_new_kernel(
            kernel_name="python3", env=environment, stderr=subprocess.DEVNULL
        )
        self._manager.shutdown_wait_time = (
            PATIENCE  # then it would be killed, and could remove nothing
        )
        self._process = psutil.Process(self._manager.provisioner.pid)
        self.seen: set[int] = {self._process.pid}

    def start(self, source: str) -> None:
        self._cell = self._send(source)

    def _send(self, source: str) -> str:
        # A kernel that stops on an error drops cells that are sent right after it. Then the cell
        # after an interrupt would never run.
        return self._client.execute(source, store_history=False, stop_on_error=False)

    def _answer(self, *sent: str) -> tuple[str, str]:
        """Return the first of the sent requests that is answered, and its error.

        The error is "" if the request succeeded.
        """
        while True:
            reply = self._client.get_shell_msg(timeout=PATIENCE)
            if (request := reply["parent_header"].get("msg_id")) in sent:
                assert reply["content"]["status"] in ("ok", "error"), reply["content"]
                return request, " ".join(
                    reply["content"].get(part, "") for part in ("ename", "evalue")
                ).strip()

    def run(self, source: str) -> str:
        """Run a cell, and return the error with which it ends."""
        self.start(source)
        return self._answer(self._cell)[1]

    def interrupted(self) -> str:
        """Interrupt the cell and return its error.

        If the interrupt comes while the cell answers, the answer is lost. Then the next cell's
        answer shows that the cell was interrupted.
        """
        self._manager.interrupt_kernel()
        request, error = self._answer(self._cell, self._send(""))
        return error if request == self._cell else "KeyboardInterrupt"

    def workers(self) -> list[psutil.Process]:
        """Return all processes below the kernel, without the servers that it keeps until it ends.

        They are multiprocessing's two servers, and the one of ranks.
        """
        under = self._process.children(recursive=True)
        self.seen |= {process.pid for process in under}
        return [process for process in under if not _is_server(process)]

    def ports(self) -> set[int]:
        """Return the ports of the kernel and its descendants that can be reached from outside."""
        connections = [
            found
            for process in (self._process, *self.workers())
            for found in process.net_connections(kind="inet")
        ]
        return {
            connection.laddr.port
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }

    def close(self) -> None:
        self.workers()
        self._client.stop_channels()
        self._manager.shutdown_kernel()


def _is_server(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return (
            process.status() == psutil.STATUS_ZOMBIE
            or "resource_tracker" in command
            or _is_forkserver(process, command)
        )
    except psutil.NoSuchProcess:
        return True


def _is_forkserver(process: psutil.Process, command: str) -> bool:
    """Return whether a process is the fork server, which is a child of the kernel.

    The server's children have the same command line, but are not children of the kernel.
    """
    parent = process.parent()
    servers = ("multiprocessing.forkserver", "labkit.processes import forkserver")
    return parent is not None and any(
        server in command and server not in " ".join(parent.cmdline()) for server in servers
    )


def soon(condition: Callable[[], object]) -> bool:
    """Wait until the condition is true once, and return whether it was.

    It may become false again, as it does for a process that has just started.
    """
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.002)  # some children live for some milliseconds only
    return False


def _is_pytorchs(path: Path) -> bool:
    """Return whether PyTorch made this folder.

    It is a cache, or torch 2.6 wrote it for `torch.distributed.nn` in a process that ended by
    os._exit.
    """
    return (
        path.name.startswith("torchinductor")
        or (path / "_remote_module_non_scriptable.py").exists()
    )


@pytest.fixture
def kernel(tmp_path) -> Iterator[Kernel]:
    # not pytest's: the name of a socket in it may have 107 characters
    with tempfile.TemporaryDirectory() as temporary:
        kernel = Kernel(temporary, tmp_path)
        try:
            yield kernel
        finally:
            kernel.close()
        assert soon(lambda: not any(psutil.pid_exists(pid) for pid in kernel.seen))
        assert [path for path in Path(temporary).iterdir() if not _is_pytorchs(path)] == []
    if SHARED.exists():
        assert [
            name
            for name in os.listdir(SHARED)
            if any(f"_{pid}_" in f"_{name}_" for pid in kernel.seen)
        ] == []


@pytest.mark.sample(2)
@pytest.mark.timeout(900)  # a whole lesson, and then some cells again and again
@pytest.mark.parametrize("lesson", STARTING)
def test_nothing_is_left_behind_by_a_lesson_nor_by_a_cell_that_is_interrupted(kernel, lesson):
    cells = {
        cell.id: cell.source
        for cell in nbformat.read(FOLDER / f"{lesson}.ipynb", as_version=4).cells
        if cell.cell_type == "code"
    }
    ports = kernel.ports()
    for name, source in cells.items():
        assert kernel.run(source) == "", name
        assert soon(lambda: not kernel.workers()), name
    assert kernel.run(f"{OUTSIDE}\n\nbefore = outside()") == ""
    for name in STARTING[lesson]:
        for delay in (0.0, LATER):
            kernel.start("\n\n".join(cells[part] for part in name.split(" + ")))
            assert soon(kernel.workers), name
            time.sleep(delay)
            # A pool that is terminated reads its own queue. That raises AcceleratorError, because a
            # process may not open CUDA tensors that it sent itself.
            error = kernel.interrupted()
            assert error.split(" ")[0] in ("", "KeyboardInterrupt", "AcceleratorError"), (
                f"{name}: {error}"
            )
            assert soon(lambda: not kernel.workers()), name
    assert kernel.ports() == ports
    assert kernel.run("assert outside() == before") == ""
