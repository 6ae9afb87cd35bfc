"""Checks of lesson 12, more than one machine."""

import math
import random
import tempfile
from typing import Any

from gpulessons.lesson_12.observed_in_ranks import (
    newest_of,
    node_work,
    summed_by_nodes,
    uneven_gradient,
)
from gputrace import units
from labkit.checks.checking import Check, Plain, Verdict, not_yet, number_or_type, right, wrong_type
from labkit.checks.comparing import apart, near, shown
from labkit.checks.in_ranks import in_ranks

# 12.1: work that is done once on each node


def draw_nodes(generator: random.Random) -> Plain:
    """Draw the number of ranks of each node, three for the first node.

    So the first ranks of the nodes are not simply every second rank. Among the other nodes, one has
    a rank that waits for another's work, and one has no second rank.
    """
    return [3, *generator.sample((1, 2), 2)]


def observe_nodes(once_per_node: Any, per_node: Plain) -> Plain:
    places = _places(per_node)
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        inputs = []
        for rank, (node, local) in enumerate(places):
            told = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_node[node],
            }
            told |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": len(per_node)}
            inputs.append(
                {
                    "folder": folder,
                    "environment": {name: str(value) for name, value in told.items()},
                }
            )
        return in_ranks(node_work, once_per_node, inputs)


def judge_nodes(told: Plain, per_node: Plain) -> Verdict:
    places = _places(per_node)
    for node, count in enumerate(per_node):
        calls = [
            found["calls"] for found, (other, _) in zip(told, places, strict=True) if other == node
        ]
        if sum(calls) != 1:
            did = "nobody did the work"
            if any(calls):
                did = f"its ranks called `work` {', '.join(map(str, calls))} times"
            return not_yet(
                f"node {node} has {count} rank{'s' * (count > 1)}, and {did}. "
                "Expected one call on each node."
            )
    for rank, found in enumerate(told):
        if not found["done"]:
            return not_yet(
                f"rank {rank} came back before the work of its node was done. "
                "Which call makes a rank wait for the others?"
            )
    return right("Each node did the work once, and no rank went on too early.")


def _places(per_node: Plain) -> list[tuple[int, int]]:
    """Return the node and the local rank of each rank."""
    return [(node, local) for node, count in enumerate(per_node) for local in range(count)]


# 12.2: an all_reduce that sends little between nodes

PER_NODE, NODES, LIKE = 3, 2, "H100"  # unlike, so that neither stands for the other
TWICE = 2  # times its share, each for itself: a sum and a broadcast make an all_reduce too


def draw_sums(generator: random.Random) -> Plain:
    """Draw whole numbers whose sums are exact in float32, but in no shorter type."""
    length = NODES * PER_NODE * generator.randint(1, 3)
    rows = [
        [generator.randint(-200_000, 200_000) for _ in range(length)]
        for _ in range(NODES * PER_NODE)
    ]
    return {"per_node": PER_NODE, "rows": rows}


def observe_sums(all_reduce_by_nodes: Any, case: Plain) -> Plain:
    return in_ranks(summed_by_nodes, all_reduce_by_nodes, [case] * len(case["rows"]), like=LIKE)


def judge_sums(told: Plain, case: Plain) -> Verdict:
    due = [float(sum(column)) for column in zip(*case["rows"], strict=True)]
    for rank, found in enumerate(told):
        if not near(found["values"], due):
            return not_yet(
                f"on rank {rank}, `x` has "
                f"{apart(found['values'], due, 'the sum over all ranks is')}."
            )
    for rank, found in enumerate(told):
        share = found["bytes"] // case["per_node"]
        given = found["between"]
        if max(given, default=0) > share or sum(given) > TWICE * share:
            whole, allowed = units.byte_text(found["bytes"]), units.byte_text(share)
            gave = " and ".join(units.byte_text(nbytes) for nbytes in given)
            return not_yet(
                f"The sums are right. The tensor of rank {rank} has {whole}, and a node has "
                f"{case['per_node']} ranks, so a collective "
                f"between nodes may get {allowed} from this rank. It got {gave}. "
                "First sum inside the node, in the group `near`."
            )
    # One node at least must send its sums, which are as large as the tensor.
    carried, needed = sum(sum(found["between"]) for found in told), told[0]["bytes"]
    if carried < needed:
        return not_yet(
            f"The sums are right, but collectives between nodes carried only "
            f"{units.byte_text(carried)}. The sums of a node have {units.byte_text(needed)}. "
            "How else did they get to the other node? Use collectives, called by the rank itself."
        )
    return right("Between nodes, each rank sends only its share.")


