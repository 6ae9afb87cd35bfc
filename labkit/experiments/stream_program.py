"""A program of copies, kernels and waits on three streams, run on a virtual GPU: what the host reads, and what nothing orders."""

import itertools
import linecache
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from gputrace import Trace, record
from labkit import machine
from labkit.experiments.result import badge
from virtualgpu import RaceWarning

STREAMS = ("a", "b", "c")
COPY_IN, KERNEL, COPY_OUT, WAIT, HOST_WAIT = "copy in", "kernel", "copy out", "stream waits", "host waits"
VERBS = (COPY_IN, KERNEL, COPY_OUT, WAIT, HOST_WAIT)
BATCHES = 3  # that can be copied in, or out
MOST_STEPS = 12
WIDTH = 1024
ORDERED, RACE, STALE = "ordered", "race", "stale value"
VERDICTS = (ORDERED, RACE, STALE)
_NUMBERS = itertools.count(1)  # each program has a name of its own, for a race between the same two lines is told once


@dataclass(frozen=True)
class Step:
    """One line of a program, on a stream; `other` is the stream that is waited for."""

    verb: str
    stream: str
    other: str = ""

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ValueError(f"verb={self.verb!r}: choose one of {', '.join(map(repr, VERBS))}")
        if self.stream not in STREAMS or (self.verb == WAIT and self.other not in STREAMS):
            raise ValueError(f"stream={self.stream!r}, other={self.other!r}: choose from {', '.join(map(repr, STREAMS))}")
        if self.verb == WAIT and self.other == self.stream:
            raise ValueError(f"stream {self.stream} is in order with itself: let it wait for another")


@dataclass(frozen=True)
class Outcome:
    """What the program of this name did.

    `due` is what its lines give one after the other, `read` what the host read: one number for each copy to the host.
    """

    program: str
    trace: Trace
    due: list[float]
    read: list[float]

    @property
    def verdict(self) -> str:
        """STALE if a value is wrong, RACE if something is not ordered and the values are right all the same, else ORDERED."""
        return STALE if self.read != self.due else RACE if self.trace.races else ORDERED


def code_of(steps: list[Step]) -> str:
    """The program as PyTorch code, a line a step; the last line reads."""
    copied_in, copied_out = itertools.count(), itertools.count()
    lines = []
    for step in steps:
        on = f"with torch.cuda.stream({step.stream}): "
        match step.verb:
            case "copy in":
                lines.append(f"{on}x.copy_(batches[{next(copied_in)}], non_blocking=True)")
            case "kernel":
                lines.append(f"{on}torch.mm(x, double, out=y)")
            case "copy out":
                lines.append(f"{on}results[{next(copied_out)}].copy_(y, non_blocking=True)")
            case "stream waits":
                lines.append(f"{step.stream}.wait_stream({step.other})")
            case _:
                lines.append(f"{step.stream}.synchronize()")
    lines.append(f"read = [result[0, 0].item() for result in results[:{next(copied_out)}]]")
    return "\n".join(lines)


def run_program(steps: list[Step]) -> Outcome:
    """Run the steps on the virtual GPU in use, and record them.

    Batch 0 is full of ones, batch 1 of twos …; x, y and the results are zeros at the start; a kernel makes y = 2 x.

    Raises ValueError for a program of no step, of too many, or of too many copies in or out; RuntimeError without a virtual GPU.
    """
    check_program(steps)
    badge()  # raises where no GPU is in use
    if not machine.in_use().virtual:
        raise RuntimeError("a real GPU does not tell of races: labkit.use(None), then labkit.use(gpus=1, virtual=True)")
    streams = {name: torch.cuda.Stream() for name in STREAMS}
    names: dict[str, Any] = {
        "torch": torch,
        **streams,
        "x": torch.zeros(WIDTH, WIDTH, device="cuda"),
        "y": torch.zeros(WIDTH, WIDTH, device="cuda"),
        "double": torch.eye(WIDTH).mul_(2).to("cuda"),
        "batches": [torch.full((WIDTH, WIDTH), index + 1.0, pin_memory=True) for index in range(BATCHES)],
        "results": [torch.zeros(WIDTH, WIDTH, pin_memory=True) for _ in range(BATCHES)],
    }
    name, source = f"program{next(_NUMBERS)}.py", code_of(steps)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # a race quotes its lines
    program = compile(source, name, "exec")
    torch.cuda.synchronize()
    for stream in streams.values():
        with torch.cuda.stream(stream):
            torch.mm(names["double"], names["double"])  # the first product on a stream takes cuBLAS's workspace
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaceWarning)  # the outcome tells of them
        with record() as trace:
            exec(program, names)
        torch.cuda.synchronize()
    trace.named_streams = {stream.cuda_stream: f"stream {letter}" for letter, stream in streams.items()}
    return Outcome(name, trace, _due(steps), names["read"])


def check_program(steps: list[Step]) -> None:
    """Raises ValueError for a program of no step, of too many, or of too many copies in or out."""
    if not 1 <= len(steps) <= MOST_STEPS:
        raise ValueError(f"a program has 1 to {MOST_STEPS} steps, this one has {len(steps)}")
    for verb in (COPY_IN, COPY_OUT):
        if sum(step.verb == verb for step in steps) > BATCHES:
            raise ValueError(f'there are {BATCHES} batches and as many results: a program has at most {BATCHES} steps "{verb}"')


def _due(steps: list[Step]) -> list[float]:
    """What the host would read if each step began after the one before it was done."""
    x = y = 0.0
    batch, results = 0, []
    for step in steps:
        if step.verb == COPY_IN:
            batch += 1
            x = float(batch)
        elif step.verb == KERNEL:
            y = 2 * x
        elif step.verb == COPY_OUT:
            results.append(y)
    return results
