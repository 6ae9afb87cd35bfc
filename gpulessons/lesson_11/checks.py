"""Checks of lesson 11, sharding."""

import math
import random
import tempfile
from typing import Any

from gpulessons.lesson_11.continued_training import UNCHANGED, UNREADABLE, go_on_in_rank
from gpulessons.lesson_11.observed_in_ranks import (
    RIGHT,
    adam_steps,
    cut_layers,
    due_groups,
    groups_of,
    layer_backward,
    mean_of_ranks,
)
from gputrace import units
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    during,
    not_yet,
    number_or_type,
    right,
    wrong_type,
)
from labkit.checks.comparing import apart, near
from labkit.checks.in_ranks import in_ranks

LIKE = "T4"  # the virtual GPUs of the ranks

# 11.1: a mean made of a reduce_scatter and an all_gather

MEAN_RANKS = 3
HALVES = ("reduce_scatter", "allgather")  # parts of the names that PyTorch gives to the two halves


def draw_tensors(generator: random.Random) -> Plain:
    """Draw a tensor for each rank, in four shapes. Three ranks cannot share two of them evenly."""
    columns = generator.choice((4, 5, 7))
    shapes = [
        [MEAN_RANKS * generator.randint(2, 4)],
        [generator.choice((5, 7)), columns],
        [1],
        [3, columns],
    ]
    generator.shuffle(shapes)
    cases = []
    for shape in shapes:
        count = math.prod(shape)
        values = [[generator.randint(-9, 9) for _ in range(count)] for _ in range(MEAN_RANKS)]
        cases.append({"shape": shape, "values": values})
    return cases


def observe_mean(averaged: Any, cases: Plain) -> Plain:
    return in_ranks(mean_of_ranks, averaged, [cases] * MEAN_RANKS)


def judge_mean(told: Plain, cases: Plain) -> Verdict:
    for number, case in enumerate(cases):
        shape, numbers = case["shape"], case["values"]
        expected = [sum(column) / MEAN_RANKS for column in zip(*numbers, strict=True)]
        for rank in range(MEAN_RANKS):
            verdict = _judge_mean(
                told[rank][number],
                f"with tensors of {shape}, rank {rank} of {MEAN_RANKS}",
                shape,
                expected,
            )
            if verdict is not None:
                return verdict
    return right("The two halves give the same mean as an all_reduce.")


def _judge_mean(found: Plain, who: str, shape: list[int], expected: list[float]) -> Verdict | None:
    """Return what is wrong with one rank's answer, or None.

    `who` names the rank in the message. `expected` is the mean over the ranks, of this `shape`.
    """
    answer = found["answer"]
    if answer["type"] != "Tensor":
        return not_yet(f"{who} returned {answer['type']}, not a tensor.")
    if answer["shape"] != shape:
        return not_yet(f"{who} returned a tensor of {answer['shape']}. Return the shape of x.")
    if not near(answer["values"], expected):
        return not_yet(f"{who} has {apart(answer['values'], expected, 'the mean is')}.")
    if found["changed"]:
        return not_yet(f"{who} has changed x. Work on a copy.")
    others = [name for name, _ in found["calls"] if not any(half in name for half in HALVES)]
    if others:
        name = others[0].removeprefix("c10d::").strip("_")
        return not_yet(
            f"the mean is right, but {who} called another collective, {name}. "
            "Use the two halves only."
        )
    scattered = sum(nbytes for name, nbytes in found["calls"] if "reduce_scatter" in name)
    gathered = sum(nbytes for name, nbytes in found["calls"] if "reduce_scatter" not in name)
    count = math.prod(shape)
    padded = 4 * MEAN_RANKS * math.ceil(count / MEAN_RANKS)
    most = padded + 4 * MEAN_RANKS  # an answer may pad a number more for each rank
    if scattered > most:
        return not_yet(
            f"the mean is right, but {who} gave {scattered} bytes to a reduce_scatter, and x has "
            f"only {4 * count} bytes. "
            "Each rank needs to add only its own part."
        )
    if scattered < 4 * count:
        return not_yet(
            f"the mean is right, but {who} gave only {scattered} bytes of x to a reduce_scatter. "
            "Who adds the rest?"
        )
    if gathered > most // MEAN_RANKS:
        return not_yet(
            f"the mean is right, but {who} gave {gathered} bytes to an all_gather. "
            "After the reduce_scatter, a rank has one part "
            f"of {MEAN_RANKS}, so {padded // MEAN_RANKS} bytes are enough."
        )
    return None


