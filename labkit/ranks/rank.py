"""The program that torchrun starts for each rank.

It connects to the process that waits for the ranks. Then it runs the script as Python would.
"""

import faulthandler
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Import this kit, even if another one is installed.
sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from labkit.processes import messages
from labkit.processes.supervision import end_before_others, end_with_parent, leave
from virtualgpu.cluster import Cluster
from virtualgpu.commands import set_up_for_times
from virtualgpu.driver import running, smi
from virtualgpu.machines import use
from virtualgpu.script import run_script

sys.path.pop(0)

HEARD = 10.0  # seconds for the process that waits to take the report of an error
HIGH = 512  # a file descriptor above those of the connections between ranks


def main(folder: str) -> None:
    """Run the script or module that the request in `folder` names.

    Its output goes to the folder's socket. So does a report of how it ended, with the plain data in
    its variable `result`.
    """
    end_with_parent()  # which is torchrun or the fork server
    end_before_others()
    reports = _connect(folder, "reports")
    with _connect(folder, "output") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    stacks = open(os.path.join(folder, f"stacks-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks)  # the file stays open for the signal
    request = json.loads(Path(folder, "request.json").read_text())
    script, module = request["script"], request["module"]
    _set_up_gpu(folder, request)
    try:
        with _traced(folder, request["trace"]):
            run_script(module or script, request["arguments"], module is not None)
    except SystemExit as error:
        if error.code not in (None, 0):
            messages.send(reports, ended="exit", text=str(error.code))
            raise
        messages.send(reports, **_returned())
        leave(0)
    except BaseException as error:
        messages.send(reports, ended="raised", **_described(error, os.path.abspath(script)))
        _wait_until_heard(reports)
        leave(1)  # prints no traceback, because the process that waits prints the first one
    else:
        messages.send(reports, **_returned())
        leave(0)


def _set_up_gpu(folder: str, request: dict[str, Any]) -> None:
    """Use the virtual GPU that the request asks for, if any, and let `labkit top` find it."""
    virtual, world = request["virtual"], request["simulated"]
    os.environ.pop(smi.ADDRESS, None)  # the nvidia-smi of a notebook shows the notebook's machine
    before = tempfile.tempdir
    tempfile.tempdir = folder  # the socket is deleted with the job, even if this process is killed
    if virtual is None:
        running.answer()
        tempfile.tempdir = before
        return
    like, memory = virtual["like"], virtual["memory"]
    if world is not None:
        from virtualgpu import simulated_world

        simulated_world.set_up(
            **world, rank=0, like=like, memory=memory, tell=lambda sentence: None
        )
        tempfile.tempdir = before
        return
    gpus = use(virtual["gpus"], like, memory, virtual["values"], host=virtual["host"])
    tempfile.tempdir = before
    set_up_for_times(gpus, virtual["time"])
    gpus.machine.cluster = Cluster(virtual["gpus"], virtual["network"])


@contextmanager
def _traced(folder: str, asked: bool) -> Iterator[None]:
    """Record the block if `asked`, and save the trace in the folder, even after an exception."""
    if not asked:
        yield
        return
    from gputrace.recording import record_and_measure

    try:
        with record_and_measure() as trace:
            yield
    finally:
        trace.save(os.path.join(folder, f"trace-{os.getpid()}.npz"))


def _connect(folder: str, purpose: str) -> socket.socket:
    """Return a connection to the process that waits for the ranks.

    `purpose` is "reports" or "output".
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, "ranks"))
    if purpose == "reports":
        # Linux closes the files of a dying process from the last to the first. This one is to be
        # closed before the connections to other ranks, so that nobody seems to fail earlier.
        above = min(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        with connection as low:
            connection = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, above))
    # Each agent counts only the failures of its own ranks. With several nodes, the port names the
    # attempt, because the ranks of all nodes meet at the same port, which is new in each attempt.
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    else:
        attempt = os.environ["MASTER_PORT"]
    rank = int(os.environ["RANK"])
    messages.send(connection, purpose=purpose, rank=rank, pid=os.getpid(), attempt=attempt)
    return connection


def _wait_until_heard(reports: socket.socket) -> None:
    """Wait until the other process has read all reports, which it shows by closing the connection.

    When this process ends, torchrun ends the other ranks. Before that, the process that waits
    looks at the stacks of ranks for which this one waited in vain.
    """
    with suppress(OSError):
        reports.shutdown(socket.SHUT_WR)
        reports.settimeout(HEARD)
        reports.recv(1)


def _returned() -> dict[str, Any]:
    """Return the report of a script that ran to its end, with its variable `result`."""
    value = vars(sys.modules["__main__"]).get("result")
    try:
        text = json.dumps(value, default=_as_lists)
    except Exception as error:
        return {"ended": "result", "text": str(error)}
    return {"ended": "returned", "result": json.loads(text)}


def _as_lists(value: Any) -> Any:
    """Return a tensor or an array as nested lists. Raise TypeError for another type."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"it holds a {type(value).__name__}")
    return value.tolist()


def _described(error: BaseException, script: str) -> dict[str, Any]:
    """Return an exception as plain data, for a report.

    The traceback begins at the first line of the script.
    """
    report = traceback.TracebackException.from_exception(error)
    files = [frame.filename for frame in report.stack]
    line = None
    if script in files:
        report.stack[:] = report.stack[files.index(script) :]
        line = [frame.lineno for frame in report.stack if frame.filename == script][-1]
    module, name = type(error).__module__, type(error).__qualname__
    return {
        "time": time.monotonic(),
        "type": name if module in ("builtins", "__main__") else f"{module}.{name}",
        "text": str(error),
        "line": line,
        "traceback": "".join(report.format()),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
