"""Make the recordings that ship with the kit, on this machine's real GPUs.

    python benchmarks/measure.py [--output FOLDER] [EXPERIMENT ...]
    python benchmarks/measure.py --report [--output FOLDER]

`--report` runs all experiments and lessons, and writes a page that compares them with virtual GPUs.
On a machine without GPUs it only updates the figures of virtual GPUs on the pages in the folder.
The exit status is 2 if nothing can be measured.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measured_report
from benchmarks.articles import articles_on_trial
from benchmarks.ddp import ddp_beside_data_parallel, ddp_seconds
from benchmarks.origin import model, origin, recording
from benchmarks.training_memory import training_memory
from gpulessons.lesson_01.labs import copy_speed
from gpulessons.lesson_03.labs import data_parallel_step
from gpulessons.lesson_04.labs import pipeline_step
from gpulessons.lesson_08.labs import shared_model
from labkit import machine
from labkit.labs import Run, collect


@dataclass(frozen=True)
class Recorded:
    """An experiment whose recording the kit has. `function` runs on `gpus` real GPUs."""

    function: Callable[[], Run]
    gpus: int = 1


PROGRAM = "python benchmarks/measure.py"
EXPERIMENTS = {
    "articles_on_trial": Recorded(articles_on_trial, gpus=4),
    "copy_speed": Recorded(copy_speed),
    "data_parallel_step": Recorded(data_parallel_step, gpus=4),
    "ddp_beside_data_parallel": Recorded(ddp_beside_data_parallel, gpus=4),
    "ddp_seconds": Recorded(ddp_seconds, gpus=2),
    "pipeline_step": Recorded(pipeline_step, gpus=4),
    "shared_model": Recorded(shared_model),
    "training_memory": Recorded(training_memory, gpus=2),
}


def measure(names: Iterable[str], folder: Path) -> Iterable[Path]:
    """Run the experiments of these names, and write each result into `folder`.

    Each file is yielded when it is complete. The second of two runs counts, because the first loads
    CUDA's libraries.

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
        raise RuntimeError(
            f"recordings are made on real GPUs: {', '.join(chosen)} need {needed}, "
            f"and PyTorch sees {machine.real_gpus()}"
        )
    return _measured(chosen, folder)


def report(folder: Path) -> Iterable[Path]:
    """Record every experiment that has enough GPUs, run every lesson, and write the page.

    Recordings of this machine, these versions and this day are kept, so an interrupted report can
    be continued. Without a real GPU, only the figures of virtual GPUs on the pages are updated.

    Each file is yielded when it is complete.

    Raises:
        RuntimeError: there is neither a real GPU nor a report, or the lessons are missing.
        ValueError: the folder has another machine's report on another number of the same GPUs, with
            which it would share its recordings.
    """
    if machine.real_gpus():
        reports = [_on_this_machine(folder)]
        yield from _go_on(reports[0])
    else:
        reports = [measured_report.Report(file) for file in sorted(folder.glob("report_*.json"))]
        if not reports:
            raise RuntimeError(
                f"a report is made on real GPUs. PyTorch sees none, and {folder} has no report"
            )
    for made in reports:
        yield made.write_page(
            {
                name: (experiment.function, experiment.gpus)
                for name, experiment in EXPERIMENTS.items()
            }
        )


def _on_this_machine(folder: Path) -> measured_report.Report:
    """Return the folder's report about these GPUs, versions and this day, or an empty one."""
    measured_report.lessons()
    gpus = machine.real_gpus()
    with machine.use(gpus, virtual=False, quiet=True) as used:
        here = origin(used, f"{PROGRAM} --report")
    folder.mkdir(parents=True, exist_ok=True)
    reports = f"report_{model(used.name)}_x"
    made = measured_report.Report(folder / f"{reports}{gpus}.json")
    for file in folder.glob(f"{reports}*.json"):
        if file != made.file and measured_report.kind(
            measured_report.Report(file).origin
        ) != measured_report.kind(here):
            raise ValueError(
                f"{file} is of another machine, other versions or another day, and its recordings "
                "would be written over: give another folder with --output"
            )
    if made.origin != here:
        made.origin, made.failures, made.outcomes = here, {}, []
    return made


def _go_on(made: measured_report.Report) -> Iterable[Path]:
    """Make the measurements that the report lacks, and run lessons that are missing or failed."""
    gpus, folder = machine.real_gpus(), made.file.parent
    for name, experiment in EXPERIMENTS.items():
        before = made.recording(name)
        if experiment.gpus > gpus or (
            before is not None
            and measured_report.kind(before.origin) == measured_report.kind(made.origin)
        ):
            continue
        made.failures.pop(name, None)
        try:
            yield from _measured([name], folder)
        except Exception as error:  # the others are measured all the same
            made.failures[name] = f"{type(error).__name__}: {error}"
        made.save()
    for path in measured_report.lessons():
        if not any(outcome.lesson == path.stem and not outcome.failed for outcome in made.outcomes):
            made.outcomes = [outcome for outcome in made.outcomes if outcome.lesson != path.stem]
            made.outcomes.append(measured_report.run_lesson(path))
            made.save()


def _measured(names: list[str], folder: Path) -> Iterable[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        experiment = EXPERIMENTS[name]
        with machine.use(experiment.gpus, virtual=False, quiet=True) as used:
            _give_back()
            collect(experiment.function())
            result = recording(collect(experiment.function()), origin(used, f"{PROGRAM} {name}"))
        file = folder / f"{name}_{model(used.name)}.json"
        file.write_text(result.to_json(), encoding="utf-8")
        yield file


def _give_back() -> None:
    """Free the memory that PyTorch caches, because some experiments report memory."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/measure.py",
        description="Make the recordings that ship with the kit.",
    )
    parser.add_argument(
        "--output",
        default="recordings",
        metavar="FOLDER",
        type=Path,
        help="where the JSON files go (default: recordings)",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run all experiments and lessons, and write a page beside virtual GPUs",
    )
    parser.add_argument(
        "names", nargs="*", metavar="EXPERIMENT", help="which experiments (default: all)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.report and options.names:
            raise ValueError("a report is of all experiments: name none")
        for file in (
            report(options.output) if options.report else measure(options.names, options.output)
        ):
            print(f"wrote {file}")
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
