"""Checks of lesson 03, DataParallel from the inside."""

import gc
import random
from typing import Any

import torch
from torch import nn

from labkit.checks.checking import Check, Plain, Verdict, describe, during, not_yet, right

WIDTH = 1 << 16  # features of a row: 256 KiB, so that what lies where shows in the memory
ROW_BYTES = 4 * WIDTH
SLACK = 1 << 16  # bytes of small tensors


def chunks(rows: int, gpus: int) -> list[int]:
    """The rows that each GPU gets: as many as fit into the smallest equal size that needs no more GPUs than there are."""
    size = -(-rows // gpus)
    return [min(size, rows - start) for start in range(0, rows, size)]


# 03.1: data_parallel from the four functions
#
# Row i of the batch is full of the number values[i], all weights are `weight`: the output of a row is value × weight × WIDTH.


class Rows(nn.Module):
    """One weighted sum for each row. `seen` notes the device and the rows of each call, in all replicas."""

    def __init__(self, weight: float, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), weight, device=device))
        self.seen: list[Plain] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([str(x.device), len(x)])
        return (x * self.weight).sum(1)


def draw_batches(generator: random.Random) -> Plain:
    """Batches for two GPUs in either order; one has fewer rows than there are GPUs."""
    orders = [[0, 1], [1, 0]]
    generator.shuffle(orders)
    cases: list[Plain] = [{"devices": order, "rows": generator.choice([4, 5, 6, 7])} for order in orders] + [
        {"devices": orders[0], "rows": 1}
    ]
    for case in cases:
        case["weight"] = generator.randint(1, 4)
        case["values"] = [generator.randint(1, 9) for _ in range(case.pop("rows"))]
    return cases


def observe_batches(data_parallel: Any, cases: Plain) -> Plain:
    """For each case the result, what ran where, the bytes that the forward pass left on each GPU, and the weight's gradient."""
    observations = []
    for case in cases:
        first = f"cuda:{case['devices'][0]}"
        module = Rows(float(case["weight"]), first)
        x = torch.tensor([float(value) for value in case["values"]], device=first)[:, None].repeat(1, WIDTH)
        before = _allocated()
        with during(f"{len(x)} rows and device_ids={case['devices']}"):
            y = data_parallel(module, x, list(case["devices"]))
        observed = {"result": describe(y), "seen": sorted(module.seen), "gradient": None}
        gc.collect()
        observed["held"] = [now - earlier for now, earlier in zip(_allocated(), before, strict=True)]
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
            observed["gradient"] = None if module.weight.grad is None else module.weight.grad[0].item()
        observations.append(observed)
        del module, x, y
    return observations


def _allocated() -> list[int]:
    return [torch.cuda.memory_allocated(index) for index in range(2)]


