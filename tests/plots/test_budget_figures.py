"""The figures of memory budgets: findings, words, and that they are drawn from whatever was measured."""

import pytest

from labkit import plots
from labkit.experiments import Result
from labkit.experiments.training_memory import COLUMNS, PLAN_COLUMNS, TERMS

GIB = 1 << 30


def plan(*peaks: float, room: float = 4, measured: tuple[float, ...] = ()) -> Result:
    """A plan whose steps have these peaks in GiB, all of it activations."""
    changes = ["as chosen", "checkpointing", "a fused Adam"][: len(peaks)]
    rows = []
    for place, (change, peak) in enumerate(zip(changes, peaks, strict=True)):
        terms = dict.fromkeys(TERMS, 0) | {"activations": round(peak * GIB)}
        seen = measured[place] if place < len(measured) else 0
        seen = seen if seen < 0 else round(seen * GIB)
        rows.append({"change": change, "moment": "forward of x", "peak": round(peak * GIB), "room": room * GIB, "measured": seen, **terms})
    parameters = {"setting": "MLP()", "gpu": "some GPU", "answer": "It fits.", "changes": changes}
    return Result("memory_plan", parameters, PLAN_COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("result", "title"),
    [
        (plan(1), "1 GiB of 4 GiB on some GPU: it fits"),
        (plan(6, 3), "6 GiB of 4 GiB on some GPU: first change checkpointing"),
        (plan(6, 5, 3), "6 GiB of 4 GiB on some GPU: first change checkpointing"),
        (plan(), "Not worked out yet: some GPU"),
    ],
)
def test_the_title_says_whether_it_fits_and_what_to_change(result, title, drawn):
    assert plots.memory_plan(result).title == title


def test_the_words_hold_terms_measurement_and_prediction():
    alt = plots.memory_plan(plan(6, 3, measured=(-1, 2.9)), prediction=2.5).alt
    assert "As chosen: 6 GiB at forward of x: activations 6 GiB; memory ran out." in alt
    assert "Checkpointing: 3 GiB at forward of x: activations 3 GiB; measured 2.9 GiB." in alt
    assert "Predicted: 2.5 GiB." in alt


def memory(*rows: tuple[str, float, float], origin: str = "") -> Result:
    told = [dict(zip(COLUMNS, (name, round(formula * GIB), round(measured * GIB)), strict=True)) for name, formula, measured in rows]
    return Result("training_memory", {"settings": []}, COLUMNS, told, "measured on paper", {"machine": origin} if origin else {})


def test_the_formula_is_told_beside_what_was_measured():
    figure = plots.training_memory(memory(("MLP(width=8), Adam", 1.02, 1), ("GPT(width=8), SGD", 2, 2)))
    assert figure.title == "The formula is within 2 % of 2 measured training steps"
    assert "MLP(width=8), Adam: formula 1.02 GiB, measured 1 GiB." in figure.alt
    assert plots.training_memory(memory()).title.startswith("Not measured yet")


def test_a_recording_is_told():
    assert "Measured on paper: MLP()" in plots.training_memory(memory(("MLP()", 1, 1)), memory(("MLP()", 1, 1), origin="an H200")).alt
