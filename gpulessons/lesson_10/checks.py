"""Checks of lesson 10, DistributedDataParallel from the inside."""

import itertools
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpulessons.lesson_10 import own_ddp
from gpulessons.lesson_10.observed_in_ranks import accumulated, gradients_after, life, rows_of
from labkit.checks.checking import Check, Plain, Verdict, not_yet, right, wrong_type
from labkit.checks.comparing import near, shown
from labkit.checks.in_ranks import in_ranks

# 10.1: the mean of all ranks' gradients

SIZES = (3, 2, 4)


def draw_gradients(generator: random.Random) -> Plain:
    """Draw a gradient of each parameter for each rank, for two and for three ranks.

    One parameter, not the last one, has no gradient on any rank. Another parameter has zeros on one
    rank.
    """
    cases: Plain = []
    for ranks in (2, 3):
        case: Plain = [
            [
                [generator.choice((-1, 1)) * generator.randint(1, 9) for _ in range(size)]
                for size in SIZES
            ]
            for _ in range(ranks)
        ]
        none, zero = generator.choice(((0, 1), (0, 2), (1, 0), (1, 2)))
        case[generator.randrange(ranks)][zero] = [0] * SIZES[zero]
        for of_rank in case:
            of_rank[none] = None
        cases.append(case)
    return cases


def observe_gradients(average_gradients: Any, cases: Plain) -> Plain:
    return [in_ranks(gradients_after, average_gradients, case) for case in cases]


def judge_gradients(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        for rank, observed in enumerate(told):
            of = f"rank {rank} of {len(case)}"
            if any(value != 1 for values in observed["parameters"] for value in values):
                return not_yet(
                    f"{of} has changed its parameters. Only the gradients should change."
                )
            for found, *everywhere in zip(
                observed["gradients"], *([*of_rank, None] for of_rank in case), strict=True
            ):
                if everywhere[rank] is None:
                    if found is not None:
                        return not_yet(
                            f"a parameter without a gradient has {shown(found)} on {of} now. "
                            "An optimizer would then not skip this parameter."
                        )
                    continue
                mean = [sum(values) / len(case) for values in zip(*everywhere, strict=True)]
                if found is None or not near(found, mean):
                    return not_yet(
                        f"{of} had the gradient {everywhere[rank]}; the mean over all ranks is "
                        f"{shown(mean)}, "
                        f"and it has {shown(found)} "
                        f"now.{_average_hint(found, everywhere[rank], len(case))}"
                    )
    return right("So does DistributedDataParallel, bucket by bucket.")


def _average_hint(found: list[float] | None, own: list[float], ranks: int) -> str:
    """Return a hint about averaged gradients that lack the other ranks' numbers.

    `found` are the answer's gradients, and `own` are those of the rank.
    """
    if found is None:
        return ""
    if near(found, [value / ranks for value in own]):
        return (
            " Was its sum there when you divided? With `async_op=True`, `wait()` before you read."
        )
    if near(found, own):
        return (
            " No other rank's gradient has arrived. Does your result reach `parameter.grad`? "
            "With `async_op=True`, `wait()` before you return."
        )
    return ""


# 10.2: each rank's rows of a dataset

# In these epochs an order comes back if there are only 1 to 10, 100, 1,000 or 2**n orders.
LATER = (12600, 16000, 16384)


def draw_epochs(generator: random.Random) -> Plain:
    """Draw numbers of rows that the ranks cannot share equally, and ten epochs.

    The last epoch is the first one again. Each rank has its own seed for its generators. For four
    ranks, `Tensor.chunk` would give the last rank two rows less than the others. With equal shares,
    the last rank would have two rows more.
    """
    cases = []
    for ranks in (2, 3, 4):
        count = ranks * generator.randint(20, 40) + min(2, ranks - 1)
        epoch = generator.randint(2, 39)
        epochs = [0, 1, epoch, epoch + 1, epoch + 2, epoch + generator.randint(3, 9), *LATER, 0]
        cases.append(
            {
                "count": count,
                "ranks": ranks,
                "epochs": epochs,
                "seeds": generator.sample(range(1 << 20), ranks),
            }
        )
    return cases


def observe_rows(my_rows: Any, cases: Plain) -> Plain:
    return [in_ranks(rows_of, my_rows, [case] * case["ranks"]) for case in cases]


def judge_rows(observations: Plain, cases: Plain) -> Verdict:
    verdicts = [_judge_epochs(told, case) for told, case in zip(observations, cases, strict=True)]
    return next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])


