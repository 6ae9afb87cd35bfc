"""One training step of a network that is cut into stages, a GPU each: what every GPU does when, and the memory that it takes."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count
from labkit.experiments.schedules import FORWARD, ONE_BATCH, SCHEDULES, launches, order

WIDTH, BATCH = 4096, 16384
LARGEST = 1 << 16
WARM_UP = 1  # steps that do not count
COLUMNS = {"schedule": "", "stage": "", "work": "", "micro_batch": "", "start": "seconds", "seconds": "seconds", "peak": "bytes"}


def pipeline_step(
    layers: Sequence[int] = (2, 2, 2, 2),
    micro_batches: int = 8,
    schedules: Sequence[str] = SCHEDULES,
    link: int = 1,
    width: int = WIDTH,
    batch: int = BATCH,
) -> Run:
    """What each stage of a pipeline does when, in one step of forward and backward under each of the `schedules`.

    `layers` says how many linear layers, each with ReLU, every stage has: stage i lies on GPU i. The batch is cut into
    `micro_batches`, but for the schedule "one batch". What is sent from GPU to GPU goes through streams of its own, so that it makes
    no other work wait; each tensor is sent `link` times, which makes the link so many times slower. The first stage computes the gradient
    of its input too, as though layers came before it: so equal stages have equal work.

    One row for a forward or backward of a micro-batch on a stage: when its GPU began it and for how long it kept it, in seconds since
    the step's start; `peak` is the most memory that the step took on that GPU, beyond parameters and gradients. Virtual GPUs compute
    no values meanwhile. Raises ValueError for what is out of bounds, RuntimeError when no GPU is in use.
    """
    name = badge()
    there = machine.in_use().count
    if not isinstance(layers, list | tuple) or not 1 <= len(layers) <= there or not all(type(n) is int and 1 <= n <= 64 for n in layers):
        raise ValueError(f"layers={layers!r}: give the number of layers, 1 to 64, of each of 1 to {there} stages, as there are GPUs in use")
    if isinstance(schedules, str) or not schedules or not set(schedules) <= set(SCHEDULES):
        raise ValueError(f"schedules={schedules!r}: give one or more of {', '.join(map(repr, SCHEDULES))}")
    for parameter, value in (("link", link), ("width", width), ("batch", batch)):
        if checked_count(parameter, value) > LARGEST:
            raise ValueError(f"{parameter}={value}: give at most {LARGEST}")
    if checked_count("micro_batches", micro_batches) > batch:
        raise ValueError(f"micro_batches={micro_batches}: a batch of {batch} rows cannot be cut into more than {batch}")
    parameters = {
        "schedules": list(schedules),
        "layers": "+".join(map(str, layers)),
        "micro_batches": micro_batches,
        "link": link,
        "width": width,
        "batch": batch,
    }
    total = sum(2 * len(layers) * (1 if schedule == ONE_BATCH else micro_batches) for schedule in schedules)
    return Run("pipeline_step", parameters, COLUMNS, name, total, _points(list(layers), micro_batches, list(schedules), link, width, batch))


def waiting_share(result: Result, schedule: str) -> float | None:
    """The share of the step, averaged over the stages, in which a GPU waited; None if not one whole step was measured."""
    starts, seconds = result.column("start", schedule=schedule), result.column("seconds", schedule=schedule)
    if not is_whole(result, schedule):
        return None
    step = max(start + took for start, took in zip(starts, seconds, strict=True)) - min(starts)
    return 1 - sum(seconds) / (step * stages(result))


def stages(result: Result) -> int:
    """How many stages the pipeline of a `pipeline_step` has."""
    return len(result.parameters["layers"].split("+"))


def is_whole(result: Result, schedule: str) -> bool:
    """Whether all of the step was measured: a run that was stopped ends in the middle."""
    count = 1 if schedule == ONE_BATCH else result.parameters["micro_batches"]
    return len(result.column("stage", schedule=schedule)) == 2 * count * stages(result)


def peaks(result: Result, schedule: str) -> dict[int, int]:
    """The bytes that the step took on each stage's GPU, as far as was measured."""
    return dict(zip(result.column("stage", schedule=schedule), result.column("peak", schedule=schedule), strict=True))


def _points(layers: list[int], micro_batches: int, schedules: list[str], link: int, width: int, batch: int) -> Iterator[Row]:
    for schedule in schedules:
        with machine.in_use().without_values():
            rows = _step(layers, 1 if schedule == ONE_BATCH else micro_batches, schedule, link, width, batch)
        yield from rows