# 12.3: the tokens from which computing hides sending


def draw_trainings(generator: random.Random) -> Plain:
    """Draw trainings with different numbers of bytes to send.

    Most thresholds are between two whole numbers, far from both. The threshold of the last one is a
    whole number. Its numbers are small powers of two, so that no rounding can miss it.
    """
    cases = []
    # With the first two pairs of bytes, no two plausible mistakes give the same number.
    pairs = [(1, 4), (4, 2), *generator.sample(((2, 4), (1, 2), (4, 4), (2, 8)), 2)]
    for keep, (gather_bytes, reduce_bytes) in zip((False, True, False, True), pairs, strict=True):
        while True:
            case = {
                "parameters": generator.randint(10**8, 10**10),
                "flops": generator.uniform(1e14, 9e14),
            }
            case |= {"bandwidth": generator.uniform(1e10, 4e11), "keep": keep}
            case |= {"gather_bytes": gather_bytes, "reduce_bytes": reduce_bytes}
            if 0.1 < _threshold(case) % 1 < 0.4:
                break
        cases.append(case)
    exact = {
        "parameters": 2**30,
        "flops": 6.0 * 2 ** generator.randint(44, 46),
        "bandwidth": 2.0**36,
        "keep": False,
    }
    return [*cases, exact | {"gather_bytes": 2, "reduce_bytes": 4}]


def _threshold(case: Plain) -> float:
    """Return the tokens per GPU at which computing takes as long as sending."""
    return _sent_by(case)


def observe_trainings(tokens_to_hide: Any, cases: Plain) -> Plain:
    return [number_or_type(tokens_to_hide(**case)) for case in cases]


def judge_trainings(answers: Plain, cases: Plain) -> Verdict:
    for answer, case in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "a whole number")
        expected = math.ceil(_threshold(case))
        given = ", ".join(f"{name}={value:.4g}" for name, value in case.items() if name != "keep")
        given += f", keep={case['keep']}"
        if isinstance(answer, float) and not answer.is_integer():
            return not_yet(
                f"With {given}, you return {answer:,.2f}. "
                "Return the smallest whole number of tokens that is enough."
            )
        if answer != expected:
            return not_yet(
                f"With {given}, {expected:,} tokens are needed. "
                f"You return {answer:,.0f}. {_hint(answer, case)}".rstrip()
            )
    return right("From this number on, sending is hidden.")


def _hint(answer: float, case: Plain) -> str:
    """Return a hint that names the mistake behind a wrong number of tokens, if one is known."""
    expected = _threshold(case)
    if abs(answer - expected) < 1:
        return "Below the threshold, sending takes longer."
    if answer == expected + 1:
        return "Computing may also take exactly as long as sending."
    if abs(answer - expected) <= 2:
        return "Round up to the next whole number."
    as_here = _sent_by(case | {"gather_bytes": 2, "reduce_bytes": 4})  # the lesson's own bytes
    if abs(answer - as_here) <= 1:
        return "Use the bytes that the function is given."
    if any(abs(answer - _sent_by(case, gathers=count)) <= 1 for count in (1, 2, 3)):
        return "How often are the parameters gathered?"
    if any(abs(answer - _sent_by(case, **none)) <= 1 for none in ({"gathers": 0}, {"reduces": 0})):
        return "Parameters are gathered, and gradients are reduced. Count the bytes of both."
    if abs(answer - _sent_by(case, reduces=2)) <= 1:
        return "How often are the gradients reduced?"
    for factor, hint in (
        (3, "The backward pass computes, too."),
        (6 / 4, "The forward pass computes, too."),
        (6 / 8, "Nothing is computed twice here."),
        (8, "The bandwidth is given in bytes per second, not in bits."),
        (case["parameters"], "Which numbers depend on the number of parameters?"),
    ):
        if abs(answer - factor * expected) <= max(factor, 1):
            return hint
    if answer < expected / 100 or answer > 100 * expected:
        return "Check the units: which numbers multiply the bytes, and which divide them?"
    return "How long does a token compute, and how long do all bytes take to send?"


