"""The programs for ranks, found by name."""

import pytest

from gpulessons.rank_programs import rank_program

pytestmark = pytest.mark.slow


def test_programs_are_found_by_name():
    assert rank_program("ddp_lanes").name == "ddp_lanes.py"
    with pytest.raises(ValueError, match="no program 'nothing' for ranks; there are ddp_lanes"):
        rank_program("nothing")
