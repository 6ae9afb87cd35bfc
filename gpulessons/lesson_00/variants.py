"""Variants of exercises of lesson 0, for exams."""

import random
from typing import Any

from labkit.checks.checking import Check, Plain, Verdict, describe, not_yet, right, wrong_type
from labkit.checks.variants import Variant

COLUMN_TASK = """Write `id_column(ids)`. It takes a list of Python integers, some of which do not
fit into 32 bits. It returns a `torch.int64` tensor on the GPU with one row per integer and one
column, so its shape is `(len(ids), 1)`."""
COLUMN_STUB = '''def id_column(ids):
    """Return a column on the GPU with the integers of the list `ids`."""
    ...'''


def draw_ids(generator: random.Random) -> Plain:
    """Draw integers that 32 bits and floating-point numbers cannot hold. One appears twice."""
    ids = [2**54 + 2 * generator.randint(0, 2**40) + 1, -generator.randint(1, 2**31 - 1)]
    ids += [generator.randint(2**33, 2**40) for _ in range(generator.randint(1, 4))]
    generator.shuffle(ids)
    return [*ids, ids[0]]


def observe_ids(id_column: Any, ids: Plain) -> Plain:
    """Return descriptions of the tensors from two calls of the answer.

    The second call shows whether the answer returns its first result again.
    """
    id_column([0] * len(ids))
    return describe(id_column(list(ids)))


def judge_ids(tensor: Plain, ids: Plain) -> Verdict:
    """Judge the device, the dtype, the shape and the values of the returned tensor."""
    if tensor["type"] != "Tensor":
        return wrong_type(tensor["type"], "a tensor")
    if not tensor["device"].startswith("cuda"):
        return not_yet(f"expected a tensor on a GPU, got one on {tensor['device']}.")
    if tensor["dtype"] != "torch.int64":
        return not_yet(f"expected dtype torch.int64, got {tensor['dtype']}.")
    if tensor["shape"] != [len(ids), 1]:
        return not_yet(
            f"expected shape {[len(ids), 1]} for {len(ids)} integers, got {tensor['shape']}."
        )
    if tensor["values"] != ids:
        return not_yet(f"expected the values {ids}, got {tensor['values']}.")
    return right("One row per integer, on the GPU.")


VARIANTS = [
    Variant(
        Check("00.101", draw_ids, observe_ids, judge_ids, section="When does Python wait?"),
        COLUMN_TASK,
        COLUMN_STUB,
    )
]
