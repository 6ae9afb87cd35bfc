"""Start Python scripts as copies of a process that has imported torch.

Importing torch takes seconds, and many tests start several scripts each. The copies are for tests
of what a script does. A test of how a script is started starts a process of its own.

    python warm_processes.py        (the server; `WarmProcesses` starts it)
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence

MODULES = (
    "torch._dynamo",  # torch imports it for the first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "virtualgpu.install",
    "gputrace.recording",
    "gputrace.fit.attempt",
    "pytest",
)


class WarmProcesses:
    """Starter of scripts, which run one after another as copies of a server.

    The server starts with the first script.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], output: int) -> "WarmProcess":
        """Start a script with its arguments, in a session of its own. Its output goes to `output`.

        It starts with this process's environment and working folder of this moment.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads do not survive a fork
            )
        request = {
            "command": list(command),
            "output": os.readlink(f"/proc/self/fd/{output}"),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return WarmProcess(self._server)

    def close(self) -> None:
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait()
            self._server.stdout.close()
            self._server = None


class WarmProcess:
    """A copy of the server, with the part of `subprocess.Popen` that `gputrace.fit` uses."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server
        self.pid = int(server.stdout.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server.stdout], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._server.stdout.readline())
        return self.returncode


def serve() -> None:
    """Run each requested script in a copy of this process, one after another."""
    for name in MODULES:
        with contextlib.suppress(ImportError):  # a torch that was built without it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(request: dict) -> None:
    """Run the requested script in this copy of the server, and end the copy."""
    from virtualgpu.script import run_script

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for target, source in enumerate((nothing, output, output)):
        os.dup2(source, target)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0),
        os.fdopen(1, "w", buffering=1),
        os.fdopen(2, "w", buffering=1),
    )
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    status = 0
    try:
        run_script(*request["command"][:1], request["command"][1:])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
