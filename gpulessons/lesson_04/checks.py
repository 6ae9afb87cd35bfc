"""Checks of lesson 04, model parallelism."""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

import labkit
from gpulessons.lesson_04.schedules import BACKWARD, FORWARD, ONE_F_ONE_B, launches, order
from labkit import machine
from labkit.checks.checking import (
    Check,
    Plain,
    Verdict,
    describe,
    during,
    not_yet,
    one_number,
    plural,
    right,
    wrong_type,
)
from labkit.checks.comparing import near

CYCLES = 1_000_000  # of a GPU's clock, about half a millisecond, which is much longer than a launch


class Log(list):
    """List of the calls of all layers, also of copies of layers.

    A call is [index of the layer, device of the weight, device of the batch, rows]. `weights` has
    the weight that each layer used last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, nn.Parameter] = {}

    def __deepcopy__(self, memo: Any) -> "Log":
        return self

    def gradients(self, layers: int, module: nn.Module | None = None) -> list[float | None]:
        """Return the gradient of each layer's weight, or None if there is none.

        With a module, only the module's own weights have one. A copy that the module made in its
        forward pass is no weight that an optimizer could train.
        """
        found: list[float | None] = []
        for index in range(layers):
            weight = self.weights.get(index)
            if module is not None and all(weight is not own for own in module.parameters()):
                weight = None
            # A replica's weight is no leaf, and PyTorch warns if its gradient is read.
            if weight is None or not weight.is_leaf or weight.grad is None:
                found.append(None)
            else:
                found.append(weight.grad.item())
        return found


class Scale(nn.Module):
    """Layer that multiplies by its weight and notes the call in the log.

    It keeps its GPU busy for `cycles`, in the forward and in the backward pass.
    """

    def __init__(self, weight: float, index: int, log: Log, cycles: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))
        self.index, self.log, self.cycles = index, log, cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append([self.index, str(self.weight.device), str(x.device), len(x)])
        self.log.weights[self.index] = self.weight
        y = x * self.weight
        if self.cycles:
            return Busy.apply(y, self.cycles)
        return y


class Busy(torch.autograd.Function):
    """Autograd function that returns its input after `cycles` of work on the GPU.

    The backward pass does the same with the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return _later(x, cycles)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _later(gradient, ctx.cycles), None


def _later(x: torch.Tensor, cycles: int) -> torch.Tensor:
    with torch.cuda.device(x.device):
        torch.cuda._sleep(cycles)
        return x.clone()


# 04.1: a model cut in two


def draw_cuts(generator: random.Random) -> Plain:
    """Draw models and the layer at which each is cut, and a batch on each device.

    The cuts are early, late and anywhere. The numbers of the batch are exact in float32, but not in
    half precision. The numbers and the weights have both signs, so that a function between the
    halves shows.
    """
    cases: list[Plain] = []
    for device in generator.sample(["cpu", "cuda:0", "cuda:1"], k=3):
        count = generator.randint(4, 5)
        weights = [generator.choice((-1, 1)) * generator.randint(2, 4) for _ in range(count)]
        values = [2 * generator.randint(1024, 2047) + 1 for _ in range(generator.randint(2, 4))]
        values[0] = -values[0]
        cut = generator.randint(1, len(weights) - 1)
        cases.append({"device": device, "weights": weights, "values": values, "cut": cut})
    cases[0]["cut"], cases[1]["cut"] = 1, len(cases[1]["weights"]) - 1  # neither is the middle
    generator.shuffle(cases)
    return cases


def observe_cuts(in_two: Any, cases: Plain) -> Plain:
    """Return the devices of the parameters, what each layer got, the result and the gradients."""
    observations: list[Plain] = []
    for case in cases:
        log = Log()
        layers = [Scale(weight, index, log) for index, weight in enumerate(case["weights"])]
        values = [float(value) for value in case["values"]]
        x = torch.tensor(values, device=case["device"], requires_grad=True)
        with during(f"{len(layers)} layers, cut={case['cut']}, a batch on {case['device']}"):
            module = in_two(nn.Sequential(*layers), case["cut"])
            if not isinstance(module, nn.Module):
                observations.append({"type": type(module).__name__})
                continue
            lie = sorted(str(parameter.device) for parameter in module.parameters())
            y = module(x)
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
        gradients = [
            *log.gradients(len(layers), module),
            None if x.grad is None else x.grad[0].item(),
        ]
        observed = {"type": "Module", "lie": lie, "ran": list(log), "result": describe(y)}
        observations.append(observed | {"gradients": gradients})
    return observations