def judge_batches(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices, values, result = case["devices"], case["values"], observed["result"]
        given = f"with {len(values)} rows and device_ids={devices}"
        if result["type"] != "Tensor":
            return not_yet(f"your function returned {result['type']}, not one tensor. What puts the outputs together?")
        if result["device"] != f"cuda:{devices[0]}":
            return not_yet(f"{given} the result is on {result['device']}; it belongs on the first of the devices.")
        if result["shape"] != [len(values)] or result["values"] != [value * case["weight"] * WIDTH for value in values]:
            return not_yet(f"{given} the result is not what the module itself gives for the batch.")
        sizes = dict(zip(devices, chunks(len(values), 2), strict=False))
        if observed["seen"] != sorted([f"cuda:{device}", rows] for device, rows in sizes.items()):
            ran = ", ".join(f"{rows} rows on {device}" for device, rows in observed["seen"]) or "nothing"
            asked = ", ".join(f"{rows} rows on cuda:{device}" for device, rows in sorted(sizes.items()))
            return not_yet(f"{given} the module was to see {asked}; it saw {ran}.")
        if observed["gradient"] != sum(values):
            return not_yet(
                f"{given} the gradient of the module's weight is {observed['gradient']}, not {sum(values)}. "
                "Do the gradients of all replicas come back to it?"
            )
        second = devices[1]
        due = ROW_BYTES * (1 + sizes[second]) if second in sizes else 0
        if observed["held"][second] > due + SLACK:
            put = observed["held"][second]
            return not_yet(f"{given} cuda:{second} needs {due >> 10} KiB, for weights and rows; you put {put >> 10} KiB there.")
    return right("Values, gradients and memory are those of nn.DataParallel.")


# 03.2: the rows that each GPU gets


def draw_rows(generator: random.Random) -> Plain:
    """Sizes that divide evenly, that do not, that leave GPUs without work, and that are fewer than the GPUs."""
    gpus = generator.randint(3, 8)
    cases = [[gpus * generator.randint(2, 9), gpus], [gpus * generator.randint(2, 9) + 1, gpus], [gpus + 1, gpus], [gpus - 1, gpus]]
    cases += [[generator.randint(1, 100), generator.randint(1, 8)] for _ in range(4)]
    generator.shuffle(cases)
    return cases


def observe_rows(chunk_sizes: Any, cases: Plain) -> Plain:
    answers = []
    for rows, gpus in cases:
        with during(f"{rows} rows and {gpus} GPUs"):
            answer = chunk_sizes(rows, gpus)
        answers.append([int(size) for size in answer] if isinstance(answer, list | tuple) else type(answer).__name__)
    return answers


def judge_rows(answers: Plain, cases: Plain) -> Verdict:
    for answer, (rows, gpus) in zip(answers, cases, strict=True):
        if isinstance(answer, str):
            return not_yet(f"your function returned {answer}, not a list.")
        due = chunks(rows, gpus)
        if answer != due:
            return not_yet(f"scatter cuts {rows} rows for {gpus} GPUs into {due}; you say {answer}.")
    return right("A GPU too many gets nothing at all.")


# 03.3: copies of a weight whose gradients come back


def draw_weights(generator: random.Random) -> Plain:
    cases = []
    for devices in ([0, 1], [1, 0], [1, 0, 1]):
        values = [generator.randint(-9, 9) for _ in range(generator.randint(2, 5))]
        cases.append({"devices": devices, "values": values, "factors": [generator.randint(1, 9) for _ in devices]})
    generator.shuffle(cases)
    return cases


def observe_weights(copies: Any, cases: Plain) -> Plain:
    """The copies, and the weight's gradient when each copy is used with a factor of its own."""
    observations: list[Plain] = []
    for case in cases:
        first = f"cuda:{case['devices'][0]}"
        weight = torch.tensor([float(value) for value in case["values"]], device=first, requires_grad=True)
        with during(f"device_ids={case['devices']}"):
            made = copies(weight, list(case["devices"]))
        if not isinstance(made, list | tuple) or len(made) != len(case["devices"]):
            observations.append({"copies": None, "gradient": None})
            continue
        observed = {"copies": [describe(copy) for copy in made], "gradient": None}
        if all(isinstance(copy, torch.Tensor) for copy in made):
            for copy, factor in zip(made, case["factors"], strict=True):
                if copy.requires_grad:
                    (factor * copy).sum().backward()
            observed["gradient"] = None if weight.grad is None else weight.grad.tolist()
        observations.append(observed)
    return observations


def judge_weights(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices = [f"cuda:{device}" for device in case["devices"]]
        if observed["copies"] is None:
            return not_yet(f"for device_ids={case['devices']} a list of {len(devices)} tensors was due.")
        found = [copy.get("device", copy["type"]) for copy in observed["copies"]]
        if found != devices:
            return not_yet(f"the copies belong on {', '.join(devices)}; yours: {', '.join(found)}.")
        if any(copy["values"] != case["values"] for copy in observed["copies"]):
            return not_yet("a copy has other values than the weight.")
        if observed["gradient"] != [float(sum(case["factors"]))] * len(case["values"]):
            return not_yet(
                f"each copy was used once, with the factors {case['factors']}, so the weight's gradient is {sum(case['factors'])} "
                f"everywhere. Yours is {observed['gradient']}. Which ways to copy does autograd follow?"
            )
    return right("The backward of a broadcast is a sum.")


# 03.4: a state saved from a model or from DataParallel around it


class Outer(nn.Module):
    """A model with a child that has the name that DataParallel gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)


MODELS = {"plain": lambda: nn.Sequential(nn.Linear(2, 1)), "with a child named module": Outer}


def draw_states(generator: random.Random) -> Plain:
    cases = [
        {"model": name, "saved": saved, "loads": loads, "value": generator.randint(2, 99)}
        for name in MODELS
        for saved in ("bare", "wrapped")
        for loads in ("bare", "wrapped")
    ]
    generator.shuffle(cases)
    return cases


def observe_states(load: Any, cases: Plain) -> Plain:
    """The values of all parameters of each model after the load."""
    observations = []
    for case in cases:
        saved, model = (_wrapped(MODELS[case["model"]](), case[role]) for role in ("saved", "loads"))
        with torch.no_grad():
            for parameter in saved.parameters():
                parameter.fill_(case["value"])
            for parameter in model.parameters():
                parameter.zero_()
        state = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
        with during(f"a {case['loads']} model and a state saved from a {case['saved']} one; the model: {case['model']}"):
            load(model, state)
        observations.append([value for parameter in model.parameters() for value in parameter.flatten().tolist()])
    return observations


def _wrapped(model: nn.Module, how: str) -> nn.Module:
    return model.cuda(0) if how == "bare" else nn.DataParallel(model.cuda(0), device_ids=[0, 1])


def judge_states(observations: Plain, cases: Plain) -> Verdict:
    for values, case in zip(observations, cases, strict=True):
        if values != [case["value"]] * 3:
            what = f"a state saved from a {case['saved']} model, loaded into a {case['loads']} one ({case['model']})"
            return not_yet(f"{what}: the parameters are not those that were saved.")
    return right("Every combination loads.")


# 03.5: the loss is computed where the outputs are

CLASSES = 1 << 10


def draw_losses(generator: random.Random) -> Plain:
    """A batch that two GPUs cannot share evenly; `targets` are classes, `shift` makes the logits of this try."""
    rows = generator.choice([9, 11, 13])
    return {"targets": [generator.randrange(CLASSES) for _ in range(rows)], "shift": generator.randint(1, 9)}


def mean_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The criterion: the mean over the rows of (a row's mean output - its target)²."""
    return (output.mean(1) - target).square().mean()


class Wide(nn.Module):
    """One number a row in, CLASSES numbers a row out: (number × weight) in each."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((CLASSES,), weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None] * self.weight


def observe_losses(with_loss: Any, inputs: Plain) -> Plain:
    """What DataParallel around the answer gathers, and the gradient of the loss that follows."""
    model = Wide(float(inputs["shift"])).cuda(0)
    targets = torch.tensor([float(target % 7) for target in inputs["targets"]], device="cuda:0")
    x = torch.ones(len(targets), device="cuda:0")
    module = with_loss(model, mean_of_squares)
    if not isinstance(module, nn.Module):
        return {"type": type(module).__name__}
    gathered = nn.DataParallel(module, device_ids=[0, 1])(x, targets)
    if not isinstance(gathered, list | tuple) or len(gathered) != 2 or not all(isinstance(part, torch.Tensor) for part in gathered):
        shape = list(gathered.shape) if isinstance(gathered, torch.Tensor) else None
        return {"type": "other", "gathered": shape}
    losses, rows = gathered
    shapes = [list(losses.shape), list(rows.shape)]
    if shapes != [[2], [2]]:
        return {"type": "shapes", "shapes": shapes}
    (losses.sum() / rows.sum()).backward()
    gradient = None if model.weight.grad is None else model.weight.grad.sum().item()
    return {"type": "losses", "losses": losses.tolist(), "rows": rows.tolist(), "gradient": gradient}


def judge_losses(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] not in ("other", "shapes", "losses"):
        return not_yet(f"your function returned {observed['type']}, not an nn.Module.")
    if observed["type"] == "other":
        got = f"one tensor of shape {observed['gathered']}" if observed["gathered"] is not None else "something else"
        return not_yet(f"DataParallel was to gather two tensors, the losses and the rows; it gathered {got}.")
    if observed["type"] == "shapes":
        losses, rows = observed["shapes"]
        return not_yet(f"from two GPUs two losses and two numbers of rows were due; the shapes are {losses} and {rows}.")
    targets, shift = [target % 7 for target in inputs["targets"]], inputs["shift"]
    sizes = chunks(len(targets), 2)
    parts = [targets[: sizes[0]], targets[sizes[0] :]]
    if observed["rows"] != sizes:
        return not_yet(f"the two GPUs have {sizes} rows; your module says {observed['rows']}.")
    due = [sum((shift - target) ** 2 for target in part) for part in parts]
    if not _close(observed["losses"], due):
        return not_yet(f"the sums of the rows' losses are {due}; yours are {observed['losses']}. The criterion gives their mean.")
    slope = sum(2 * (shift - target) for target in targets) / len(targets)
    if observed["gradient"] is None or not _close([observed["gradient"]], [slope]):
        return not_yet(
            f"the weights' gradient adds up to {observed['gradient']}, not to {slope:.4g}. Does it come back through your module?"
        )
    return right("Two numbers from each GPU travel; the outputs stay where they are.")


def _close(found: list[float], due: list[float]) -> bool:
    return all(abs(a - b) <= 1e-3 * max(1.0, abs(b)) for a, b in zip(found, due, strict=True))


CHECKS = [
    Check("03.1", draw_batches, observe_batches, judge_batches, gpus=2),
    Check("03.2", draw_rows, observe_rows, judge_rows),
    Check("03.3", draw_weights, observe_weights, judge_weights, gpus=2),
    Check("03.4", draw_states, observe_states, judge_states, gpus=2),
    Check("03.5", draw_losses, observe_losses, judge_losses, gpus=2),
]
