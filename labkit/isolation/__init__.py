"""Experiments that may crash: a function runs in a process of its own, and this process goes on whatever happens there."""

import json
import linecache
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit import machine
from labkit.isolation import exit_status, payload
from labkit.isolation.exit_status import Isolated, IsolatedError, Original
from labkit.isolation.process import LIMITS, EndedProcess, IsolatedProcess, Stage

__all__ = ["Isolated", "IsolatedError", "Original", "isolated"]

NOT_RUN = "the function was not run"


def isolated(function: Callable[..., Any], /, *args: Any, timeout: float | None = 60, **keywords: Any) -> Isolated:
    """Run `function(*args, **keywords)` in a process of its own, on the same machine, and return its result, output and trace.

    The process is new: besides the machine it has only this one's working directory, environment and import path, no input, and what
    the function and its arguments bring along. A function of a cell takes the variables and the classes that it uses with it, as copies.
    Tensors on a GPU cannot come along, nor be returned: make them inside, and return `.cpu()` copies or numbers.
    When it ends, all its memory is free again, on the GPU too, and every process that it started is ended.

    Args:
        timeout: seconds that the function may take, not counting the start of the process. None: no limit.

    Raises:
        IsolatedError: the function raised an error, crashed its process, took too long, or cannot be sent there or its result back. Its
            message names what happened, and its note shows where; `IsolatedError` lists its attributes.
        TypeError, ValueError: `function` cannot be called, or `timeout` is no positive number.
    """
    _check(function, timeout)
    name = f"{getattr(function, '__name__', type(function).__name__)}()"
    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as name_of_folder:
        folder = Path(name_of_folder)
        _write_request(folder, name, function, args, keywords, timeout)
        try:
            process = IsolatedProcess(name_of_folder)
        except OSError as error:
            raise IsolatedError(
                f"a process of its own for {name} cannot be started: {error}", kind="start", why_no_trace=NOT_RUN
            ) from error
        return _result(folder, name, process.run(timeout), timeout)


def _check(function: Any, timeout: Any) -> None:
    if os.name != "posix":
        raise NotImplementedError("labkit.isolated works on Linux and macOS, not on this system")
    if not callable(function):
        raise TypeError(f"{function!r} is no function: call labkit.isolated(function, arguments...)")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9):
        raise ValueError(f"timeout={timeout!r}: choose a positive number of seconds, or None for no limit")


def _write_request(
    folder: Path, name: str, function: Callable[..., Any], args: tuple, keywords: dict[str, Any], timeout: float | None
) -> None:
    used = machine.current()
    cells = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    request = {"machine": asdict(used.request) if used else None, "timeout": timeout, "cells": cells}
    (folder / "request.json").write_text(json.dumps(request))
    try:
        payload.pack(folder / "call", (function, args, keywords))
    except Exception:
        part, error = payload.unsendable(name, function, args, keywords, folder / "call")
        if isinstance(error, payload.DeviceTensorError):
            advice = f"holds {error}, whose memory belongs to this process: make it inside the function, or send x.cpu()"
        else:
            advice = f"cannot be sent to another process ({type(error).__name__}: {error}): make it inside the function"
        raise IsolatedError(f"{part} {advice}.", kind="argument", why_no_trace=NOT_RUN) from error


def _result(folder: Path, name: str, ended: EndedProcess, timeout: float | None) -> Isolated:
    """The result, or the error, from what the worker left in its folder."""
    try:
        report = json.loads((folder / "report.json").read_text())
    except FileNotFoundError:
        raise _without_report(folder, name, ended, timeout) from None
    ending = report["ending"]
    known = {"output": ended.output, **_trace(folder, ran=ending in ("returned", "raised", "result"))}
    if ending == "returned":
        try:
            return Isolated(payload.unpack(folder / "value"), cut=ended.cut, **known)
        except Exception as error:
            raise IsolatedError(
                f"{name} returned a value of type {report['of']} that cannot be built in this process ({type(error).__name__}: {error}).",
                kind="result",
                **known,
            ) from error
    original = Original(report["type"], report["text"], report["traceback"])
    kind = report["kind"] if ending == "raised" else ending
    raise IsolatedError(_message(name, kind, original, report, ended.output), kind=kind, original=original, **known)


def _trace(folder: Path, ran: bool) -> dict[str, Any]:
    """The trace, or why there is none."""
    if (folder / "trace").exists():
        from gputrace import Trace

        return {"trace": Trace.load(folder / "trace"), "why_no_trace": ""}
    why = folder / "why_no_trace"
    reason = why.read_text() if why.exists() else "the process ended before it was written" if ran else NOT_RUN
    return {"trace": None, "why_no_trace": reason}


def _message(name: str, kind: str, error: Original, report: dict[str, str], output: str) -> str:
    cause = f"{error.type}: {error.text}"
    if kind == "start":
        return f"the machine of this process cannot be put in place in the one for {name} ({cause})."
    if kind == "argument":
        return f"{name} or an argument cannot be built in another process ({cause})."
    if kind == "result":
        if error.type.endswith("DeviceTensorError"):
            held = error.text if report["of"].endswith(("Tensor", "Parameter")) else f"a {report['of']} with {error.text} in it"
            return f"{name} returned {held}, whose memory ends with its process: return x.cpu(), or a number."
        return f"{name} returned a value of type {report['of']} that cannot be sent to this process ({cause}): return plain data."
    return exit_status.raised(name, kind, error, output)


def _without_report(folder: Path, name: str, ended: EndedProcess, timeout: float | None) -> IsolatedError:
    """The error for a process that ended before it had written its report."""
    crash = folder / "crash"
    stack = exit_status.stack(crash.read_text(errors="replace")) if crash.exists() else ""
    kind, message = exit_status.without_report(name, ended.status)
    if ended.stage == Stage.STARTING:
        why = f"it was not ready after {LIMITS[ended.stage]:g} s" if ended.late else (ended.output.strip() or message).splitlines()[-1]
        kind, message = "start", f"the process of its own for {name} cannot be started: {why.rstrip('.')}."
    elif ended.late:
        kind, message = "timeout", f"{name} took longer than {timeout:g} s and was stopped."
    return IsolatedError(
        message,
        kind=kind,
        original=Original("", "", stack) if stack else None,
        output=ended.output,
        why_no_trace=NOT_RUN if ended.stage == Stage.STARTING else "the recording went with the process",
    )
