"""Notebooks as students hand them in, and a course that they belong to."""

import json
import re
from dataclasses import replace
from pathlib import Path

import nbformat

from labcourse.sandbox import Limits

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
SETUP = "import torch, labkit\nfrom torch import nn\nlabkit.use(gpus=2)"
# No busy machine exceeds these times. HURRIED is for submissions that never end.
LIMITS = Limits(memory=1 << 30, output=4 << 20, cell_seconds=150, trial_seconds=150, seconds=600)
HURRIED = replace(LIMITS, cell_seconds=2, trial_seconds=2, seconds=8, grace=4)

COURSE = f"""
course = "GPUs, a trial"
seed = "20261121202611212026112120261121"
notebooks = "{NOTEBOOKS}"

[labs."00"]
[labs."01"]
[labs."06"]
"""


def solution(number: str) -> str:
    """Return the lesson's own solution of an exercise."""
    path = next(NOTEBOOKS.glob(f"{number[:2]}_*.ipynb"))
    cells = nbformat.read(path, as_version=4).cells
    text = next(cell.source for cell in cells if f"Solution of {number}<" in cell.source)
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


def notebook(*cells: str, number: str = "00.1", name: str = "on_gpu") -> bytes:
    """Return a notebook file with the set-up, these cells and the check.

    The last cell has the exercise's tag.
    """
    built = [
        {
            "cell_type": "code",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for source in (SETUP, *cells)
    ]
    built[-1]["metadata"] = {"tags": ["exercise"], "labkit": {"exercise": number}}
    built.append(
        {"cell_type": "code", "source": f'labkit.check("{number}", {name})', "metadata": {}}
    )
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": built}).encode()
