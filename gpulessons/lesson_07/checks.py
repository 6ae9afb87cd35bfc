"""Checks of lesson 07, half precision."""

import math
import random
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
    number,
    right,
    wrong_type,
)

DEVICE = "cuda:0"

# 07.1: the value of a string of bits

WIDTHS = ((5, 10), (8, 7), (8, 23))  # bits of exponent and fraction: float16, bfloat16, float32


def draw_bits(generator: random.Random) -> Plain:
    """Draw numbers of each kind as bit patterns in several formats.

    The digits are random, and the signs alternate.
    """
    drawn = [(generator.choice((2, 3, 4, 6, 7)), generator.randint(2, 12)) for _ in range(2)]
    cases = []
    first = generator.randint(0, 1)
    for negative, (exponent_bits, fraction_bits) in enumerate([*WIDTHS, *drawn], start=first):
        ones = 2**exponent_bits - 1
        some = generator.randint(1, 2**fraction_bits - 1)
        normal = generator.randint(1, ones - 1)
        kinds = [(normal, some), (0, some), (0, 0), (ones, 0), (ones, some), (ones, 1)]
        for exponent, fraction in kinds:
            bits = f"{negative % 2}{exponent:0{exponent_bits}b}{fraction:0{fraction_bits}b}"
            cases.append({"bits": bits, "exponent_bits": exponent_bits})
    generator.shuffle(cases)
    return cases


def observe_bits(decode: Any, cases: Plain) -> Plain:
    """Return the answer's number for each case, or the type's name of any other value."""
    answers = []
    for case in cases:
        with during(f'"{case["bits"]}" with {case["exponent_bits"]} bits of exponent'):
            answer = decode(case["bits"], case["exponent_bits"])
            answers.append(_number(answer))
    return answers


def _number(answer: Any) -> Plain:
    """Return a number as a float, and the type's name of anything else."""
    if number(answer) is None:
        return type(answer).__name__
    return float(answer)


