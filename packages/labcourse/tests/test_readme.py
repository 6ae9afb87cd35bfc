"""The examples of README.md run."""

from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_examples_run(run_examples):
    assert "01_device_basics.ipynb" in run_examples(README)
