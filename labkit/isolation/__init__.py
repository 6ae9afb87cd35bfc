"""`isolated` runs a function in a process of its own, which may crash."""

import linecache
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit import machine
from labkit.processes import by_value, exit_status, forkserver
from labkit.processes.supervision import kill_job, rank_environment

_PROGRAM = str(Path(__file__).with_name("child.py"))


@dataclass(frozen=True)
class Isolated:
    """The `value` that a function returned, and the `output` of its process (stdout and stderr)."""

    value: Any
    output: str


class IsolatedError(Exception):
    """The function did not return. `output` is what its process wrote to stdout and stderr."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def isolated(function: Callable[..., Any], /, *args: Any, timeout: float | None = 60, **keywords: Any) -> Isolated:
    """Run `function(*args, **keywords)` in a new process and return its result and output.

    The process has the same GPUs, working directory, environment and import path. It gets copies of
    the arguments and of the variables and classes of a notebook's cell that the function uses.
    When the function ends, the process and all processes that it started are killed.

    Args:
        timeout: the seconds that the process may take. None: no limit.

    Raises:
        IsolatedError: the function raised an error, ended its process or took too long. The
            message says which. A note of the error shows the traceback in the process.
        ValueError: `timeout` is not positive.
        Exception: what pickle raises if the function or an argument cannot be copied.
    """
    if timeout is not None and not timeout > 0:
        choices = "choose a positive number of seconds, or None for no limit"
        raise ValueError(f"timeout={timeout!r}: {choices}")
    name = f"{getattr(function, '__name__', type(function).__name__)}()"
    used = machine.current()
    request = None
    if used is not None:
        request = asdict(used.request) | {"virtual": used.virtual}
        del request["host"]
    call = by_value.dumps((function, args, keywords))
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as folder:
        settings = sys.path, _cells(), _threads(), request
        Path(folder, "call").write_bytes(pickle.dumps((*settings, call)))
        try:
            status = _run(folder, timeout)
        except subprocess.TimeoutExpired:
            late = f"{name} took longer than {timeout:g} s and was stopped."
            raise IsolatedError(late, _output(folder)) from None
        result = Path(folder, "result")
        if not result.exists():
            _, message = exit_status.without_report(name, status)
            raise IsolatedError(message, _output(folder))
        returned, found = pickle.loads(result.read_bytes())
        if returned:
            return Isolated(found, _output(folder))
        what, traceback = found
        error = IsolatedError(f"{name} raised {what}.", _output(folder))
        error.add_note(f"In the process of its own:\n{traceback}")
        raise error


def _threads() -> int | None:
    """Return the number of PyTorch's threads, unless the environment already says it."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    torch = sys.modules.get("torch")
    return os.cpu_count() if torch is None else torch.get_num_threads()


def _cells() -> dict[str, Any]:
    """Return the source lines of a notebook's cells, for tracebacks."""
    cache = linecache.cache.items()
    return {name: lines for name, lines in cache if len(lines) == 4 and not os.path.exists(name)}


def _run(folder: str, timeout: float | None) -> int:
    """Run the call in `folder` and return the exit status. Kill whatever is left of the process."""
    environment = rank_environment(folder)  # that of ranks, so that they share a fork server
    with Path(folder, "output").open("wb") as output:
        process = forkserver.popen([_PROGRAM, folder], environment, output=output.fileno(), with_caller=True)
    try:
        return process.wait(timeout)
    finally:
        kill_job(folder)
        process.wait()


def _output(folder: str) -> str:
    return Path(folder, "output").read_text(errors="replace")
