"""Checks of lesson 50."""

import torch

from labkit.checks.checking import Check, describe, not_yet, right


def draw(generator):
    """Draw the inputs of one try: numbers, texts, lists and dictionaries."""
    return {"table": [[generator.randint(-9, 9) for _ in range(4)] for _ in range(3)]}


def observe(row_means, inputs):
    """Call the learner's function, and return what it did as plain data."""
    table = torch.tensor(inputs["table"], dtype=torch.float32, device="cuda")
    return describe(row_means(table))


def expect(inputs):
    """Compute the expected result. Grading does this where no learner's code runs."""
    return [sum(row) / len(row) for row in inputs["table"]]


def judge(observed, inputs, expected):
    """Compare what the function did with the expected result. Only plain data arrives here."""
    if observed["type"] != "Tensor":
        return not_yet(f"your function returned {observed['type']}. Expected a tensor.")
    if observed["device"] != "cuda:0":
        return not_yet(f"the means are on {observed['device']}. Leave them on the GPU.")
    if observed["shape"] != [3]:
        return not_yet(
            f"expected one mean per row, shape [3]. Yours has the shape {observed['shape']}."
        )
    if any(abs(mean - due) > 1e-4 for mean, due in zip(observed["values"], expected, strict=True)):
        return not_yet(f"expected the means {expected}. Yours are {observed['values']}.")
    return right("`mean(1)` reduces dimension 1, the columns.")


CHECKS = [Check("50.1", draw, observe, judge, expect=expect, section="Rows")]
