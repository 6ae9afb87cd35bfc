"""What every rank holds before and after a collective: broadcast, all_reduce, reduce_scatter, all_gather."""

from collections.abc import Iterator

from labkit.experiments import programs
from labkit.experiments.result import Row, Run, checked_count

COLLECTIVES = ("broadcast", "all_reduce", "reduce_scatter", "all_gather")
COLUMNS = {"collective": "", "rank": "", "before": "", "after": ""}
MOST = 8  # ranks


def collectives(ranks: int = 3) -> Run:
    """The vector that each of so many ranks holds before and after each of the `COLLECTIVES`, as lists of whole numbers.

    Rank r brings 10 (r + 1), 10 (r + 1) + 1, …, a number for each rank; all_gather begins with what reduce_scatter left. The ranks are
    processes that torchrun starts, once. Raises ValueError for less than 2 ranks and for more than 8, and as
    `labkit.torchrun` does.
    """
    if not 2 <= checked_count("ranks", ranks) <= MOST:
        raise ValueError(f"ranks={ranks}: choose 2 to {MOST}")
    return Run("collectives", {"ranks": ranks}, COLUMNS, programs.badge(ranks), len(COLLECTIVES) * ranks, _points(ranks))


def _points(ranks: int) -> Iterator[Row]:
    told = programs.results("collectives", ranks)
    for collective in COLLECTIVES:
        for rows in told:
            yield next(row for row in rows if row["collective"] == collective)
