"""Short functions for the tests of races."""

import pytest
import torch

import virtualgpu

RACES = pytest.mark.filterwarnings("ignore::virtualgpu.streams.race_reports.RaceWarning")


def here() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def kinds() -> list[str]:
    return [race.kind for race in virtualgpu.races()]
