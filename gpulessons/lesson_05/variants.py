"""Variants of exercises of lesson 5, for exams."""

import random
from typing import Any

import torch

from gpulessons.lesson_05.checks import DTYPES, requested
from gputrace.units import byte_text
from labkit.checks.checking import Check, Plain, Verdict, during, not_yet, right, wrong_type
from labkit.checks.comparing import first_difference
from labkit.checks.variants import Variant

COLUMNS_TASK = """A training writes down what its last layer returned. Each output is a table on the
GPU, with one row per example. Write `last_columns(outputs, count)`. It returns a dict with the same
keys as the dict `outputs`. Each value has the last `count` columns of the output, on the GPU. When
the outputs are deleted, only those columns may stay allocated."""
COLUMNS_STUB = '''def last_columns(outputs, count):
    """Return the last columns of each output. They keep nothing else in memory."""
    ...'''


def draw_outputs(generator: random.Random) -> Plain:
    """Draw tables of different sizes. Some have only slightly more columns than requested."""
    count = generator.randint(2, 9)
    return {
        "dtype": generator.choice(list(DTYPES)),
        "rows": 4096 + 512 * generator.randint(0, 8),
        "columns": {
            f"step {10 * step}": count + columns
            for step, columns in enumerate(generator.sample(range(1, 80), 3), 1)
        },
        "count": count,
    }


def observe_outputs(last_columns: Any, inputs: Plain) -> Plain:
    """Return the columns that the answer keeps, and the bytes that remain allocated."""
    rows, count, dtype = inputs["rows"], inputs["count"], getattr(torch, inputs["dtype"])
    before = requested()
    expected = {
        name: (torch.arange(rows * columns).remainder(1997) + columns).view(rows, columns).to(dtype)
        for name, columns in inputs["columns"].items()
    }
    outputs = {name: table.cuda() for name, table in expected.items()}
    with during(f"{len(outputs)} outputs and {count} columns"):
        kept = last_columns(outputs, count)
    del outputs
    held = requested() - before
    if not isinstance(kept, dict):
        return {"type": type(kept).__name__}
    names = [name if isinstance(name, str) else repr(name) for name in kept]
    difference = ""
    devices: list[str] = []
    if names == list(expected):
        values = list(kept.values())
        columns = [table[:, -count:] for table in expected.values()]
        difference = first_difference(values, columns)
        devices = [str(getattr(value, "device", "")) for value in values]
    return {
        "type": "dict",
        "names": names,
        "held": held,
        "difference": difference,
        "devices": devices,
    }


def judge_outputs(observed: Plain, inputs: Plain) -> Verdict:
    """Judge the keys, the values and the memory of the results."""
    if observed["type"] != "dict":
        return wrong_type(observed["type"], "a dict of tensors")
    count = inputs["count"]
    if observed["names"] != list(inputs["columns"]):
        return not_yet(f"expected the keys {list(inputs['columns'])}. Yours are different.")
    if observed["difference"]:
        return not_yet(
            f"expected the last {count} columns of each output, with all rows and the same dtype. "
            f"{observed['difference']}."
        )
    if any(not device.startswith("cuda") for device in observed["devices"]):
        return not_yet("the columns should stay on the GPU of the outputs.")
    tables = len(inputs["columns"])
    needed = tables * DTYPES[inputs["dtype"]] * count * inputs["rows"]
    if observed["held"] > needed + 512 * tables:
        return not_yet(
            f"the columns take {byte_text(needed)}, but {byte_text(observed['held'])} stay "
            "allocated. Whose storage do your columns use?"
        )
    return right(f"{byte_text(observed['held'])} stay allocated, no more than the columns take.")


VARIANTS = [
    Variant(
        Check(
            "05.104",
            draw_outputs,
            observe_outputs,
            judge_outputs,
            section="A row of a matrix",
        ),
        COLUMNS_TASK,
        COLUMNS_STUB,
    )
]
