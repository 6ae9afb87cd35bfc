"""Wrong answers to the exercises of lesson 07: for each, what a learner may well write, and a part of what the check says."""

DECODE = """
def decode(bits, exponent_bits):
    sign = -1.0 if bits[0] == "1" else 1.0
    exponent, fraction = int(bits[1:1 + exponent_bits], 2), bits[1 + exponent_bits:]
    part, bias = int(fraction, 2) / 2 ** len(fraction), 2 ** (exponent_bits - 1) - 1
    if exponent == 2 ** exponent_bits - 1:
        return float("nan") if part else sign * float("inf")
    if exponent == 0:
        return sign * part * 2.0 ** (1 - bias)
    return sign * (1 + part) * 2.0 ** (exponent - bias)
"""
IOU = """
def iou(a, b):
    a, b = a.float(), b.float()
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(dim=1)
    return (shared / ((a[:, 2:] - a[:, :2]).prod(dim=1) + (b[:, 2:] - b[:, :2]).prod(dim=1) - shared)).half()
"""
SCALE = """
def best_scale(gradients):
    import math
    largest = max(gradient.abs().max().item() for gradient in gradients)
    return 2.0 ** math.floor(math.log2(65519 / largest))
"""
MENDED = """
def half_but_norms(model):
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for layer in model.modules():
        if not isinstance(layer, norms):
            for tensor in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
                tensor.data = tensor.data.to(torch.float16) if tensor.is_floating_point() else tensor.data
    return model
"""
STEP = """
def training_step(model, optimizer, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
"""


def without(source: str, line: str, instead: str = "") -> str:
    """The source with one piece changed, which must be there."""
    assert line in source
    return source.replace(line, instead)


UNSCALE, CLIP = "    scaler.unscale_(optimizer)\n", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
WRONG = {
    "07.1": {
        "no subnormal numbers": (without(DECODE, "if exponent == 0:", "if exponent == 0 and not part:"), "exponent of zeros"),
        "subnormal numbers one power too low": (without(DECODE, "(1 - bias)", "-bias"), "exponent of zeros"),
        "no infinity": (without(DECODE, "if exponent == 2 ** exponent_bits - 1:", "if False:"), "exponent of ones"),
        "nan for infinity": (without(DECODE, 'if part else sign * float("inf")', ""), "exponent of ones"),
        "infinity without a sign": (without(DECODE, 'else sign * float("inf")', 'else float("inf")'), "What does the first bit say"),
        "no leading one": (without(DECODE, "(1 + part)", "part"), "leading 1 is not stored"),
        "a bias one too large": (without(DECODE, "2 ** (exponent_bits - 1) - 1\n    if", "2 ** (exponent_bits - 1)\n    if"), "stands for"),
        "as text": (
            without(DECODE, "return sign * (1 + part)", "return str(sign) * (1 + int(part))").replace("* 2.0 ** (exponent - bias)", ""),
            "returned str",
        ),
        "subnormal numbers without a sign": (without(DECODE, "return sign * part", "return part"), "What does the first bit say"),
        "no sign": (without(DECODE, '-1.0 if bits[0] == "1" else 1.0', "1.0"), "What does the first bit say"),
        "zero without a sign": (
            without(DECODE, "    if exponent == 0:", "    if exponent == part == 0:\n        return 0.0\n    if exponent == 0:"),
            "stands for -0; you said 0. What does the first bit say",
        ),
        "one fixed bias": (without(DECODE, "2 ** (exponent_bits - 1) - 1\n    if", "15\n    if"), "stands for"),
    },
    "07.2": {
        "areas in float16": (without(IOU, "a, b = a.float(), b.float()", "pass"), "larger than 65504"),
        "areas in bfloat16": (without(IOU, "a.float(), b.float()", "a.bfloat16(), b.bfloat16()"), "larger than 65504"),
        "smaller numbers, still in float16": (
            without(IOU, "a, b = a.float(), b.float()", "a, b = a / 64, b / 64"),
            "rounded to three digits",
        ),
        "all that is kept in float16": (
            without(IOU, "a, b = a.float(), b.float()", "a, b = a / 4096, b / 4096"),
            "rounded to three digits",
        ),
        "no clamp": (without(IOU, ".clamp(min=0)"), "Do they touch"),
        "in float32": (without(IOU, ".half()"), "torch.float32"),
        "the shared area counted twice": (without(IOU, " - shared)", " )"), "overlap by"),
        "sides in float16": (without(IOU, "(high - low)", "(high.half() - low.half()).float()"), "rounded to three digits"),
        "converted too late": (
            without(IOU, "a, b = a.float(), b.float()", "pass").replace(".prod(dim=1)", ".prod(dim=1).float()"),
            "larger than 65504",
        ),
    },
    "07.3": {
        "there and back": (
            """
def half_but_norms(model):
    model.half()
    for layer in model.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            layer.float()
    return model
""",
            "float16 in between",
        ),
        "only 2d": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if not isinstance(layer, nn.BatchNorm2d):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model
""",
            "all three kinds|only BatchNorm stays",
        ),
        "only the first level": (
            """
def half_but_norms(model):
    for layer in model.children():
        if not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            layer.half()
    return model
""",
            "at any depth",
        ),
        "only linear and convolutional layers": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.half()
    return model
""",
            "only BatchNorm stays",
        ),
        "a copy": (
            """
def half_but_norms(model):
    import copy
    model = copy.deepcopy(model)
    for layer in model.modules():
        if not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model
""",
            "in place",
        ),
        "parameters alone": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model
""",
            "shift is torch.float32",
        ),
        "bfloat16": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for tensor in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
                tensor.data = tensor.data.bfloat16()
    return model
""",
            "is torch.bfloat16",
        ),
        "buffers of whole numbers too": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for tensor in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
                tensor.data = tensor.data.half()
    return model
