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

WIDTH = 1 << 16  # features of a row: a row has 256 KiB, so that its place shows in the memory
ROW_BYTES = 4 * WIDTH
SLACK = 1 << 16  # bytes that small tensors may take


def chunks(rows: int, gpus: int) -> list[int]:
    """Return the number of rows that DataParallel gives to each GPU.

    All parts have the same size, the smallest that is enough for all rows. Only the last part may
    be smaller.
    """
    size = -(-rows // gpus)
    return [min(size, rows - start) for start in range(0, rows, size)]


# 03.1: data_parallel from the four functions
#
# Row i of the batch is full of the number values[i], and all weights are `weight`. So the output of
# a row is value × weight × WIDTH.


class Shared(list):
    """List that a deep copy of its owner shares with the original."""

    def __deepcopy__(self, memo: Any) -> "Shared":
        return self


class Rows(nn.Module):
    """Module that computes one weighted sum for each row.

    `seen` notes the device and the rows of each call, also for replicas and deep copies.
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
    """Draw three batches for all GPUs in use, in one order of the GPUs and in the reverse order.

    The first has one row less than there are GPUs. The second gives all GPUs the same number of
    rows. The third has one row more.
    """
    order = generator.sample(range(MOST_GPUS), k=MOST_GPUS)
    cases: list[Plain] = [
        {"order": order, "each": 1, "more": -1},
        {"order": order, "each": generator.choice([2, 3]), "more": 0},
    ]
    cases.append({"order": order[::-1], "each": generator.choice([2, 3]), "more": 1})
    for case in cases:
        case["weight"] = generator.randint(1, 4)
        case["values"] = [generator.randint(1, 9) for _ in range(MOST_GPUS * 3 + 1)]
    return cases


def observe_batches(data_parallel: Any, cases: Plain) -> Plain:
    """Return for each case the result, where the module ran, the memory and the gradients.

    The memory is the bytes that the forward pass left on each GPU, and each GPU's peak.
    """
    observations = []
    for case in cases:
        devices = [device for device in case["order"] if device < torch.cuda.device_count()]
        values = case["values"][: len(devices) * case["each"] + case["more"]]
        first = f"cuda:{devices[0]}"
        module = Rows(float(case["weight"]), first)
        column = torch.tensor([float(value) for value in values], device=first)[:, None]
        x = column.repeat(1, WIDTH).requires_grad_()
        before = _allocated()
        with _without_the_wrapper(), during(f"{len(x)} rows and device_ids={devices}"):
            y = data_parallel(module, x, list(devices))
        observed = {"devices": devices, "values": values, "result": describe(y)}
        observed |= {"seen": sorted(module.seen), "peak": _above(before), "gradient": None}
        gc.collect()
        observed["held"] = [
            now - earlier for now, earlier in zip(_allocated(), before, strict=True)
        ]
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
            if module.weight.grad is not None:
                observed["gradient"] = module.weight.grad[0].item()
        observed["batch"] = None
        if x.grad is not None:
            observed["batch"] = x.grad[:, 0].tolist()
        observations.append(observed)
        del module, x, y
    return observations


@contextmanager
def _without_the_wrapper() -> Iterator[None]:
    """Make nn.DataParallel and nn.parallel.data_parallel raise an error.

    Their code is replaced, so that the answer gets the error under any name that it has imported.
    """

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            "the exercise asks for what nn.DataParallel does inside: "
            "scatter, replicate, parallel_apply, gather"
        )

    with ExitStack() as stack:
        for function in (nn.DataParallel.forward, nn.parallel.data_parallel):
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = refuse.__code__
        yield


def _allocated() -> list[int]:
    """Return the bytes allocated on each GPU now, and reset the peaks."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
    return [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]


def _above(before: list[int]) -> list[int]:
    """Return by how many bytes each GPU's peak exceeds the bytes in `before`."""
    peaks = [torch.cuda.max_memory_allocated(index) for index in range(len(before))]
    return [peak - earlier for peak, earlier in zip(peaks, before, strict=True)]


def judge_batches(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices, values, result = observed["devices"], observed["values"], observed["result"]
        given = f"with {plural(len(values), 'row')} and device_ids={devices}"
        if result["type"] != "Tensor":
            return wrong_type(result["type"], "one tensor", "What puts the outputs together?")
        if result["device"] != f"cuda:{devices[0]}":
            return not_yet(
                f"{given} expected the result on cuda:{devices[0]}, the first of the devices, "
                f"got it on {result['device']}."
            )
        outputs = [value * case["weight"] * WIDTH for value in values]
        if result["shape"] != [len(values), 1] or result["values"] != outputs:
            return not_yet(
                f"{given} the result differs from the module's own output for the batch."
            )
        sizes = dict(zip(devices, chunks(len(values), len(devices)), strict=False))
        expected = sorted([f"cuda:{device}", rows] for device, rows in sizes.items())
        if observed["seen"] != expected:
            return not_yet(
                f"{given} the module should see {_rows_on(expected)}, and "
                f"it saw {_rows_on(observed['seen'])}."
            )
        if observed["gradient"] != sum(values):
            return not_yet(
                f"{given} expected {sum(values)} as the gradient of the module's weight, "
                f"got {observed['gradient']}. Do the gradients of all replicas come back to it?"
            )
        if observed["batch"] != [case["weight"]] * len(values):
            return not_yet(
                f"{given} the gradient of the batch differs from the one that the module itself "
                "gives. Which scatter does autograd follow?"
            )
        for device in devices:
            needed = 0
            if device in sizes and device != devices[0]:
                needed = ROW_BYTES * (1 + sizes[device])
            used = observed["held" if device in sizes else "peak"][device]
            if used > needed + SLACK:
                what = "nothing new, except for the results"
                if needed:
                    what = f"{needed >> 10} KiB, for weights and rows"
                return not_yet(
                    f"{given} cuda:{device} needs {what}. You put {used >> 10} KiB there."
                )
    return right("Values, gradients and memory are those of nn.DataParallel.")


def _rows_on(seen: Plain) -> str:
    return ", ".join(f"{plural(rows, 'row')} on {device}" for device, rows in seen) or "nothing"


# 03.2: the memory of each GPU at the peak of a step


UNIT = 4 << 20  # bytes
CLOSE = 2 << 20  # bytes by which a block of the allocator may be larger than the request


def draw_peaks(generator: random.Random) -> Plain:
    """Draw for each GPU what it holds before the step, what the step allocates, and what remains.

    `brief` lists tensors that the step makes and frees one after the other. The one that remains is
    `kept`. All are in units of memory. GPU 1 gets more than GPU 0.
    """
    highest = sorted(generator.sample((4, 6, 8), k=2))  # apart by more than CLOSE on each side
    before = generator.sample(range(1, 9), k=2)
    gpus = [
        {"before": held, "brief": [generator.randint(1, 3), most], "kept": generator.randint(1, 3)}
        for held, most in zip(before, highest, strict=True)
    ]
    return {"gpus": gpus, "current": 1, "devices": [1, 0]}


def observe_peaks(peaks: Any, inputs: Plain) -> Plain:
    """Return the peaks that the answer reports, and how often it ran the step.

    Each GPU had a higher peak before the step than in it.
    """
    held: list[torch.Tensor] = []
    for index, gpu in enumerate(inputs["gpus"]):
        _take(index, 32)
        held.append(_take(index, gpu["before"]))
    kept: list[torch.Tensor] = []

    def step() -> None:
        for index, gpu in enumerate(inputs["gpus"]):
            for units in gpu["brief"]:
                _take(index, units)
            kept.append(_take(index, gpu["kept"]))
            # A step trains, so it fails under no_grad.
            torch.ones(1, device=f"cuda:{index}", requires_grad=True).sum().backward()

    with torch.cuda.device(inputs["current"]):
        said = peaks(step, list(inputs["devices"]))
        now = torch.cuda.current_device()
    result: Plain = type(said).__name__
    if isinstance(said, list | tuple):
        result = [one_number(value) for value in said]
    return {"said": result, "calls": len(kept) // len(held), "current": now}


def _take(index: int, units: int) -> torch.Tensor:
    return torch.empty(units * UNIT, dtype=torch.uint8, device=f"cuda:{index}")


def judge_peaks(observed: Plain, inputs: Plain) -> Verdict:
    said = observed["said"]
    if not isinstance(said, list):
        return wrong_type(said, "a list of bytes")
    if observed["calls"] != 1:
        return not_yet(f"expected step to run once. It ran {plural(observed['calls'], 'time')}.")
    expected = [max(inputs["gpus"][device]["brief"]) * UNIT for device in inputs["devices"]]
    if len(said) != len(expected) or not all(map(_is_close, said, expected)):
        return not_yet(
            f"at the step's peak the GPUs {inputs['devices']} held {expected} bytes more than "
            f"before the step. You say {said}. "
            "Since when is a peak counted, and what was there already?"
        )
    if observed["current"] != inputs["current"]:
        return not_yet(
            f"GPU {inputs['current']} was the current one before your function, and "
            f"GPU {observed['current']} was the current one afterwards."
        )
    return right("What a GPU holds at its peak must fit, however briefly.")


def _is_close(said: float | None, expected: int) -> bool:
    return said is not None and abs(said - expected) <= CLOSE


# 03.3: copies of a weight whose gradients come back


def draw_weights(generator: random.Random) -> Plain:
    cases = []
    for devices in ([0, 1], [1, 0], [1, 0, 1]):
        # The values have more digits than half precision can hold.
        count = generator.randint(2, 5)
        values = [generator.randint(-9, 9) + 2.0**-12 for _ in range(count)]
        factors = [generator.randint(1, 9) for _ in devices]
        cases.append({"devices": devices, "values": values, "factors": factors})
    generator.shuffle(cases)
    return cases


def observe_weights(copies: Any, cases: Plain) -> Plain:
    """Return the copies of a weight, and the weight's gradient after the copies were used.

    Each copy was used with a factor of its own.
    """
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
            observed["gradient"] = None
            if weight.grad is not None:
                observed["gradient"] = weight.grad.flatten().tolist()
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
            return not_yet(f"expected copies on {', '.join(devices)}, got {', '.join(found)}.")
        same = {"dtype": "torch.float32", "shape": [len(case["values"]), 1]}
        same["values"] = case["values"]
        if any(copy | same != copy for copy in observed["copies"]):
            return not_yet("a copy differs from the weight in its values, its shape or its dtype.")
        total = sum(case["factors"])
        if observed["gradient"] != [float(total)] * len(case["values"]):
            return not_yet(
                f"each copy was used once, with the factors {case['factors']}, so the weight's "
                f"gradient is {total} everywhere. Yours is {observed['gradient']}. "
                "Which ways to copy does autograd follow?"
            )
    return right("The backward pass of a broadcast is a sum.")


# 03.4: parts of chosen sizes


def draw_parts(generator: random.Random) -> Plain:
    """Draw the number of rows that each GPU gets of a batch. The first part is the smallest.

    The GPUs come in either order, and no two parts have the same size. One batch has four parts,
    the first of which is empty. One batch is on the host.
    """
    cases = []
    for devices, source, least in (
        ([0, 1], "cuda:0", 1),
        ([1, 0, 1, 0], "cuda:1", 0),
        ([1, 0], "cpu", 1),
    ):
        first = 0
        if least:
            first = generator.randint(least, 3)
        more = generator.sample(range(1, 5), k=len(devices) - 1)
        rows = [first, *(first + count for count in more)]
        cases.append({"devices": devices, "source": source, "rows": rows})
    generator.shuffle(cases)
    return cases


def observe_parts(scatter_rows: Any, cases: Plain) -> Plain:
    """Return for each case the parts, the peak of each GPU in bytes, and the batch's gradient."""
    observations = []
    for case in cases:
        count = sum(case["rows"])
        column = torch.arange(float(count), device=case["source"])[:, None]
        x = column.repeat(1, WIDTH).requires_grad_()
        before = _allocated()
        given = f"a batch on {case['source']}, device_ids={case['devices']} and rows={case['rows']}"
        with during(given):
            parts = scatter_rows(x, list(case["devices"]), list(case["rows"]))
        observed: dict[str, Plain] = {"type": type(parts).__name__, "peak": _above(before)}
        are_tensors = isinstance(parts, list | tuple) and all(
            isinstance(part, torch.Tensor) for part in parts
        )
        if are_tensors:
            observed["parts"] = [
                [str(part.device), list(part.shape), str(part.dtype), part.detach()[:, -1].tolist()]
                for part in parts
                if part.dim() == 2
            ]
            used = [
                (index + 1) * part.sum() for index, part in enumerate(parts) if part.requires_grad
            ]
            if used and len(parts) == len(observed["parts"]):
                torch.autograd.backward(used)
            observed["gradient"] = None
            if x.grad is not None:
                observed["gradient"] = x.grad[:, 0].tolist()
        observations.append(observed)
        del x, parts
    return observations


def judge_parts(observations: Plain, cases: Plain) -> Verdict:
    for observed, case in zip(observations, cases, strict=True):
        devices, rows = case["devices"], case["rows"]
        given = f"of a batch on {case['source']}, with device_ids={devices} and rows={rows},"
        if "parts" not in observed:
            return wrong_type(observed["type"], "a list of tensors")
        expected: Plain = []
        gradient: list[float] = []
        for index, (device, count) in enumerate(zip(devices, rows, strict=True)):
            values = [float(row) for row in range(len(gradient), len(gradient) + count)]
            expected.append([f"cuda:{device}", [count, WIDTH], "torch.float32", values])
            gradient += [float(index + 1)] * count
        if observed["parts"] != expected:
            asked, found = _parts_text(expected), _parts_text(observed["parts"])
            got = f"Yours are {found}"
            if found == asked:
                got = "Yours have other values, another order or another dtype"
            return not_yet(f"{given} expected parts with these rows: {asked}. {got}.")
        if observed["gradient"] != gradient:
            return not_yet(f"{given} the gradients of the parts do not come back to the batch.")
        for device, peak in enumerate(observed["peak"]):
            own = sum(count for other, count in zip(devices, rows, strict=True) if other == device)
            needed = ROW_BYTES * own
            if peak > needed + SLACK:
                hint = "Copy only the rows that belong on a GPU, and straight to that GPU."
                if peak >= sum(rows) * ROW_BYTES:
                    hint = "Was the whole batch there? What does a view keep?"
                return not_yet(
                    f"{given} cuda:{device} needs at most {needed >> 10} KiB, for its own rows. "
                    f"Your function took {peak >> 10} KiB there. {hint}"
                )
    return right("Each GPU holds its own rows, and no others.")


def _parts_text(parts: Plain) -> str:
    return ", ".join(f"{shape[0]} on {device}" for device, shape, *_ in parts) or "none"


# 03.5: the loss is computed where the outputs are

CLASSES = 1 << 10


def draw_losses(generator: random.Random) -> Plain:
    """Draw the targets of a batch that two GPUs cannot share evenly, and the model's weight.

    The weight, `shift`, is above all targets modulo 7, so that no gradients cancel each other.
    """
    rows = generator.choice([9, 11, 13])
    return {
        "targets": [generator.randrange(CLASSES) for _ in range(rows)],
        "shift": generator.randint(7, 12),
    }


class Wide(nn.Module):
    """Model with two input numbers and CLASSES outputs, each the first number × weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((CLASSES,), weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * self.weight


def observe_losses(with_loss: Any, inputs: Plain) -> Plain:
    """Return what DataParallel gathers from the answer's module, and the gradient of its loss."""
    devices, where = [1, 0], []
    model = Wide(float(inputs["shift"])).cuda(devices[0])

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over the rows of (a row's mean output - its target)²."""
        where.append(str(output.device))
        return (output.mean(1) - target).square().mean()

    targets = torch.tensor([float(target % 7) for target in inputs["targets"]], device=devices[0])
    x = torch.ones(len(targets), 2, device=devices[0])
    module = with_loss(model, criterion)
    if not isinstance(module, nn.Module):
        return {"type": type(module).__name__}
    with during("a batch on cuda:1, without DataParallel around your module"):
        alone = module(x, targets)
    outputs = alone
    if not isinstance(alone, list | tuple):
        outputs = [alone]
    shapes = [_shape(value) for value in outputs]
    if shapes != [[1], [1]]:
        return {"type": "other", "shapes": shapes}
    elsewhere = [str(value.device) for value in alone if value.device != x.device]
    if elsewhere:
        return {"type": "elsewhere", "on": elsewhere[0], "due": str(x.device)}
    where.clear()
    with during("a batch, with DataParallel around your module"):
        losses, rows = nn.DataParallel(module, device_ids=devices)(x, targets)
    loss = losses.sum() / rows.sum()
    if loss.requires_grad:
        loss.backward()
    gradient = None
    if model.weight.grad is not None:
        gradient = model.weight.grad.sum().item()
    gathered = {"losses": losses.tolist(), "rows": rows.tolist()}
    return {"type": "losses", **gathered, "gradient": gradient, "where": sorted(set(where))}


def _shape(value: Any) -> list[int] | str:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    return type(value).__name__


def judge_losses(observed: Plain, inputs: Plain) -> Verdict:
    if observed["type"] == "elsewhere":
        return not_yet(
            f"for a batch on {observed['due']}, one of the two tensors is on {observed['on']}. "
            "It belongs where the rows are."
        )
    if observed["type"] not in ("other", "losses"):
        return not_yet(f"expected an nn.Module, and your function returned {observed['type']}.")
    if observed["type"] == "other":
        returned = []
        for shape in observed["shapes"]:
            if isinstance(shape, list):
                returned.append(f"a tensor of shape {shape}")
            else:
                returned.append(shape)
        got = ", ".join(returned)
        return not_yet(
            "expected forward to return two tensors of one element each, both of shape [1]: "
            f"the sum of the losses and the number of rows. It returned {got}. "
            "(gather joins along dimension 0.)"
        )
    targets, shift = [target % 7 for target in inputs["targets"]], inputs["shift"]
    sizes = chunks(len(targets), 2)
    if observed["where"] != ["cuda:0", "cuda:1"]:
        return not_yet(
            "each GPU should compute the loss of its own rows. The criterion ran on "
            f"{', '.join(observed['where']) or 'none'}."
        )
    parts = [targets[: sizes[0]], targets[sizes[0] :]]
    if observed["rows"] != sizes:
        return not_yet(f"the two GPUs have {sizes} rows. Your module says {observed['rows']}.")
    sums = [sum((shift - target) ** 2 for target in part) for part in parts]
    if not near(observed["losses"], sums, 1e-3, 1e-3):
        return not_yet(
            f"the sums of the rows' losses are {sums}. Yours are {observed['losses']}. "
            "What does the criterion return for several rows?"
        )
    slope = sum(2 * (shift - target) for target in targets) / len(targets)
    if observed["gradient"] is None:
        return not_yet(
            "the model's weights get no gradient from the losses that your module returns. "
            "Does a line leave the graph, as detach() and item() do, or copy the model?"
        )
    if not near(observed["gradient"], slope, 1e-3, 1e-3):
        return not_yet(
            f"the weights' gradient adds up to {slope:.4g}. Yours adds up to "
            f"{observed['gradient']}. Does it come back through your module?"
        )
    return right("Each GPU sends two numbers. The outputs stay where they are.")


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
