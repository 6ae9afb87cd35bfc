"""Variants of exercises of lesson 6, for exams."""

import inspect

from torch import nn

from gpulessons.lesson_06 import checks
from labkit.checks.variants import Variant

LARGEST_TASK = """Fix `train_reporting`. It trains, and reports the largest output of each step and
the mean of all losses, but it leaks. Your version must return the same and train the same. No step
leaves more on the GPU than the first one, not even 4 bytes in each step, and no step leaves more
graphs. Each backward pass frees what it used."""


def train_reporting(model, optimizer, batches):  # what the exercise hands out, without types
    """Train. Return the largest absolute output of each step, and the mean of the losses."""
    largest, total, steps = [], 0, 0
    for x, y in batches:
        output = model(x)
        loss = nn.functional.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        largest.append(output.abs().max())
        total = total + loss
        steps += 1
    return [value.item() for value in largest], (total / steps).item()


def stub() -> str:
    """Return the source of the script that students get in their cell."""
    first, *others = inspect.getsource(train_reporting).rstrip().splitlines()
    return "\n".join([first.partition("  #")[0], *others])


VARIANTS = [
    Variant(
        checks.fix(
            "06.103",
            train_reporting,
            "What do your numbers remember besides their values?",
            "Six loops",
        ),
        LARGEST_TASK,
        stub(),
    )
]
