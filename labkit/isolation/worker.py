"""The worker process: puts the machine in place, runs the function under a recording, and writes a report of how it ended."""

import contextlib
import faulthandler
import json
import linecache
import os
import resource
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

import gputrace
import virtualgpu
from labkit import machine
from labkit.isolation import payload
from labkit.isolation.exit_status import kind_of
from labkit.isolation.process import Stage
from labkit.processes.supervision import end_before_others, end_with_caller, leave, stay_until_cleared

# Frames that a traceback leaves out: how this process works, and what is C++ on a real GPU.
_HIDDEN = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, cloudpickle.__file__, virtualgpu.__file__))


def main(folder: str, fileno: str) -> None:
    """Serve the request that lies in `folder`: leave a report there, and the result and the trace if there are any.

    The report is JSON: `ending` is "returned", "raised", "result" (it cannot be sent), "argument" (the call cannot be built here) or
    "start" (the machine cannot be put in place); with the exception's `kind`, `type`, `text` and `traceback`, and the result's type `of`.
    """
    job, connection = Path(folder), socket.socket(fileno=int(fileno))
    end_with_caller(connection, folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file of gigabytes
    end_before_others()
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    request = json.loads((job / "request.json").read_text())
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in request["cells"].items()})
    with (job / "crash").open("w") as crash:
        faulthandler.enable(crash)
        _serve(job, request, connection, crash)
        faulthandler.disable()
    _report_stage(connection, Stage.ENDING)
    stay_until_cleared(connection)
    leave(0)


def _report_stage(connection: socket.socket, stage: Stage) -> None:
    with contextlib.suppress(OSError):  # the function may have closed every file
        connection.send(bytes([stage]))


def _write(path: Path, text: str) -> None:
    """The whole file, or none."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def _serve(job: Path, request: dict[str, Any], connection: socket.socket, crash: TextIO) -> None:
    process, ending = os.getpid(), "start"
    try:
        _use(request["machine"], job)
        ending = "argument"
        function, args, keywords = payload.unpack(job / "call")
        _fill_main(function)
        ending = "start"
        recording = _Recording(job)
    except BaseException as failure:
        _write(job / "report.json", json.dumps({"ending": ending, **_described(failure)}))
        return
    if request["timeout"] is not None:
        faulthandler.dump_traceback_later(request["timeout"], file=crash)  # where an endless loop is
    _report_stage(connection, Stage.RUNNING)
    value, error = _call(function, args, keywords)
    if os.getpid() != process:
        os._exit(0)  # a copy that the function forked, and that came back from it
    report = {"ending": "raised", **_described(error)} if error is not None else _sent(job, value)
    faulthandler.cancel_dump_traceback_later()
    _report_stage(connection, Stage.RETURNING)
    _write(job / "report.json", json.dumps(report))
    recording.finish(error)


def _call(function: Any, args: tuple, keywords: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """What the function returned, or what it raised."""
    try:
        value = function(*args, **keywords)
        _synchronize()
    except BaseException as error:
        return None, error
    return value, None


def _sent(job: Path, value: Any) -> dict[str, str]:
    """The report on a function that returned; the value goes to a file of its own."""
    of = type(value).__name__
    try:
        payload.pack(job / "value", value)
    except Exception as error:
        return {"ending": "result", **_described(error), "of": of}
    return {"ending": "returned", "of": of}


class _Recording:
    """The recording of the GPUs, where there are any; it, or the reason why there is none, goes to a file."""

    def __init__(self, job: Path) -> None:
        import torch

        self._job = job
        self._block = gputrace.record() if torch.cuda.is_available() else None
        if self._block is not None:
            self._trace = self._block.__enter__()

    def finish(self, error: BaseException | None) -> None:
        """End it as the `with` block of a function that returned, or raised this error."""
        why = "there is no GPU to record: labkit.use(gpus=1) gives you one, real or virtual"
        if self._block is not None:
            try:
                self._block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
                self._trace.save(self._job / "trace.part")
                os.replace(self._job / "trace.part", self._job / "trace")
                return
            except BaseException as failure:  # after some errors CUDA answers nothing any more
                why = f"the recording failed ({type(failure).__name__}: {failure})"
        _write(self._job / "why_no_trace", why)


def _use(request: dict[str, Any] | None, job: Path) -> None:
    """The machine that the request came from."""
    if request is None:
        return
    tempfile.tempdir = os.fspath(job)  # a virtual machine's own files: they go with the folder, also after a crash
    try:
        machine.use(quiet=True, **request)
    finally:
        tempfile.tempdir = None


def _fill_main(function: Any) -> None:
    """Let pickle, and so `torch.save`, find the notebook's or script's own classes by their names, as they are found there."""
    found = getattr(function, "__globals__", {})
    if found.get("__name__") == "__main__":
        vars(sys.modules["__main__"]).update({name: value for name, value in found.items() if not name.startswith("__")})


def _synchronize() -> None:
    """Wait for the kernels: an error of one that still runs is the function's."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # the others were not used, and asking would create a context there
                torch.cuda.synchronize(device)


def _described(error: BaseException) -> dict[str, str]:
    """As text: an exception may be of a class that only exists here. Its traceback begins at the function's own first line."""
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [
        frame for frame in report.stack if not (frame.filename.startswith(_HIDDEN) or frame.filename.endswith("/torch/_ops.py"))
    ]
    module, name = type(error).__module__, type(error).__qualname__
    return {
        "kind": kind_of(error),
        "type": name if module in ("builtins", "__main__") else f"{module}.{name}",
        "text": str(report),
        "traceback": "".join(report.format()),
    }
