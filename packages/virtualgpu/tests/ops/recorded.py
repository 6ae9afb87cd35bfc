"""Allocations of single operators on a real H200, and those of a virtual GPU for the same calls."""

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from virtualgpu.errors import VERSION

FIDELITY = Path(__file__).parents[2] / "benchmarks" / "fidelity"
# The first product of a process allocates cuBLAS's workspace, which stays.
WORKSPACES = {
    33554432,
    1048576,
}


@lru_cache(maxsize=1)
def operators() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "fidelity_operators", FIDELITY / "operators.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def cases() -> dict[str, dict]:
    """Return all recorded cases by recording and name."""
    found = {}
    for which in ("shared", "more", "further"):
        for case in json.loads((FIDELITY / "h200" / f"operators_{which}.json").read_text())[
            "cases"
        ]:
            found[f"{which}/{case['name']}"] = case
    return found


# Cases that virtual GPUs do not match yet, because we have not found out what CUDA does.
MISSED = {
    "further/sdpa_boolmask": "a mask of truth values",
    "further/sdpa_gqa": "heads that share keys and values",
    "further/sdpa_one": "a single query",
    "further/conv_cl_bn": "normalization of channels_last",
    "further/conv_sep": "a layer whose workspace nobody measured",
}


# Recorded with torch 2.11. From torch 2.14 on, other operators compute them.
OTHERWISE_FROM_2_14 = {
    "further/quantile2": (
        "torch 2.14 computes the ranks of a quantile in float64, and before it sorts"
    ),
    "further/quantile_many": (
        "torch 2.14 computes the ranks of a quantile in float64, and before it sorts"
    ),
    "further/nanquant": (
        "torch 2.14 computes the ranks of a quantile in float64, and before it sorts"
    ),
    "further/clamp_both": "torch 2.14 shares a gradient between values that are equal",
}


def recorded(prefixes: tuple[str, ...], every: int = 1) -> list:
    """Return the cases whose names begin with a prefix, as parameters of a test.

    A case that is known not to match is expected to fail.
    """
    names = [name for name in cases() if name.split("/")[1].startswith(prefixes)][::every]
    return [
        pytest.param(name, marks=pytest.mark.xfail(raises=AssertionError, reason=MISSED[name]))
        if name in MISSED
        else name
        for name in names
    ]


def sequences(case: dict) -> dict[str, list]:
    """Return the allocations and frees of a recorded case, by turn and pass ("cold forward").

    Segments and the libraries' workspaces are left out.
    """
    return {
        f"{turn} {way}": [
            [sign, size]
            for sign, size in case[turn][way]
            if sign in "+-" and size not in WORKSPACES
        ]
        for turn in ("cold", "warm")
        for way in ("forward", "backward")
        if way in case.get(turn, {})
    }


def check(name: str) -> None:
    """Raise AssertionError if a virtual GPU's allocations are not the recorded ones.

    Skips cases that torch has changed since the recording.
    """
    if VERSION >= (2, 14) and name in OTHERWISE_FROM_2_14:
        pytest.skip(OTHERWISE_FROM_2_14[name])
    case = cases()[name]
    assert sequences(operators().one(case["line"])) == sequences(case)
