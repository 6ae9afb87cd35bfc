"""What torchrun starts for each rank: it introduces itself to the process that waits, then runs the script as Python would."""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # for this kit, not one installed
from labkit.cli import run_script

sys.path.pop(0)

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
HIGH = 512  # a number of a file above those of connections


def main(folder: str, script: str, *arguments: str) -> None:
    """Run `script`. All that it prints goes to `folder`'s socket, and how it ended, with the plain data in its variable `result`."""
    _end_with_torchrun()
    control, output = _connect(folder, "control"), _connect(folder, "output")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file of gigabytes
    stacks = open(os.path.join(folder, f"stacks-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks)  # it stays open for the signal
    try:
        run_script(script, list(arguments))
    except SystemExit as error:
        if error.code not in (None, 0):
            _tell(control, ended="exit", text=str(error.code))
            raise
        _tell(control, **_returned())
        _end(0)
    except BaseException as error:
        _tell(control, ended="raised", **_described(error, os.path.abspath(script)))
        _end(1)  # without the traceback: the process that waits for this one prints the first
    else:
        _tell(control, **_returned())
        _end(0)


def _end_with_torchrun() -> None:
    """Linux kills this process when its parent is gone, torchrun's agent or the fork server, and before a
    notebook's when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def _connect(folder: str, purpose: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.path.join(folder, "ranks"))
    if purpose == "control":
        # Linux lets go of the files of a process that dies from the last to the first: of this before its connections to other ranks.
        above = min(HIGH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        with line as low:
            line = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, above))
    # Each agent counts its own ranks' failures alone; but the ranks of all nodes meet at one port, each time at a new one.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT" if os.environ["GROUP_WORLD_SIZE"] == "1" else "MASTER_PORT"]
    _tell(line, purpose=purpose, rank=int(os.environ["RANK"]), pid=os.getpid(), attempt=attempt)
    return line


def _tell(there: socket.socket, **what: Any) -> None:
    with contextlib.suppress(OSError):  # the script may have closed every file
        there.sendall(json.dumps(what).encode() + b"\n")


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
    told = traceback.TracebackException.from_exception(error)
    own = [frame.filename for frame in told.stack]
    told.stack[:] = told.stack[own.index(script) if script in own else 0 :]
    module, name = type(error).__module__, type(error).__qualname__
    return {
        "time": time.monotonic(),
        "type": name if module in ("builtins", "__main__") else f"{module}.{name}",
        "text": str(error),
        "line": next((frame.lineno for frame in reversed(told.stack) if frame.filename == script), None),
        "traceback": "".join(told.format()),
    }


def _end(status: int) -> NoReturn:
    """End as Python does, but leave the interpreter to the system: a thread of C++ that still lets go of a message's Python object while
    Python takes itself apart is stopped in the middle, and aborts the process; and the other ranks see their connections close before this
    process has ended, fail, and torchrun would stop this one with them."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it
            stream.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the system, too, closes the connections first
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