def _sent_by(case: Plain, gathers: int | None = None, reduces: int = 1) -> float:
    """Return the threshold that a wrong count of messages would give.

    `gathers` and `reduces` are how often the weights are gathered and the gradients reduced.
    """
    if gathers is None:
        gathers = 1 if case["keep"] else 2
    sent = gathers * case["gather_bytes"] + reduces * case["reduce_bytes"]
    return sent * case["flops"] / (6 * case["bandwidth"])


# 12.4: the rank for which the others wait


def draw_entries(generator: random.Random) -> Plain:
    """Draw a case for each plausible wrong rule to find the late rank.

    In this case the wrong rule finds another rank. A case has a list for each rank, with pairs of a
    collective's number and the time.
    """
    cases = [_entries(generator, 2)]
    for misled in (
        _most_often,
        _longest_once,
        _over_all,
        _latest_in_the_first,
        _latest_in_the_last,
        _latest_on_average,
        _behind_the_first,
        _longest_on_average,
        _behind_the_mean,
        _all_waits_together,
        _without_the_first,
        _last_wait,
        _sum_of_squares,
        _in_tenths,
        _in_hundredths,
        _without_short_waits,
    ):
        case = _entries(generator, generator.randint(3, 4))
        while misled(case) == _late_rank(case):
            case = _entries(generator, generator.randint(3, 4))
        cases.append(case)
    return cases


def _entries(generator: random.Random, ranks: int) -> Plain:
    """Draw the times at which ranks enter collectives.

    Some ranks lack the first collectives, others the last one.
    """
    first, count = generator.randint(1, 900), generator.randint(5, 7)
    entered: Plain = [[] for _ in range(ranks)]
    for number in range(first, first + count):
        times = generator.sample(range(1000), ranks)
        for of_rank, time in zip(entered, times, strict=True):
            of_rank.append([number, number + time / 1000])
    short, ahead = generator.sample(range(ranks), 2)
    entered[short] = entered[short][1:]
    entered[ahead] = entered[ahead][:-1]
    for of_rank in entered:
        generator.shuffle(of_rank)
    return entered


def _common(case: Plain) -> list[list[float]]:
    """Return the times of all ranks for each collective that every rank has entered, in order."""
    found = [{number: time for number, time in of_rank} for of_rank in case]
    numbers = sorted(set.intersection(*map(set, found)))
    return [[of_rank[number] for of_rank in found] for number in numbers]


def _waits(rows: list[list[float]], behind: int = -2) -> list[list[float]]:
    """Return for each rank the seconds for which other ranks waited for it.

    They waited from the entry at position `behind`, in order of entry, to the last entry.
    """
    waits: list[list[float]] = [[] for _ in rows[0]]
    for times in rows:
        waits[times.index(max(times))].append(max(times) - sorted(times)[behind])
    return waits


def _largest(sums: list[float]) -> int:
    return sums.index(max(sums))


def _late_rank(case: Plain) -> int:
    return _largest([sum(waits) for waits in _waits(_common(case))])


def _most_often(case: Plain) -> int:
    return _largest([len(waits) for waits in _waits(_common(case))])


def _longest_once(case: Plain) -> int:
    return _largest([max(waits, default=0) for waits in _waits(_common(case))])


def _behind_the_first(case: Plain) -> int:
    return _largest([sum(waits) for waits in _waits(_common(case), behind=0)])


def _longest_on_average(case: Plain) -> int:
    return _largest([sum(waits) / max(len(waits), 1) for waits in _waits(_common(case))])


def _behind_the_mean(case: Plain) -> int:
    """Return the rank that a wrong rule finds, which compares with the mean of the other ranks."""
    sums = [0.0] * len(case)
    for times in _common(case):
        last = max(times)
        sums[times.index(last)] += last - (sum(times) - last) / (len(times) - 1)
    return _largest(sums)


def _all_waits_together(case: Plain) -> int:
    """Return the rank that a wrong rule finds, which adds up the waits of all other ranks."""
    sums = [0.0] * len(case)
    for times in _common(case):
        sums[times.index(max(times))] += sum(max(times) - time for time in times)
    return _largest(sums)


def _without_the_first(case: Plain) -> int:
    return _largest([sum(waits) for waits in _waits(_common(case)[1:])])


def _last_wait(case: Plain) -> int:
    return _largest([waits[-1] if waits else 0.0 for waits in _waits(_common(case))])


