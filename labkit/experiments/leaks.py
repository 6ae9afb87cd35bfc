"""What a training loop with leaks keeps: the bytes allocated after each step, and who holds them in the end."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gputrace import record
from labkit.experiments.result import Result, Row, Run, badge

# The lines that make a training leak, by the name of the leak. That of "retain_graph" takes the place of the backward line.
LEAKS = {
    "summed losses": "total += loss",
    "kept losses": "losses.append(loss)",
    "hook": "model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))",
    "kept batches": "history.append((x, output))",
    "evaluation": "valid += nn.functional.mse_loss(model(x + 1), y + 1)",
    "retain_graph": "loss.backward(retain_graph=True)",
}
ALONE = tuple(LEAKS)[:5]  # those that are worth a training of their own: a retained graph goes with its loss, if nothing keeps that
STEPS = 6
MOST_STEPS = 1000
COLUMNS = {"leak": "", "step": "", "allocated": "bytes", "grown": "bytes", "holder": ""}
NO_LEAK = "no leak"

_SET_UP = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = valid = 0
losses, seen, history = [], [], []
"""
_STEP = """x = torch.ones(2048, 128, device="cuda")
y = torch.ones(2048, 64, device="cuda")
output = model(x)
loss = nn.functional.mse_loss(output, y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def leaky_training(leaks: Sequence[str] = ALONE, steps: int = STEPS, together: bool = False) -> Run:
    """Trains a small network with leaks built in: a training for each of `leaks`, or with `together` one that has them all.

    The leaks are those of `LEAKS`, by name. One row a step: `allocated` after it, and by how much that has `grown` since the first step
    began, two that do not count aside. With `together`, the last row names the `holder` of the largest tensor that leaked, if one did.
    A step's input takes 1 MiB, and so does the hidden layer; target and output take half of that each.

    Raises ValueError for other leaks, or steps outside 2 to 1000, RuntimeError when no GPU is in use.
    """
    chosen = list(dict.fromkeys(leaks))
    if not set(chosen) <= set(LEAKS) or not (chosen or together):
        raise ValueError(f"leaks={leaks!r}: choose from {', '.join(map(repr, LEAKS))}; none of them only with together=True")
    if type(steps) is not int or not 2 <= steps <= MOST_STEPS:
        raise ValueError(f"steps={steps!r}: give a whole number from 2 to {MOST_STEPS}")
    trainings = [chosen] if together else [[leak] for leak in chosen]
    parameters = {"leaks": chosen, "steps": steps, "together": together}
    return Run("leaky_training", parameters, COLUMNS, badge(), steps * len(trainings), _points(trainings, steps, together))


def script(leaks: Sequence[str]) -> tuple[str, str]:
    """The training's source: what comes before the loop, and a step."""
    before = _SET_UP + (f"{LEAKS['hook']}\n" if "hook" in leaks else "")
    step = _STEP.replace("loss.backward()", LEAKS["retain_graph"]) if "retain_graph" in leaks else _STEP
    return before, step + "".join(f"{LEAKS[leak]}\n" for leak in LEAKS if leak in leaks and leak not in ("hook", "retain_graph"))


def growth(result: Result) -> dict[str, float]:
    """Bytes that each training added a step, as far as it was measured."""
    rows = {row["leak"]: row for row in result.rows}  # the last of each
    return {leak: row["grown"] / row["step"] for leak, row in rows.items()}


def _points(trainings: list[list[str]], steps: int, names_holder: bool) -> Iterator[Row]:
    for leaks in trainings:
        yield from _training(leaks, steps, names_holder)


def _training(leaks: list[str], steps: int, names_holder: bool) -> Iterator[Row]:
    before, step = (compile(source, "<string>", "exec") for source in script(leaks))
    names: dict[str, Any] = {"__name__": "training"}  # a namespace of its own: what it holds is told by name
    try:
        exec(before, names)
        exec(step, names)
        exec(step, names)
        start = torch.cuda.memory_allocated()

        def row(number: int) -> Row:
            exec(step, names)
            allocated = torch.cuda.memory_allocated()
            return {"leak": " + ".join(leaks) or NO_LEAK, "step": number, "allocated": allocated, "grown": allocated - start, "holder": ""}

        with record(timeline=False) if names_holder else nullcontext() as trace:
            for number in range(1, steps):
                yield row(number)
        last = row(steps)  # after it nothing is left of the recorded steps, but for what leaked
        leaked = trace.leaks() if trace is not None else []
        yield {**last, "holder": leaked[0].holders[0].text if leaked else ""}
    finally:
        names.clear()  # the hook and these names hold each other
