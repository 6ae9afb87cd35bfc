"""Checks of lesson 12, more than one machine."""

import random
import tempfile
from typing import Any

from gpulessons.lesson_12.observed_in_ranks import checked_sums, newest_of, node_work, summed_by_nodes, uneven_gradient
from gputrace import units
from labkit.checks.checking import Check, Plain, Verdict, not_yet, right
from labkit.checks.comparing import apart, near, shown
from labkit.checks.in_ranks import in_ranks

# 12.1: work that is done once on each node


def draw_nodes(generator: random.Random) -> Plain:
    """How many ranks each node has, the first three: every second rank of all is not one a node. Of the others, one has a rank that
    waits for another's work, and one has no second rank.
    """
    return [3, *generator.sample((1, 2), 2)]


def observe_nodes(once_per_node: Any, per_node: Plain) -> Plain:
    places = _places(per_node)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        inputs = []
        for rank, (node, local) in enumerate(places):
            told = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node[node]}
            told |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": len(per_node)}
            inputs.append({"folder": folder, "environment": {name: str(value) for name, value in told.items()}})
        return in_ranks(node_work, once_per_node, inputs)


def judge_nodes(told: Plain, per_node: Plain) -> Verdict:
    places = _places(per_node)
    for node, count in enumerate(per_node):
        calls = [found["calls"] for found, (other, _) in zip(told, places, strict=True) if other == node]
        if sum(calls) != 1:
            did = f"its ranks called it {', '.join(map(str, calls))} times" if any(calls) else "nobody did the work"
            return not_yet(f"node {node} has {count} rank{'s' * (count > 1)}, and {did}. Once was asked for on each node.")
    for rank, found in enumerate(told):
        if not found["done"]:
            return not_yet(f"rank {rank} came back before the work of its node was done. What do ranks wait at?")
    return right("Once on each node, and nobody goes on too early.")


def _places(per_node: Plain) -> list[tuple[int, int]]:
    """Node and local rank of each rank."""
    return [(node, local) for node, count in enumerate(per_node) for local in range(count)]


# 12.2: an all_reduce that sends little between nodes

PER_NODE, NODES, LIKE = 3, 2, "H100"  # unlike, so that neither stands for the other
TWICE = 2  # times its share, each for itself: a sum and a broadcast make an all_reduce too


def draw_sums(generator: random.Random) -> Plain:
    """Whole numbers whose sums float32 keeps, and no shorter type does."""
    length = NODES * PER_NODE * generator.randint(1, 3)
    rows = [[generator.randint(-200_000, 200_000) for _ in range(length)] for _ in range(NODES * PER_NODE)]
    return {"per_node": PER_NODE, "rows": rows}


def observe_sums(all_reduce_by_nodes: Any, case: Plain) -> Plain:
    return in_ranks(summed_by_nodes, all_reduce_by_nodes, [case] * len(case["rows"]), like=LIKE)


def judge_sums(told: Plain, case: Plain) -> Verdict:
    due = [float(sum(column)) for column in zip(*case["rows"], strict=True)]
    for rank, found in enumerate(told):
        if not near(found["values"], due):
            return not_yet(f"rank {rank} has, in `x`, {apart(found['values'], due, 'the sum over all ranks is')}.")
    for rank, found in enumerate(told):
        share, given = found["bytes"] / case["per_node"], sum(found["between"])
        if not (given <= TWICE * share and all(nbytes <= share for nbytes in found["between"])):
            calls, whole = ", ".join(units.byte_text(nbytes) for nbytes in found["between"]), units.byte_text(found["bytes"])
            return not_yet(
                f"the sums are right, but of its {whole} rank {rank} may give each collective between nodes {units.byte_text(int(share))}, "
                f"because a node has {case['per_node']} ranks. It gave {calls}. Which part is its share, and which group is `far`?"
            )
    return right("Each rank takes its share from node to node.")


# 12.3: the newest checkpoint that all ranks find


def draw_steps(generator: random.Random) -> Plain:
    """What each of three ranks finds: where the oldest of their newest is not found by all, where nothing is, where one finds nothing.

    Step 0 is one like the others, and the newest of all in `pairs`. At last, all find two, which are listed upwards and downwards, and of
    which the newer comes first by the alphabet.
    """
    one, two, three, four, five = 0, *sorted(generator.sample(range(1, 1_000_000), 4))
    listed = [[one, two, three, five], [two, one, four], [one, three, two, four]]
    pairs = [[one, three, four], [one, three, five], [one, four, five]]  # any two have a newer one than all three
    cases = [
        listed,
        pairs,
        [[two, one], [four, three], [one, four]],
        [[one, two], [], [two, one]],
        [[three], [three, one], [one, three, two]],
    ]
    for case in cases:
        for steps in case:
            generator.shuffle(steps)
    generator.shuffle(cases[0])
    older, newer, newest = generator.randint(700, 999), generator.randint(1000, 4000), generator.randint(5000, 6000)
    upwards = [[older, newer], [older, newer], [older, newer, newest]]
    return [*cases, upwards, [steps[::-1] for steps in upwards]]


def observe_steps(newest_common: Any, cases: Plain) -> Plain:
    return in_ranks(newest_of, newest_common, [cases] * 3)


def judge_steps(told: Plain, cases: Plain) -> Verdict:
    for number_of_case, case in enumerate(cases):
        due = max(set.intersection(*map(set, case)), default=None)
        for rank, answers in enumerate(told):
            found, changed = answers[number_of_case]
            if isinstance(found, str):
                return not_yet(f"your function returned {found}; a step or None is due.")
            if found != due:
                lists = "; ".join(f"rank {other}: {steps}" for other, steps in enumerate(case))
                return not_yet(f"{lists}. The newest that all have found is {due}; on rank {rank} you return {found}.")
            if changed:
                return not_yet("your function changed the list that it was given. Leave it as it was.")
    return right("All ranks go on from the same step.")


