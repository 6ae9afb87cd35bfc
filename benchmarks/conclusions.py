"""Conclusions of the recorded experiments, each with a function that says whether a result has it.

Learners remember these sentences, so a virtual GPU must show what a real one shows. If the two
differ, the virtual GPU is wrong.
"""

from collections.abc import Callable
from math import isclose
from statistics import median

from benchmarks.ddp import DATA_PARALLEL, DDP
from gpulessons.lesson_04.labs.pipeline import stage_peaks, stages, waiting_share
from gpulessons.lesson_08.labs import held_by_way
from labkit.labs.experiment import Result

Conclusions = dict[str, Callable[[Result], bool]]
LEAST_PINNED = 64 << 10  # bytes of a copy from which on pinned memory pays


def drawn(result: Result) -> dict[str, bool]:
    """Return for each sentence about the result's experiment whether it is true of this result."""
    return {sentence: holds(result) for sentence, holds in CONCLUSIONS[result.name].items()}


def _seconds(result: Result, **where: object) -> float:
    """Return the seconds of the row that `where` selects, or the median of several such rows."""
    return median(result.column("seconds", **where))


def _pinned_is_faster(result: Result) -> bool:
    copies = {(row["size"], row["direction"], row["memory"]): row["seconds"] for row in result.rows}
    return all(
        seconds < copies[size, direction, "pageable"]
        for (size, direction, memory), seconds in copies.items()
        if memory == "pinned" and size >= LEAST_PINNED
    )


def _by_gpus(result: Result, model: str) -> list[float]:
    """Return the model's seconds per number of GPUs, in rising order of this number."""
    return result.column("seconds", model=model)


def _with_checkpoints(result: Result) -> float:
    """Return the peak of the GPT with checkpoints, as a share of the peak without."""
    peaks = result.by("setting", "measured")
    [checkpoints] = [
        setting for setting in peaks if setting.startswith("GPT") and "checkpointing" in setting
    ]
    return peaks[checkpoints] / peaks[checkpoints.removesuffix(", checkpointing")]


CONCLUSIONS: dict[str, Conclusions] = {
    "articles_on_trial": {
        "every claim that was tried comes out as the articles' trial says": lambda r: (
            "no" not in r.column("as_expected")
        ),
    },
    "copy_speed": {
        "pinned memory is faster than pageable at every size from 64 KiB on, "
        "to the GPU and back": _pinned_is_faster,
        "a large copy moves far more bytes a second than a small one": lambda r: (
            r.column("bytes_per_second", memory="pinned")[-1]
            > 10 * r.column("bytes_per_second", memory="pinned")[0]
        ),
    },
    "data_parallel_step": {
        "DataParallel is slower than one GPU for the small model": lambda r: (
            min(_by_gpus(r, "small")[1:]) > _by_gpus(r, "small")[0]
        ),
        "DataParallel is faster than one GPU for the large model": lambda r: (
            max(_by_gpus(r, "large")[1:]) < _by_gpus(r, "large")[0]
        ),
    },
    "ddp_beside_data_parallel": {
        "on 4 GPUs DistributedDataParallel is faster than DataParallel "
        f"for the {model} model": lambda r, model=model: (  # type: ignore[misc]
            _seconds(r, gpus=4, model=model, way=DDP)
            < _seconds(r, gpus=4, model=model, way=DATA_PARALLEL)
        )
        for model in ("small", "large")
    },
    "ddp_seconds": {
        "of wide layers, a second rank lengthens the step by less than a quarter": lambda r: (
            max(r.column("seconds", width=4096, ranks=2))
            < 1.25 * min(r.column("seconds", width=4096, ranks=1))
        ),
    },
    "pipeline_step": {
        "with one batch the stages take turns": lambda r: isclose(
            waiting_share(r, "one batch") or 0.0, 1 - 1 / stages(r), abs_tol=0.1
        ),
        "micro-batches make the GPUs wait less": lambda r: (
            max(waiting_share(r, name) or 1.0 for name in ("GPipe", "1F1B"))
            < (waiting_share(r, "one batch") or 0.0)
        ),
        "1F1B takes less memory than GPipe on the first GPU": lambda r: (
            stage_peaks(r, "1F1B")[0] < stage_peaks(r, "GPipe")[0]
        ),
    },
    "shared_model": {
        "one server takes the least memory, a copy each the most": lambda r: (
            sorted(held_by_way(r), key=lambda way: held_by_way(r)[way])
            == ["one server", "shared weights", "a copy each"]
        ),
    },
    "training_memory": {
        "a GPT with checkpoints takes half the memory of the same GPT without": lambda r: (
            _with_checkpoints(r) < 0.5
        ),
    },
}