# 11.2: ZeRO's first stage

SHARERS = 3  # ranks
# Most bytes, as shares of Adam's whole state, that one rank and all ranks together may keep. Whole
# layers cannot be shared exactly.
KEPT, TOGETHER = 0.6, 1.2


def draw_adam(generator: random.Random) -> Plain:
    layers = 2 * SHARERS
    return {
        "width": 16 * generator.randint(6, 9),
        "layers": layers,
        # This parameter has no gradient. An answer that skips it numbers the others wrongly.
        "idle": generator.randrange(1, layers),
        "lr": generator.choice((0.01, 0.02, 0.05)),
        "steps": 3,
        "seed": generator.randrange(1 << 20),
    }


def observe_adam(sharded_adam: Any, case: Plain) -> Plain:
    return in_ranks(adam_steps, sharded_adam, [case] * SHARERS, like=LIKE)


def judge_adam(told: Plain, case: Plain) -> Verdict:
    count = case["layers"] + 2
    for found in told:
        if "returned" in found:
            return not_yet(
                f"your function returned {found['returned']}. Expected the function `step`."
            )
    for step in range(case["steps"]):
        for rank, found in enumerate(told):
            still, wrong = found["still"][step], found["wrong"][step]
            altered = found["altered"][step]
            if still:
                return not_yet(
                    f"in step {step + 1}, {still} of {count - 1} parameters with a gradient did "
                    f"not move on rank {rank}. Which rank sends them?"
                )
            if wrong:
                return not_yet(
                    f"after step {step + 1}, {wrong} of {count} parameters on rank {rank} are "
                    f"not those of Adam with lr={case['lr']}."
                )
            if altered:
                return not_yet(
                    f"step {step + 1} has changed the gradient of {altered} of {count} "
                    f"parameters on rank {rank}. "
                    "A step of Adam leaves them alone."
                )
    for rank, found in enumerate(told):
        if found["drew"]:
            return not_yet(
                f"the steps are right, but your functions changed the random state of "
                f"{', '.join(found['drew'])} on rank {rank}. Adam needs no random numbers."
            )
        if not found["kept"] < KEPT * found["whole"]:
            kept, whole = units.byte_text(found["kept"]), units.byte_text(found["whole"])
            return not_yet(
                f"the steps are right, but rank {rank} keeps {kept}. Adam's whole state is "
                f"{whole}, which {SHARERS} ranks share."
            )
    together, whole = sum(found["kept"] for found in told), told[0]["whole"]
    if not together < TOGETHER * whole:
        return not_yet(
            f"the steps are right, but all {SHARERS} ranks together keep "
            f"{units.byte_text(together)}. Adam's whole state is "
            f"{units.byte_text(whole)}. What does more than one rank keep?"
        )
    return right(
        f"No rank keeps more than {units.byte_text(max(found['kept'] for found in told))} of "
        f"{units.byte_text(told[0]['whole'])}."
    )


# 11.3: how many GPUs a model needs

HELD = 16  # bytes of a parameter that the ranks share: weight, gradient and Adam's two
WHOLE = 8  # of a parameter of the largest layer, in its backward: weight and gradient


def draw_budgets(generator: random.Random) -> Plain:
    """Draw models for which the size of the largest layer matters.

    One model fits on one GPU. One fills its GPUs to the byte. The second needs a little more than a
    whole number of GPUs, so that wrong rounding is noticed.
    """
    cases = []
    for ranks, rest in (
        (1, 0.5),
        (generator.randint(2, 4), 0.4),
        (generator.randint(5, 9), 0),
        (generator.randint(20, 60), 1),
    ):
        parameters = generator.randint(50, 900) * ranks * 10**6
        layer = parameters // generator.randint(8, 30)
        needed: float = ranks  # GPUs of this kind, before the number is rounded up
        if rest:
            needed = ranks - 1 + generator.uniform(rest / 8, rest)
        cases.append([parameters, layer, WHOLE * layer + round(HELD * parameters / needed)])
    generator.shuffle(cases)
    return cases