def _judge_epochs(told: Plain, case: Plain) -> Verdict:
    count, ranks, epochs = case["count"], case["ranks"], case["epochs"]
    by_epoch = list(zip(*(of_rank["rows"] for of_rank in told), strict=True))
    for shares, epoch in zip(by_epoch, epochs, strict=True):
        if odd := next((rows for rows in shares if isinstance(rows, str)), None):
            return wrong_type(odd, "a list of numbers of rows")
        every, lengths = (
            sorted(row for rows in shares for row in rows),
            [len(rows) for rows in shares],
        )
        if every != list(range(count)):
            missing, twice = (
                count - len(set(every) & set(range(count))),
                len(every) - len(set(every)),
            )
            return not_yet(
                f"of {count} rows, {missing} went to none of {ranks} ranks in epoch {epoch}, and "
                f"{twice} came up once more."
            )
        if max(lengths) - min(lengths) > 1:
            return not_yet(
                f"the ranks have {lengths} rows. A rank with fewer rows would wait for the others."
            )
        steps = [later > row for rows in shares for row, later in itertools.pairwise(rows)]
        if not 0.2 < sum(steps) / len(steps) < 0.8:
            return not_yet(f"in epoch {epoch} the rows come in their original order. Shuffle them.")
    for (one, first), (other, second) in itertools.combinations(
        zip(epochs[:-1], by_epoch[:-1], strict=True), 2
    ):
        neighbours, again = _neighbours(first), _neighbours(second)
        if 2 * len(neighbours & again) > len(neighbours):
            return not_yet(
                f"in epochs {one} and {other} most rows follow the same row. Give each epoch its "
                "own order."
            )
        if {frozenset(rows) for rows in first} == {frozenset(rows) for rows in second}:
            return not_yet(
                f"in epochs {one} and {other} the same rows are together on a rank. "
                "Shuffle first, then divide the rows among the ranks."
            )
    if by_epoch[0] != by_epoch[-1]:
        return not_yet(
            f"asked again for epoch {epochs[0]}, the ranks get other rows than before. A run "
            "that resumes would miss some rows."
        )
    for name, *drawn in zip(
        ("torch", "random", "NumPy"), *(of_rank["drawn"] for of_rank in told), strict=True
    ):
        if len(set(drawn)) == 1:
            return not_yet(
                f"after your function, {name} draws the same on all ranks, for dropout too. "
                "Use a generator of your own."
            )
    for rank, of_rank in enumerate(told):
        if of_rank["drawn"] != of_rank["undisturbed"]:
            return not_yet(
                f"rank {rank} had a random state of its own, and your function has changed it. "
                "Use a generator of your own."
            )
    return right("One order for all ranks, another for each epoch, every row once.")


def _neighbours(shares: Plain) -> set[frozenset[int]]:
    return {frozenset(pair) for rows in shares for pair in itertools.pairwise(rows)}


# 10.3: accumulation that sends once


def draw_parts(generator: random.Random) -> Plain:
    """Draw micro-batches of two rows of two numbers, for each of three ranks.

    The numbers grow from one micro-batch to the next, so that each has another effect.
    """
    count = generator.randint(5, 7)  # With three, two losses at once would look like one.

    def part(place: int) -> Plain:
        return [
            [generator.randint(1 + 3 * place, 3 + 3 * place) for _ in range(2)] for _ in range(2)
        ]

    return [[part(3 * number + rank) for number in range(count)] for rank in range(3)]


def observe_accumulation(accumulate: Any, parts: Plain) -> Plain:
    return in_ranks(accumulated, accumulate, parts)


def judge_accumulation(told: Plain, parts: Plain) -> Verdict:
    count, size = len(parts[0]), len(parts[0][0])
    rows = [row for of_rank in parts for part in of_rank for row in part]
    due = [
        sum(2 * 0.5 * (row[0] + row[1]) * row[column] for row in rows) / len(rows)
        for column in range(2)
    ]
    for rank, observed in enumerate(told):
        found = observed["gradient"]
        if observed["weight"] != [0.5, 0.5]:
            return not_yet("the weights have changed. Only the gradients should change.")
        if observed["messages"] == 0:
            return not_yet(
                "nothing was sent, so every rank has the gradient of its own rows alone. "
                f"Which of the {count} backward passes should send?"
            )
        if found is None or not near(found, due):
            return not_yet(
                f"rank {rank} has the gradient {shown(found)}. The gradient of all ranks' rows in "
                f"one batch is {shown(due)}."
            )
        if observed["messages"] != 1:
            return not_yet(
                f"the gradient is right, but it was sent {observed['messages']} times. Once is "
                f"enough for {count} micro-batches."
            )
        if set(observed["rows"]) != {size} or sum(observed["rows"]) < count * size:
            return not_yet(
                f"the model got batches of {observed['rows']} rows. Expected {count} micro-batches "
                f"of {size}, one at a time."
            )
        if observed["waiting"] > 1:
            return not_yet(
                f"when a forward pass began, the outputs of {observed['waiting']} others were "
                "still there. When is a graph freed?"
            )
    return right("One message, whatever the number of micro-batches.")


