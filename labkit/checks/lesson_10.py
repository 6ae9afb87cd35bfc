"""Checks of lesson 10, more than one process, more than one machine."""

import os
import random
import tempfile
from typing import Any

import torch

from labkit.checks.checking import Check, Plain, Verdict, during, not_yet, right
from labkit.checks.in_ranks import in_ranks
from labkit.checks.rank_programs import accumulated, cut_layers, gradients_after, life
from labkit.labs.sharding import rank_memory

CLOSE = 1e-4

# 10.1: the mean of all ranks' gradients


def draw_gradients(generator: random.Random) -> Plain:
    """For two and for three ranks: a gradient of each parameter on every rank; one parameter has none."""
    return [[[[generator.randint(-9, 9) for _ in range(size)] for size in (3, 2)] for _ in range(ranks)] for ranks in (2, 3)]


def observe_gradients(average_gradients: Any, cases: Plain) -> Plain:
    return [in_ranks(gradients_after, average_gradients, case) for case in cases]


def judge_gradients(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        means = [[sum(values) / len(case) for values in zip(*tensors, strict=True)] for tensors in zip(*case, strict=True)]
        for rank, observed in enumerate(told):
            of = f"rank {rank} of {len(case)}"
            if any(value != 1 for values in observed["parameters"] for value in values):
                return not_yet(f"{of} has changed its parameters. Only the gradients were to change.")
            for found, mine, mean in zip(observed["gradients"], case[rank], means, strict=False):
                if found is None or not _near(found, mean):
                    return not_yet(
                        f"{of} had the gradient {mine}; the mean over all ranks is {_shown(mean)}, and it has {_shown(found)} now."
                    )
    return right("So does DistributedDataParallel, bucket by bucket.")


def _near(found: Any, due: list[float]) -> bool:
    return len(found) == len(due) and all(abs(a - b) <= CLOSE * max(1.0, abs(b)) for a, b in zip(found, due, strict=True))


def _shown(values: Any) -> str:
    return "none" if values is None else "[" + ", ".join(f"{value:g}" for value in values) + "]"


# 10.2: each rank's rows of a dataset


def draw_epochs(generator: random.Random) -> Plain:
    """Numbers of rows that leave a rest of several when shared equally, a seed for each rank's own generator, and two epochs."""
    cases = []
    for ranks in (2, 3, 4):
        count = ranks * generator.randint(5, 12) + generator.randint(min(2, ranks - 1), ranks - 1)
        epochs = generator.sample(range(50), 2)
        cases.append({"count": count, "ranks": ranks, "epochs": epochs, "seeds": [generator.randrange(1 << 20) for _ in range(ranks)]})
    return cases


def observe_rows(my_rows: Any, cases: Plain) -> Plain:
    """What the answer gives each rank in each epoch; the ranks are processes of their own, so each has another state of random numbers."""
    observations = []
    with torch.random.fork_rng(devices=[]):
        for case in cases:
            told = []
            for epoch in case["epochs"]:
                of_epoch = []
                for rank, seed in enumerate(case["seeds"]):
                    torch.manual_seed(seed + epoch)
                    random.seed(seed + epoch)
                    with during(f"{case['count']} rows, rank {rank} of {case['ranks']}, epoch {epoch}"):
                        of_epoch.append(_numbers(my_rows(case["count"], rank, case["ranks"], epoch)))
                told.append(of_epoch)
            observations.append(told)
    return observations


def _numbers(answer: Any) -> Plain:
    values = answer.tolist() if isinstance(answer, torch.Tensor) else answer
    if not isinstance(values, list | tuple | range):
        return type(answer).__name__
    return [int(value) for value in values]


def judge_rows(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        count, ranks = case["count"], case["ranks"]
        for of_epoch, epoch in zip(told, case["epochs"], strict=True):
            if odd := next((rows for rows in of_epoch if isinstance(rows, str)), None):
                return not_yet(f"your function returned {odd}, not a list of numbers of rows.")
            every = sorted(row for rows in of_epoch for row in rows)
            lengths = [len(rows) for rows in of_epoch]
            if every != list(range(count)):
                missing, twice = count - len(set(every) & set(range(count))), len(every) - len(set(every))
                return not_yet(f"of {count} rows, {missing} went to none of {ranks} ranks in epoch {epoch}, and {twice} came up once more.")
            if max(lengths) - min(lengths) > 1:
                return not_yet(f"the ranks have {lengths} rows: the one with fewer would wait for the others.")
        if told[0] == told[1]:
            return not_yet(f"epochs {case['epochs'][0]} and {case['epochs'][1]} give each rank the same rows in the same order.")
        if all(rows == sorted(rows) for rows in told[0]):
            return not_yet("the rows come in their own order: shuffle them.")
    return right("One order for all ranks, another for each epoch, every row once.")


# 10.3: accumulation that sends once


def draw_parts(generator: random.Random) -> Plain:
    """For each of two ranks: micro-batches of two rows of two numbers, and how many."""
    count = generator.randint(3, 5)
    return [[[[generator.randint(-4, 4) for _ in range(2)] for _ in range(2)] for _ in range(count)] for _ in range(2)]


def observe_accumulation(accumulate: Any, parts: Plain) -> Plain:
    return in_ranks(accumulated, accumulate, parts)


def judge_accumulation(told: Plain, parts: Plain) -> Verdict:
    count = len(parts[0])
    rows = [row for of_rank in parts for part in of_rank for row in part]
    due = [sum(2 * 0.5 * (row[0] + row[1]) * row[column] for row in rows) / len(rows) for column in range(2)]
    for rank, observed in enumerate(told):
        found = observed["gradient"]
        if observed["weight"] != [0.5, 0.5]:
            return not_yet("the weights have changed: only the gradients were asked for.")
        if observed["messages"] == 0:
            return not_yet(f"nothing was sent, so every rank has the gradient of its own rows alone. Which of the {count} backwards sends?")
        if found is None or not _near(found, due):
            return not_yet(f"rank {rank} has the gradient {_shown(found)}; that of all ranks' rows in one batch is {_shown(due)}.")
        if observed["messages"] != 1:
            return not_yet(
                f"the gradient is right, but it was sent {observed['messages']} times; once is enough for {count} micro-batches."
            )
    return right("One message, whatever the number of micro-batches.")


# 10.4: training that goes on where it was


def draw_lives(generator: random.Random) -> Plain:
    steps = generator.randint(5, 7)
    return {"steps": steps, "dies": generator.randint(2, steps - 2), "gradients": [generator.randint(1, 9) for _ in range(steps)]}


def observe_lives(train: Any, inputs: Plain) -> Plain:
    """Two lives of two ranks, in processes of their own: the first ends in the midst of a step."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = os.path.join(folder, "checkpoint.pt")
        first = in_ranks(life, train, [{**inputs, "path": path}] * 2)
        kept = os.path.exists(path)
        second = in_ranks(life, train, [{**inputs, "path": path, "dies": None}] * 2)
    return {"first": first, "second": second, "kept": kept}


def judge_lives(observed: Plain, inputs: Plain) -> Verdict:
    steps, dies = inputs["steps"], inputs["dies"]
    weight, momentum = 1.0, 0.0
    for gradient in inputs["gradients"]:
        momentum = 0.5 * momentum + gradient
        weight -= 0.125 * momentum
    for rank, told in enumerate(observed["first"]):
        if told["begun"] != list(range(dies + 1)):
            return not_yet(
                f"with nothing saved before, rank {rank} was to do the steps 0 to {dies}, where it died; it did {told['begun']}."
            )
    if not observed["kept"]:
        return not_yet(f"the ranks died in step {dies}, and no checkpoint was there. Save after every step.")
    if observed["first"][1]["saved"]:
        return not_yet("rank 1 saved the checkpoint too: two processes that write one file at once can spoil it.")
    for rank, told in enumerate(observed["second"]):
        if told["begun"] != list(range(dies, steps)):
            return not_yet(f"{dies} steps were done when the ranks died; started again, rank {rank} did {told['begun']} of {steps}.")
        if not _near([told["weight"]], [weight]):
            cause = "momentum" if told["momentum"] is None or not _near([told["momentum"]], [momentum]) else "weight"
            return not_yet(
                f"rank {rank} ends with the weight {told['weight']:g}; without a death it is {weight:g}. The {cause} was not restored."
            )
    return right("As if nobody had died.")


# 10.5: two layers cut among the ranks


def draw_layers(generator: random.Random) -> Plain:
    """For two and three ranks: a batch, two layers, and their biases, whose hidden neurons the ranks share."""
    cases = []
    for ranks in (2, 3):
        width, hidden, out = generator.randint(2, 3), 2 * ranks, generator.randint(2, 3)

        def matrix(rows: int, columns: int) -> Plain:
            return [[generator.randint(-3, 3) for _ in range(columns)] for _ in range(rows)]

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
            if not _near(answer["values"], [float(value) for value in due]):
                return not_yet(
                    f"{of} has {_shown(answer['values'][:3])} … where the whole layers give {_shown(due[:3])} …. "
                    "What is summed, and how often?"
                )
    return right("One sum over the ranks for two layers.")


def _layer(case: Plain, name: str) -> list[tuple[list[int], int]]:
    return list(zip(case[name], case[f"{name}_bias"], strict=True))


# 10.6: how many GPUs a model needs


def draw_budgets(generator: random.Random) -> Plain:
    """Models whose largest layer matters, some of which fit one GPU, and some none but with many."""
    cases = []
    for ranks in (1, generator.randint(2, 4), generator.randint(5, 9), generator.randint(20, 60)):
        parameters = generator.randint(50, 900) * 10**7
        layer = parameters // generator.randint(8, 30)
        share = rank_memory("FSDP", parameters, ranks).total
        before = rank_memory("FSDP", parameters, ranks - 1).total if ranks > 1 else 2 * share
        cases.append([parameters, layer, generator.randint(share + 16, before - 16) + 4 * layer])
    generator.shuffle(cases)
    return cases


def observe_budgets(ranks_needed: Any, cases: Plain) -> Plain:
    answers = []
    for parameters, layer, memory in cases:
        with during(f"{parameters} parameters, the largest layer with {layer}, and {memory} bytes"):
            answer = ranks_needed(parameters, layer, memory)
        answers.append(answer if type(answer) is int else type(answer).__name__)
    return answers


def judge_budgets(answers: Plain, cases: Plain) -> Verdict:
    for answer, (parameters, layer, memory) in zip(answers, cases, strict=True):
        room = memory - 4 * layer
        due = -(-16 * parameters // room)
        if isinstance(answer, str):
            return not_yet(f"your function returned {answer}, not a whole number.")
        if answer != due:
            return not_yet(
                f"{parameters:,} parameters, the largest layer with {layer:,}, in {memory:,} bytes a GPU: {due} GPUs are enough "
                f"and fewer are not; you say {answer}. What does a rank hold, and what while a layer computes?"
            )
    return right("Sixteen bytes a parameter, shared, and one layer whole.")


CHECKS = [
    Check("10.1", draw_gradients, observe_gradients, judge_gradients),
    Check("10.2", draw_epochs, observe_rows, judge_rows),
    Check("10.3", draw_parts, observe_accumulation, judge_accumulation),
    Check("10.4", draw_lives, observe_lives, judge_lives),
    Check("10.5", draw_layers, observe_layers, judge_layers),
    Check("10.6", draw_budgets, observe_budgets, judge_budgets),
]
