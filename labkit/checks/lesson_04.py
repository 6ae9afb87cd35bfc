"""Checks of lesson 04, model parallelism."""

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from labkit import machine
from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, right
from labkit.labs.micro_batches import compute_first, copy_first
from labkit.labs.schedules import BACKWARD, FORWARD, ONE_F_ONE_B, launches, order

# 04.1: a model cut in two


class Scale(nn.Module):
    """Multiplies by its weight. `seen` notes the device and the rows of each call."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.seen: list[Plain] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([str(x.device), len(x)])
        return x * self.weight


def draw_cuts(generator: random.Random) -> Plain:
    """Models cut in different places; the batch lies on each of the devices once."""
    cases = []
    for device in ("cpu", "cuda:0", "cuda:1"):
        weights = [generator.randint(2, 5) for _ in range(generator.randint(3, 5))]
        values = [generator.randint(1, 9) for _ in range(generator.randint(2, 4))]
        cases.append({"device": device, "weights": weights, "values": values, "cut": generator.randint(1, len(weights) - 1)})
    cases[-1]["cut"] = 1  # not the middle
    generator.shuffle(cases)
    return cases


def observe_cuts(in_two: Any, cases: Plain) -> Plain:
    """Where each layer lies and ran, the result, and each layer's gradient."""
    observations: list[Plain] = []
    for case in cases:
        layers = [Scale(float(weight)) for weight in case["weights"]]
        x = torch.tensor([float(value) for value in case["values"]], device=case["device"])
        with during(f"{len(layers)} layers, cut={case['cut']}, a batch on {case['device']}"):
            module = in_two(nn.Sequential(*layers), case["cut"])
            if not isinstance(module, nn.Module):
                observations.append({"type": type(module).__name__})
                continue
            y = module(x)
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
        observations.append(
            {
                "type": "Module",
                "parameters": len(list(module.parameters())),
                "lie": [str(layer.weight.device) for layer in layers],
                "ran": [layer.seen for layer in layers],
                "result": describe(y),
                "gradients": [None if layer.weight.grad is None else layer.weight.grad.item() for layer in layers],
            }
        )
    return observations