# 10.4: training that goes on where it was


def draw_lives(generator: random.Random) -> Plain:
    steps = generator.randint(5, 7)
    return {
        "steps": steps,
        "dies": generator.randint(2, steps - 2),
        "gradients": [generator.randint(1, 9) for _ in range(steps)],
    }


def observe_lives(train: Any, inputs: Plain) -> Plain:
    """Run the training in two ranks three times, in new processes.

    The first run is killed in the middle of a step. The third run finds that all steps are done.
    Each run finds only the checkpoint in the folder.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path, lives = os.path.join(os.path.realpath(folder), "checkpoint.pt"), []
        for dies in (inputs["dies"], None, None):
            lives.append(in_ranks(life, train, [{**inputs, "path": path, "dies": dies}] * 2))
            # The checkpoint must contain everything that the next run needs.
            for beside in set(Path(folder).iterdir()) - {Path(path)}:
                if beside.is_dir():
                    shutil.rmtree(beside)
                else:
                    beside.unlink()
        return lives


def judge_lives(lives: Plain, inputs: Plain) -> Verdict:
    steps, dies = inputs["steps"], inputs["dies"]
    weight, momentum = 1.0, 0.0
    for gradient in inputs["gradients"]:
        momentum = 0.5 * momentum + gradient
        weight -= 0.125 * momentum
    first, second, third = lives
    for rank, told in enumerate(first):
        if told["begun"] != list(range(dies + 1)):
            return not_yet(
                f"without a checkpoint, rank {rank} should do the steps 0 to {dies}, in which it "
                f"dies. It did the steps {told['begun']}."
            )
    savers = sum(told["saved"] + told["placed"] > 0 for told in first)
    if savers > 1:
        return not_yet(
            f"{savers} ranks saved the checkpoint. Two processes that write one file at the same "
            "time can corrupt it."
        )
    for step, (before, after) in enumerate(itertools.pairwise(first[0]["files"])):
        if after in (None, before):
            return not_yet(
                f"after step {step}, the file "
                f"{'was not there' if after is None else 'was as before'}. Save after every step."
            )
    for rank, told in enumerate(second):
        if told["begun"] != list(range(dies, steps)):
            hint = " Did you save before `work(step)`?" if first[0]["files"][0] is not None else ""
            return not_yet(
                f"{dies} steps were done when the ranks died. After the restart, rank {rank} did "
                f"the steps {told['begun']} of {steps}.{hint}"
            )
        if not near([told["weight"]], [weight]):
            cause = "weight"
            if told["momentum"] is None or not near([told["momentum"]], [momentum]):
                cause = "momentum"
            return not_yet(
                f"rank {rank} ends with the weight {told['weight']:g}. Without the restart it "
                f"would be {weight:g}. The {cause} was not restored."
            )
    if any(told["removed"] for told in first + second):
        return not_yet(
            "the file was removed. A rank that dies before the new file is there leaves no "
            "checkpoint."
        )
    again = third[0]["begun"]
    if again:
        hint = "Save after the last step, too."
        if first[0]["files"][0] is not None:  # there before the first step
            hint = "You save before `work(step)`. Save when the step is done."
        return not_yet(
            f"all {steps} steps were done. After another start, the ranks did {again}. {hint}"
        )
    if any(told["moved"] for told in first):
        return not_yet(
            "the new file was written in another folder, and moved. "
            "That folder may be on another file system, where moving means "
            "copying. A rank that dies meanwhile leaves half a file. "
            "Write it next to the checkpoint."
        )
    written = any(told["overwritten"] for told in first)
    if written or sum(told["placed"] for told in first) < len(set(first[0]["files"]) - {None}):
        return not_yet(
            "the checkpoint was written in place. A rank that dies meanwhile leaves half a file. "
            "Which call puts a whole file there?"
        )
    return right("As if nobody had died.")


CHECKS = [
    Check(
        "10.1",
        draw_gradients,
        observe_gradients,
        judge_gradients,
        children=True,
        section="A sum over all ranks",
    ),
    Check(
        "10.2",
        draw_epochs,
        observe_rows,
        judge_rows,
        children=True,
        section="Where training begins",
    ),
    Check(
        "10.3",
        draw_parts,
        observe_accumulation,
        judge_accumulation,
        children=True,
        section="Micro-batches",
    ),
    Check(
        "10.4", draw_lives, observe_lives, judge_lives, children=True, section="The whole script"
    ),
    own_ddp.CHECK,
]
