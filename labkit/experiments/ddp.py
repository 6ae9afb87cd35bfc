"""DistributedDataParallel beside DataParallel: the same training step in one process with threads, and in a process for each GPU."""

import json
from collections.abc import Iterator, Mapping, Sequence

from labkit import machine
from labkit.experiments import data_parallel, programs
from labkit.experiments.result import Result, Row, Run, badge, checked_count, checked_sizes

DATA_PARALLEL, DDP = "DataParallel", "DistributedDataParallel"
WAYS = (DATA_PARALLEL, DDP)
MODELS = data_parallel.MODELS
TINY, ON_CPU = "tiny", (256, 256)  # a step that a laptop's processor makes in milliseconds, with little memory for each rank
CPU_RANKS = 2
COLUMNS = {"gpus": "", "model": "", "way": "", "device": "", "width": "neurons", "batch": "rows", "seconds": "seconds"}


def ddp_beside_data_parallel(
    gpus: Sequence[int] = (1, 2, 4), models: Mapping[str, Sequence[int]] = MODELS, repeats: int = 5, on_cpu: Sequence[int] = ON_CPU
) -> Run:
    """Seconds of one training step of each of the `models`, given as (width, batch), on so many GPUs, under either way.

    The step is that of `data_parallel_step`. DistributedDataParallel runs in ranks that torchrun starts, one for each GPU, and each has
    its share of the batch there already. Where there are too few real GPUs, the `device` of its rows is "CPU": its ranks, two at most,
    exchange tensors of the CPU through gloo, by the real clock, and train the model "tiny" of the size `on_cpu`, which DataParallel
    then trains too, on the virtual GPUs. Rows of different devices are times of different clocks.

    Raises as `data_parallel_step` and `labkit.torchrun` do.
    """
    used = badge()
    gpus = checked_sizes("gpus", gpus, machine.in_use().count)
    repeats = checked_count("repeats", repeats)
    real = programs.on_gpus(max(gpus))
    sizes = {model: list(size) for model, size in models.items()}
    parameters = {"gpus": gpus, "models": sizes, "repeats": repeats, "on_cpu": list(on_cpu)}
    trained = sizes if real else {TINY: list(on_cpu)} | sizes
    ranks = gpus if real else [count for count in gpus if count <= CPU_RANKS]
    by_ranks = trained if real else {TINY: list(on_cpu)}
    where = used if real else f"{used}; DistributedDataParallel: {programs.badge(CPU_RANKS)}"
    total = len(gpus) * len(trained) + len(ranks) * len(by_ranks)
    return Run("ddp_beside_data_parallel", parameters, COLUMNS, where, total, _points(gpus, trained, ranks, by_ranks, repeats))


def ddp_gain(result: Result, gpus: int) -> dict[str, float]:
    """How many times faster DistributedDataParallel's step is than DataParallel's on so many GPUs, by model; of rows of the same device."""
    gains = {}
    for model in dict.fromkeys(result.column("model")):
        threads, processes = (result.column("seconds", model=model, way=way, gpus=gpus, device="GPU") for way in WAYS)
        if threads and processes:
            gains[model] = threads[0] / processes[0]
    return gains


def _points(
    gpus: Sequence[int], trained: Mapping[str, list[int]], ranks: Sequence[int], by_ranks: Mapping[str, list[int]], repeats: int
) -> Iterator[Row]:
    for row in data_parallel.data_parallel_step(gpus, trained, repeats):
        yield row | {"way": DATA_PARALLEL, "device": "GPU"}
    if ranks:
        asked = {"gpus": list(ranks), "models": by_ranks, "layers": data_parallel.LAYERS, "repeats": repeats}
        device = "GPU" if programs.on_gpus(max(gpus)) else "CPU"
        for row in programs.results("step_seconds", max(ranks), json.dumps(asked))[0]:
            yield row | {"way": DDP, "device": device}
