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
    """Run the function in the file `call` and write the file `result`: (returned, value or error)."""
    end_before_others()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file of gigabytes
    path, cells, threads, request, call = pickle.loads(Path(folder, "call").read_bytes())
    if threads is not None:  # those of the caller, and not one as in a rank
        del os.environ["OMP_NUM_THREADS"]
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
    sys.path[:] = [*path, KIT]
    linecache.cache.update(cells)
    process = os.getpid()
    try:
        if request is not None:
            tempfile.tempdir = folder  # the files of virtual GPUs go with the folder
            machine.use(quiet=True, **request)
            tempfile.tempdir = None
        function, args, keywords = pickle.loads(call)
        names = getattr(function, "__globals__", {})
        if names.get("__name__") == "__main__":  # for torch.save of a notebook's own classes
            own = {name: value for name, value in names.items() if not name.startswith("__")}
            vars(sys.modules["__main__"]).update(own)
        value = function(*args, **keywords)
        _synchronize()
        result = by_value.dumps((True, value))
    except BaseException as error:
        result = pickle.dumps((False, _described(error)))
    if os.getpid() == process:  # otherwise a copy that the function forked has come back from it
        Path(folder, "result").write_bytes(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of the function


def _synchronize() -> None:
    """Wait for the function's kernels, so that an error of a kernel is the function's error."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # on an unused GPU this would create a context
                torch.cuda.synchronize(device)


def _described(error: BaseException) -> tuple[str, str]:
    """Return the first line of what Python prints of the error, and all without the kit's frames."""
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [frame for frame in report.stack if not front_end.is_ours(frame.filename)]
    last = "".join(report.format_exception_only()).removeprefix("__main__.")
    return last.strip().split("\n")[0].rstrip("."), "".join(report.format())


if __name__ == "__main__":
    main(*sys.argv[1:])
