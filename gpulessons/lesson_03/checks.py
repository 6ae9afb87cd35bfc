"""Checks of lesson 03, DataParallel from the inside."""

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

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


class Shared(list):
    """A list that a deep copy of its owner shares."""

    def __deepcopy__(self, memo: Any) -> "Shared":
        return self


class Rows(nn.Module):
    """One weighted sum for each row.

    `seen` notes the device and the rows of each call, also of replicas and deep copies.
    """

    def __init__(self, weight: float, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), weight, device=device))
        self.seen: list[Plain] = Shared()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([str(x.device), len(x)])
        return (x * self.weight).sum(1, keepdim=True)


MOST_GPUS = 4


def draw_batches(generator: random.Random) -> Plain:
    """Batches for as many GPUs as are in use, in one order and in another: with fewer rows than GPUs, as many for each, and some over."""
    order = generator.sample(range(MOST_GPUS), k=MOST_GPUS)
    cases: list[Plain] = [
        {"order": order, "each": each, "more": more}
        for each, more in ((1, -1), (generator.choice([2, 3]), 0))
    ]
    cases.append({"order": order[::-1], "each": generator.choice([2, 3]), "more": 1})
    for case in cases:
        case["weight"] = generator.randint(1, 4)
        case["values"] = [generator.randint(1, 9) for _ in range(MOST_GPUS * 3 + 1)]
    return cases


def observe_batches(data_parallel: Any, cases: Plain) -> Plain:
    """For each case the result, what ran where, the bytes that the forward pass left on each GPU, and the gradients of weight and batch."""
    observations = []
    for case in cases:
        devices = [device for device in case["order"] if device < torch.cuda.device_count()]
        values = case["values"][: len(devices) * case["each"] + case["more"]]
        first = f"cuda:{devices[0]}"
        module = Rows(float(case["weight"]), first)
        x = (
            torch.tensor([float(value) for value in values], device=first)[:, None]
            .repeat(1, WIDTH)
            .requires_grad_()
        )
        before = _allocated()
        with _without_the_wrapper(), during(f"{len(x)} rows and device_ids={devices}"):
            y = data_parallel(module, x, list(devices))
        observed = {
            "devices": devices,
            "values": values,
            "result": describe(y),
            "seen": sorted(module.seen),
            "peak": _above(before),
        }
        observed["gradient"] = None
        gc.collect()
        observed["held"] = [
            now - earlier for now, earlier in zip(_allocated(), before, strict=True)
        ]
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
            observed["gradient"] = (
                None if module.weight.grad is None else module.weight.grad[0].item()
            )
        observed["batch"] = None if x.grad is None else x.grad[:, 0].tolist()
        observations.append(observed)
        del module, x, y
    return observations


@contextmanager
def _without_the_wrapper() -> Iterator[None]:
    """nn.DataParallel, and the function that does the same, say that they are not to be used, whatever name they were imported under."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            "the exercise asks for what nn.DataParallel does inside: scatter, replicate, parallel_apply, gather"
        )

    with ExitStack() as stack:
        for function in (nn.DataParallel.forward, nn.parallel.data_parallel):
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = refuse.__code__
        yield


def _allocated() -> list[int]:
    """What is allocated on each GPU, from where its peak counts anew."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    return [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]


def _above(before: list[int]) -> list[int]:
    """How much more than that each GPU has had allocated."""
    return [
        torch.cuda.max_memory_allocated(index) - earlier for index, earlier in enumerate(before)
    ]