# 12.4: a sum that refuses what does not fit

SUMMERS = 3
DESCRIBED = 8192  # bytes: more than shape and type take, whatever way they are told, and less than the large tensors have


def draw_tensors(generator: random.Random) -> Plain:
    """Tensors that agree, also of one dimension and none; then one rank whose shape, layout, or type is another; then large ones.

    The values of these are one number throughout.
    """

    def tensor(shape: list[int], dtype: str = "float32") -> Plain:
        count = 1
        for size in shape:
            count *= size
        return {"values": [float(generator.randint(1, 40)) for _ in range(count)], "shape": shape, "dtype": dtype}

    rows, columns = generator.sample((2, 3, 4), 2)
    cases = [
        [tensor(shape, dtype) for _ in range(SUMMERS)]
        for shape, dtype in (([rows, columns], "float32"), ([columns], "float64"), ([], "int32"))
    ]
    odd_types = [tensor([rows, columns], dtype) for dtype in ("float64", "int32")]  # int32 is as large as float32
    for odd in (tensor([columns, rows]), tensor([rows * columns]), *odd_types, tensor([rows, columns + 1])):
        case = [tensor([rows, columns]) for _ in range(SUMMERS)]
        case[generator.randrange(SUMMERS)] = odd
        cases.append(case)
    large = [tensor([1]) | {"shape": [60 * (rank + 1), 100]} for rank in range(SUMMERS)]
    return [*cases, [tensor([rows, columns]) for _ in range(SUMMERS)], large]


def observe_tensors(checked_all_reduce: Any, cases: Plain) -> Plain:
    return in_ranks(checked_sums, checked_all_reduce, [cases] * SUMMERS)


def judge_tensors(told: Plain, cases: Plain) -> Verdict:
    for number_of_case, case in enumerate(cases):
        kinds = [f"{each['dtype']} of {each['shape']}" for each in case]
        ranks = "the ranks have " + ", ".join(kinds)
        for rank, answers in enumerate(told):
            found = answers[number_of_case]
            if len(set(kinds)) > 1:
                if found["raised"] != "ValueError":
                    did = f"raised {found['raised']}" if found["raised"] else "raised nothing"
                    return not_yet(f"{ranks}; rank {rank} {did}, where a ValueError was due on every rank.")
                if found["given"] > DESCRIBED:
                    gave = units.byte_text(found["given"])
                    return not_yet(
                        f"{ranks}; rank {rank} gave {gave} to collectives before it raised a ValueError. What has to be compared?"
                    )
                if found["changed"]:
                    return not_yet(f"{ranks}; rank {rank} raised a ValueError, but its tensor was changed before.")
            elif found["raised"]:
                return not_yet(f"all ranks have {kinds[0]}, and rank {rank} raised {found['raised']}.")
            elif not near(found["values"], due := [float(sum(values)) for values in zip(*(each["values"] for each in case), strict=True)]):
                return not_yet(f"all ranks have {kinds[0]}: rank {rank} has {apart(found['values'], due, 'the sum is')}.")
    return right("Refused on every rank, before a value is sent.")


# 12.5: the gradient of a batch that ranks share unevenly


def draw_shares(generator: random.Random) -> Plain:
    """For two and three ranks: a linear layer and each rank's rows, of which one has none."""
    cases = []
    for shares in ([1, generator.randint(3, 5)], [generator.randint(3, 4), 0, 2]):
        generator.shuffle(shares)
        rows = [
            [{"x": [generator.randint(-3, 3) for _ in range(2)], "y": generator.randint(-9, 9)} for _ in range(count)] for count in shares
        ]
        cases.append({"weight": [generator.choice((-2, -1, 1, 2)) for _ in range(2)], "bias": generator.randint(1, 3), "rows": rows})
    return cases


def observe_shares(batch_gradient: Any, cases: Plain) -> Plain:
    return [in_ranks(uneven_gradient, batch_gradient, [case] * len(case["rows"])) for case in cases]


def judge_shares(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        weight, bias = [float(value) for value in case["weight"]], float(case["bias"])
        every = [row for rows in case["rows"] for row in rows]
        errors = [2 * (sum(a * b for a, b in zip(weight, row["x"], strict=True)) + bias - row["y"]) / len(every) for row in every]
        due = [[sum(e * row["x"][place] for e, row in zip(errors, every, strict=True)) for place in range(2)], [sum(errors)]]
        for rank, found in enumerate(told):
            if found["parameters"] != [weight, [bias]]:
                return not_yet(f"rank {rank} has changed the parameters; leave the step to the optimizer.")
            for name, gradient, wanted in zip(("weight", "bias"), found["gradients"], due, strict=True):
                if gradient is None or not near(gradient, wanted):
                    counts = ", ".join(str(len(rows)) for rows in case["rows"])
                    return not_yet(
                        f"the ranks have {counts} rows. The gradient of the {name} over all of them is {shown(wanted)}; rank {rank} has "
                        f"{shown(gradient)}. By how many rows is it divided?"
                    )
    return right("The same gradient, however many ranks share the batch.")


CHECKS = [
    Check("12.1", draw_nodes, observe_nodes, judge_nodes, children=True, section="Two machines, one command"),
    Check("12.2", draw_sums, observe_sums, judge_sums, children=True, section="What the network costs", alters=("values",)),
    Check("12.3", draw_steps, observe_steps, judge_steps, children=True, section="A rank that dies"),
    Check("12.4", draw_tensors, observe_tensors, judge_tensors, children=True, section="A hang", alters=("values",)),
    Check("12.5", draw_shares, observe_shares, judge_shares, children=True, section="A rank that dies"),
]
