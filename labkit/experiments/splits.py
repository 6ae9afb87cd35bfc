"""A batch that goes through two GPUs in micro-batches: seconds of a step by their number, and by the order in which two halves launch."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import nn

from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

SPLITS = (1, 2, 4, 8, 16, 32, 64)
COMPUTE_FIRST, COPY_FIRST = "compute first", "copy first"
COLUMNS = {"splits": "", "program": "", "seconds": "seconds"}
LARGEST = 1 << 16


def pipeline_splits(splits: Sequence[int] = SPLITS, repeats: int = 3, layers: int = 16, width: int = 4096, batch: int = 8192) -> Run:
    """Seconds of forward and backward of a network whose halves lie on two GPUs, by the number of micro-batches.

    The network has `layers` linear layers, each with ReLU, `width` neurons wide. Two programs do the same with plain `.to`, and differ
    in one thing: "compute first" launches the second half on a micro-batch before the first half and the copy of the next, "copy first"
    after them. The median of `repeats`, after one that does not count. Virtual GPUs compute no values meanwhile.

    Raises ValueError for what is out of bounds, RuntimeError when fewer than two GPUs are in use.
    """
    name = badge()
    if machine.in_use().count < 2:
        raise RuntimeError("a network cut in two needs labkit.use(gpus=2)")
    for parameter, value in (("repeats", repeats), ("layers", layers), ("width", width), ("batch", batch)):
        if checked_count(parameter, value) > LARGEST:
            raise ValueError(f"{parameter}={value}: give at most {LARGEST}")
    if layers % 2:
        raise ValueError(f"layers={layers}: give an even number, for two equal halves")
    splits = checked_sizes("splits", splits, batch)
    parameters = {"splits": splits, "repeats": repeats, "layers": layers, "width": width, "batch": batch}
    return Run("pipeline_splits", parameters, COLUMNS, name, 2 * len(splits), _points(splits, repeats, layers // 2, width, batch))


def split_gain(result: Result, program: str = COMPUTE_FIRST) -> dict[int, float]:
    """How many times faster a program's step is than with the batch in one piece, by the number of splits."""
    seconds = dict(zip(result.column("splits", program=program), result.column("seconds", program=program), strict=True))
    return {splits: seconds[1] / value for splits, value in seconds.items() if splits > 1 and 1 in seconds}


def _points(splits: list[int], repeats: int, layers: int, width: int, batch: int) -> Iterator[Row]:
    for count in splits:
        for program, work in ((COPY_FIRST, copy_first), (COMPUTE_FIRST, compute_first)):
            with machine.in_use().without_values():
                seconds = _step_seconds(work, count, repeats, layers, width, batch)
            yield {"splits": count, "program": program, "seconds": seconds}


def copy_first(first: nn.Module, second: nn.Module, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the micro-batches. The first half of one, and its copy, are launched before the second half of the one before."""
    outputs, before = [], None
    for part in parts:
        arrived = first(part).to("cuda:1")
        if before is not None:
            outputs.append(second(before))
        before = arrived
    return [*outputs, second(before)]


def compute_first(first: nn.Module, second: nn.Module, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of the micro-batches, each of which is launched as a whole before the next."""
    return [second(first(part).to("cuda:1")) for part in parts]


def _step_seconds(work: Callable, splits: int, repeats: int, layers: int, width: int, batch: int) -> float:
    first, second = (_half(layers, width, f"cuda:{index}") for index in range(2))
    parts = torch.ones(batch, width, device="cuda:0").chunk(splits)

    def seconds() -> float:
        _synchronize()
        start = machine.host_time()
        torch.cat(work(first, second, parts)).square().mean().backward()
        _synchronize()
        return machine.host_time() - start

    seconds()
    return median(seconds() for _ in range(repeats))


def _half(layers: int, width: int, device: str) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width, device=device), nn.ReLU())])


def _synchronize() -> None:
    for index in range(2):
        torch.cuda.synchronize(index)
