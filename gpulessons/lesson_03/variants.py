"""Variants of exercises of lesson 3, for exams."""

import random
from typing import Any

import torch

from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    right,
    wrong_type,
)
from labkit.checks.comparing import near, shown
from labkit.checks.variants import Variant

LOSS_TASK = """Each GPU has computed the loss of its own rows. Write
`mean_of_losses(losses, rows, gpu)`. `losses` is a list of tensors without dimensions, and
`losses[i]` is the *mean* loss of `rows[i]` rows. A loss may be on any GPU. Return the mean loss of
all rows together, as a tensor without dimensions on GPU number `gpu`. The gradients of the result
come back to all losses."""
LOSS_STUB = '''def mean_of_losses(losses, rows, gpu):
    """Return the mean loss of all rows on one GPU, as part of the same graph."""
    ...'''


def draw_losses(generator: random.Random) -> Plain:
    """Draw losses with different numbers of rows. Each GPU in turn is the result's device."""
    cases = []
    for gpu in generator.sample((0, 1), k=2):
        count = generator.randint(2, 4)
        cases.append(
            {
                "gpu": gpu,
                "devices": [(gpu + 1 + index) % 2 for index in range(count)],
                "rows": generator.sample(range(1, 20), count),
                "losses": [generator.randint(1, 40) / 8 for _ in range(count)],
            }
        )
    return cases


def observe_losses(mean_of_losses: Any, cases: Plain) -> Plain:
    """Return for each case the mean that the answer computes, and the gradients of the losses."""
    found = []
    for case in cases:
        losses = [
            torch.tensor(loss, device=f"cuda:{device}", requires_grad=True)
            for loss, device in zip(case["losses"], case["devices"], strict=True)
        ]
        with torch.cuda.device(1 - case["gpu"]), during(_given(case)):
            result = mean_of_losses(list(losses), list(case["rows"]), case["gpu"])
        if isinstance(result, torch.Tensor) and result.requires_grad and not result.dim():
            result.backward()
        gradients = [None if loss.grad is None else loss.grad.item() for loss in losses]
        found.append({"result": describe(result), "gradients": gradients})
    return found


def _given(case: Plain) -> str:
    """Return the losses, the rows and the GPU of a case in words, for a message."""
    return f"losses {shown(case['losses'])} of {case['rows']} rows and gpu={case['gpu']}"


def judge_losses(found: Plain, cases: Plain) -> Verdict:
    """Judge the device, the shape, the value and the gradients of each mean loss."""
    for observed, case in zip(found, cases, strict=True):
        result, given, total = observed["result"], _given(case), sum(case["rows"])
        if result["type"] != "Tensor":
            return wrong_type(result["type"], "a tensor")
        if result["device"] != f"cuda:{case['gpu']}":
            return not_yet(
                f"with {given}, expected the result on cuda:{case['gpu']}, got it on "
                f"{result['device']}."
            )
        if result["shape"]:
            return not_yet(
                f"expected a tensor without dimensions, got one of shape {result['shape']}."
            )
        products = zip(case["losses"], case["rows"], strict=True)
        mean = sum(loss * rows for loss, rows in products) / total
        if not near(result["values"], [mean]):
            return not_yet(
                f"with {given}, the mean loss of all rows is {mean:g}. You returned "
                f"{result['values'][0]:g}. What does a loss of many rows count?"
            )
        shares = [rows / total for rows in case["rows"]]
        if not near(observed["gradients"], shares):
            return not_yet(
                f"with {given}, the gradients of the losses should be {shown(shares)}. "
                f"They are {_gradients(observed['gradients'])}. "
                "Does each step belong to autograd's graph?"
            )
    return right("Autograd follows numbers from GPU to GPU, too.")


def _gradients(values: Plain) -> str:
    """Return gradients as text for a message. None means that there is no gradient."""
    return "[" + ", ".join("None" if value is None else f"{value:g}" for value in values) + "]"


VARIANTS = [
    Variant(
        Check(
            "03.103",
            draw_losses,
            observe_losses,
            judge_losses,
            gpus=2,
            alters=("values",),
            section="The gradients come back",
        ),
        LOSS_TASK,
        LOSS_STUB,
    )
]
