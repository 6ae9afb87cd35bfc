"""The original functions have the scores that the notebook shows, with each version of torch.

`make test-versions` runs this test with the oldest version, the pinned one and the newest.
"""

import json
import re
from pathlib import Path

import pytest

from labkit.puzzles import request
from labkit.puzzles.attempt import attempt
from labkit.puzzles.definitions import puzzles
from virtualgpu import machines

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "puzzles.ipynb"
SCORE = re.compile(r"^score on .*  original (.+)$", re.MULTILINE)


def stored_scores():
    """Return the scores of the original functions that the notebook shows, by puzzle."""
    found = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        name = re.search(r'labkit\.puzzle\("(.+?)"', "".join(cell["source"]))
        if cell["cell_type"] != "code" or name is None:
            continue
        for output in cell["outputs"]:
            score = SCORE.search("".join(output.get("data", {}).get("text/plain", "")))
            if score:
                found[name[1]] = score[1].strip()
    return found


@pytest.fixture(scope="module")
def stored():
    return stored_scores()


def test_the_notebook_shows_a_score_for_each_puzzle(stored):
    assert list(stored) == list(puzzles())


@pytest.mark.parametrize("name", list(puzzles()))
def test_the_original_has_the_score_that_the_notebook_shows(name, stored):
    puzzle = puzzles()[name]
    with machines.put_in_use(request(puzzle), machines.VirtualGPUs):
        found = attempt(puzzle, puzzle.function)
    assert puzzle.score.text(puzzle.score.read(found.trace)) == stored[name]
