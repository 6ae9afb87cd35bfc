"""What nn.DataParallel costs and gains: a training step of a small and of a large network, by the number of GPUs, and what each did."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import nn

from gputrace import Trace, record
from labkit import machine
from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

MODELS = {"small": (1024, 512), "large": (4096, 8192)}  # width in neurons, rows of a batch
LAYERS = 8
LARGEST = 1 << 16
COLUMNS = {"gpus": "GPUs", "model": "", "width": "neurons", "batch": "rows", "seconds": "seconds"}
WORK_COLUMNS = {"model": "", "gpu": "", "computing": "seconds", "seconds": "seconds"}


def data_parallel_step(gpus: Sequence[int] = (1, 2, 4), models: Mapping[str, Sequence[int]] = MODELS, repeats: int = 3) -> Run:
    """Seconds of one training step of each of the `models` under `nn.DataParallel`, on each number of `gpus`.

    A model is given as (width, batch): eight linear layers of that width with ReLU between them, on a batch of so many rows, which
    lies on the first GPU. A step is forward, backward and SGD; the median of `repeats`, after two that do not count. On one GPU,
    DataParallel calls the model itself. Virtual GPUs compute no values meanwhile: only memory, order and time are asked for.

    Raises ValueError for more GPUs than are in use, and for models outside 1 to 65536, RuntimeError when no GPU is in use.
    """
    name = badge()
    gpus = checked_sizes("gpus", gpus, machine.in_use().count)
    repeats = checked_count("repeats", repeats)
    if not models:
        raise ValueError("models={}: give at least one model as name: (width, batch)")
    sizes = {model: _checked_model(model, size) for model, size in models.items()}
    parameters = {"gpus": gpus, "models": sizes, "repeats": repeats}
    return Run("data_parallel_step", parameters, COLUMNS, name, len(gpus) * len(sizes), _points(gpus, sizes, repeats))


def data_parallel_work(gpus: int = 4, models: Mapping[str, Sequence[int]] = MODELS) -> Run:
    """Seconds for which each GPU computes in one training step of each of the `models`, and the seconds of the step.

    The models and the step are those of `data_parallel_step`; recorded is the step after two that are not. Raises as it does.
    """
    name = badge()
    [gpus] = checked_sizes("gpus", [gpus], machine.in_use().count)
    sizes = {model: _checked_model(model, size) for model, size in models.items()}
    parameters = {"gpus": gpus, "models": sizes}
    return Run("data_parallel_work", parameters, WORK_COLUMNS, name, gpus * len(sizes), _work_points(gpus, sizes))


def _work_points(gpus: int, models: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    for model, (width, batch) in models.items():
        trace = traced_step(width, batch, gpus)
        for gpu in range(gpus):
            yield {"model": model, "gpu": gpu, "computing": trace.busy(gpu, "kernel"), "seconds": trace.end}


def traced_step(width: int, batch: int, gpus: int = 4) -> Trace:
    """What runs when in one training step of a network of this width, on a batch of so many rows, under DataParallel on `gpus` GPUs.

    Virtual GPUs compute no values meanwhile. Raises ValueError for more GPUs than are in use and for sizes outside 1 to 65536,
    RuntimeError when no GPU is in use.
    """
    badge()  # raises where no GPU is in use
    checked_sizes("gpus", [gpus], machine.in_use().count)
    width, batch = _checked_model("asked for", [width, batch])
    with machine.in_use().without_values():
        step = _prepared(width, batch, gpus)
        _synchronize(gpus)
        with record(timeline=True) as trace:
            step()
            _synchronize(gpus)
        del step  # what it holds has no values
    return trace


def parallel_gain(result: Result, model: str) -> dict[int, float]:
    """How many times faster the model's step is than on one GPU, by the number of GPUs; less than 1 where it is slower."""
    seconds = dict(zip(result.column("gpus", model=model), result.column("seconds", model=model), strict=True))
    return {gpus: seconds[1] / value for gpus, value in seconds.items() if gpus > 1 and 1 in seconds}


def computing_shares(result: Result, model: str) -> dict[int, float]:
    """The share of the model's step for which each GPU computes, from a result of `data_parallel_work`."""
    columns = (result.column(name, model=model) for name in ("gpu", "computing", "seconds"))
    return {gpu: computing / seconds for gpu, computing, seconds in zip(*columns, strict=True)}


def _checked_model(model: str, size: Sequence[int]) -> list[int]:
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and 1 <= n <= LARGEST for n in size):
        raise ValueError(f"model {model!r} has the size {size!r}: give its width and batch, whole numbers from 1 to {LARGEST}")
    return list(size)


def _points(gpus: Sequence[int], models: Mapping[str, Sequence[int]], repeats: int) -> Iterator[Row]:
    for model, (width, batch) in models.items():
        for count in gpus:
            with machine.in_use().without_values():
                seconds = _step_seconds(width, batch, count, repeats)
            yield {"gpus": count, "model": model, "width": width, "batch": batch, "seconds": seconds}


def _step_seconds(width: int, batch: int, gpus: int, repeats: int) -> float:
    step = _prepared(width, batch, gpus)
    return median(_seconds(step, gpus) for _ in range(repeats))


def _prepared(width: int, batch: int, gpus: int) -> Callable[[], None]:
    """A training step that has run twice: the first loads libraries, and both fill caches."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, device="cuda:0"), nn.ReLU())]
    parallel = nn.DataParallel(nn.Sequential(*layers), device_ids=list(range(gpus)))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    inputs = torch.ones(batch, width, device="cuda:0")

    def step() -> None:
        loss = parallel(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    step()
    return step


def _seconds(work: Callable[[], None], gpus: int) -> float:
    _synchronize(gpus)
    start = machine.host_time()
    work()
    _synchronize(gpus)
    return machine.host_time() - start


def _synchronize(gpus: int) -> None:
    for index in range(gpus):
        torch.cuda.synchronize(index)