def judge_cuts(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        if observed["type"] != "Module":
            return not_yet(f"expected an nn.Module, and your function returned {observed['type']}.")
        weights, values, cut = case["weights"], case["values"], case["cut"]
        given = f"with {len(weights)} layers, cut={cut} and a batch on {case['device']}"
        devices = ["cuda:0"] * cut + ["cuda:1"] * (len(weights) - cut)
        if len(observed["lie"]) != len(weights):
            return not_yet(
                f"the model has {len(weights)} parameters, and your module has "
                f"{len(observed['lie'])}. An optimizer would miss some."
            )
        if observed["lie"] != devices:
            return not_yet(
                f"{given} expected layers on {', '.join(devices)}. "
                f"Your module has layers on {', '.join(observed['lie'])}."
            )
        if observed["ran"] != [
            [i, device, device, len(values)] for i, device in enumerate(devices)
        ]:
            saw = "; ".join(
                f"layer {index} on {lies} saw {plural(rows, 'row')} on {at}"
                for index, lies, at, rows in observed["ran"]
            )
            return not_yet(
                f"{given} each layer should see the whole batch once, on its own GPU, "
                f"in this order: {', '.join(devices)}. But {saw or 'no layer ran'}."
            )
        result, factor = observed["result"], prod(weights)
        if result["type"] != "Tensor":
            return not_yet(f"{given} expected a tensor, and your module returned {result['type']}.")
        if result["device"] != "cuda:1":
            return not_yet(
                f"{given} the result is on {result['device']}. Expected it to stay on cuda:1."
            )
        if result["values"] != [factor * value for value in values]:
            return not_yet(f"{given} the result differs from the model's own output.")
        gradients = [sum(values) * factor / weight for weight in weights]
        if observed["gradients"] != [*gradients, factor]:
            return not_yet(
                f"{given} the gradients of layers and batch are {observed['gradients']}. "
                "Is each copy part of autograd's graph?"
            )
    return right("Two GPUs, one model, one graph.")


# 04.2: the seconds of a forward pass through unequal stages


def draw_stages(generator: random.Random) -> Plain:
    """Draw pipelines: equal stages, one stage, one micro-batch, and the slowest stage anywhere."""
    cases: list[Plain] = []
    for _ in range(4):
        seconds = [generator.randint(1, 35) / 4 for _ in range(generator.randint(2, 6))]
        cases.append([seconds, generator.randint(2, 12)])
    cases += [
        [[3] * generator.randint(2, 5), generator.randint(2, 9)],
        [[generator.randint(1, 9)], generator.randint(2, 9)],
        [[generator.randint(1, 9) for _ in range(3)], 1],
        [[1.5, 2.75, 8], 4],
        [[9, 2, 1.25], 5],
        [[2, 7.75, 1], 2],
    ]
    generator.shuffle(cases)
    return cases


def observe_seconds(forward_seconds: Any, cases: Plain) -> Plain:
    answers = []
    for stages, count in cases:
        with during(f"stages of {stages} seconds and {count} micro-batches"):
            answer = forward_seconds([float(seconds) for seconds in stages], count)
        seconds = one_number(answer)
        answers.append(type(answer).__name__ if seconds is None else seconds)
    return answers


def judge_seconds(answers: Plain, cases: Plain) -> Verdict:
    for answer, (stages, count) in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "a number")
        seconds = sum(stages) + (count - 1) * max(stages)
        if not abs(answer - seconds) <= 1e-6 * seconds:  # so that nan fails
            return not_yet(
                f"with stage_seconds={stages} and micro_batches={count}, the forward pass takes "
                f"{seconds} s. You say {answer:g} s. Draw it."
            )
    return right("All stages wait for the slowest.")


# 04.3: a training step with micro-batches: the values of one batch, in the time of the formula

WIDTH = 1 << 19  # numbers in a row: a copy through the host takes long enough to show
ALLOWED = 1.07  # times as long as `compute_first`; an unneeded wait costs more


