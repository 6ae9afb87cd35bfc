"""What each rank holds: by formula, measured, and drawn."""

import pytest

from gpulessons.lesson_11.labs import plot_held_by_ranks
from gpulessons.lesson_11.labs.sharding import COLUMNS, CUT_BY_WAY, MEASURED, PARTS, held_by_ranks, rank_memory
from labkit.labs import Result, collect


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
def test_ranks_hold_what_the_formula_says_and_ddp_its_buckets_besides():
    result = collect(held_by_ranks(ranks=2, width=256, layers=8))
    count = 8 * 256**2
    assert len(result.rows) == len(MEASURED) * len(PARTS) and "2 ranks, a virtual GPU each" in result.badge
    other = {"DDP": 4 * count}  # its buckets
    for way in MEASURED:
        found, whole = result.by("part", "bytes", way=way), rank_memory(FORMULA.get(way, way), count, 2)
        assert found["parameters"] == whole.parameters or way == "FSDP, no reshard"  # which keeps parameters whole during a step alone
        assert found["gradients"] == whole.gradients
        assert whole.optimizer_state <= found["optimizer state"] < 1.01 * whole.optimizer_state
        assert abs(found["other"] - other.get(way, 0)) < 0.05 * count, way
    peak = result.by("way", "bytes", part="peak")
    assert peak["FSDP"] < peak["FSDP, no reshard"] < peak["ZeRO-1, views"] < peak["DDP, views"] < peak["DDP"]


FORMULA = {"DDP, views": "DDP", "ZeRO-1, views": "ZeRO-1", "FSDP, no reshard": "ZeRO-2"}


@pytest.mark.parametrize("asked", [{"ranks": 9}, {"width": 255}, {"width": 1 << 15, "layers": 2}])
def test_what_cannot_be_cut_is_refused(asked):
    with pytest.raises(ValueError, match="give at most 8 ranks, a width that divides by them, and at most 1,073,741,824 parameters"):
        held_by_ranks(**asked)


def holding(**ways) -> Result:
    rows = [{"way": way, "part": part, "bytes": 8 * nbytes} for way, held in ways.items() for part, nbytes in zip(PARTS, held, strict=True)]
    return Result("held_by_ranks", {"ranks": 4, "width": 2, "layers": 2}, COLUMNS, rows, "measured on paper")


def test_bars_stand_on_one_another_and_the_peak_is_hollow(drawn):
    figure = plot_held_by_ranks(holding(DDP=[4, 4, 8, 4, 21], FSDP=[1, 1, 2, 0, 6]))
    assert figure.title == "Of 20 bytes a parameter under DDP, a rank holds 4 under FSDP"
    assert "FSDP: bytes a parameter on each rank, 1 of parameters, 1 of gradients, 2 of optimizer state; at the peak 6." in figure.alt
    [axes] = drawn[-1].axes
    assert [bar.get_y() for bar in axes.patches[:5]] == [0, 0, 4, 8, 16]
    assert [bar.get_height() for bar in axes.patches if not bar.get_fill()] == [21, 6]
    assert plot_held_by_ranks(holding(DDP=[4, 4, 8, 4, 21])).title == "Not measured yet: what a rank holds"