""",
            "floating-point tensors alone",
        ),
        "every kind of norm": (
            """
def half_but_norms(model):
    for layer in model.modules():
        if "Norm" not in type(layer).__name__:
            for tensor in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
                tensor.data = tensor.data.half()
    return model
""",
            "only BatchNorm stays",
        ),
        "no result": ("def half_but_norms(model): model.half()", "returned NoneType"),
        "frozen": (
            without(MENDED, "    return model", "    return model.requires_grad_(False)"),
            "which of the model's parameters require",
        ),
        "in evaluation mode": (without(MENDED, "    return model", "    return model.eval()"), "another mode"),
    },
    "07.4": {
        "no sign": (without(SCALE, ".abs()"), "ValueError|infinite in float16"),
        "the norm": (
            without(
                SCALE,
                "max(gradient.abs().max().item() for gradient in gradients)",
                "sum(g.square().sum().item() for g in gradients) ** 0.5",
            ),
            "not the largest",
        ),
        "the mean": (without(SCALE, "gradient.abs().max()", "gradient.abs().mean()"), "infinite in float16"),
        "the smallest": (without(SCALE, "max(gradient.abs().max()", "min(gradient.abs().max()"), "infinite in float16"),
        "up to 65536": (without(SCALE, "65519", "65536"), "infinite in float16, as is everything from 65520 on"),
        "up to 65504": (without(SCALE, "65519", "65504"), "rounds what is below 65520 to 65504"),
        "the exponent": (without(SCALE, "return 2.0 **", "return"), "no power of two|not the largest|infinite"),
        "one tensor": (without(SCALE, "for gradient in gradients", "for gradient in gradients[:1]"), "infinite in float16"),
        "no power of two": (without(SCALE, "2.0 ** math.floor(math.log2(65519 / largest))", "65504 / largest"), "no power of two"),
        "never below 1": (without(SCALE, "return ", "return max(1.0, ").rstrip() + ")", "infinite in float16"),
        "one power too many": (without(SCALE, "math.floor", "math.ceil"), "infinite in float16"),
        "exponents to 32": (
            """
def best_scale(gradients):
    scales = [2.0**power for power in range(-32, 33)]
    return max(scale for scale in scales if all((gradient * scale).half().isfinite().all() for gradient in gradients))
