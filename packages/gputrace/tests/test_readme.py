"""The examples of README.md run."""

from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_examples_run(run_examples, tmp_path):
    assert "examples.py:" in run_examples(README)
    written = {"memory.png", "timeline.png", "devices.png", "trace.html", "trace.json"}
    assert written <= {path.name for path in tmp_path.iterdir()}
