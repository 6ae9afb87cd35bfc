"""The program that `isolated` starts: it runs a function and leaves the result in a file."""

import linecache
import os
import pickle
import resource
import sys
import tempfile
import traceback
from pathlib import Path

# For this kit, not one that is installed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from labkit import machine
from labkit.processes import by_value
from labkit.processes.supervision import KIT, end_before_others
from virtualgpu import front_end


def main(folder: str) -> None:
    """Run the function in the file `call` and write the file `result`.

    The result is (failure, traceback, pickled value). The failure is empty if the function returned.
    """
    end_before_others()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file of gigabytes
    path, cells, request, call = pickle.loads(Path(folder, "call").read_bytes())
    sys.path[:] = [*path, KIT]
    linecache.cache.update(cells)
    process = os.getpid()
    try:
        if request is not None:
            tempfile.tempdir = folder  # the files of virtual GPUs go with the folder
            machine.use(quiet=True, **request)
            tempfile.tempdir = None
        result = "", "", _value(call)
    except BaseException as error:
        result = _failure(error), _traceback(error), b""
    if os.getpid() == process:  # otherwise a copy that the function forked has come back from it
        Path(folder, "result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of the function


class _SendingError(Exception):
    """The function's result cannot be pickled."""


def _value(call: bytes) -> bytes:
    """Run the call and return its pickled result."""
    function, args, keywords = pickle.loads(call)
    names = getattr(function, "__globals__", {})
    if names.get("__name__") == "__main__":  # for torch.save of a notebook's own classes
        own = {name: value for name, value in names.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(own)
    value = function(*args, **keywords)
    _synchronize()
    try:
        return by_value.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        problem = f"returned a value of type {kind} that cannot be copied: {error}"
        raise _SendingError(problem) from None


def _synchronize() -> None:
    """Wait for the function's kernels, so that an error of a kernel is the function's error."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # on an unused GPU this would create a context
                torch.cuda.synchronize(device)


def _failure(error: BaseException) -> str:
    """Describe the error in a part of a sentence whose subject is the function."""
    message = str(error).strip().split("\n")[0].rstrip(".")
    if isinstance(error, _SendingError):
        return message
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    return f"raised {name}: {message}" if message else f"raised {name}"


def _traceback(error: BaseException) -> str:
    """Return the traceback without the kit's own frames."""
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [frame for frame in report.stack if not front_end.is_ours(frame.filename)]
    return "".join(report.format())


if __name__ == "__main__":
    main(*sys.argv[1:])