def draw_steps(generator: random.Random) -> Plain:
    """Draw a batch of rising numbers, and a number of micro-batches that does not divide it."""
    rows, splits = generator.choice([(5, 4), (7, 5)])  # chunk, split and tensor_split differ
    values = sorted(generator.sample(range(1, 10), rows))
    return {"values": values, "weights": generator.sample(range(2, 6), k=2), "splits": splits}


def observe_steps(step: Any, inputs: Plain) -> Plain:
    """Run a training step with the answer, and one in the way of the lesson.

    Return the loss, the gradients, what each half saw, and the seconds of both steps. The second
    step is `compute_first` of the lesson.
    """
    splits, log = inputs["splits"], Log()
    first, second = (
        Scale(weight, index, log, 4 * CYCLES).cuda(index)
        for index, weight in enumerate(inputs["weights"])
    )
    column = torch.tensor([float(value) for value in inputs["values"]], device="cuda:0")[:, None]
    x = column.repeat(1, WIDTH)
    with during(f"{len(x)} rows, splits={splits}"):
        loss = step(first, second, x, splits)
        observed: dict[str, Plain] = {"loss": type(loss).__name__}
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            observed["loss"] = loss.item()
        observed["gradients"] = log.gradients(2)
        observed["seen"] = [[device for at, _, device, _ in log if at == i] for i in range(2)]
        # The fastest try counts, because the first on a real GPU is slow.
        tries = 1 if machine.in_use().virtual else 6
        seconds: list[list[float]] = [[], []]
        for _ in range(tries):
            for times, run in zip(seconds, (step, _known), strict=True):
                work = partial(run, first, second, x, splits)
                times.append(labkit.seconds(work, repeats=1, warm_up=0))
    return observed | {"seconds": [min(times) for times in seconds]}


def _known(first: nn.Module, second: nn.Module, x: torch.Tensor, splits: int) -> None:
    """Run a training step as the lesson's `compute_first` does, with `splits` micro-batches."""
    outputs = [second(first(part).to("cuda:1")) for part in x.chunk(splits)]
    torch.cat(outputs).square().mean().backward()


