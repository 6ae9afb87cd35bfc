"""One model for several processes: a copy each, the weights mapped into all, or one server that the others ask. Who holds what?"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge
from labkit.processes import PATIENCE, children, context

MIB = 1 << 20
# By way, the part of the first process and that of each other.
PARTS = {"a copy each": ("worker", "worker"), "shared weights": ("owner", "borrower"), "one server": ("server", "client")}
WAYS = tuple(PARTS)
MOST_PROCESSES = 8
LARGEST = 1 << 34  # bytes
COLUMNS = {"way": "", "process": "", "context": "bytes", "weights": "bytes", "cache": "bytes"}
HELD = ("context", "weights", "cache")


def shared_model(ways: Sequence[str] = WAYS, processes: int = 3, weights: int = 512 * MIB, work: int = 64 * MIB) -> Run:
    """Bytes of the GPU that each of some `processes` holds, when all use one model, by way.

    "a copy each": each process has weights of its own. "shared weights": the first lends them to the others. "one server": the first
    has them, the others send it numbers. A request takes `work` bytes for a moment, which stay in the cache of the process that
    answers it. One row a process: its CUDA `context`, with all that the GPU lost beside PyTorch's reserve; its own `weights`; and the
    rest of what it has reserved, the `cache`. Nothing is computed.

    Raises ValueError for other ways, processes outside 2 to 8, or sizes outside 1 MiB to 16 GiB, RuntimeError when no GPU is in use.
    """
    chosen = [way for way in WAYS if way in ways]
    if not chosen or not set(ways) <= set(WAYS):
        raise ValueError(f"ways={ways!r}: choose from {', '.join(map(repr, WAYS))}")
    if type(processes) is not int or not 2 <= processes <= MOST_PROCESSES:
        raise ValueError(f"processes={processes!r}: give a whole number from 2 to {MOST_PROCESSES}")
    for name, size in (("weights", weights), ("work", work)):
        if type(size) is not int or not MIB <= size <= LARGEST:
            raise ValueError(f"{name}={size!r}: give a number of bytes from {MIB} (1 MiB) to {LARGEST} (16 GiB)")
    parameters = {"ways": chosen, "processes": processes, "weights": weights, "work": work}
    return Run("shared_model", parameters, COLUMNS, badge(), len(chosen) * processes, _points(chosen, processes, weights, work))


def held(result: Result) -> dict[str, int]:
    """Bytes of the GPU that all processes hold together, by way."""
    return {way: sum(sum(result.column(name, way=way)) for name in HELD) for way in dict.fromkeys(result.column("way"))}


def _points(ways: list[str], processes: int, weights: int, work: int) -> Iterator[Row]:
    torch.empty(1, device="cuda")  # this process's context is not counted
    for way in ways:
        first, other = PARTS[way]
        yield from _rows(way, [first] + [other] * (processes - 1), weights, work)


def _rows(way: str, parts: list[str], weights: int, work: int) -> Iterator[Row]:
    """Starts the processes, gives each its turn, and ends them in reverse: who borrows must go first."""
    make = context()
    queues = [make.SimpleQueue() for _ in range(3)]
    lines = [make.Pipe() for _ in parts]
    arguments = [(theirs, part, weights, work, queues) for (_, theirs), part in zip(lines, parts, strict=True)]
    with children(_process, arguments) as started:
        for _, theirs in lines:
            theirs.close()  # a child that dies is heard of
        for number, ((line, _), part) in enumerate(zip(lines, parts, strict=True)):
            before = _used()
            line.send(len(parts) - 1)
            try:
                reserved, own = line.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError(f"process {number + 1} of “{way}” has ended; its error stands in the kernel's log") from None
            taken = _used() - before
            name = part if parts.count(part) == 1 else f"{part} {number + (parts[0] == part)}"
            yield {"way": way, "process": name, "context": taken - reserved, "weights": own, "cache": reserved - own}
        for (line, _), process in reversed(list(zip(lines, started, strict=True))):
            line.close()
            process.join(PATIENCE)


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def _process(line: Connection, part: str, weights: int, work: int, queues: list[Any]) -> None:
    """What a child does: it waits for its turn, does its part, tells (reserved, weights) in bytes, and stays until the line is closed."""
    lent, requests, replies = queues
    others = line.recv()
    if part == "client":
        requests.put(1.0)
        replies.get()
        line.send((0, 0))
        line.poll(None)
        return
    with _without_values():
        model = lent.get() if part == "borrower" else torch.empty(weights, dtype=torch.uint8, device="cuda")
        for _ in range(others if part == "owner" else 0):
            lent.put(model)
        torch.empty(work, dtype=torch.uint8, device="cuda")  # a request's activations
        line.send((torch.cuda.memory_reserved(), 0 if part == "borrower" else model.nbytes))
        for _ in range(others if part == "server" else 0):
            replies.put(requests.get() + 1)
        line.poll(None)


def _without_values() -> AbstractContextManager[None]:
    """On virtual GPUs, nothing is computed, and no memory of the host taken."""
    used = machine.current()  # a child of a process with real GPUs has none
    return used.without_values() if used is not None else nullcontext()
