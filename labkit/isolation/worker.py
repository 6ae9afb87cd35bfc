"""The other process: puts the machine in place, runs the function under a recording, and writes down what came of it."""

import contextlib
import faulthandler
import json
import linecache
import os
import resource
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

import gputrace
import virtualgpu
from labkit import machine
from labkit.isolation import parcel
from labkit.isolation.endings import kind_of
from labkit.isolation.process import Stage, end_with, stay_until_cleared

# Frames that a traceback leaves out: how this process works, and what is C++ on a real GPU.
_HIDDEN = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, cloudpickle.__file__, virtualgpu.__file__))


def main(folder: str, control: str) -> None:
    """Serve the request that lies in `folder`: leave a report there, and the result and the trace if there are any.

    The report is JSON: `ending` is "returned", "raised", "result" (it cannot be sent), "argument" (the call cannot be built here) or
    "start" (the machine cannot be put in place); with the exception's `kind`, `type`, `text` and `traceback`, and the result's type `of`.
    """
    place, line = Path(folder), socket.socket(fileno=int(control))
    threading.Thread(target=end_with, args=(line, folder), name="lifeline", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file of gigabytes
    with contextlib.suppress(OSError):  # where Linux runs out of memory, it ends this process before the notebook
        Path("/proc/self/oom_score_adj").write_text("1000")
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    request = json.loads((place / "request.json").read_text())
    linecache.cache.update({name: (len(lines), None, lines, name) for name, lines in request["cells"].items()})
    with (place / "crash").open("w") as crash:
        faulthandler.enable(crash)
        _serve(place, request, line, crash)
        faulthandler.disable()
    _say(line, Stage.ENDING)
    stay_until_cleared(line)


def _say(line: socket.socket, stage: Stage) -> None:
    with contextlib.suppress(OSError):  # the function may have closed every file
        line.send(bytes([stage]))


def _write(path: Path, text: str) -> None:
    """The whole file, or none."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def _serve(place: Path, request: dict[str, Any], line: socket.socket, crash: TextIO) -> None:
    process, ending = os.getpid(), "start"
    try:
        _use(request["machine"], place)
        ending = "argument"
        function, args, keywords = parcel.unpack(place / "call")
        _fill_main(function)
        ending = "start"
        recording = _Recording(place)
    except BaseException as failure:
        _write(place / "report.json", json.dumps({"ending": ending, **_described(failure)}))
        return
    if request["timeout"] is not None:
        faulthandler.dump_traceback_later(request["timeout"], file=crash)  # where an endless loop is
    _say(line, Stage.RUNNING)
    value, error = _call(function, args, keywords)
    if os.getpid() != process:
        os._exit(0)  # a copy that the function forked, and that came back from it
    report = {"ending": "raised", **_described(error)} if error is not None else _sent(place, value)
    faulthandler.cancel_dump_traceback_later()
    _say(line, Stage.RETURNING)
    _write(place / "report.json", json.dumps(report))
    recording.finish(error)


def _call(function: Any, args: tuple, keywords: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """What the function returned, or what it raised."""
    try:
        value = function(*args, **keywords)
        _synchronize()
    except BaseException as error:
        return None, error
    return value, None


def _sent(place: Path, value: Any) -> dict[str, str]:
    """The report on a function that returned; the value goes to a file of its own."""
    of = type(value).__name__
    try:
        parcel.pack(place / "value", value)
    except Exception as error:
        return {"ending": "result", **_described(error), "of": of}
    return {"ending": "returned", "of": of}


class _Recording:
    """The recording of the GPUs, where there are any; it, or the reason why there is none, goes to a file."""

    def __init__(self, place: Path) -> None:
        import torch

        self._place = place
        self._block = gputrace.record() if torch.cuda.is_available() else None
        if self._block is not None:
            self._trace = self._block.__enter__()

    def finish(self, error: BaseException | None) -> None:
        """End it as the `with` block of a function that returned, or raised this error."""
        why = "there is no GPU to record: labkit.use(gpus=1) gives you one, real or virtual"
        if self._block is not None:
            try:
                self._block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
                self._trace.save(self._place / "trace.part")
                os.replace(self._place / "trace.part", self._place / "trace")
                return
            except BaseException as failure:  # after some errors CUDA answers nothing any more
                why = f"the recording failed ({type(failure).__name__}: {failure})"
        _write(self._place / "why_no_trace", why)


def _use(request: dict[str, Any] | None, place: Path) -> None:
    """The machine that the request came from."""
    if request is None:
        return
    tempfile.tempdir = os.fspath(place)  # a virtual machine's own files: they go with the folder, also after a crash
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
    told = traceback.TracebackException.from_exception(error)
    told.stack[:] = [frame for frame in told.stack if not (frame.filename.startswith(_HIDDEN) or frame.filename.endswith("/torch/_ops.py"))]
    module, name = type(error).__module__, type(error).__qualname__
    return {
        "kind": kind_of(error),
        "type": name if module in ("builtins", "__main__") else f"{module}.{name}",
        "text": str(told),
        "traceback": "".join(told.format()),
    }