""",
            "not the largest|max",
        ),
        "of one shape": (
            without(SCALE, "max(gradient.abs().max().item() for gradient in gradients)", "torch.stack(gradients).abs().max()"),
            "RuntimeError",
        ),
        "in place": (without(SCALE, ".abs()", ".abs_()"), "works in place"),
        "one power too few": (without(SCALE, "65519", "32000"), "not the largest"),
    },
    "07.5": {
        "clipped by the largest gradient": (without(STEP, "1.0)", 'float(1), norm_type=float("inf"))'), "clipped: after unscale_"),
        "clipped by value": (without(STEP, "clip_grad_norm_", "clip_grad_value_"), "clipped: after unscale_"),
        "not clipped": (without(STEP, CLIP), "clipped: after unscale_"),
        "old gradients": (without(STEP, "    optimizer.zero_grad()\n"), "old gradients cleared"),
        "no autocast": (without(STEP, 'torch.autocast("cuda", dtype=torch.float16)', "torch.enable_grad()"), "in torch.float32"),
        "in bfloat16": (without(STEP, "torch.float16", "torch.bfloat16"), "in torch.bfloat16"),
        "the optimizer's own step": (without(STEP, "scaler.step(optimizer)", "optimizer.step()"), "leaves out the step|AssertionError"),
        "no update": (without(STEP, "    scaler.update()\n"), "Who changes it"),
        "no scaler": (
            without(STEP, UNSCALE)
            .replace("scaler.scale(loss)", "loss")
            .replace("scaler.step(optimizer)", "optimizer.step()")
            .replace("    scaler.update()\n", ""),
            "What multiplies the loss|leaves out the step",
        ),
        "the scaled loss": (without(STEP, "loss.item()", "scaler.scale(loss).item()"), "true loss"),
    },
}

RIGHT = {
    "07.1": {
        "powers": DECODE,
        "exact fractions": without(
            DECODE, "return sign * (1 + part)", "from fractions import Fraction\n    return Fraction(sign) * (1 + Fraction(part))"
        ).replace("2.0 ** (exponent - bias)", "Fraction(2) ** (exponent - bias)"),
        "decimals": "from decimal import Decimal, getcontext\n"
        + without(DECODE, "return sign * (1 + part)", "getcontext().prec = 300\n    return Decimal(sign) * (1 + Decimal(part))").replace(
            "2.0 ** (exponent - bias)", "Decimal(2) ** (exponent - bias)"
        ),
        "NumPy's numbers": "import numpy\n" + without(DECODE, "return sign * (1 + part)", "return numpy.float64(sign) * (1 + part)"),
        "ldexp": "import math\n"
        + without(DECODE, "sign * (1 + part) * 2.0 ** (exponent - bias)", "math.ldexp(sign * (1 + part), exponent - bias)"),
    },
    "07.2": {
        "in float32": IOU,
        "in float64": IOU.replace(".float()", ".double()"),
        "smaller numbers, in float32": without(IOU, "a, b = a.float(), b.float()", "a, b = a.float() / 64, b.float() / 64"),
        "sides clipped by relu": without(IOU, ".clamp(min=0)", ".relu()"),
    },
    "07.3": {
        "the data": MENDED,
        "by the base class": without(MENDED, "(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)", "nn.modules.batchnorm._BatchNorm"),
    },
    "07.4": {
        "by a logarithm": SCALE,
        "NumPy's number": "import numpy\n" + without(SCALE, "return ", "return numpy.float64(1) * "),
    },
    "07.5": {
        "as in the lesson": STEP,
        "cleared at the end": without(STEP, "    optimizer.zero_grad()\n", "    model.zero_grad(set_to_none=True)\n"),
        "cleared first": without(STEP, "    with torch.autocast", "    optimizer.zero_grad()\n    with torch.autocast"),
        "the loss outside": without(
            STEP,
            "        loss = nn.functional.mse_loss(model(x), y)\n",
            "        output = model(x)\n    loss = (output.float() - y).square().mean()\n",
        ),
    },
}