def _sum_of_squares(case: Plain) -> int:
    return _largest([sum(wait**2 for wait in waits) for waits in _waits(_common(case))])


def _in_tenths(case: Plain) -> int:
    return _largest([sum(round(wait, 1) for wait in waits) for waits in _waits(_common(case))])


def _in_hundredths(case: Plain) -> int:
    return _largest([sum(round(wait, 2) for wait in waits) for waits in _waits(_common(case))])


def _without_short_waits(case: Plain) -> int:
    """Return the late rank if waits of up to a tenth of a second do not count."""
    return _largest([sum(wait for wait in waits if wait > 0.1) for waits in _waits(_common(case))])


def _latest_in_the_first(case: Plain) -> int:
    return _largest(_common(case)[0])


def _latest_in_the_last(case: Plain) -> int:
    return _largest(_common(case)[-1])


def _latest_on_average(case: Plain) -> int:
    """Return the rank that a wrong rule finds, which has the latest times on average."""
    sums = [sum(times) for times in zip(*_common(case), strict=True)]
    return sums.index(max(sums))


def _over_all(case: Plain) -> int:
    """Return the rank that a wrong rule finds, which counts collectives that some ranks lack."""
    found = [{number: time for number, time in of_rank} for of_rank in case]
    waits = [0.0] * len(case)
    for number in set.union(*map(set, found)):
        there = [(of_rank[number], rank) for rank, of_rank in enumerate(found) if number in of_rank]
        if len(there) > 1:
            (second, _), (last, rank) = sorted(there)[-2:]
        else:
            (second, _), (last, rank) = [(0.0, 0), (0.0, 0)]
        waits[rank] += last - second
    return _largest(waits)


def observe_entries(late_rank: Any, cases: Plain) -> Plain:
    return [
        number_or_type(late_rank([{number: time for number, time in of_rank} for of_rank in case]))
        for case in cases
    ]


def judge_entries(answers: Plain, cases: Plain) -> Verdict:
    for answer, case in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "the number of a rank")
        expected = _late_rank(case)
        if answer != expected:
            sums = ", ".join(
                f"{sum(waits):.3f} s for rank {rank}"
                for rank, waits in enumerate(_waits(_common(case)))
            )
            return not_yet(
                f"in the collectives that every rank has, the other ranks waited {sums}. "
                f"So rank {expected} is late. You return {answer}."
            )
    return right("The rank is found.")


# 12.5: the newest checkpoint that all ranks find


def draw_steps(generator: random.Random) -> Plain:
    """Draw the steps that each of three ranks finds on its disk.

    In one case, not all ranks find the oldest of their newest steps. In one case no rank finds a
    step, and in one a single rank finds none. Step 0 is an ordinary step, and it is the newest in
    `pairs`. In the last case all find two steps, sorted upwards and downwards. The newer one comes
    first in alphabetical order.
    """
    one, two, three, four, five = 0, *sorted(generator.sample(range(1, 1_000_000), 4))
    listed = [[one, two, three, five], [two, one, four], [one, three, two, four]]
    # any two have a newer one than all three
    pairs = [
        [one, three, four],
        [one, three, five],
        [one, four, five],
    ]
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
    older, newer, newest = (
        generator.randint(700, 999),
        generator.randint(1000, 4000),
        generator.randint(5000, 6000),
    )
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
                return not_yet(
                    f"your function returned {found}. Expected the number of a step, or None."
                )
            if found != due:
                lists = "; ".join(f"rank {other}: {steps}" for other, steps in enumerate(case))
                return not_yet(
                    f"{lists}. The newest step that all ranks find is {due}. On rank {rank} you "
                    f"return {found}."
                )
            if changed:
                return not_yet(
                    "your function changed the list that it was given. Leave it as it was."
                )
    return right("All ranks go on from the same step.")


# 12.6: the gradient of a batch that ranks share unevenly


def draw_shares(generator: random.Random) -> Plain:
    """Draw a linear layer and the rows of each rank, for two and for three ranks. One has no rows.

    In the second case, the layer is a part of a network, so its parameters have other names.
    """
    cases: list[Plain] = []
    for shares in ([1, generator.randint(3, 5)], [generator.randint(3, 4), 0, 2]):
        generator.shuffle(shares)
        rows = [
            [
                {"x": [generator.randint(-3, 3) for _ in range(2)], "y": generator.randint(-9, 9)}
                for _ in range(count)
            ]
            for count in shares
        ]
        cases.append(
            {
                "weight": [generator.choice((-2, -1, 1, 2)) for _ in range(2)],
                "bias": generator.randint(1, 3),
                "inside": bool(cases),
                "rows": rows,
            }
        )
    return cases