def observe_budgets(ranks_needed: Any, cases: Plain) -> Plain:
    answers = []
    for parameters, layer, memory in cases:
        with during(f"{parameters} parameters, the largest layer with {layer}, and {memory} bytes"):
            answer = ranks_needed(parameters, layer, memory)
        answers.append(number_or_type(answer))
    return answers


def judge_budgets(answers: Plain, cases: Plain) -> Verdict:
    for answer, (parameters, layer, memory) in zip(answers, cases, strict=True):
        due = -(-HELD * parameters // (memory - WHOLE * layer))
        if isinstance(answer, str):
            return wrong_type(answer, "a whole number")
        if answer != due:
            enough = "1 GPU is enough"
            if due != 1:
                enough = f"{due} GPUs are enough and fewer are not"
            return not_yet(
                f"with {parameters:,} parameters, {layer:,} of them in the largest layer, and "
                f"{memory:,} bytes per GPU, {enough}. "
                f"You say {answer}. What does a rank always hold, and what else does it hold "
                "while a layer's backward pass runs?"
            )
    return right("The ranks share 16 bytes per parameter, and one layer is whole.")


# 11.4: the backward of a layer under FSDP

HOLDERS = 3  # ranks. With two, a divided share takes as much as half of a second whole matrix.
MOST = 1.9  # whole weights at a time: one, the returned share, and another share in the making


def draw_layer(generator: random.Random) -> Plain:
    outputs, inputs = 64 * HOLDERS * generator.randint(3, 4), 64 * generator.randint(4, 6)
    return {"outputs": outputs, "inputs": inputs, "rows": 4, "seed": generator.randrange(1 << 20)}


def observe_backward(backward: Any, case: Plain) -> Plain:
    return in_ranks(layer_backward, backward, [case] * HOLDERS, like=LIKE)


def judge_backward(told: Plain, case: Plain) -> Verdict:
    for rank, found in enumerate(told):
        if "returned" in found:
            return not_yet(
                f"rank {rank} returned {found['returned']}. Expected two tensors: the gradients "
                "of x and of this rank's rows."
            )
        for name, of in (("x", "x"), ("part", "this rank's rows of the weight")):
            if found[name] != RIGHT:
                return not_yet(f"on rank {rank}, the gradient of {of} is {found[name]}.")
        if found["changed"]:
            return not_yet(
                f"rank {rank} has changed {', '.join(found['changed'])}. Other code may still "
                "need the old values."
            )
        if found["to_all"]:
            return not_yet(
                f"the gradients are right, but rank {rank} sent every rank more than its rows of "
                "the weight. "
                "Which collective gives each rank only its own part?"
            )
        if not found["peak"] < MOST:
            return not_yet(
                f"the gradients are right, but rank {rank} held {found['peak']:.1f} times the "
                "weight's bytes at its peak. What does not have to be whole at the same time?"
            )
    return right("Never more than one matrix whole.")


# 11.5: two layers cut among the ranks

ROWS = 16
# Neurons of a rank. They, and its part of either weight, have more bytes than a rank may send.
HIDDEN = 64
OBJECT = 1024  # bytes: more than a pickled tensor has beside its numbers


def draw_layers(generator: random.Random) -> Plain:
    """Draw a batch and two layers with biases, for two and for three ranks.

    The ranks share the hidden neurons.
    """
    cases = []
    for ranks in (2, 3):
        width, hidden, out = generator.randint(20, 24), HIDDEN * ranks, generator.randint(8, 12)

        def matrix(rows: int, columns: int) -> Plain:
            return [
                [generator.choice((-3, -2, -1, 1, 2, 3)) for _ in range(columns)]
                for _ in range(rows)
            ]

        whole = {
            "x": matrix(ROWS, width),
            "first": matrix(hidden, width),
            "first_bias": matrix(1, hidden)[0],
            "second": matrix(out, hidden),
            "second_bias": [generator.randint(1, 3) for _ in range(out)],
        }
        cases.append({"ranks": ranks, **whole})
    return cases


def observe_layers(two_layers: Any, cases: Plain) -> Plain:
    return [
        in_ranks(cut_layers, two_layers, [{**case, "rank": rank} for rank in range(case["ranks"])])
        for case in cases
    ]


def judge_layers(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        hidden = [
            [
                max(0, sum(a * b for a, b in zip(row, weights, strict=True)) + bias)
                for weights, bias in _layer(case, "first")
            ]
            for row in case["x"]
        ]
        due = [
            sum(a * b for a, b in zip(row, weights, strict=True)) + bias
            for row in hidden
            for weights, bias in _layer(case, "second")
        ]
        for rank, answer in enumerate(told):
            of = f"rank {rank} of {case['ranks']}"
            if answer["type"] != "Tensor":
                return not_yet(f"{of} returned {answer['type']}, not a tensor.")
            if answer["shape"] != [len(case["x"]), len(case["second"])]:
                return not_yet(
                    f"{of} returned a tensor of {answer['shape']}. Expected "
                    f"{[len(case['x']), len(case['second'])]}, the whole output on each rank."
                )
            if not near(answer["values"], [float(value) for value in due]):
                return not_yet(
                    f"{of} has {apart(answer['values'], due, 'the whole layers give')}. "
                    "What is summed, and how often?"
                )
            if answer["changed"]:
                return not_yet(
                    f"{of} has changed {', '.join(answer['changed'])}. The next call would "
                    "compute with other numbers."
                )
            output = 4 * len(due)
            if answer["sent"] > (case["ranks"] - 1) * output + OBJECT:
                return not_yet(
                    f"the outputs are right, but {of} sent {units.byte_text(answer['sent'])}, "
                    "and the whole output has "
                    f"{units.byte_text(output)}. Leave the weights where they are. What has to "
                    "be sent?"
                )
    return right("Two layers, cut among the ranks, give every rank the whole output.")


def _layer(case: Plain, name: str) -> list[tuple[list[int], int]]:
    return list(zip(case[name], case[f"{name}_bias"], strict=True))


# 11.6: the groups of a mesh


def draw_meshes(generator: random.Random) -> Plain:
    """Draw meshes of six ranks.

    An answer that forgets rows or columns is right for at most one of the first two meshes.
    """
    return [*generator.sample([[2, 3], [3, 2]], 2), [1, 6], [6, 1]]


def observe_meshes(my_groups: Any, meshes: Plain) -> Plain:
    rows, columns = meshes[0]
    return in_ranks(groups_of, my_groups, [meshes] * (rows * columns))


def judge_meshes(told: Plain, meshes: Plain) -> Verdict:
    for found, (rows, columns) in zip(zip(*told, strict=True), meshes, strict=True):
        verdict = _judge_mesh(found, rows, columns)
        if verdict is not None:
            return verdict
    return right("Each rank is in one row and in one column.")


def _judge_mesh(told: Plain, rows: int, columns: int) -> Verdict | None:
    """Return what is wrong with the groups that the ranks made for one mesh, or None.

    `told` has the groups that each rank reported.
    """
    mesh = f"{rows} × {columns} ranks"
    for rank, found in enumerate(told):
        if isinstance(found["groups"], str):
            return not_yet(
                f"your function returned {found['groups']}. Expected a pair of groups: the group "
                "of the row, and the group of the column."
            )
        for name, group, due in zip(
            ("row", "column"), found["groups"], due_groups(rank, rows, columns), strict=True
        ):
            if isinstance(group, str):
                return not_yet(
                    f"for the {name} of rank {rank} you returned {group}, not a process group "
                    "that it is in."
                )
            if group != due:
                return not_yet(
                    f"in a mesh of {mesh}, the {name} of rank {rank} has the ranks {due}. "
                    f"Your group has {group}."
                )
    for rank, found in enumerate(told):
        if found["reached"] != due_groups(rank, rows, columns):
            return not_yet(
                f"an all_reduce in the groups of rank {rank} of {mesh} added up "
                f"{found['reached']}. Does every rank make every group?"
            )
    return None


# 11.7: training that goes on under FSDP

CONTINUED_BY = 3  # ranks


def draw_training(generator: random.Random) -> Plain:
    """Draw a training whose gradients are clipped in two of three steps.

    In the other step, their norm is below the limit.
    """
    scales = [1, 20, 20]  # of the targets
    generator.shuffle(scales)
    return {
        "scales": scales,
        "width": 4 * generator.randint(4, 6),
        "layers": 3,
        "rows": 4 * CONTINUED_BY,
        "lr": generator.choice((0.01, 0.02, 0.03)),
        "seed": generator.randrange(1 << 20),
        "ranks": CONTINUED_BY,
    }


def observe_training(go_on: Any, case: Plain) -> Plain:
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        return in_ranks(go_on_in_rank, go_on, [case | {"folder": folder}] * CONTINUED_BY, like=LIKE)


def judge_training(told: Plain, case: Plain) -> Verdict:
    for rank, found in enumerate(told):
        who = f"rank {rank} of {case['ranks']}"
        if "returned" in found:
            return not_yet(f"{who} returned {found['returned']}, not the model.")
        if not found["built"]:
            return not_yet(f"{who} did not call build().")
        elsewhere = sorted({device for device in found["built"] if device != "meta"})
        if elsewhere:
            return not_yet(
                f"{who} built the whole model on {elsewhere[0]}, where it would not fit. "
                "Which device needs no memory?"
            )
        if found["whole"]:
            return not_yet(
                f"on {who}, {found['whole']} of {found['parameters']} parameters are not divided "
                "by rows among all ranks. "
                "Does `fully_shard` cover the whole model?"
            )
        if found["undivided"]:
            return not_yet(
                f"{who} gave memory on {found['undivided'][0]} to whole layers, and "
                "`fully_shard` divided them afterwards. "
                "The whole model would not fit. Which of the two comes first?"
            )
        if found["apart"] < found["layers"]:
            return not_yet(
                f"the model is divided, but only {found['apart']} of {found['layers']} layers "
                "with parameters have their own call of "
                "`fully_shard`. The others are gathered together, so all of them are whole at "
                "the same time."
            )
    saved = told[0]["saved"]
    if saved == UNCHANGED:
        return not_yet(
            "the folder still has the checkpoint from before the training. Save the new one there."
        )
    if saved == UNREADABLE:
        return not_yet(
            'the folder has no checkpoint with the weights and averages under the keys "model" '
            'and "optimizer".'
        )
    if saved != RIGHT:
        return not_yet(
            "the weights and averages that you saved are not those of the whole batches. "
            f"They are {saved}."
        )
    return right(f"{case['ranks']} ranks went on where one had stopped.")


CHECKS = [
    Check(
        "11.1",
        draw_tensors,
        observe_mean,
        judge_mean,
        children=True,
        section="Two halves of an all_reduce",
    ),
    Check(
        "11.2",
        draw_adam,
        observe_adam,
        judge_adam,
        children=True,
        section="Bytes per parameter",
        alters=("values",),
    ),
    Check("11.3", draw_budgets, observe_budgets, judge_budgets, section="When is a layer whole?"),
    Check(
        "11.4", draw_layer, observe_backward, judge_backward, children=True, section="FSDP by hand"
    ),
    Check("11.5", draw_layers, observe_layers, judge_layers, children=True, section="Cut a layer"),
    Check(
        "11.6",
        draw_meshes,
        observe_meshes,
        judge_meshes,
        children=True,
        section="Rows and columns of ranks",
    ),
    Check(
        "11.7",
        draw_training,
        observe_training,
        judge_training,
        children=True,
        section="A checkpoint of shares",
    ),
]
