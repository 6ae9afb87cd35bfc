"""The programs for ranks: found by name, and those that print for the lesson."""

import pytest

import labkit
from gpulessons.rank_programs import rank_program

pytestmark = pytest.mark.slow


def test_programs_are_found_by_name():
    assert rank_program("resuming").name == "resuming.py"
    with pytest.raises(ValueError, match="no program 'nothing' for ranks; there are .*collectives, ddp_lanes, "):
        rank_program("nothing")


def test_training_goes_on_where_its_ranks_died(tmp_path):
    died = labkit.torchrun(rank_program("resuming"), tmp_path / "died.pt", 5, 2, max_restarts=1, quiet=True, devices="cpu", timeout=200)
    whole = labkit.torchrun(rank_program("resuming"), tmp_path / "whole.pt", 5, 9, quiet=True, devices="cpu", timeout=200)
    assert died.results == whole.results and len(died.restarts) == 1
    assert "start 2: from step 2" in died.outputs[0] and "step 4" in died.outputs[0]
    assert "start 1: from step 0" in whole.outputs[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["died.pt", "whole.pt"]
