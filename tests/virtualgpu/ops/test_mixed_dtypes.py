"""Operands of two dtypes: what a virtual GPU answers, word for word as an H200 did."""

import json
import sys
from pathlib import Path

import pytest
import torch

FIDELITY = Path(__file__).parents[3] / "benchmarks" / "fidelity"
sys.path.insert(0, str(FIDELITY))
from mixed_dtypes import cases, outcome  # noqa: E402  (a program, not a package)

RECORDED = json.loads((FIDELITY / "h200/mixed_dtypes.json").read_text(encoding="utf-8"))["outcomes"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("low", "name"), [(low, name) for low, names in RECORDED.items() for name in names])
def test_two_dtypes_give_what_they_gave_on_an_h200(machine, low, name):
    assert outcome(cases(getattr(torch, low))[name]) == RECORDED[low][name]
