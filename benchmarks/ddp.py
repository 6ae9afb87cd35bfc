"""Experiments with DistributedDataParallel on real GPUs, whose recordings lessons show.

One runs the same training step in one process with threads, and in a process for each of four GPUs.
The other times a step on two GPUs in several runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from gpulessons.lesson_03.labs.data_parallel import LAYERS, MODELS, data_parallel_step
from gpulessons.lesson_10.labs.buckets import PROGRAM
from labkit.labs import Run
from labkit.labs.experiment import Row, badge
from labkit.ranks import torchrun

DATA_PARALLEL, DDP = "DataParallel", "DistributedDataParallel"
COLUMNS = {
    "gpus": "",
    "model": "",
    "way": "",
    "device": "",
    "width": "neurons",
    "batch": "rows",
    "seconds": "seconds",
}
GPUS, REPEATS = (1, 2, 4), 5


def ddp_beside_data_parallel() -> Run:
    """Measure a training step with DataParallel and with DistributedDataParallel, in seconds.

    There is a row for each model and number of GPUs. The step is that of `data_parallel_step`.
    DistributedDataParallel runs in ranks that torchrun starts, one for each GPU. Each rank has its
    share of the batch on its GPU from the start.
    """
    models = {model: list(size) for model, size in MODELS.items()}
    parameters = {"gpus": list(GPUS), "models": models, "repeats": REPEATS}
    return Run(
        "ddp_beside_data_parallel",
        parameters,
        COLUMNS,
        badge(),
        2 * len(GPUS) * len(models),
        _points(models),
    )


def _points(models: dict[str, list[int]]) -> Iterator[Row]:
    for row in data_parallel_step(GPUS, models, REPEATS):
        yield row | {"way": DATA_PARALLEL, "device": "GPU"}
    asked = json.dumps({"gpus": GPUS, "models": models, "layers": LAYERS, "repeats": REPEATS})
    program = Path(__file__).with_name("ddp_step_seconds.py")
    for row in torchrun(
        program, asked, ranks=max(GPUS), devices="cuda", timeout=300, quiet=True
    ).results[0]:
        yield row | {"way": DDP, "device": "GPU"}


RUNS = 12
WIDTHS, RANKS = (1024, 4096), (1, 2)
SECONDS_COLUMNS = {"width": "neurons", "ranks": "", "seconds": "seconds"}


def ddp_seconds(repeats: int = RUNS) -> Run:
    """Measure the training step of `gpulessons.lesson_10.labs.BucketsLab` in `repeats` runs.

    It runs on one GPU without DistributedDataParallel, and on two GPUs with it.
    """
    parameters = {
        "widths": list(WIDTHS),
        "ranks": list(RANKS),
        "repeats": repeats,
        "bucket": "25 MiB",
        "link": "NVLink",
    }
    points = (
        {"width": width, "ranks": ranks, "seconds": _longest_step(width, ranks)}
        for width in WIDTHS
        for ranks in RANKS
        for _ in range(repeats)
    )
    return Run(
        "ddp_seconds",
        parameters,
        SECONDS_COLUMNS,
        badge(),
        len(WIDTHS) * len(RANKS) * repeats,
        points,
    )


def _longest_step(width: int, ranks: int) -> float:
    """Return the seconds of the step on the rank that took longest."""
    results = torchrun(PROGRAM, width, 25, 1, ranks=ranks, timeout=300, quiet=True).results
    return max(marks[-1] for marks in results)