def judge_cuts(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        if observed["type"] != "Module":
            return not_yet(f"your function returned {observed['type']}, not an nn.Module.")
        weights, values, cut = case["weights"], case["values"], case["cut"]
        given = f"with {len(weights)} layers, cut={cut} and a batch on {case['device']}"
        due = ["cuda:0"] * cut + ["cuda:1"] * (len(weights) - cut)
        if observed["lie"] != due:
            return not_yet(f"{given} the layers belong on {_listed(due)}; yours are on {_listed(observed['lie'])}.")
        if observed["ran"] != [[[device, len(values)]] for device in due]:
            return not_yet(f"{given} each layer was to see the whole batch once, on its own GPU.")
        if observed["parameters"] != len(weights):
            return not_yet(f"your module has {observed['parameters']} parameters, the model {len(weights)}: an optimizer would miss some.")
        result, factor = observed["result"], prod(weights)
        if result.get("device") != "cuda:1":
            return not_yet(f"{given} the result is on {result.get('device', result['type'])}; it was to stay on cuda:1.")
        if result["values"] != [factor * value for value in values]:
            return not_yet(f"{given} the result is not what the model itself gives.")
        if observed["gradients"] != [sum(values) * factor / weight for weight in weights]:
            return not_yet(f"{given} the layers' gradients are {observed['gradients']}. Does each copy stand in autograd's graph?")
    return right("Two GPUs, one model, one graph.")


def _listed(devices: list[str]) -> str:
    return ", ".join(devices)


# 04.2: the seconds of a forward pass through stages that are not equal


def draw_stages(generator: random.Random) -> Plain:
    """Stages of equal and of different length, the slowest first, last and between; one stage alone, and one micro-batch."""
    cases = [[[generator.randint(1, 9) for _ in range(generator.randint(2, 6))], generator.randint(2, 12)] for _ in range(4)]
    cases += [[[3] * generator.randint(2, 5), generator.randint(2, 9)], [[generator.randint(1, 9)], generator.randint(2, 9)]]
    cases += [[[generator.randint(1, 9) for _ in range(3)], 1], [[1, 2, 8], 4], [[9, 2, 1], 5]]
    generator.shuffle(cases)
    return cases


def observe_seconds(forward_seconds: Any, cases: Plain) -> Plain:
    answers = []
    for stages, count in cases:
        with during(f"stages of {stages} seconds and {count} micro-batches"):
            answer = forward_seconds([float(seconds) for seconds in stages], count)
        answers.append(float(answer) if isinstance(answer, int | float) else type(answer).__name__)
    return answers


def judge_seconds(answers: Plain, cases: Plain) -> Verdict:
    for answer, (stages, count) in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return not_yet(f"your function returned {answer}, not a number.")
        due = sum(stages) + (count - 1) * max(stages)
        if not abs(answer - due) <= 1e-6 * due:  # so that nan fails
            return not_yet(f"stages that take {stages} seconds end {count} micro-batches after {due} s; you say {answer:g} s. Draw it.")
    return right("All wait for the slowest.")


# 04.3: where to cut


def draw_layers(generator: random.Random) -> Plain:
    """Layers' times such that neither the middle layer nor the first cut beyond or before half of the time is always best."""
    while True:
        cases = [[generator.randint(1, 9) for _ in range(generator.randint(4, 8))] for _ in range(6)]
        for case in cases[:3]:
            case[generator.randrange(len(case))] = generator.randint(12, 30)
        if all(any(_slower(case, rule(case)) > _best(case) for case in cases) for rule in (_middle, _beyond_half, _before_half)):
            return cases


def _slower(layers: Sequence[float], cut: int) -> float:
    """The seconds of the half that takes longer."""
    return max(sum(layers[:cut]), sum(layers[cut:]))


def _best(layers: Sequence[float]) -> float:
    return min(_slower(layers, cut) for cut in range(1, len(layers)))


def _middle(layers: Sequence[float]) -> int:
    return len(layers) // 2


def _beyond_half(layers: Sequence[float]) -> int:
    return next((cut for cut in range(1, len(layers)) if 2 * sum(layers[:cut]) >= sum(layers)), len(layers) - 1)


def _before_half(layers: Sequence[float]) -> int:
    return max((cut for cut in range(1, len(layers)) if 2 * sum(layers[:cut]) <= sum(layers)), default=1)


def observe_best_cuts(best_cut: Any, cases: Plain) -> Plain:
    answers = []
    for layers in cases:
        with during(f"layers of {layers} seconds"):
            answer = best_cut([float(seconds) for seconds in layers])
        answers.append(answer if type(answer) is int else type(answer).__name__)
    return answers


def judge_best_cuts(answers: Plain, cases: Plain) -> Verdict:
    for answer, layers in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return not_yet(f"your function returned {answer}, not a whole number.")
        if not 1 <= answer < len(layers):
            return not_yet(f"a cut after {answer} of {len(layers)} layers leaves a GPU without work.")
        if _slower(layers, answer) > _best(layers):
            return not_yet(
                f"layers that take {layers} s, cut after {answer}: the slower half takes {_slower(layers, answer)} s. "
                f"Another cut makes it {_best(layers)} s."
            )
    return right("The slower half is as fast as it can be.")


# 04.4: a step with micro-batches: the values of one batch, in the time of the formula

WIDTH, ROWS, LAYERS = 4096, 8192, 4  # of the network whose step is timed: layers in each half


def draw_steps(generator: random.Random) -> Plain:
    """A small batch, rising, whose micro-batches are not equally long; and into how many both batches are cut."""
    values = sorted(generator.sample(range(1, 10), generator.choice([5, 7])))
    return {"values": values, "weights": [generator.randint(1, 4), generator.randint(1, 4)], "splits": generator.choice([2, 3])}


def observe_steps(step: Any, inputs: Plain) -> Plain:
    """Loss, gradients and what each half saw of the small batch; the seconds of a step of the large one."""
    splits = inputs["splits"]
    first, second = (Scale(float(weight)).cuda(index) for index, weight in enumerate(inputs["weights"]))
    x = torch.tensor([float(value) for value in inputs["values"]], device="cuda:0")
    with during(f"{len(x)} rows, splits={splits}"):
        loss = step(first, second, x, splits)
    told = {
        "loss": loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else type(loss).__name__,
        "gradients": [None if half.weight.grad is None else half.weight.grad.item() for half in (first, second)],
        "seen": [[device for device, _ in half.seen] for half in (first, second)],
    }
    with machine.in_use().without_values(), during("a large batch, of which memory and time count and no value is computed"):
        return told | {"seconds": _step_seconds(step, splits)}


def _step_seconds(step: Any, splits: int) -> list[float]:
    """Of the large batch: the answer's, and for comparison those of the two orders of launching that the lesson shows."""
    halves = [_half(f"cuda:{index}") for index in range(2)]
    large = torch.ones(ROWS, WIDTH, device="cuda:0")

    def known(program: Callable) -> None:
        torch.cat(program(*halves, large.chunk(splits))).square().mean().backward()

    answer = _seconds(lambda: step(*halves, large, splits))
    return [answer, _seconds(lambda: known(compute_first)), _seconds(lambda: known(copy_first))]


def _half(device: str) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, device=device), nn.ReLU())])


def _seconds(work: Callable[[], Any]) -> float:
    """Of the second of two runs."""
    for _ in range(2):
        start = machine.host_time()
        work()
        for index in range(2):
            torch.cuda.synchronize(index)
        seconds = machine.host_time() - start
    return seconds


