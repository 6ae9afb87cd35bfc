"""What a process with GPUs does at this moment, for `labkit top`.

Nothing is kept for it. The figures are read when somebody asks, by the thread of the server for
nvidia-smi (`smi.Server`). Importing this module does not import torch.
"""

import os
import shlex
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from virtualgpu import front_end
from virtualgpu.driver import smi
from virtualgpu.source_lines import SourceLine, is_users
from virtualgpu.stream_numbers import stream_name

if TYPE_CHECKING:
    from virtualgpu.hardware import Gpu, Machine


def report(machine: "Machine") -> dict[str, Any]:
    """Return the report for nvidia-smi, together with this process's memory, streams and line."""
    from virtualgpu.driver import nvml

    found = nvml.report(machine).plain()
    for gpu, row in zip(machine.gpus, found["gpus"], strict=True):
        row["allocated"] = gpu.allocator.allocated
        row["reserved"] = gpu.allocator.reserved
        row["streams"] = _busy_streams(gpu)
    return found | {"process": process(), "virtual": True}


def _busy_streams(gpu: "Gpu") -> list[str]:
    """Return the names of a GPU's streams whose work is not finished at the host's present time."""
    now, names = gpu.machine.clock.host, []
    for stream_id, stream in sorted(gpu.streams.copy().items()):
        if stream.ready > now:
            default = f"stream {stream_id:#x}" if stream_id else "default stream"
            names.append(stream_name(stream_id) or default)
    return names


def process() -> dict[str, Any]:
    """Return this process's id, its program, its rank and the user's line that is running.

    The line is that of the main thread as (location, text). It is None if none of the user's
    lines is running.
    """
    line = None
    for filename, number, function in _main_calls():
        if is_users(filename):
            found = SourceLine.read(filename, number, function)
            line = found.location, found.text
            break
    rank = None
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        rank = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return {"pid": os.getpid(), "program": _program(), "rank": rank, "line": line}


def _main_calls() -> list[tuple[str, int, str]]:
    """Return the call stack of the main thread as (file, line, function), innermost call first.

    No frame is kept, because a frame keeps the tensors of its function alive.
    """
    calls = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def _program() -> str:
    """Return the command line of this process, or the name of its notebook."""
    if front_end.ipython_shell() is not None:
        name = os.environ.get("JPY_SESSION_NAME")  # set by Jupyter's server
        return f"notebook {os.path.basename(name)}" if name else "IPython"
    command = [str(argument) for argument in sys.argv] or [sys.executable]
    return shlex.join([os.path.basename(command[0]), *command[1:]])


def answer() -> smi.Server | None:
    """Start and return a server that reports the real GPUs of this process.

    Returns None if the system has no local sockets. The server ends with the process. The program
    nvidia-smi remains the driver's own.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    return smi.Server(report_of_real_gpus)


def report_of_real_gpus() -> dict[str, Any]:
    """Return the bytes that PyTorch holds on each real GPU that this process uses.

    Streams and running work are missing, because asking CUDA for them from another thread would
    disturb a graph capture.
    """
    gpus: list[dict[str, Any]] = []
    cuda: Any = sys.modules.get("torch.cuda")
    # While another thread imports torch, the module is there in part.
    if hasattr(cuda, "is_initialized") and cuda.is_initialized():
        for index in range(cuda.device_count()):
            properties = cuda.get_device_properties(index)
            row = {"index": index, "name": properties.name, "total": properties.total_memory}
            row["allocated"] = cuda.memory_allocated(index)
            row["reserved"] = cuda.memory_reserved(index)
            gpus.append(row)
    return {"gpus": gpus, "process": process(), "virtual": False}
