"""What a notebook sets changes no score, and what cannot be run is said in a sentence."""

import os
import threading

import pytest
import torch

import labkit.puzzles
from virtualgpu.allocator import VARIABLES

CAT = "growing cache"


def cached(keys):
    cache = keys[0]
    for key in keys[1:]:
        cache = torch.cat([cache, key])
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("variable", VARIABLES)
def test_the_allocators_settings_in_the_environment_change_no_score(variable, monkeypatch):
    monkeypatch.setenv(variable, "expandable_segments:True")
    labkit.puzzles._originals.pop(CAT, None)
    outcome = labkit.puzzle(CAT, cached)
    assert "Your reserved memory: 466.00 MiB" in repr(outcome)
    assert "original 466.00 MiB" in repr(outcome)
    assert os.environ[variable] == "expandable_segments:True"


def test_a_function_that_cannot_be_copied_is_refused_in_a_sentence():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be copied to another process .*Leave it out."):
        labkit.puzzle("one launch", lambda scores: lock)


def test_an_interrupt_says_that_the_function_was_interrupted(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(labkit.puzzles, "isolated_on", interrupted)
    with pytest.raises(KeyboardInterrupt, match="interrupted while your function ran") as raised:
        labkit.puzzle("one launch", cached)
    assert raised.value.__suppress_context__