def judge_steps(observed: Plain, inputs: Plain) -> Verdict:
    values, (a, b), splits = inputs["values"], inputs["weights"], inputs["splits"]
    squares = sum(value * value for value in values) / len(values)
    loss, expected = observed["loss"], squares * (a * b) ** 2
    if isinstance(loss, str):
        return not_yet(
            f"your function returned {loss}. Expected the loss as a tensor of one element."
        )
    size = -(-len(values) // splits)
    count = -(-len(values) // size)
    if observed["seen"] != [[f"cuda:{index}"] * count for index in range(2)]:
        ran = " and ".join(str(len(seen)) for seen in observed["seen"])
        return not_yet(
            f"{len(values)} rows, splits={splits}: each half should see {count} micro-batches "
            f"on its GPU. They saw {ran}."
        )
    if not near(loss, expected, 1e-3, 1e-3):
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        means = [sum(value * value for value in part) / len(part) * (a * b) ** 2 for part in parts]
        hint = "It is the mean of the squares of all outputs."
        if near(loss, sum(means) / len(means), 1e-3, 1e-3) or near(loss, sum(means), 1e-3, 1e-3):
            hint = (
                "The micro-batches have different sizes, so the mean of their means is another "
                "number."
            )
        return not_yet(f"the loss of the batch {values} is {expected:g}. Yours is {loss:g}. {hint}")
    gradients = 2 * squares * a * b * b, 2 * squares * a * a * b
    for found, gradient in zip(observed["gradients"], gradients, strict=True):
        if found is None:
            return not_yet(
                f"a gradient is None. For the whole batch it is {gradient:g}. "
                "Does a backward pass run, and is the copy between the halves part of the graph?"
            )
        if not near(found, gradient, 1e-3, 1e-3):
            return not_yet(
                f"a gradient is {found:g}. For the whole batch it is {gradient:g}. "
                "Does one backward pass run, from the mean over all rows?"
            )
    answer, known = observed["seconds"]
    if not answer <= ALLOWED * known:
        return not_yet(
            f"the values are right, but {count} micro-batches take {answer / known:.2f} times as "
            "long as they need. What is launched between a copy and the second half that needs it? "
            "When does the backward pass begin? Does Python wait for a GPU?"
        )
    return right(
        f"The values of one batch, and {count} micro-batches take no longer than they need."
    )


# 04.4: where to cut, by measured times

TOLERANCE = 1.05  # times as slow as the best cut, because times are measured


def draw_layers(generator: random.Random) -> Plain:
    """Draw times of layers for which no simple rule always finds the best cut.

    Such rules are a fixed number, the middle, and the first cut beyond or before half of the time.
    """
    halves = partial(_fastest, 2, 0), partial(_fastest, 1, 1)
    rules: list[Callable[[Sequence[float]], int]] = [_beyond_half, _before_half, _middle, *halves]
    rules += [partial(_always, cut) for cut in range(1, 8)]
    while True:
        cases = [
            [generator.randint(1, 9) for _ in range(generator.randint(4, 8))] for _ in range(6)
        ]
        # A very slow layer makes the first cut the best one, or the last one, or any.
        for case, place in zip(cases, (0, -1, generator.randrange(4)), strict=False):
            case[place] = generator.randint(30, 60)
        if all(any(_share(case, rule(case)) > TOLERANCE for case in cases) for rule in rules):
            return cases


def _slower(layers: Sequence[float], cut: int) -> float:
    """Return the time of the slower half if the layers are divided at `cut`."""
    return max(sum(layers[:cut]), sum(layers[cut:]))


def _best(layers: Sequence[float]) -> float:
    return min(_slower(layers, cut) for cut in range(1, len(layers)))


def _share(layers: Sequence[float], cut: int) -> float:
    """Return how many times longer the slower half takes with this cut than with the best cut."""
    return _slower(layers, cut) / _best(layers)


def _fastest(first: int, left_out: int, layers: Sequence[float]) -> int:
    """Return the best cut among those from `first` on, without the last `left_out` cuts."""
    return min(range(first, len(layers) - left_out), key=partial(_slower, layers))


def _middle(layers: Sequence[float]) -> int:
    return len(layers) // 2


def _always(cut: int, layers: Sequence[float]) -> int:
    return min(cut, len(layers) - 1)


def _beyond_half(layers: Sequence[float]) -> int:
    cuts = [cut for cut in range(1, len(layers)) if 2 * sum(layers[:cut]) >= sum(layers)]
    return min(cuts, default=len(layers) - 1)


def _before_half(layers: Sequence[float]) -> int:
    cuts = [cut for cut in range(1, len(layers)) if 2 * sum(layers[:cut]) <= sum(layers)]
    return max(cuts, default=1)


class OneMore(Scale):
    """Layer that needs the rows of the layer before it, and returns one more row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expected = self.index + 1
        if len(x) != expected:
            raise RuntimeError(
                f"layer {self.index} takes the {plural(expected, 'row')} that the layer before "
                f"it returns, but got {len(x)}"
            )
        return torch.cat([super().forward(x), x[:1]])


def observe_best_cuts(best_cut: Any, cases: Plain) -> Plain:
    """Return the cut that the answer chooses for each case's layers.

    The layers take the drawn times, and are otherwise alike.
    """
    answers = []
    with torch.cuda.device("cuda:0"):
        x = torch.ones(1, device="cuda:0")
        for case in cases:
            layers = [OneMore(1, index, Log(), 5 * n * CYCLES) for index, n in enumerate(case)]
            model = nn.Sequential(*layers).cuda()
            model(x)  # The first call loads kernels.
            torch.cuda.synchronize()
            with during(f"{len(case)} layers"):
                cut = best_cut(model, x)
                answer = one_number(cut)
            answers.append(answer if isinstance(answer, int) else type(cut).__name__)
            torch.cuda.synchronize()
    return answers


def judge_best_cuts(answers: Plain, cases: Plain) -> Verdict:
    for answer, layers in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return wrong_type(answer, "a whole number")
        if not 1 <= answer < len(layers):
            return not_yet(
                f"a cut after {answer} of {len(layers)} layers leaves a GPU without work."
            )
        if _share(layers, answer) > TOLERANCE:
            return not_yet(
                f"the layers take {', '.join(map(str, layers))} units of time. With "
                f"{plural(answer, 'layer')} in the first half, the slower half takes "
                f"{_slower(layers, answer)} units. Another cut makes it {_best(layers)}. "
                "What did you measure, and was the GPU done?"
            )
    return right("The slower half is as fast as it can be.")


# 04.5: the order of 1F1B

SECONDS = {FORWARD: 1, BACKWARD: 2}
WORK = {"F": FORWARD, "B": BACKWARD}


def draw_pipelines(generator: random.Random) -> Plain:
    """Draw pairs (stages, micro-batches), some of them with fewer micro-batches than stages."""
    cases = [
        [generator.randint(3, 5), generator.randint(6, 9)],
        [2, generator.randint(3, 6)],
        [4, generator.randint(2, 3)],
        [3, 1],
    ]
    generator.shuffle(cases)
    return cases


def observe_orders(one_forward_one_backward: Any, cases: Plain) -> Plain:
    """Return the list that the answer gives for each stage."""
    observations = []
    for stages, count in cases:
        lists = []
        for stage in range(stages):
            with during(f"stage {stage} of {stages}, {count} micro-batches"):
                answer = one_forward_one_backward(stage, stages, count)
            is_list = isinstance(answer, Iterable) and not isinstance(answer, str | dict | set)
            lists.append([str(action) for action in answer] if is_list else type(answer).__name__)
        observations.append(lists)
    return observations


def judge_orders(observations: Plain, cases: Plain) -> Verdict:
    for lists, (stages, count) in zip(observations, cases, strict=True):
        every = sorted(f"{letter}{number}" for letter in WORK for number in range(1, count + 1))
        for stage, actions in enumerate(lists):
            of = f"stage {stage} of {stages}, {count} micro-batches"
            if isinstance(actions, str):
                return wrong_type(actions, "a list")
            if sorted(actions) != every:
                return not_yet(
                    f"{of}: expected F1 to F{count} and B1 to B{count}, each once. "
                    f"Your list has {', '.join(actions) or 'nothing'}."
                )
            kept, most = _most_kept(actions), stages - stage
            if kept > most:
                return not_yet(
                    f"{of}: {kept} micro-batches wait for their backward pass at once. "
                    f"The stage should keep at most {most}."
                )
        orders = [[(WORK[action[0]], int(action[1:])) for action in actions] for actions in lists]
        try:
            took = finish(orders)
        except ValueError as error:
            return not_yet(f"{stages} stages, {count} micro-batches: {error}.")
        pipeline = [order(ONE_F_ONE_B, stage, stages, count) for stage in range(stages)]
        expected = finish(pipeline)
        if took > expected:
            return not_yet(
                f"{stages} stages, {count} micro-batches: if a forward pass takes 1 s and a "
                f"backward pass 2 s, your order ends after {took} s. Expected {expected} s."
            )
    return right(
        "It takes as long as GPipe, and a stage keeps at most one micro-batch for each stage "
        "from itself on."
    )


def _most_kept(actions: list[str]) -> int:
    kept = most = 0
    for action in actions:
        kept += 1 if action.startswith("F") else -1
        most = max(most, kept)
    return most


def finish(orders: Sequence[Sequence[tuple[str, int]]]) -> int:
    """Return the second at which the last stage finishes, if copies take no time.

    Raises ValueError if the stages wait for each other.
    """
    last, free = len(orders) - 1, [0] * len(orders)
    ends: dict[tuple[int, str, int], int] = {}
    for stage, work, index in launches(orders):
        if work == FORWARD:
            before = (stage - 1, FORWARD, index)
        elif stage < last:
            before = (stage + 1, BACKWARD, index)
        else:
            before = (stage, FORWARD, index)
        end = max(free[stage], ends.get(before, 0)) + SECONDS[work]
        ends[stage, work, index] = free[stage] = end
    return max(free)


CHECKS = [
    Check(
        "04.1",
        draw_cuts,
        observe_cuts,
        judge_cuts,
        gpus=2,
        alters=("values", "hooks"),
        section="A network in two halves",
    ),
    Check("04.2", draw_stages, observe_seconds, judge_seconds, section="Micro-batches on paper"),
    Check("04.3", draw_steps, observe_steps, judge_steps, gpus=2, section="Two orders"),
    Check("04.4", draw_layers, observe_best_cuts, judge_best_cuts, section="Where to cut"),
    Check("04.5", draw_pipelines, observe_orders, judge_orders, section="Two schedules"),
]
