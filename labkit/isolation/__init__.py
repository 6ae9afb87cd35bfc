"""Run a function in a process of its own with `isolated`. The process may crash."""

import linecache
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from labkit import machine
from labkit.processes import by_value, exit_status, forkserver
from labkit.processes.supervision import KIT, end_before_others, kill_job, rank_environment
from virtualgpu import front_end, machines

_PROGRAM = str(Path(__file__).with_name("child.py"))


@dataclass(frozen=True)
class Isolated:
    """The result of a function that ran in its own process.

    Attributes:
        value: what the function returned.
        output: what the process wrote to stdout and stderr.
    """

    value: Any
    output: str


class IsolatedError(Exception):
    """Error for a function in its own process that did not return.

    Attributes:
        output: what the process wrote to stdout and stderr.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def isolated(
    function: Callable[..., Any], /, *args: Any, timeout: float | None = 60, **keywords: Any
) -> Isolated:
    """Run `function(*args, **keywords)` in a new process and return its result and output.

    Use it for code that may crash or exhaust the GPU's memory: `labkit.isolated(train, 8).value` is
    what `train(8)` returned.

    The process has the same GPUs, working directory, environment and import path. It gets copies of
    the arguments and of the variables and classes of a notebook's cell that the function uses.
    When the function ends, the process and all processes that it started are killed.

    Args:
        function: the function to run.
        args: its positional arguments.
        timeout: the number of seconds that the process may take, or None for no limit.
        keywords: its keyword arguments.

    Raises:
        IsolatedError: the function raised an error, ended its process or took too long. The
            message says which. A note of the error shows the traceback in the process.
        ValueError: `timeout` is not positive.
        Exception: what pickle raises if the function or an argument cannot be copied.
    """
    if timeout is not None and not timeout > 0:
        expected = "choose a positive number of seconds, or None for no limit"
        raise ValueError(f"timeout={timeout!r}: {expected}")
    used = machine.current()
    gpus = None if used is None else (used.request, type(used))
    return isolated_on(gpus, timeout, function, args, keywords)


def isolated_on(
    gpus: tuple[machines.Request, type[machines.GPUsInUse]] | None,
    timeout: float | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> Isolated:
    """Run a function in a new process as `isolated` does, on GPUs that need not be those in use.

    `gpus` has the request and the class of the GPUs, or is None for a process without GPUs.
    """
    name = f"{getattr(function, '__name__', type(function).__name__)}()"
    cache = linecache.cache.items()
    cells = {file: lines for file, lines in cache if len(lines) == 4 and not os.path.exists(file)}
    call = by_value.dumps((function, args, keywords or {}))
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as folder:
        Path(folder, "call").write_bytes(pickle.dumps((sys.path, cells, gpus, name, call)))
        try:
            _, message = exit_status.without_report(name, _run(folder, timeout))
        except subprocess.TimeoutExpired:
            message = f"{name} took longer than {timeout:g} s and was stopped."
        output = Path(folder, "output").read_text(errors="replace")
        value, error = None, IsolatedError(message)
        if Path(folder, "result").exists():
            value, error = pickle.loads(Path(folder, "result").read_bytes())
    if error is None:
        return Isolated(value, output)
    error.output = output
    raise error


def _run(folder: str, timeout: float | None) -> int:
    """Run the call in `folder` and return the exit status. Kill whatever is left of the process."""
    torch = sys.modules.get("torch")
    threads = os.cpu_count() if torch is None else torch.get_num_threads()
    environment = rank_environment(folder) | {"OMP_NUM_THREADS": str(threads)}
    process = None
    try:
        with Path(folder, "output").open("wb") as output:
            process = forkserver.popen([_PROGRAM, folder], environment, output=output.fileno())
        return process.wait(timeout)
    finally:
        kill_job(folder)  # also if the start was interrupted
        if process is not None:
            process.wait()


# In the process


def run_call(folder: str) -> NoReturn:
    """Run the call in the folder, and write what it returned or raised to the file `result`."""
    end_before_others()
    path, cells, gpus, name, call = pickle.loads(Path(folder, "call").read_bytes())
    sys.path[:] = [*path, KIT]
    linecache.cache.update(cells)  # for tracebacks
    process = os.getpid()
    try:
        if gpus is not None:
            tempfile.tempdir = folder  # virtual GPUs' files are deleted with it
            machines.put_in_use(*gpus)
            tempfile.tempdir = None
        function, args, keywords = pickle.loads(call)
        names = getattr(function, "__globals__", {})
        if names.get("__name__") == "__main__":  # for torch.save of a notebook's own classes
            own = {name: value for name, value in names.items() if not name.startswith("__")}
            vars(sys.modules["__main__"]).update(own)
        value = function(*args, **keywords)
        _synchronize()
        result = by_value.dumps((value, None))
    except BaseException as error:
        result = pickle.dumps((None, _described(name, error)))
    if os.getpid() == process:  # a process that the function forked must not write the result
        Path(folder, "result").write_bytes(result)
    os._exit(0)  # without waiting for threads of the function


def _synchronize() -> None:
    """Wait for the function's kernels, so that an error of a kernel is the function's error."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # on an unused GPU this would create a context
                torch.cuda.synchronize(device)


def _described(name: str, error: BaseException) -> IsolatedError:
    """Return the exception that the caller raises for an error in the process.

    `name` is the name of the function. A note has the traceback without the kit's frames.
    """
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [frame for frame in report.stack if not front_end.is_ours(frame.filename)]
    last = "".join(report.format_exception_only()).removeprefix("__main__.").strip()
    described = IsolatedError(f"{name} raised {last.splitlines()[0].rstrip('.')}.")
    described.add_note(f"In the process of its own:\n{''.join(report.format())}")
    return described