def observe_shares(batch_gradient: Any, cases: Plain) -> Plain:
    return [in_ranks(uneven_gradient, batch_gradient, [case] * len(case["rows"])) for case in cases]


def judge_shares(observations: Plain, cases: Plain) -> Verdict:
    for told, case in zip(observations, cases, strict=True):
        weight, bias = [float(value) for value in case["weight"]], float(case["bias"])
        due = _mean_gradient(case, [row for rows in case["rows"] for row in rows])
        for rank, found in enumerate(told):
            if found["parameters"] != [weight, [bias]]:
                return not_yet(
                    f"rank {rank} has changed the parameters. Leave the step to the optimizer."
                )
            for name, gradient, wanted in zip(
                ("weight", "bias"), found["gradients"], due, strict=True
            ):
                if gradient is None or not near(gradient, wanted):
                    counts = ", ".join(str(len(rows)) for rows in case["rows"])
                    return not_yet(
                        f"the ranks have {counts} rows. The gradient of the {name} over all of "
                        f"these rows is {shown(wanted)}. Rank {rank} has {shown(gradient)}. "
                        f"{_gradient_hint(found['gradients'], due, case, rank)}"
                    )
    return right("The gradient is the same, however the ranks share the batch.")


def _mean_gradient(case: Plain, rows: Plain) -> list[list[float]]:
    """Return the gradients of weight and bias of the mean squared error over these rows.

    `case` has the layer's weight and bias.
    """
    errors = [
        2
        * (sum(a * b for a, b in zip(case["weight"], row["x"], strict=True)) + case["bias"])
        / len(rows)
        - 2 * row["y"] / len(rows)
        for row in rows
    ]
    of_weight = [
        float(sum(error * row["x"][place] for error, row in zip(errors, rows, strict=True)))
        for place in range(len(case["weight"]))
    ]
    return [of_weight, [float(sum(errors))]]


def _gradient_hint(found: Plain, due: Plain, case: Plain, rank: int) -> str:
    """Return a hint that names the mistake behind a rank's wrong gradients, if one is known."""
    if any(gradient is None for gradient in found):
        return "Leave each gradient in the parameter's `grad`."
    values, expected = [*found[0], *found[1]], [*due[0], *due[1]]
    means = []  # of each rank's own rows
    for rows in case["rows"]:
        if rows:
            of_weight, of_bias = _mean_gradient(case, rows)
        else:
            of_weight, of_bias = ([0.0, 0.0], [0.0])
        means.append([*of_weight, *of_bias])
    own_rows = len(case["rows"][rank])
    own = [value * own_rows for value in means[rank]]
    if near(values, means[rank]) or near(values, own):
        return "This is the gradient of its own rows. Which collective adds up all gradients?"
    added = [sum(column) for column in zip(*means, strict=True)]
    if _times(values, added):
        return "A rank with more rows must count more. By how many rows is each gradient divided?"
    if _times(values, expected):
        return "The direction is right. By how many rows is it divided?"
    return "Which error is it the gradient of, and over which rows?"


def _times(values: list[float], others: list[float]) -> bool:
    """Return whether the values are a positive multiple of the other values."""
    scale = sum(a * b for a, b in zip(values, others, strict=True))
    scale /= sum(b * b for b in others) or 1.0
    return scale > 0 and near(values, [scale * other for other in others])


CHECKS = [
    Check(
        "12.1",
        draw_nodes,
        observe_nodes,
        judge_nodes,
        children=True,
        section="Two machines, one command",
    ),
    Check(
        "12.2",
        draw_sums,
        observe_sums,
        judge_sums,
        children=True,
        section="What the network carries",
        alters=("values",),
    ),
    Check(
        "12.3",
        draw_trainings,
        observe_trainings,
        judge_trainings,
        section="When computing hides sending",
    ),
    Check("12.4", draw_entries, observe_entries, judge_entries, section="The flight recorder"),
    Check(
        "12.5", draw_steps, observe_steps, judge_steps, children=True, section="A rank that dies"
    ),
    Check(
        "12.6", draw_shares, observe_shares, judge_shares, children=True, section="A rank that dies"
    ),
]
