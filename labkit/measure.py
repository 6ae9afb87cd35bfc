"""`python -m labkit measure`: make the recordings that ship with the kit, on this machine's real GPUs."""

import datetime
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from labkit import beside, experiments, machine, nvidia
from labkit.experiments import Result, Run, collect


@dataclass(frozen=True)
class Recorded:
    """An experiment whose recording ships: `function` is run with its default parameters, on `gpus` real GPUs."""

    function: Callable[[], Run]
    gpus: int = 1


EXPERIMENTS = {
    "articles_on_trial": Recorded(experiments.articles_on_trial, gpus=4),
    "copy_overlap": Recorded(experiments.copy_overlap),
    "copy_speed": Recorded(experiments.copy_speed),
    "data_parallel_step": Recorded(experiments.data_parallel_step, gpus=4),
    "data_parallel_work": Recorded(experiments.data_parallel_work, gpus=4),
    "ddp_beside_data_parallel": Recorded(experiments.ddp_beside_data_parallel, gpus=4),
    "format_speed": Recorded(experiments.format_speed),
    "four_ways": Recorded(experiments.four_ways),
    "fragmentation": Recorded(experiments.fragmentation),
    "host_and_device": Recorded(experiments.host_and_device),
    "leaky_training": Recorded(experiments.leaky_training),
    "memory_for_time": Recorded(experiments.memory_for_time),
    "pipeline_splits": Recorded(experiments.pipeline_splits, gpus=2),
    "pipeline_step": Recorded(experiments.pipeline_step, gpus=4),
    "shared_model": Recorded(experiments.shared_model),
    "training_memory": Recorded(experiments.training_memory, gpus=2),
    "two_streams": Recorded(experiments.two_streams),
}


def measure(names: Iterable[str], folder: Path) -> Iterable[Path]:
    """Run the experiments of these names and write each result into `folder`, yielding each file when it is whole.

    The second of two runs counts: the first loads CUDA's libraries.

    Raises:
        ValueError: a name is not an experiment's.
        RuntimeError: there are too few real GPUs. Nothing is measured then.
    """
    chosen = list(names) or list(EXPERIMENTS)
    for name in chosen:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    needed = max(EXPERIMENTS[name].gpus for name in chosen)
    if machine.real_gpus() < needed:
        raise RuntimeError(f"recordings are made on real GPUs: {', '.join(chosen)} need {needed}, and PyTorch sees {machine.real_gpus()}")
    return _measured(chosen, folder)


def report(folder: Path) -> Iterable[Path]:
    """Record every experiment for which there are GPUs enough, and run every lesson; one page says how all went.

    The page, written anew after each of them, has what virtual GPUs of the same model say beside what was measured. Yields each recording
    when it is whole, and the page at the end. Raises RuntimeError where there is no real GPU, and where the lessons are not there.
    """
    gpus, paths = machine.real_gpus(), beside.lessons()
    if not gpus:
        raise RuntimeError("a report is made on real GPUs, and PyTorch sees none")
    with machine.use(gpus, virtual=False, quiet=True) as used:
        origin, model = _origin(used, "--report"), used.name
    folder.mkdir(parents=True, exist_ok=True)
    versions = f"{origin['date']}, torch {origin['torch']}, CUDA {origin['cuda']}, driver {origin['driver']}, {origin['cores']} cores"
    file = folder / f"report_{_model(model).lower()}_x{gpus}.md"
    pairs: list[beside.Pair] = []
    outcomes: list[beside.Outcome] = []

    def write() -> None:
        file.write_text(beside.page(f"Measured on {origin['machine']}", versions, pairs, outcomes), encoding="utf-8")

    for name, experiment in EXPERIMENTS.items():
        measured: Result | str = f"needs {experiment.gpus} GPUs"
        if experiment.gpus <= gpus:
            try:
                for recording in _measured([name], folder):
                    measured = Result.from_json(recording.read_text(encoding="utf-8"))
                    yield recording
            except Exception as error:  # the others are measured all the same
                measured = f"failed: {type(error).__name__}: {error}"
        virtual = "" if isinstance(measured, str) else beside.virtually(name, experiment.function, experiment.gpus, model)
        pairs.append(beside.Pair(name, experiment.gpus, measured, virtual))
        write()
    for path in paths:
        outcomes.append(beside.run_lesson(path))
        write()
    yield file


def _measured(names: list[str], folder: Path) -> Iterable[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        experiment = EXPERIMENTS[name]
        with machine.use(experiment.gpus, virtual=False, quiet=True) as used:
            collect(experiment.function())
            result = _recording(collect(experiment.function()), used)
        file = folder / f"{name}_{_model(used.name).lower()}.json"
        file.write_text(result.to_json(), encoding="utf-8")
        yield file


def _recording(result: Result, used: machine.Machine) -> Result:
    """The result as a recording: with the machine, the versions and the date."""
    origin = _origin(used, result.name)
    version = ".".join(origin["torch"].split(".")[:2])
    return replace(result, badge=f"recorded on {origin['machine'].replace('x ', '× ')}, torch {version}", origin=origin)


def _origin(used: machine.Machine, measured: str) -> dict[str, Any]:
    import torch

    driver = nvidia.ask_nvml().gpus
    return {
        "machine": used.name if used.count == 1 else f"{used.count}x {used.name}",
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver[0].driver if driver else None,
        "date": datetime.date.today().isoformat(),
        "program": f"python -m labkit measure {measured}",
    }


def _model(name: str) -> str:
    """ "H200" of "NVIDIA H200", for the file's name."""
    return name.removeprefix("NVIDIA ").replace(" ", "-")