def judge_batches(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices, values, result = observed["devices"], observed["values"], observed["result"]
        given = f"with {plural(len(values), 'row')} and device_ids={devices}"
        if result["type"] != "Tensor":
            return wrong_type(result["type"], "one tensor", "What puts the outputs together?")
        if result["device"] != f"cuda:{devices[0]}":
            return not_yet(
                f"{given} the result is on {result['device']}; it belongs on the first of the devices."
            )
        if result["shape"] != [len(values), 1] or result["values"] != [
            value * case["weight"] * WIDTH for value in values
        ]:
            return not_yet(f"{given} the result is not what the module itself gives for the batch.")
        sizes = dict(zip(devices, chunks(len(values), len(devices)), strict=False))
        if observed["seen"] != sorted([f"cuda:{device}", rows] for device, rows in sizes.items()):
            ran = ", ".join(
                f"{plural(rows, 'row')} on {device}" for device, rows in observed["seen"]
            )
            asked = ", ".join(
                f"{plural(rows, 'row')} on cuda:{device}" for device, rows in sorted(sizes.items())
            )
            return not_yet(f"{given} the module should see {asked}; it saw {ran or 'nothing'}.")
        if observed["gradient"] != sum(values):
            return not_yet(
                f"{given} the gradient of the module's weight is {observed['gradient']}, not {sum(values)}. "
                "Do the gradients of all replicas come back to it?"
            )
        if observed["batch"] != [case["weight"]] * len(values):
            return not_yet(
                f"{given} the gradient of the batch is not what the module itself gives. Which scatter does autograd follow?"
            )
        for device in devices:
            due = ROW_BYTES * (1 + sizes[device]) if device in sizes and device != devices[0] else 0
            if (put := observed["held" if device in sizes else "peak"][device]) > due + SLACK:
                what = (
                    f"{due >> 10} KiB, for weights and rows"
                    if due
                    else "nothing new, but for the results"
                )
                return not_yet(
                    f"{given} cuda:{device} needs {what}; you put {put >> 10} KiB there."
                )
    return right("Values, gradients and memory are those of nn.DataParallel.")


# 03.2: what each GPU takes at the peak of a step


UNIT = 4 << 20  # bytes
CLOSE = 2 << 20  # a block of the allocator may be a little larger than what was asked for


def draw_peaks(generator: random.Random) -> Plain:
    """In units, what each GPU holds before the step, those that the step makes there in turn (GPU 1 more), and the one that it keeps."""
    highest, before = sorted(generator.sample(range(4, 9), k=2)), generator.sample(range(1, 9), k=2)
    gpus = [
        {"before": held, "brief": [generator.randint(1, 3), most], "kept": generator.randint(1, 3)}
        for held, most in zip(before, highest, strict=True)
    ]
    return {"gpus": gpus, "current": 1, "devices": [1, 0]}


def observe_peaks(peaks: Any, inputs: Plain) -> Plain:
    """What the answer says, and how often it ran the step. Each GPU held more once, so that an older peak is higher."""
    held = [
        _take(index, units)
        for index, gpu in enumerate(inputs["gpus"])
        for units in (32, gpu["before"])
    ][1::2]
    kept: list[torch.Tensor] = []

    def step() -> None:
        for index, gpu in enumerate(inputs["gpus"]):
            for units in gpu["brief"]:
                _take(index, units)
            kept.append(_take(index, gpu["kept"]))
            torch.ones(
                1, device=f"cuda:{index}", requires_grad=True
            ).sum().backward()  # a step trains: not under no_grad

    with torch.cuda.device(inputs["current"]):
        said = peaks(step, list(inputs["devices"]))
        now = torch.cuda.current_device()
    told = (
        [one_number(value) for value in said]
        if isinstance(said, list | tuple)
        else type(said).__name__
    )
    return {"said": told, "calls": len(kept) // len(held), "current": now}


def _take(index: int, units: int) -> torch.Tensor:
    return torch.empty(units * UNIT, dtype=torch.uint8, device=f"cuda:{index}")


def judge_peaks(observed: Plain, inputs: Plain) -> Verdict:
    if not isinstance(observed["said"], list):
        return wrong_type(observed["said"], "a list of bytes")
    if observed["calls"] != 1:
        return not_yet(f"expected step to run once; it ran {plural(observed['calls'], 'time')}.")
    due, said = (
        [max(inputs["gpus"][device]["brief"]) * UNIT for device in inputs["devices"]],
        observed["said"],
    )
    if len(said) != len(due) or not all(
        told is not None and abs(told - most) <= CLOSE for told, most in zip(said, due, strict=True)
    ):
        return not_yet(
            f"at the step's peak the GPUs {inputs['devices']} held {due} bytes more than before it; you say {observed['said']}. "
            "Since when is a peak counted, and what was there already?"
        )
    if observed["current"] != inputs["current"]:
        return not_yet(
            f"GPU {inputs['current']} was the current one before your function, and GPU {observed['current']} afterwards."
        )
    return right("What a GPU holds at its peak must fit, however briefly.")


# 03.3: copies of a weight whose gradients come back


def draw_weights(generator: random.Random) -> Plain:
    cases = []
    for devices in ([0, 1], [1, 0], [1, 0, 1]):
        values = [
            generator.randint(-9, 9) + 2.0**-12 for _ in range(generator.randint(2, 5))
        ]  # more than half precision holds
        cases.append(
            {
                "devices": devices,
                "values": values,
                "factors": [generator.randint(1, 9) for _ in devices],
            }
        )
    generator.shuffle(cases)
    return cases


def observe_weights(copies: Any, cases: Plain) -> Plain:
    """The copies, and the weight's gradient when each copy is used with a factor of its own."""
    observations: list[Plain] = []
    for case in cases:
        first = f"cuda:{case['devices'][0]}"
        weight = torch.tensor(
            [[float(value)] for value in case["values"]], device=first, requires_grad=True
        )
        with during(f"device_ids={case['devices']}"):
            made = copies(weight, list(case["devices"]))
        if not isinstance(made, list | tuple) or len(made) != len(case["devices"]):
            observations.append({"copies": None, "gradient": None})
            continue
        observed = {"copies": [describe(copy) for copy in made], "gradient": None}
        if all(isinstance(copy, torch.Tensor) for copy in made):
            used = [
                (factor * copy).sum()
                for copy, factor in zip(made, case["factors"], strict=True)
                if copy.requires_grad
            ]
            torch.autograd.backward(used)
            observed["gradient"] = None if weight.grad is None else weight.grad.flatten().tolist()
        observations.append(observed)
    return observations


def judge_weights(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices = [f"cuda:{device}" for device in case["devices"]]
        if observed["copies"] is None:
            return not_yet(
                f"for device_ids={case['devices']}, expected a list of {len(devices)} tensors."
            )
        found = [copy.get("device", copy["type"]) for copy in observed["copies"]]
        if found != devices:
            return not_yet(f"the copies belong on {', '.join(devices)}; yours: {', '.join(found)}.")
        same = {
            "dtype": "torch.float32",
            "shape": [len(case["values"]), 1],
            "values": case["values"],
        }
        if any(copy | same != copy for copy in observed["copies"]):
            return not_yet(
                "a copy has other values than the weight, another shape or another dtype."
            )
        if observed["gradient"] != [float(sum(case["factors"]))] * len(case["values"]):
            return not_yet(
                f"each copy was used once, with the factors {case['factors']}, so the weight's gradient is {sum(case['factors'])} "
                f"everywhere. Yours is {observed['gradient']}. Which ways to copy does autograd follow?"
            )
    return right("The backward of a broadcast is a sum.")


# 03.4: parts of chosen sizes


def draw_parts(generator: random.Random) -> Plain:
    """Rows for the GPUs in either order, fewest for the first, no two alike; once four parts, the first empty; once from the host."""
    cases = []
    for devices, source, least in (
        ([0, 1], "cuda:0", 1),
        ([1, 0, 1, 0], "cuda:1", 0),
        ([1, 0], "cpu", 1),
    ):
        first = least and generator.randint(1, 3)
        rows = [
            first,
            *(first + more for more in generator.sample(range(1, 5), k=len(devices) - 1)),
        ]
        cases.append({"devices": devices, "source": source, "rows": rows})
    generator.shuffle(cases)
    return cases


def observe_parts(scatter_rows: Any, cases: Plain) -> Plain:
    """For each case the parts by device and rows, the bytes that each GPU took at most, and the gradient that comes back to the batch."""
    observations = []
    for case in cases:
        count = sum(case["rows"])
        x = (
            torch.arange(float(count), device=case["source"])[:, None]
            .repeat(1, WIDTH)
            .requires_grad_()
        )
        before = _allocated()
        with during(
            f"a batch on {case['source']}, device_ids={case['devices']} and rows={case['rows']}"
        ):
            parts = scatter_rows(x, list(case["devices"]), list(case["rows"]))
        observed: dict[str, Plain] = {"type": type(parts).__name__, "peak": _above(before)}
        if isinstance(parts, list | tuple) and all(
            isinstance(part, torch.Tensor) for part in parts
        ):
            observed["parts"] = [
                [str(part.device), list(part.shape), str(part.dtype), part.detach()[:, -1].tolist()]
                for part in parts
                if part.dim() == 2
            ]
            if len(parts) == len(observed["parts"]) and any(part.requires_grad for part in parts):
                torch.autograd.backward(
                    [
                        (index + 1) * part.sum()
                        for index, part in enumerate(parts)
                        if part.requires_grad
                    ]
                )
            observed["gradient"] = None if x.grad is None else x.grad[:, 0].tolist()
        observations.append(observed)
        del x, parts
    return observations


def judge_parts(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices, rows = case["devices"], case["rows"]
        given = f"of a batch on {case['source']}, with device_ids={devices} and rows={rows},"
        if "parts" not in observed:
            return wrong_type(observed["type"], "a list of tensors")
        due, start = [], 0
        for device, count in zip(devices, rows, strict=True):
            due.append(
                [
                    f"cuda:{device}",
                    [count, WIDTH],
                    "torch.float32",
                    [float(row) for row in range(start, start + count)],
                ]
            )
            start += count
        if observed["parts"] != due:
            found, asked = (
                ", ".join(f"{shape[0]} on {device}" for device, shape, *_ in told)
                for told in (observed["parts"], due)
            )
            other = f". Yours are {found or 'none'}"
            if found == asked:
                other = ". Yours have other values, another order or another dtype"
            return not_yet(f"{given} expected parts with these rows: {asked}{other}.")
        if observed["gradient"] != [
            float(index + 1) for index, count in enumerate(rows) for _ in range(count)
        ]:
            return not_yet(f"{given} the gradients of the parts do not come back to it.")
        for device, put in enumerate(observed["peak"]):
            own = ROW_BYTES * sum(
                count for other, count in zip(devices, rows, strict=True) if other == device
            )
            if put > own + SLACK:
                hint = "Copy only the rows that belong on a GPU, and straight to that GPU."
                if put >= sum(rows) * ROW_BYTES:
                    hint = "Was the whole batch there? What does a view keep?"
                return not_yet(
                    f"{given} cuda:{device} needs at most {own >> 10} KiB, for its own rows. "
                    f"Your function took {put >> 10} KiB there. {hint}"
                )
    return right("Each GPU holds its own rows, and no others.")


# 03.5: the loss is computed where the outputs are

CLASSES = 1 << 10


def draw_losses(generator: random.Random) -> Plain:
    """A batch that two GPUs cannot share evenly; `shift` makes the outputs of this try: above all targets, so that no gradient cancels."""
    rows = generator.choice([9, 11, 13])
    return {
        "targets": [generator.randrange(CLASSES) for _ in range(rows)],
        "shift": generator.randint(7, 12),
    }


class Wide(nn.Module):
    """Two numbers a row in, CLASSES numbers a row out: (the first number × weight) in each."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((CLASSES,), weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * self.weight


def observe_losses(with_loss: Any, inputs: Plain) -> Plain:
    """What DataParallel around the answer gathers, and the gradient of the loss that follows."""
    devices, where = [1, 0], []
    model = Wide(float(inputs["shift"])).cuda(devices[0])

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean over the rows of (a row's mean output - its target)²."""
        where.append(str(output.device))
        return (output.mean(1) - target).square().mean()

    targets = torch.tensor([float(target % 7) for target in inputs["targets"]], device=devices[0])
    x = torch.ones(len(targets), 2, device=devices[0])
    module = with_loss(model, criterion)
    if not isinstance(module, nn.Module):
        return {"type": type(module).__name__}
    with during("a batch on cuda:1, without DataParallel around your module"):
        alone = module(x, targets)
    shapes = (
        [_shape(value) for value in alone] if isinstance(alone, list | tuple) else [_shape(alone)]
    )
    if shapes != [[1], [1]]:
        return {"type": "other", "shapes": shapes}
    if elsewhere := [str(value.device) for value in alone if value.device != x.device]:
        return {"type": "elsewhere", "on": elsewhere[0], "due": str(x.device)}
    where.clear()
    with during("a batch, with DataParallel around your module"):
        losses, rows = nn.DataParallel(module, device_ids=devices)(x, targets)
    loss = losses.sum() / rows.sum()
    if loss.requires_grad:
        loss.backward()
    gradient = None if model.weight.grad is None else model.weight.grad.sum().item()
    return {
        "type": "losses",
        "losses": losses.tolist(),
        "rows": rows.tolist(),
        "gradient": gradient,
        "where": sorted(set(where)),
    }


def _shape(value: Any) -> list[int] | str:
    return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def judge_losses(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] == "elsewhere":
        return not_yet(
            f"for a batch on {observed['due']}, one of the two tensors is on {observed['on']}. It belongs where the rows are."
        )
    if observed["type"] not in ("other", "losses"):
        return not_yet(f"your function returned {observed['type']}, not an nn.Module.")
    if observed["type"] == "other":
        got = ", ".join(
            f"a tensor of shape {shape}" if isinstance(shape, list) else shape
            for shape in observed["shapes"]
        )
        return not_yet(
            "expected forward to return two tensors of one element each, both of shape [1]: the sum of the "
            f"losses and the number of rows. It returned {got}. (gather joins along dimension 0.)"
        )
    targets, shift = [target % 7 for target in inputs["targets"]], inputs["shift"]
    sizes = chunks(len(targets), 2)
    if observed["where"] != ["cuda:0", "cuda:1"]:
        return not_yet(
            f"each GPU should compute the loss of its own rows; the criterion ran on {', '.join(observed['where']) or 'none'}."
        )
    parts = [targets[: sizes[0]], targets[sizes[0] :]]
    if observed["rows"] != sizes:
        return not_yet(f"the two GPUs have {sizes} rows; your module says {observed['rows']}.")
    due = [sum((shift - target) ** 2 for target in part) for part in parts]
    if not near(observed["losses"], due, 1e-3, 1e-3):
        return not_yet(
            f"the sums of the rows' losses are {due}; yours are {observed['losses']}. The criterion gives their mean."
        )
    slope = sum(2 * (shift - target) for target in targets) / len(targets)
    if observed["gradient"] is None:
        return not_yet(
            "the model's weights get no gradient from the losses that your module returns. "
            "Does a line leave the graph, as detach() and item() do, or copy the model?"
        )
    if not near(observed["gradient"], slope, 1e-3, 1e-3):
        return not_yet(
            f"the weights' gradient adds up to {observed['gradient']}, not to {slope:.4g}. Does it come back through your module?"
        )
    return right("Two numbers from each GPU travel; the outputs stay where they are.")


CHECKS = [
    Check("03.1", draw_batches, observe_batches, judge_batches, gpus=2, section="Four functions"),
    Check(
        "03.2", draw_peaks, observe_peaks, judge_peaks, gpus=2, section="GPU 0 needs more memory"
    ),
    Check(
        "03.3",
        draw_weights,
        observe_weights,
        judge_weights,
        gpus=2,
        section="The gradients come back",
    ),
    Check(
        "03.4", draw_parts, observe_parts, judge_parts, gpus=2, section="Which GPU gets which rows"
    ),
    Check(
        "03.5",
        draw_losses,
        observe_losses,
        judge_losses,
        gpus=2,
        section="The loss inside the module",
    ),
]
