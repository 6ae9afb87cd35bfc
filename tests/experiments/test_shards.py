"""What a rank holds of a model: the formula, and real ranks."""

import pytest
import torch

from labkit.experiments import collect
from labkit.experiments.shards import CUT, KINDS, MEASURED, held, held_by_ranks

pytestmark = pytest.mark.slow


def test_the_formula_cuts_what_each_way_cuts():
    billion = 10**9
    assert [held(way, billion, 8).total / billion for way in CUT] == [16, 9, 5.5, 2, 2]
    assert (held("ZeRO-1", 80, 8).parameters, held("ZeRO-1", 80, 8).gradients, held("ZeRO-1", 80, 8).optimizer_state) == (320, 320, 80)
    assert all(held(way, 80, 1).total == 16 * 80 for way in CUT)
    with pytest.raises(ValueError, match="way='ZeRO': choose one of 'DDP', 'ZeRO-1'"):
        held("ZeRO", 80, 8)


@pytest.mark.xfail(torch.__version__ < (2, 7), reason="torch 2.6's FSDP2 asks a CPU for streams that record events")
def test_two_ranks_hold_what_the_formula_says():
    result = collect(held_by_ranks(ranks=2, width=64, layers=4))
    layer = 4 * 64 * 64
    assert len(result.rows) == len(MEASURED) * 2 * len(KINDS)
    for row in result.rows:
        assert row["formula"] <= row["bytes"] <= 1.01 * row["formula"], row
    whole = {way: set(result.column("whole", way=way)) for way in MEASURED}
    assert whole == {"DDP": {4 * layer}, "ZeRO-1": {4 * layer}, "FSDP": {layer}, "tensor parallel": {0}}


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
