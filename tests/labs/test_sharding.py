"""What each rank holds: by formula, measured, and drawn."""

import pytest

from labkit.labs import Result, collect, plot_held_by_ranks
from labkit.labs.sharding import COLUMNS, CUT_BY_WAY, KINDS, MEASURED, held_by_ranks, rank_memory


@pytest.mark.slow
def test_the_formula_cuts_what_each_way_cuts():
    billion = 10**9
    assert [rank_memory(way, billion, 8).total / billion for way in CUT_BY_WAY] == [16, 9, 5.5, 2, 2]
    assert (
        rank_memory("ZeRO-1", 80, 8).parameters,
        rank_memory("ZeRO-1", 80, 8).gradients,
        rank_memory("ZeRO-1", 80, 8).optimizer_state,
    ) == (320, 320, 80)
    assert all(rank_memory(way, 80, 1).total == 16 * 80 for way in CUT_BY_WAY)
    with pytest.raises(ValueError, match="way='ZeRO': choose one of 'DDP', 'ZeRO-1'"):
        rank_memory("ZeRO", 80, 8)


@pytest.mark.slow
def test_two_ranks_hold_what_the_formula_says():
    result = collect(held_by_ranks(ranks=2, width=64, layers=4))
    layer = 4 * 64 * 64
    assert len(result.rows) == len(MEASURED) * 2 * len(KINDS)
    for row in result.rows:
        assert row["formula"] <= row["bytes"] <= 1.01 * row["formula"], row
    whole = {way: set(result.column("whole", way=way)) for way in MEASURED}
    assert whole == {"DDP": {4 * layer}, "ZeRO-1": {4 * layer}, "FSDP": {layer}, "tensor parallel": {0}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ranks": 9}, "ranks=9: give at most 8"),
        ({"width": 2048}, "width=2048: give at most 1024"),
        ({"width": 255}, "width=255, layers=4: the width must divide by 2 ranks"),
        ({"layers": 3}, "the layers come in pairs"),
        ({"layers": 0}, "layers=0: give a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        held_by_ranks(**asked)


BADGE = "measured on paper"


def holding(**ways) -> Result:
    rows = [
        {"way": way, "rank": rank, "kind": kind, "bytes": nbytes + 8, "formula": nbytes, "whole": 0}
        for way, sizes in ways.items()
        for rank in range(2)
        for kind, nbytes in zip(KINDS, sizes, strict=True)
    ]
    return Result("held_by_ranks", {"ranks": 2, "width": 256, "layers": 4}, COLUMNS, rows, BADGE)


def test_bars_stand_on_one_another_and_the_formula_is_hollow(drawn):
    figure = plot_held_by_ranks(holding(DDP=[1 << 20, 1 << 20, 2 << 20], FSDP=[1 << 19, 1 << 19, 1 << 20]))
    assert figure.title == "A rank holds 4 MiB under DDP, 2 MiB under FSDP"
    assert "FSDP: each rank 512 KiB of parameters, 512 KiB of gradients, 1 MiB of optimizer state. Measured on paper." in figure.alt
    [axes] = drawn[-1].axes
    assert [round(bar.get_y()) for bar in axes.patches[:3]] == [0, (1 << 20) + 8, (2 << 20) + 16]
    assert [line.get_ydata()[0] for line in axes.lines] == [4 << 20, 4 << 20, 2 << 20, 2 << 20]
    assert [bar.get_height() for bar in axes.patches if not bar.get_fill()] == [5 << 19] * 2  # ZeRO-2, which nobody can measure
    assert "ZeRO-2, by the formula alone: each rank 2.5 MiB." in figure.alt
    assert all(line.get_markerfacecolor() == "white" for line in axes.lines)
    assert plot_held_by_ranks(holding(DDP=[1, 1, 2])).title == "Not measured yet: what a rank holds"
