"""torch.distributed.pipelining: a stage on each rank, the order of its work under two schedules, and what comes out."""

from collections.abc import Iterator

from labkit.experiments import programs
from labkit.experiments.result import Row, Run, checked_count

SCHEDULES = ("GPipe", "1F1B")
COLUMNS = {"schedule": "", "rank": "", "order": "", "loss": "", "gradients": ""}


def pipelining(ranks: int = 2, micro_batches: int = 4) -> Run:
    """What each rank did in one step of a pipeline of `ranks` stages, under each of the `SCHEDULES` of torch.distributed.pipelining.

    The model has two linear layers of 16 neurons a stage, with the weights that `torch.manual_seed(0)` gives; the batch of 32 rows rises
    evenly from -1 to 1, and the targets are its sines. `order` is such as "FFBB": F for the forward of a micro-batch, B for a backward.
    `loss` is that of the last stage (None elsewhere), `gradients` the norm of each parameter's.

    Raises ValueError for ranks outside 2 to 8, and for micro-batches that are fewer or do not divide the batch; and as `labkit.torchrun`
    does.
    """
    if not 2 <= checked_count("ranks", ranks) <= 8:
        raise ValueError(f"ranks={ranks}: choose 2 to 8")
    allowed = [count for count in (2, 4, 8, 16, 32) if count >= ranks]
    if checked_count("micro_batches", micro_batches) not in allowed:
        raise ValueError(f"micro_batches={micro_batches}: choose {', '.join(map(str, allowed))}")
    parameters = {"schedules": list(SCHEDULES), "ranks": ranks, "micro_batches": micro_batches}
    total = len(SCHEDULES) * ranks
    return Run("pipelining", parameters, COLUMNS, programs.badge(ranks), total, _points(ranks, micro_batches))


def _points(ranks: int, micro_batches: int) -> Iterator[Row]:
    told = programs.results("stages", ranks, micro_batches)
    for schedule in SCHEDULES:
        for rows in told:
            yield next(row for row in rows if row["schedule"] == schedule)
