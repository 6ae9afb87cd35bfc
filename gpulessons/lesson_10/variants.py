"""Variants of exercises of lesson 10, for exams."""

import random
from typing import Any

from gpulessons.lesson_10.observed_in_ranks import buffers_after
from labkit.checks.checking import Check, Plain, Verdict, not_yet, right
from labkit.checks.comparing import near, shown
from labkit.checks.in_ranks import in_ranks
from labkit.checks.variants import Variant

BUFFERS_TASK = """The BatchNorm layers of each rank have seen different rows. Write
`equal_buffers(model)`, which makes the buffers of all ranks equal, in place. Every floating-point
buffer gets the mean of all ranks' buffers. Every other buffer, such as a counter, gets the largest
number of all ranks. Parameters and gradients stay as they are. The check runs your function in
ranks on the CPU."""
BUFFERS_STUB = '''def equal_buffers(model):
    """Make the buffers of all ranks equal: means, and the largest of other numbers."""
    ...'''


def draw_buffers(generator: random.Random) -> Plain:
    """Draw the running means and the counter of each rank, for two and for three ranks."""
    cases: Plain = []
    for ranks in (2, 3):
        counters = generator.sample(range(10, 99), ranks)
        case = []
        for counter in counters:
            mean = [generator.choice((-1, 1)) * generator.randint(1, 9) for _ in range(3)]
            case.append({"mean": mean, "counter": counter})
        cases.append(case)
    return cases


def observe_buffers(equal_buffers: Any, cases: Plain) -> Plain:
    """Return the buffers, parameters and gradients of each rank after the answer."""
    return [in_ranks(buffers_after, equal_buffers, case) for case in cases]


def judge_buffers(found: Plain, cases: Plain) -> Verdict:
    """Judge the buffers of each rank, which must be the means and the largest counter."""
    for ranks, case in zip(found, cases, strict=True):
        columns = zip(*(given["mean"] for given in case), strict=True)
        mean = [sum(column) / len(case) for column in columns]
        counter = max(given["counter"] for given in case)
        for rank, observed in enumerate(ranks):
            of = f"rank {rank} of {len(case)}"
            if not near(observed["mean"], mean):
                return not_yet(
                    f"{of} had the running mean {shown(case[rank]['mean'])}. The mean over all "
                    f"ranks is {shown(mean)}, and it has {shown(observed['mean'])} now. "
                    "With `async_op=True`, `wait()` before you read or return."
                )
            if observed["counter"] != counter:
                return not_yet(
                    f"{of} had the counter {case[rank]['counter']}. The largest of all ranks is "
                    f"{counter}, and it has {observed['counter']} now."
                )
            if not observed["unchanged"]:
                return not_yet(
                    f"{of} has other parameters or gradients than before. Change only buffers."
                )
    return right("So do ranks agree on what no gradient tells them.")


VARIANTS = [
    Variant(
        Check(
            "10.101",
            draw_buffers,
            observe_buffers,
            judge_buffers,
            alters=("values",),
            children=True,
            section="A sum over all ranks",
        ),
        BUFFERS_TASK,
        BUFFERS_STUB,
    )
]
