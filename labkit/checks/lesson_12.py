"""Checks of lesson 12, beyond DDP."""

import random
from typing import Any

from labkit.checks.checking import Check, Plain, Verdict, during, not_yet, number, right
from labkit.checks.in_ranks import in_ranks
from labkit.checks.lesson_10 import near, shown
from labkit.checks.rank_programs import cut_layers

# 12.1: two layers cut among the ranks


def draw_layers(generator: random.Random) -> Plain:
    """For two and three ranks: a batch, two layers, and their biases, whose hidden neurons the ranks share."""
    cases = []
    for ranks in (2, 3):
        width, hidden, out = generator.randint(2, 3), 2 * ranks, generator.randint(2, 3)

        def matrix(rows: int, columns: int) -> Plain:
            return [[generator.choice((-3, -2, -1, 1, 2, 3)) for _ in range(columns)] for _ in range(rows)]

        whole = {
            "x": matrix(4, width),
            "first": matrix(hidden, width),
            "first_bias": matrix(1, hidden)[0],
            "second": matrix(out, hidden),
            "second_bias": [generator.randint(1, 3) for _ in range(out)],
        }
        cases.append({"ranks": ranks, **whole})
    return cases


def observe_layers(two_layers: Any, cases: Plain) -> Plain:
    return [in_ranks(cut_layers, two_layers, [{**case, "rank": rank} for rank in range(case["ranks"])]) for case in cases]


def judge_layers(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        hidden = [
            [max(0, sum(a * b for a, b in zip(row, weights, strict=True)) + bias) for weights, bias in _layer(case, "first")]
            for row in case["x"]
        ]
        due = [sum(a * b for a, b in zip(row, weights, strict=True)) + bias for row in hidden for weights, bias in _layer(case, "second")]
        for rank, answer in enumerate(told):
            of = f"rank {rank} of {case['ranks']}"
            if answer["type"] != "Tensor":
                return not_yet(f"{of} returned {answer['type']}, not a tensor.")
            if answer["shape"] != [len(case["x"]), len(case["second"])]:
                return not_yet(
                    f"{of} returned a tensor of {answer['shape']}; {[len(case['x']), len(case['second'])]} was due, whole on each rank."
                )
            if not near(answer["values"], [float(value) for value in due]):
                return not_yet(
                    f"{of} has {shown(answer['values'][:3])} … where the whole layers give {shown(due[:3])} …. "
                    "What is summed, and how often?"
                )
            if answer["changed"]:
                return not_yet(f"{of} has changed {', '.join(answer['changed'])}: the next call would compute with other numbers.")
    return right("One sum over the ranks for two layers.")


def _layer(case: Plain, name: str) -> list[tuple[list[int], int]]:
    return list(zip(case[name], case[f"{name}_bias"], strict=True))


# 12.2: how many GPUs a model needs

HELD = 16  # bytes of a parameter that the ranks share: weight, gradient and Adam's two
WHOLE = 8  # of a parameter of the largest layer, in its backward: weight and gradient


def draw_budgets(generator: random.Random) -> Plain:
    """Models whose largest layer matters: one that fits one GPU, some that need several, one of which leaves not a byte.

    The second needs a little more than a whole number of GPUs, so that who rounds is told.
    """
    cases = []
    for ranks, rest in ((1, 0.5), (generator.randint(2, 4), 0.4), (generator.randint(5, 9), 0), (generator.randint(20, 60), 1)):
        parameters = generator.randint(50, 900) * ranks * 10**6
        layer = parameters // generator.randint(8, 30)
        needed = ranks - 1 + generator.uniform(rest / 8, rest) if rest else ranks  # of such GPUs, before it is rounded up
        cases.append([parameters, layer, WHOLE * layer + round(HELD * parameters / needed)])
    generator.shuffle(cases)
    return cases


def observe_budgets(ranks_needed: Any, cases: Plain) -> Plain:
    answers = []
    for parameters, layer, memory in cases:
        with during(f"{parameters} parameters, the largest layer with {layer}, and {memory} bytes"):
            answer = ranks_needed(parameters, layer, memory)
        said = number(answer)
        answers.append(type(answer).__name__ if said is None else said)
    return answers


def judge_budgets(answers: Plain, cases: Plain) -> Verdict:
    for answer, (parameters, layer, memory) in zip(answers, cases, strict=True):
        due = -(-HELD * parameters // (memory - WHOLE * layer))
        if isinstance(answer, str):
            return not_yet(f"your function returned {answer}, not a whole number.")
        if answer != due:
            enough = "1 GPU is enough" if due == 1 else f"{due} GPUs are enough and fewer are not"
            return not_yet(
                f"{parameters:,} parameters, the largest layer with {layer:,}, in {memory:,} bytes a GPU: {enough}; "
                f"you say {answer}. What does a rank hold, and what while a layer's backward computes?"
            )
    return right("Sixteen bytes a parameter, shared, and one layer whole.")


CHECKS = [
    Check("12.1", draw_layers, observe_layers, judge_layers, section="Tensor parallelism"),
    Check("12.2", draw_budgets, observe_budgets, judge_budgets, section="FSDP by hand"),
]
