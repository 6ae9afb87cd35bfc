"""The program that torchrun starts for each rank: it introduces itself to the process that waits, then runs the script as Python would."""

import ctypes
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

sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)  # for this kit, not one installed
from labkit.processes import messages
from labkit.processes.supervision import end_before_others, leave
from virtualgpu.cluster import Cluster
from virtualgpu.commands import set_up_for_times
from virtualgpu.machines import use
from virtualgpu.script import run_script

sys.path.pop(0)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
HEARD = 10.0  # seconds for the process that waits to read of an error
HIGH = 512  # a number of a file above those of connections


def main(folder: str) -> None:
    """Run the script or module that the request in `folder` names.

    Its output goes to the folder's socket. So does a report of how it ended, with the plain data in
    its variable `result`.
    """
    _end_with_torchrun()
    reports, output = _connect(folder, "reports"), _connect(folder, "output")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    stacks = open(os.path.join(folder, f"stacks-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks)  # it stays open for the signal
    request = json.loads(Path(folder, "request.json").read_text())
    script, module, virtual = request["script"], request["module"], request["virtual"]
    if request["simulated"] is not None:
        _simulate(folder, request["simulated"], virtual)
    elif virtual is not None:
        before, tempfile.tempdir = (
            tempfile.tempdir,
            folder,
        )  # its nvidia-smi goes with the job, even if this process is killed
        gpus = use(
            virtual["gpus"],
            virtual["like"],
            virtual["memory"],
            virtual["values"],
            host=virtual["host"],
        )
        tempfile.tempdir = before
        set_up_for_times(gpus, virtual["time"])
        gpus.machine.cluster = Cluster(virtual["gpus"], virtual["network"])
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
        leave(1)  # without the traceback: the process that waits for this one prints the first
    else:
        messages.send(reports, **_returned())
        leave(0)


def _simulate(folder: str, world: dict[str, Any], virtual: dict[str, Any]) -> None:
    """Make this process rank 0 of the simulated world that the request describes."""
    from virtualgpu import simulated_world

    before, tempfile.tempdir = tempfile.tempdir, folder
    like, memory = virtual["like"], virtual["memory"]
    simulated_world.set_up(**world, rank=0, like=like, memory=memory, tell=lambda sentence: None)
    tempfile.tempdir = before


@contextmanager
def _traced(folder: str, asked: bool) -> Iterator[None]:
    """Leave a recording of the block in the folder, also where an exception ends it, if this is asked for."""
    if not asked:
        yield
        return
    from gputrace import record

    try:
        with record() as trace:
            yield
    finally:
        trace.save(os.path.join(folder, f"trace-{os.getpid()}.npz"))


def _end_with_torchrun() -> None:
    """Linux kills this process when its parent is gone, torchrun's agent or the fork server, and before a
    notebook's when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    end_before_others()


def _connect(folder: str, purpose: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, "ranks"))
    if purpose == "reports":
        # Linux lets go of the files of a process that dies from the last to the first: of this before its connections to other ranks.
        above = min(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        with connection as low:
            connection = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, above))
    # Each agent counts its own ranks' failures alone; but the ranks of all nodes meet at one port, each time at a new one.
    attempt = os.environ[
        "TORCHELASTIC_RESTART_COUNT" if os.environ["GROUP_WORLD_SIZE"] == "1" else "MASTER_PORT"
    ]
    messages.send(
        connection, purpose=purpose, rank=int(os.environ["RANK"]), pid=os.getpid(), attempt=attempt
    )
    return connection


def _wait_until_heard(reports: socket.socket) -> None:
    """Before this process ends, and torchrun with it the others: who waits for it looks where those are that it waited for in vain."""
    with suppress(OSError):
        reports.shutdown(socket.SHUT_WR)
        reports.settimeout(HEARD)
        reports.recv(1)  # it closes the connection


def _returned() -> dict[str, Any]:
    """The script's variable `result`, if it left one. Tensors and arrays become lists."""
    value = vars(sys.modules["__main__"]).get("result")
    try:
        text = json.dumps(value, default=_as_lists)
    except Exception as error:
        return {"ended": "result", "text": str(error)}
    return {"ended": "returned", "result": json.loads(text)}


def _as_lists(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"it holds a {type(value).__name__}")
    return value.tolist()


def _described(error: BaseException, script: str) -> dict[str, Any]:
    """As text. The traceback begins at the script's own first line."""
    report = traceback.TracebackException.from_exception(error)
    own = [frame.filename for frame in report.stack]
    report.stack[:] = report.stack[own.index(script) if script in own else 0 :]
    module, name = type(error).__module__, type(error).__qualname__
    return {
        "time": time.monotonic(),
        "type": name if module in ("builtins", "__main__") else f"{module}.{name}",
        "text": str(error),
        "line": next(
            (frame.lineno for frame in reversed(report.stack) if frame.filename == script), None
        ),
        "traceback": "".join(report.format()),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
