"""Collectives: what each rank holds and sends."""

import pytest

from gpulessons.lesson_11.labs import plot_collectives
from gpulessons.lesson_11.labs.communication import COLLECTIVES, COLUMNS, RANKS, collectives
from gputrace.figures.figure import GREY
from labkit.labs import Result, collect


@pytest.mark.slow
def test_two_ranks_say_what_they_hold():
    result = collect(collectives(ranks=2))
    assert result.badge == "measured in 2 ranks on the CPU, gloo"
    assert len(result.rows) == collectives(ranks=2).total == 2 * len(COLLECTIVES)
    brought, sums = [[10, 11], [20, 21]], [30, 32]
    for collective in COLLECTIVES[:3]:
        assert result.column("before", collective=collective) == brought
    assert result.column("after", collective="broadcast") == [brought[0]] * 2
    assert result.column("after", collective="all_reduce") == [sums] * 2
    assert result.column("after", collective="reduce_scatter") == [[30], [32]]
    assert result.column("before", collective="all_gather") == [[30], [32]]
    assert result.column("after", collective="all_gather") == [sums] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 1, 9, 2.0])
def test_other_numbers_of_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks}"):
        collectives(ranks)


BADGE = "measured on paper"


BROUGHT, SUMS = [[10, 11], [20, 21]], [30, 32]


AFTER = {"broadcast": [BROUGHT[0]] * 2, "all_reduce": [SUMS] * 2, "reduce_scatter": [[30], [32]], "all_gather": [SUMS] * 2}


def exchanged(after=AFTER) -> Result:
    rows = [
        {"collective": name, "rank": rank, "before": [[30], [32]][rank] if name == "all_gather" else BROUGHT[rank], "after": left}
        for name, vectors in after.items()
        for rank, left in enumerate(vectors)
    ]
    return Result("collectives", {"ranks": 2}, COLUMNS, rows, BADGE)


def test_every_number_is_drawn_in_the_colour_of_who_brought_it(drawn):
    figure = plot_collectives(exchanged())
    assert figure.title == "An all_reduce does what reduce_scatter and all_gather do together"
    assert "Reduce_scatter: before, ranks 0 to 1 hold 10, 11; 20, 21; after, 30; 32." in figure.alt
    assert "All_gather: before, ranks 0 to 1 hold 30; 32; after, each 30, 32. Measured on paper." in figure.alt
    from matplotlib.colors import to_hex

    broadcast, all_reduce, *_ = drawn[-1].axes
    assert [to_hex(box.get_edgecolor(), keep_alpha=False).upper() for box in broadcast.patches] == [
        *[RANKS[0]] * 4,
        *[RANKS[1]] * 2,
        *[RANKS[0]] * 2,
    ]
    assert [to_hex(box.get_edgecolor(), keep_alpha=False).upper() for box in all_reduce.patches[2:4]] == [GREY] * 2


def test_ranks_that_found_something_else_are_not_said_to_agree():
    assert plot_collectives(exchanged(AFTER | {"all_gather": [[30, 31]] * 2})).title == "What 2 ranks hold before and after collectives"