def meaning(bits: str, exponent_bits: int) -> float:
    """Return the number that a bit pattern represents in IEEE 754."""
    fraction_bits = len(bits) - 1 - exponent_bits
    exponent, fraction = divmod(int(bits[1:], 2), 2**fraction_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        if fraction:
            size = math.nan
        else:
            size = math.inf
    else:
        leading = 0
        if exponent:
            leading = 2**fraction_bits
        size = math.ldexp(fraction + leading, max(exponent, 1) - bias - fraction_bits)
    return math.copysign(size, -1 if bits[0] == "1" else 1)


def judge_bits(answers: Plain, cases: Plain) -> Verdict:
    """Compare each number with the right one."""
    for answer, case in zip(answers, cases, strict=True):
        bits, exponent_bits = case["bits"], case["exponent_bits"]
        expected = meaning(bits, exponent_bits)
        parts = f"{bits[0]} {bits[1 : 1 + exponent_bits]} {bits[1 + exponent_bits :]}"
        if isinstance(answer, str):
            return not_yet(f"for {parts}, your function returned {answer}. Return a number.")
        if not _same_number(answer, expected):
            question = _question(parts, answer, expected)
            return not_yet(
                f"{parts} stands for {expected:.9g}. "
                f"Your function returned {answer:.9g}. {question}"
            )
    return right("One rule reads every format.")


def _same_number(answer: float, expected: float) -> bool:
    """Compare two floats. NaN equals NaN, and 0 and -0 differ."""
    if math.isnan(expected):
        return math.isnan(answer)
    return answer == expected and math.copysign(1, answer) == math.copysign(1, expected)


def _question(parts: str, answer: float, expected: float) -> str:
    """Return a question about the part of the bit pattern that the answer misread.

    `parts` has the bits, divided into sign, exponent and fraction.
    """
    _, exponent, fraction = parts.split()
    if answer == -expected:
        zero = " Zero has a sign, too." if expected == 0 else ""
        return f"What does the first bit say?{zero}"
    if "1" not in exponent:
        return "What does an exponent of zeros mean?" if "1" in fraction else "All zeros are 0."
    if "0" not in exponent:
        return "What does an exponent of ones mean?"
    return (
        "The exponent is stored with a bias of 2 ** (exponent_bits - 1) - 1, "
        "and the leading 1 is not stored."
    )


# 07.2: the overlap of boxes whose areas no float16 holds

PAIRS = 40
# Half of float16's last digit, and a little more, in units of the last digit of a double.
NEAR = 1.02 * 2.0**41


def draw_boxes(generator: random.Random) -> Plain:
    """Draw pairs of large boxes, of small ones, and of boxes that do not touch.

    float16 holds all edges exactly, but not all sides of large boxes.
    """

    def box(least: int, most: int) -> list[int]:
        width, height = (2 * generator.randint(least // 2, most // 2) for _ in range(2))
        edges = []
        for side in (width, height):
            near = 2 * generator.randint(1, (4000 - side) // 2)
            odd = 0
            if side > 2048:
                odd = generator.randint(0, 1)  # 1 makes the side odd
            edges.append((near - odd, near + side))
        (left, right_edge), (top, bottom) = edges
        return [left, top, right_edge, bottom]

    pairs = [[box(2000, 3800), box(2000, 3800)] for _ in range(PAIRS - 4)]  # they always touch
    small = box(10, 20)  # one pixel more changes its overlap
    pairs.append([small, [small[0] + 4, small[1], small[2] + 4, small[3]]])
    # Apart in both directions: two negative sides make a positive area.
    pairs.append([[0, 0, 600, 800], [1000, 1200, 1600, 1800]])
    pairs.append([[0, 0, 1000, 1000], [1200, 0, 2200, 1000]])
    same = box(500, 3000)
    pairs.append([same, same])
    generator.shuffle(pairs)
    return pairs


def observe_boxes(iou: Any, pairs: Plain) -> Plain:
    """Return a description of the overlaps that the answer computes.

    Also return the device on which the overlaps should be.
    """
    boxes = ([pair[side] for pair in pairs] for side in range(2))
    a, b = (torch.tensor(several, device=DEVICE).half() for several in boxes)
    with torch.cuda.device(DEVICE):
        return describe(iou(a, b)) | {"due": str(a.device)}


def overlap(a: list[int], b: list[int]) -> float:
    """Return the intersection over union of two boxes."""
    sides = [max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in range(2)]
    shared = sides[0] * sides[1]
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return shared / (sum(areas) - shared)


def judge_boxes(found: Plain, pairs: Plain) -> Verdict:
    """Judge each overlap. It must be the exact one, rounded once."""
    if found["type"] != "Tensor":
        return wrong_type(found["type"], "a tensor")
    if found["shape"] != [len(pairs)] or found["dtype"] != "torch.float16":
        return not_yet(
            f"expected a tensor of torch.float16 with the shape [{len(pairs)}], "
            f"got {found['dtype']} with the shape {found['shape']}."
        )
    if found["device"] != found["due"]:
        return not_yet(
            f"the boxes are on {found['due']}, and the overlaps on {found['device']}. "
            "Return the overlaps on the GPU of the boxes."
        )
    for value, (a, b) in zip(found["values"], pairs, strict=True):
        expected = overlap(a, b)
        if not abs(value - expected) <= NEAR * math.ulp(expected):  # so that nan fails
            hint = (
                "Check the formula. "
                "Which numbers exceed 65504, or are rounded to three digits before the end?"
            )
            if expected == 0:
                hint = "Do they touch at all?"
            return not_yet(
                f"the boxes {a} and {b} have an IoU of {expected:.4f}. "
                f"Your function returned {value:.4f}. {hint}"
            )
    return right("The boxes and the overlaps fit float16; the areas do not.")


# 07.3: a model in float16, its BatchNorm layers untouched


class Scaled(nn.Module):
    """Module with a child, a parameter, and buffers of several formats.

    The positions are integers, and the mask is boolean. One buffer is not persistent, so
    `state_dict` leaves it out.
    """

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("temperature", torch.ones(()), persistent=False)


NORMS = {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d, "3d": nn.BatchNorm3d}
BATCH_NORMS = tuple(NORMS.values())


def draw_model(generator: random.Random) -> Plain:
    """Draw a model: each kind of BatchNorm at a depth of its own, among layers to be converted."""
    kinds = generator.sample(list(NORMS), k=3)
    norms = [{"norm": kind, "depth": depth} for depth, kind in enumerate(kinds)]
    generator.shuffle(norms)
    features, seed = generator.randint(2, 6), generator.randrange(1 << 30)
    return {"norms": norms, "features": features, "seed": seed}


def build(model: Plain) -> nn.Module:
    """Return the drawn model with random values, and with a parameter and buffers of its own.

    Its first layer is frozen and on the CPU. An InstanceNorm has running statistics like those of a
    BatchNorm.
    """
    size = model["features"]
    first = nn.Linear(size, size)
    instance_norm = nn.InstanceNorm2d(size, track_running_stats=True)
    layers: list[nn.Module] = [first, nn.GroupNorm(1, size), instance_norm]
    for item in model["norms"]:
        layer: nn.Module = NORMS[item["norm"]](size, affine=item["depth"] != 1)
        for _ in range(item["depth"]):
            layer = Scaled(nn.Sequential(nn.Conv2d(size, size, 1), layer))
        layers.append(layer)
    built = Scaled(nn.Sequential(*layers)).to(DEVICE)
    first.cpu().requires_grad_(False)
    draws = torch.Generator().manual_seed(model["seed"])
    with torch.no_grad():
        for tensor in [*built.parameters(), *built.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=draws) + 1e-5)
        for layer in built.modules():
            if isinstance(layer, BATCH_NORMS):
                layer.get_buffer("running_var").mul_(1e6)  # too large for float16
    return built


def observe_model(half_but_norms: Any, model: Plain) -> Plain:
    """Return the dtypes of each tensor of the model, and the largest change of its values.

    Also return whether the answer is the same model with the same parameters.
    """
    built = build(model)
    tensors_before = _tensors(built)
    before = {name: tensor.detach().cpu().clone() for name, tensor in tensors_before.items()}
    places = {name: tensor.device for name, tensor in tensors_before.items()}
    norms = {name for name, layer in built.named_modules() if isinstance(layer, BATCH_NORMS)}
    parameters = [*built.parameters()]
    with torch.cuda.device(DEVICE):
        answer = half_but_norms(built)
    if not isinstance(answer, nn.Module):
        return {"type": type(answer).__name__}
    tensors = {}
    for name, tensor in _tensors(answer).items():
        if name not in before:
            continue
        off = (tensor.detach().cpu().double() - before[name].double()).abs().max().item()
        before_dtype, moved = str(before[name].dtype), tensor.device != places[name]
        found = {"dtype": str(tensor.dtype), "dtype_before": before_dtype, "off": off}
        tensors[name] = found | {"moved": moved, "in_norm": name.rpartition(".")[0] in norms}
    # An optimizer may hold the parameters, so they must stay the same objects.
    kept = [*map(id, parameters)] == [*map(id, answer.parameters())]
    told = {"same": answer is built, "kept": kept, "names": list(before) == list(_tensors(answer))}
    return {"type": "Module", **told, "tensors": tensors}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def judge_model(found: Plain, model: Plain) -> Verdict:
    """Judge the dtype, the values and the device of each parameter and buffer."""
    if found["type"] != "Module":
        return wrong_type(found["type"], "the model")
    if not found["same"] or not found["names"]:
        return not_yet(
            "your function returned another model, or one without some of its tensors. "
            "Convert the given model in place."
        )
    if not found["kept"]:
        return not_yet(
            "some parameters are new objects, and an optimizer would still hold the old ones. "
            "Convert parameters in place, by their data."
        )
    for name, tensor in found["tensors"].items():
        in_norm, dtype, dtype_before = tensor["in_norm"], tensor["dtype"], tensor["dtype_before"]
        if tensor["moved"]:
            return not_yet(f"{name} is on another device than before. Change only the formats.")
        if dtype_before in ("torch.int64", "torch.bool"):
            if dtype != dtype_before:
                changed = f"{name}, a buffer of {dtype_before}, is {dtype} now"
                return not_yet(
                    f"{changed}. Convert only floating-point tensors, as model.half() does."
                )
            continue
        if in_norm and dtype != "torch.float32":
            return not_yet(
                f"{name}, of a BatchNorm layer, is {dtype}. "
                "Does your function find all three kinds, at any depth?"
            )
        if in_norm and tensor["off"] != 0:
            return not_yet(
                f"{name} has other values than before. Was it converted to float16 and back?"
            )
        if not in_norm and dtype != "torch.float16":
            return not_yet(f"{name} is {dtype}. Only BatchNorm stays in float32.")
        if not in_norm and not tensor["off"] < 1e-2:
            return not_yet(f"{name} changed its values by more than rounding.")
    return right("Nothing of a BatchNorm layer was rounded.")


# 07.4: the largest scale that keeps gradients finite

OVERFLOW = 65520  # from here on, numbers are rounded to infinity in float16


def draw_gradients(generator: random.Random) -> Plain:
    """Draw lists of tensors with one and with two dimensions.

    Some gradients are tiny, some are huge. The largest has either sign, in any row and column.
    """
    cases: list[list[Any]] = []
    columns = generator.sample(range(3), k=3)
    exponents = [generator.randint(*span) for span in ((-60, -40), (-8, 4), (40, 60))]
    for exponent, column in zip(exponents, columns, strict=True):
        for sign, place in ((1, column), (-1, 3)):
            largest = sign * 2.0**exponent * generator.uniform(1.0, 1.9)
            rows = [[largest * generator.uniform(-0.2, 0.2) for _ in range(3)] for _ in range(4)]
            rows[place][column] = largest
            cases.append([rows[0], rows[1:3], rows[3]])
    # The norm and the sum of equal gradients are much larger than each of them.
    alike = 2.0 ** generator.randint(-20, -2) * generator.uniform(1.0, 1.9)
    cases.append([[alike, alike], [[alike, alike]] * 2, [-alike]])
    cases.append([[65510 * 2.0 ** generator.randint(-20, -2)]])  # scaled, it is rounded to 65504
    cases.append([[65528 * 2.0 ** generator.randint(-20, -2)]])  # scaled, it becomes infinite
    cases.append([[65520 * 2.0 ** generator.randint(-20, -2)]])  # the smallest that does so
    cases.append([[0.0, 0.0], [alike]])  # a layer without gradients
    generator.shuffle(cases)
    return cases


def observe_gradients(best_scale: Any, cases: Plain) -> Plain:
    """Return the scale that the answer finds for each case.

    Also return whether the gradients kept their values.
    """
    answers = []
    for case in cases:
        gradients = [torch.tensor(values, device=DEVICE) for values in case]
        before = [gradient.clone() for gradient in gradients]
        with during(f"{len(case)} tensors"):
            answer = best_scale(list(gradients))
        answers.append([_number(answer), all(map(torch.equal, gradients, before))])
    return answers


def judge_gradients(answers: Plain, cases: Plain) -> Verdict:
    """Judge each scale, which must be the largest power of two that leaves all gradients finite."""
    for (scale, same), case in zip(answers, cases, strict=True):
        if isinstance(scale, str):
            return wrong_type(scale, "a number")
        if not same:
            return not_yet(
                "the gradients have other values than before. "
                "Which of your operations works in place?"
            )
        if not (math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
            return not_yet(f"{scale:.9g} is not a power of two.")
        largest = max(abs(value) for values in case for value in _flat(values))
        known = f"the largest gradient has the size {largest:.9g}"
        if largest * scale >= OVERFLOW:
            return not_yet(
                f"{known}. Times {scale:g} it is {largest * scale:.9g}, and numbers from "
                f"{OVERFLOW} on are infinite in float16. Look at all tensors and both signs."
            )
        if largest * scale * 2 < OVERFLOW:
            return not_yet(
                f"{known}, and {scale:g} is not the largest scale. "
                f"Times {2 * scale:g} the gradient is {2 * largest * scale:.9g}, "
                f"which is below {OVERFLOW} and finite in float16."
            )
    return right("GradScaler searches for this number by trial and error.")


def _flat(values: Plain) -> list[float]:
    """Return the numbers in nested lists as one flat list."""
    if not isinstance(values, list):
        return [values]
    return [value for row in values for value in _flat(row)]


# 07.5: a step of mixed-precision training
#
# The model is one linear layer in two parts, so its gradients are known. For n errors e of an
# output and inputs x they are 2/n Σ e x for the weight and 2/n Σ e for the bias. With more than one
# output, n is not the number of rows.

ROWS, OUTPUTS = 64, 2
# The kind of gradients in each case, and the scale at the start.
CASES = {"large": 2.0**8, "small": 2.0**22, "overflowing": 2.0**16}
SMALL = 1e-8  # a target that float16 rounds to 0


class Parts(nn.Module):
    """Linear layer in two parts. The first part has the bias and the first two inputs."""

    def __init__(self, weight: list[list[float]]) -> None:
        super().__init__()
        values = torch.tensor(weight)
        outputs, features = values.shape
        self.first = nn.Linear(2, outputs)
        self.rest = nn.Linear(features - 2, outputs, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(values[:, :2])
            self.first.bias.zero_()
            self.rest.weight.copy_(values[:, 2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x[:, :2]) + self.rest(x[:, 2:])


def draw_step(generator: random.Random) -> Plain:
    """Draw a step with large gradients, one with small ones, and one that overflows."""
    features = generator.randint(3, 6)

    def numbers(count: int) -> list[float]:
        """Return random numbers that float16 holds exactly."""
        return [generator.choice((-1, 1)) * generator.randint(4, 16) / 16 for _ in range(count)]

    cases = []
    for kind, scale in CASES.items():
        small = kind == "small"
        weight = [[0.0] * features if small else numbers(features) for _ in range(OUTPUTS)]
        least = SMALL if small else 64.0
        targets = [[least * generator.uniform(1, 2) for _ in range(OUTPUTS)] for _ in range(ROWS)]
        # With positive inputs, the gradients of the weights are as large as that of the bias.
        inputs = [list(map(abs, numbers(features))) for _ in range(ROWS)]
        rate = generator.choice((0.25, 0.5)) * (1e3 if small else 1)
        case = {"kind": kind, "weight": weight, "inputs": inputs, "targets": targets}
        cases.append(case | {"rate": rate, "scale": scale})
    return cases


def observe_step(training_step: Any, cases: Plain) -> Plain:
    """Return the weights, biases and scale after a step, for each case.

    Also return the loss that the answer returned, and the dtypes in which the layer computed.
    """
    found = []
    for case in cases:
        dtypes: list[str] = []
        model = Parts(case["weight"]).to(DEVICE)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e5)  # of an earlier step
        model.register_forward_hook(
            lambda module, inputs, output, dtypes=dtypes: dtypes.append(str(output.dtype))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=case["rate"])
        scaler = torch.amp.GradScaler("cuda", init_scale=case["scale"])
        x = torch.tensor(case["inputs"], device=DEVICE)
        y = torch.tensor(case["targets"], device=DEVICE)
        with torch.cuda.device(DEVICE), during(f"{case['kind']} gradients"):
            loss = training_step(model, optimizer, scaler, x, y)
        weights = torch.cat([model.first.weight, model.rest.weight], dim=1)
        after = [*weights.flatten().tolist(), *model.first.bias.tolist()]
        told = {"after": after, "scale": scaler.get_scale()}
        found.append(told | {"loss": _number(loss), "dtypes": dtypes})
    return found


def start_of(case: Plain) -> list[float]:
    """Return the weights and the biases before the step."""
    return [*(value for row in case["weight"] for value in row), *[0.0] * OUTPUTS]


def expected_step(case: Plain) -> tuple[list[float], float]:
    """Return the weights and the biases after the step, and the loss before it."""
    slopes, bias_slopes, squares = [], [], 0.0
    for output, weight in enumerate(case["weight"]):
        errors = []
        for row, targets in zip(case["inputs"], case["targets"], strict=True):
            errors.append(sum(a * b for a, b in zip(weight, row, strict=True)) - targets[output])
        squares += sum(error**2 for error in errors)
        for column in zip(*case["inputs"], strict=True):
            products = (error * x for error, x in zip(errors, column, strict=True))
            slopes.append(2 / (ROWS * OUTPUTS) * sum(products))
        bias_slopes.append(2 / (ROWS * OUTPUTS) * sum(errors))
    gradient = [*slopes, *bias_slopes]
    clip = min(1.0, 1 / math.hypot(*gradient))
    if case["kind"] == "overflowing":
        clip = 0.0  # the step is skipped
    rate = case["rate"] * clip
    start = start_of(case)
    after = [value - rate * slope for value, slope in zip(start, gradient, strict=True)]
    return after, squares / (ROWS * OUTPUTS)


def judge_step(found: Plain, cases: Plain) -> Verdict:
    """Judge the parameters, the scale and the loss after the step."""
    for step, case in zip(found, cases, strict=True):
        kind = case["kind"]
        if step["dtypes"] != ["torch.float16"]:
            ran = f"{len(step['dtypes'])} times"
            if len(step["dtypes"]) == 1:
                ran = f"in {step['dtypes'][0]}"
            return not_yet(
                f"the model should run once, under autocast in torch.float16. It ran {ran}."
            )
        after, loss = expected_step(case)
        if isinstance(step["loss"], str) or not math.isclose(step["loss"], loss, rel_tol=0.02):
            return not_yet(
                f"the loss was {loss:.4g}, and your function returned {step['loss']}. "
                "Return the true loss, as a number."
            )
        moved = math.dist(after, start_of(case))
        if not math.dist(step["after"], after) <= 0.03 * moved:
            return not_yet(
                f"with {kind} gradients, the parameters did not move as they should. "
                f"{_STEP_HINTS[kind]}"
            )
        halved = kind == "overflowing"
        if step["scale"] != case["scale"] * (0.5 if halved else 1):
            return not_yet(
                f"with {kind} gradients, the scale was {case['scale']:g} before the step "
                f"and {step['scale']:g} after it. Which call changes the scale?"
            )
    return right("The step is clipped and scaled, and skipped where it has to be.")


_STEP_HINTS = {
    "large": "Are old gradients cleared? Are the true ones clipped, after unscale_?",
    "small": "Do they survive float16? What multiplies the loss?",
    "overflowing": "What skips the step when a gradient is infinite?",
}


CHECKS = [
    Check("07.1", draw_bits, observe_bits, judge_bits, section="Digits"),
    Check("07.2", draw_boxes, observe_boxes, judge_boxes, section="Range"),
    Check(
        "07.3",
        draw_model,
        observe_model,
        judge_model,
        alters=("values",),
        section="A model in half",
    ),
    Check("07.4", draw_gradients, observe_gradients, judge_gradients, section="Small gradients"),
    Check("07.5", draw_step, observe_step, judge_step, alters=("values",), section="The scaler"),
]