def judge_steps(observed: Plain, inputs: Plain) -> Verdict:
    values, (a, b), splits = inputs["values"], inputs["weights"], inputs["splits"]
    squares = sum(value * value for value in values) / len(values)
    loss, due = observed["loss"], squares * (a * b) ** 2
    if isinstance(loss, str):
        return not_yet(f"your function returned {loss}, not the loss.")
    count = -(-len(values) // -(-len(values) // splits))
    if observed["seen"] != [[f"cuda:{index}"] * count for index in range(2)]:
        ran = " and ".join(str(len(seen)) for seen in observed["seen"])
        return not_yet(f"{len(values)} rows, splits={splits}: each half was to see {count} micro-batches on its GPU; they saw {ran}.")
    if not _close(loss, due):
        return not_yet(f"the loss of the batch {values} is {due:g}; yours is {loss:g}. The micro-batches are not equal.")
    for found, gradient in zip(observed["gradients"], (2 * squares * a * b * b, 2 * squares * a * a * b), strict=True):
        if found is None or not _close(found, gradient):
            return not_yet(f"a gradient is {found}; for the whole batch it is {gradient:g}. Count each row once.")
    answer, early, late = observed["seconds"]
    if answer > (early + late) / 2:
        return not_yet(
            f"the values are right, but {splits} micro-batches take {answer / early:.2f} times as long as they need. "
            "What is launched between a copy and the second half that needs it, and when does the backward begin?"
        )
    return right(f"Whole values, and {splits} micro-batches take no longer than they need.")


def _close(found: float, due: float) -> bool:
    return abs(found - due) <= 1e-3 * max(1.0, abs(due))


# 04.5: the order of 1F1B

SECONDS = {FORWARD: 1, BACKWARD: 2}
WORK = {"F": FORWARD, "B": BACKWARD}


def draw_pipelines(generator: random.Random) -> Plain:
    """(stages, micro-batches): many and few of either, fewer micro-batches than stages among them."""
    cases = [[generator.randint(3, 5), generator.randint(6, 9)], [2, generator.randint(3, 6)], [4, generator.randint(1, 2)]]
    generator.shuffle(cases)
    return cases


def observe_orders(one_forward_one_backward: Any, cases: Plain) -> Plain:
    """What the answer says of each stage."""
    observations = []
    for stages, count in cases:
        lists = []
        for stage in range(stages):
            with during(f"stage {stage} of {stages}, {count} micro-batches"):
                answer = one_forward_one_backward(stage, stages, count)
            lists.append([str(action) for action in answer] if isinstance(answer, list | tuple) else type(answer).__name__)
        observations.append(lists)
    return observations


def judge_orders(observations: Plain, cases: Plain) -> Verdict:
    for lists, (stages, count) in zip(observations, cases, strict=True):
        every = sorted(f"{letter}{number}" for letter in WORK for number in range(1, count + 1))
        for stage, actions in enumerate(lists):
            of = f"stage {stage} of {stages}, {count} micro-batches"
            if isinstance(actions, str):
                return not_yet(f"your function returned {actions}, not a list.")
            if sorted(actions) != every:
                return not_yet(f"{of}: F1 to F{count} and B1 to B{count} were due, each once; you say {', '.join(actions)}.")
            if (kept := _most_kept(actions)) > stages - stage:
                return not_yet(f"{of}: {kept} micro-batches wait for their backward at once; {stages - stage} are enough.")
        orders = [[(WORK[action[0]], int(action[1:])) for action in actions] for actions in lists]
        try:
            took = finish(orders)
        except ValueError as error:
            return not_yet(f"{stages} stages, {count} micro-batches: {error}.")
        due = finish([order(ONE_F_ONE_B, stage, stages, count) for stage in range(stages)])
        if took > due:
            return not_yet(f"{stages} stages, {count} micro-batches: if a backward takes two forwards, yours take {took}, not {due}.")
    return right("The time of GPipe, and at most as many micro-batches kept as there are stages to come.")


def _most_kept(actions: list[str]) -> int:
    kept = most = 0
    for action in actions:
        kept += 1 if action.startswith("F") else -1
        most = max(most, kept)
    return most


def finish(orders: Sequence[Sequence[tuple[str, int]]]) -> int:
    """When the last work of all stages ends, in units of SECONDS; copies take none. Raises ValueError if the stages wait for each other."""
    last, free = len(orders) - 1, [0] * len(orders)
    ends: dict[tuple[int, str, int], int] = {}
    for stage, work, index in launches(orders):
        before = (stage - 1, work, index) if work == FORWARD else (stage + 1, work, index) if stage < last else (stage, FORWARD, index)
        ends[stage, work, index] = free[stage] = max(free[stage], ends.get(before, 0)) + SECONDS[work]
    return max(free)


CHECKS = [
    Check("04.1", draw_cuts, observe_cuts, judge_cuts, gpus=2),
    Check("04.2", draw_stages, observe_seconds, judge_seconds),
    Check("04.3", draw_layers, observe_best_cuts, judge_best_cuts),
    Check("04.4", draw_steps, observe_steps, judge_steps, gpus=2),
    Check("04.5", draw_pipelines, observe_orders, judge_orders),
]