def _step(layers: list[int], micro_batches: int, schedule: str, link: int, width: int, batch: int) -> list[Row]:
    pipe = Pipe([_stage(count, width, f"cuda:{index}") for index, count in enumerate(layers)], link)
    inputs = torch.ones(batch, width, device="cuda:0")
    for _ in range(WARM_UP):
        pipe.step(inputs, micro_batches, schedule)
    held = [torch.cuda.memory_allocated(index) for index in range(len(layers))]
    for index in range(len(layers)):
        torch.cuda.reset_peak_memory_stats(index)
    work = pipe.step(inputs, micro_batches, schedule)
    took = [torch.cuda.max_memory_allocated(index) - held[index] for index in range(len(layers))]
    rows = [
        {"schedule": schedule, "stage": stage, "work": what, "micro_batch": index, "start": start, "seconds": seconds, "peak": took[stage]}
        for stage, what, index, start, seconds in work
    ]
    return sorted(rows, key=lambda row: (row["start"], row["stage"]))


def _stage(layers: int, width: int, device: str) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width, device=device), nn.ReLU())])


class Pipe:
    """Stages of a network on GPUs 0, 1, 2 …, and a pair of streams for each direction of the links between neighbours."""

    def __init__(self, stages: list[nn.Module], link: int = 1) -> None:
        self.stages, self.link = stages, link
        neighbours = [(i, i + 1) for i in range(len(stages) - 1)]
        pairs = neighbours + [(there, here) for here, there in neighbours]
        self.streams = {(i, j): (torch.cuda.Stream(i), torch.cuda.Stream(j)) for i, j in pairs}

    def step(self, inputs: torch.Tensor, micro_batches: int, schedule: str) -> list[tuple[int, str, int, float, float]]:
        """Forward and backward of the mean square, the gradients added to the parameters'.

        Returns (stage, work, micro-batch, start, seconds) of each piece of work; the GPUs have done all of it.
        """
        count = len(self.stages)
        self.parts = inputs.chunk(micro_batches)
        self.sent: dict[tuple[int, str, int], tuple[torch.Tensor, torch.cuda.Event]] = {}  # to a stage, for its forward or backward
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # input and output of a forward, for its backward
        for index in range(count):
            torch.cuda.synchronize(index)
        begun = [_mark(index) for index in range(count)]
        timed = []
        for stage, work, index in launches([order(schedule, stage, count, len(self.parts)) for stage in range(count)]):
            arrived = self._receive(stage, work, index)
            before = _mark(stage)
            result = self._forward(stage, index, arrived) if work == FORWARD else self._backward(stage, index, arrived)
            timed.append((stage, work, index, before, _mark(stage)))
            self._send(stage, work, index, result)
        for index in range(count):
            torch.cuda.synchronize(index)
        milli = 1e-3  # what events tell
        return [
            (stage, work, index, begun[stage].elapsed_time(before) * milli, before.elapsed_time(after) * milli)
            for stage, work, index, before, after in timed
        ]

    def _forward(self, stage: int, index: int, arrived: torch.Tensor | None) -> torch.Tensor:
        entered = (self.parts[index].detach() if arrived is None else arrived).requires_grad_()
        left = self.stages[stage](entered)
        if stage == len(self.stages) - 1:
            left = left.square().mean() / len(self.parts)
        self.kept[stage, index] = entered, left
        return left.detach()

    def _backward(self, stage: int, index: int, arrived: torch.Tensor | None) -> torch.Tensor | None:
        entered, left = self.kept.pop((stage, index))
        left.backward(arrived)
        return entered.grad

    def _send(self, stage: int, work: str, index: int, tensor: torch.Tensor | None) -> None:
        """Copy a result to the stage that needs it, once the work before is done, on streams on which nothing else waits."""
        neighbour = stage + 1 if work == FORWARD else stage - 1
        if tensor is None or neighbour not in range(len(self.stages)):
            return
        leaves, arrives = self.streams[stage, neighbour]
        leaves.wait_stream(torch.cuda.current_stream(stage))
        with torch.cuda.stream(leaves), torch.cuda.stream(arrives):
            copy = torch.empty_like(tensor, device=f"cuda:{neighbour}")
            for _ in range(self.link):
                copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(leaves)  # or its memory might be given to others before it has left
        copy.record_stream(torch.cuda.current_stream(neighbour))
        self.sent[neighbour, work, index] = copy, arrives.record_event()

    def _receive(self, stage: int, work: str, index: int) -> torch.Tensor | None:
        """What the neighbour sent for this work, which will start after it has come; None for the first or last stage of all."""
        copy, event = self.sent.pop((stage, work, index), (None, None))
        if event is not None:
            torch.cuda.current_stream(stage).wait_event(event)
        return copy


def _mark(index: int) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(index))
    return event
