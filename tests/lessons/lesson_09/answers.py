"""Wrong answers to the exercises of lesson 09: for each, what a learner may well write, and a part of what the check says."""

import re

BYTES = """
def training_bytes(model, optimizer):
    kept = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return kept + {"SGD": 1, "momentum": 2, "Adam": 3}[optimizer] * trained
"""
ACCUMULATE = """
def accumulate(model, x, y, rows):
    for a, b in zip(x.split(rows), y.split(rows)):
        (torch.nn.functional.cross_entropy(model(a), b) * len(a) / len(x)).backward()
"""
RESTORED = """    for module, training in modes:
        module.training = training
"""
PREDICT = """
def predict(model, x, rows):
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        result = torch.cat([model(part) for part in x.split(rows)])
    for module, training in modes:
        module.training = training
    return result
"""
RUN = """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    for first in range(0, len(blocks), every):
        x = checkpoint(torch.nn.Sequential(*blocks[first : first + every]), x, use_reentrant=False)
    return x
"""
ROWS = """
def most_rows(peak, limit):
    one, two = peak(1), peak(2)
    row = two - one
    return max(0, (limit - (one - row)) // row)
"""


def without(source: str, line: str, instead: str = "") -> str:
    """The source with one piece changed, which must be there."""
    assert line in source
    return source.replace(line, instead)


def partly(part: str, after: str = "return result") -> str:
    """The prediction with other work on each part, and another end."""
    return without(without(PREDICT, "model(part) for", f"{part} for"), "return result", after)


LAST_RUN = "range(0, len(blocks), every)"

WRONG = {
    "09.1": {
        "what is saved": (without(BYTES, "[*model.parameters(), *model.buffers()]", "model.state_dict().values()"), "never saved"),
        "a constant": ("def training_bytes(model, optimizer): return 12345", "You said 12345 B"),
        "four bytes each": (without(BYTES, "parameter.nbytes", "4 * parameter.numel()"), "in half precision"),
        "four bytes everywhere": (
            BYTES.replace("tensor.nbytes", "4 * tensor.numel()").replace("parameter.nbytes", "4 * parameter.numel()"),
            "half",
        ),
        "no buffers": (without(BYTES, "*model.parameters(), *model.buffers()", "*model.parameters()"), "some buffers"),
        "one average of Adam": (without(BYTES, '"Adam": 3', '"Adam": 2'), "with Adam there are"),
        "momentum keeps nothing": (without(BYTES, '"momentum": 2', '"momentum": 1'), "with momentum there are"),
        "SGD keeps something": (without(BYTES, '"SGD": 1', '"SGD": 2'), "with SGD there are"),
        "no gradients": (without(BYTES, '{"SGD": 1, "momentum": 2, "Adam": 3}', '{"SGD": 0, "momentum": 1, "Adam": 2}'), "gradients"),
        "buffers have gradients": (without(BYTES, "* trained", "* kept"), "there are"),
        "only what is trained": (without(BYTES, "return kept +", "return trained +"), "there are"),
        "in MiB": (without(BYTES, "return kept", "return (kept").replace("* trained", "* trained) / 2**20"), "there are"),
        "as text": ("def training_bytes(model, optimizer): return '12 MiB'", "returned str"),
    },
    "09.2": {
        "not divided": (without(ACCUMULATE, " * len(a) / len(x)"), "not the gradients of the whole batch"),
        "divided by the parts": (without(ACCUMULATE, "len(a) / len(x)", "rows / len(x)"), "not the gradients of the whole batch"),
        "the sum": (without(ACCUMULATE, "b) * len(a) / len(x)", "b, reduction='sum')"), "not the gradients of the whole batch"),
        "the sum by rows": (without(ACCUMULATE, "b) * len(a) / len(x)", "b, reduction='sum') / rows"), "not the gradients"),
        "cleared first": (without(ACCUMULATE, "    for a", "    model.zero_grad()\n    for a"), "What was in .grad before"),
        "cleared each time": (
            without(ACCUMULATE, "        (torch", "        model.zero_grad()\n        (torch"),
            "What was in .grad before",
        ),
        "all at once": (
            "def accumulate(model, x, y, rows): torch.nn.functional.cross_entropy(model(x), y).backward()",
            "rows at once; at most",
        ),
        "rows for a number of parts": (
            without(ACCUMULATE, "x.split(rows), y.split(rows)", "x.chunk(rows), y.chunk(rows)"),
            "a size, or a number",
        ),
        "so many parts": (without(ACCUMULATE, "x.split(rows), y.split(rows)", "x.chunk(5), y.chunk(5)"), "rows at once; at most"),
        "the last part left out": (without(ACCUMULATE, "    for a, b", "    x, y = x[: len(x) // rows * rows], y\n    for a, b"), "rows"),
        "with a step": (ACCUMULATE + "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n", "parameters have changed"),
        "all graphs alive": (
            """
def accumulate(model, x, y, rows):
    losses = [torch.nn.functional.cross_entropy(model(a), b, reduction="sum") for a, b in zip(x.split(rows), y.split(rows))]
    (sum(losses) / len(x)).backward()
""",
            "What keeps their graphs",
        ),
        "graphs retained": (
            """
def accumulate(model, x, y, rows):
    for a, b in zip(x.split(rows), y.split(rows)):
        loss = torch.nn.functional.cross_entropy(model(a), b) * len(a) / len(x)
        loss.backward(retain_graph=True)
""",
            "What keeps their graphs",
        ),
    },
    "09.3": {
        "inference mode": (without(PREDICT, "no_grad", "inference_mode"), "inference tensors"),
        "in training mode": (without(PREDICT, "    model.eval()\n"), "averages have changed|not the model's predictions"),
        "always left in training mode": (without(PREDICT, RESTORED, "    model.train()\n"), "is now in training mode"),
        "left in evaluation mode": (without(PREDICT, RESTORED), "is now in evaluation mode"),
        "one mode for all": (without(PREDICT, RESTORED, "    model.train(modes[0][1])\n"), "is now in"),
        "the layers' modes alone": (without(PREDICT, "model.modules()", "[model, *model]"), "(BatchNorm1d|ReLU|Dropout) is now in"),
        "modes of a model in training": (
            without(PREDICT, RESTORED, "    if modes[0][1]:\n        for module, training in modes: module.training = training\n"),
            "Dropout is now in",
        ),
        "with a graph": (without(PREDICT, "torch.no_grad()", "torch.enable_grad()"), "made a graph"),
        "detached too late": (
            without(partly("model(part)", "return result.detach()"), "torch.no_grad()", "torch.enable_grad()"),
            "made a graph",
        ),
        "each part detached": (without(partly("model(part).detach()"), "torch.no_grad()", "torch.enable_grad()"), "made a graph"),
        "all rows at once": (without(PREDICT, "x.split(rows)", "[x]"), "at its peak it took"),
        "twice the rows": (without(PREDICT, "x.split(rows)", "x.split(2 * rows)"), "at its peak it took|rows at once"),
        "on the CPU": (partly("model(part).cpu()"), "They should stay on the GPU"),
        "the model on the CPU": (partly("model.cpu()(part.cpu())", "return result.cuda()"), "from their GPU"),
        "frozen for good": (
            without(PREDICT, "    model.eval()\n", "    model.eval().requires_grad_(False)\n"),
            "require gradients",
        ),
        "the last rows first": (without(PREDICT, "x.split(rows)", "x.split(rows)[::-1]"), "all of them in order"),
        "without the rest": (without(PREDICT, "x.split(rows)", "x.split(rows)[:-1]"), "all of them in order"),
        "in half precision": (partly("model(part).half()"), "not the model's predictions"),
        "in the default dtype": (
            without(PREDICT, "return result", "return torch.empty(len(x), 4, device=x.device).copy_(result)"),
            "answers in torch.float64",
        ),
        "no graphs ever after": (
            without(PREDICT, "    with torch.no_grad():\n    ", "    torch.set_grad_enabled(False)\n"),
            "is_grad_enabled",
        ),
        "forgotten averages": (
            without(PREDICT, "model.eval()", "model.eval(); model[1][0].reset_running_stats()"),
            "averages have changed",
        ),
        "a list": (
            without(PREDICT, "torch.cat([model(part) for part in x.split(rows)])", "[model(part) for part in x.split(rows)]"),
            "list",
        ),
    },
    "09.4": {
        "reentrant": (
            without(RUN, "use_reentrant=False", "use_reentrant=True"),
            "What if x itself needs none|None of the inputs have requires_grad",
        ),
        "one for all": (
            """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(torch.nn.Sequential(*blocks), x, use_reentrant=False)
""",
            "The longest part decides",
        ),
        "one for each block": (without(RUN, LAST_RUN, "range(len(blocks))").replace("first + every", "first + 1"), "need less"),
        "the rest first": (
            without(RUN, LAST_RUN, "[0, *range(len(blocks) % every, len(blocks), every)]").replace(
                "[first : first + every]", "[first : first + every if first else len(blocks) % every]"
            ),
            "part by part",
        ),
        "without dropout": (
            without(RUN, "    for first", "    for block in blocks: block[2].p = 0.0\n    for first"),
            "not what the blocks make",
        ),
        "so many parts": (
            """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    size = -(-len(blocks) // every)
    for first in range(0, len(blocks), size):
        x = checkpoint(torch.nn.Sequential(*blocks[first : first + size]), x, use_reentrant=False)
    return x
""",
            "part by part|need less",
        ),
        "the last part without": (
            without(RUN, "        x = checkpoint(", "        x = (checkpoint if first + every < len(blocks) else lambda f, x, **_: f(x))("),
            "need less",
        ),
        "every second part": (
            without(RUN, "        x = checkpoint(", "        x = (checkpoint if first % (2 * every) else lambda f, x, **_: f(x))("),
            "need less",
        ),
        "on the CPU's memory": (
            """
def run(blocks, x, every):
    with torch.autograd.graph.save_on_cpu():
        return torch.nn.Sequential(*blocks)(x)
""",
            "part by part",
        ),
        "cut off": (without(RUN, ", x, use", ", x.detach(), use"), "gradients are not those"),
        "no graph": (
            """
def run(blocks, x, every):
    with torch.no_grad():
        return torch.nn.Sequential(*blocks)(x)
""",
            "result has no gradient",
        ),
        "the last blocks left out": (without(RUN, "len(blocks), every", "len(blocks) - every + 1, every"), "not what the blocks make"),
        "in evaluation mode": (
            without(RUN, "    for first", "    for block in blocks: block.eval()\n    for first"),
            "not what the blocks make",
        ),
        "the input by its name": (
            RUN.replace(", x, use", ", input=x, use"),
            "gradients are not those",
        ),
        "other dropout": (without(RUN, "use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"), "gradients are not those"),
    },
    "09.5": {
        "a search": (
            """
def most_rows(peak, limit):
    rows = 0
    while peak(rows + 1) <= limit:
        rows += 1
    return rows
""",
            "you measured|rows? fits?, you said",
        ),
        "measured at nothing": (
            without(ROWS, "one, two = peak(1), peak(2)", "one, two = peak(0) + peak(1) - peak(0), peak(2)"),
            "no row at all|you measured",
        ),
        "measured where no step fits": (
            without(ROWS, "peak(1), peak(2)", "peak(1), peak(10**6)").replace("two - one", "(two - one) // 999_999"),
            "a step of 1,000,000 rows needs .* GiB, and the GPU has 128 GiB",
        ),
        "rounded": (without(ROWS, "(limit - (one - row)) // row", "round((limit - (one - row)) / row)"), "above the limit"),
        "two rows or none": (without(ROWS, "    return", "    if limit < two: return 0\n    return"), "1 row fits, you said 0"),
        "rounded up": (without(ROWS, "// row", "// row + 1"), "above the limit|Not even one row"),
        "less than the limit": (without(ROWS, "(limit - (", "(limit - 1 - ("), "exactly the limit, and the limit may be reached"),
        "below nothing": (without(ROWS, "max(0, ", "("), "Not even one row fits"),
        "never none": (without(ROWS, "max(0", "max(1"), "Not even one row fits"),
        "no whole number": (without(ROWS, "// row", "/ row"), "A batch has a whole number of rows"),
        "one measurement for all": (
            without(ROWS, "one, two = peak(1), peak(2)", "one, two = known or known.extend((peak(1), peak(2))) or known").replace(
                "limit):", "limit, known=[]):"
            ),
            "rows? fits?, you said",
        ),
        "the fixed part forgotten": (without(ROWS, "(limit - (one - row))", "limit"), "What does a step take that does not grow"),
        "one row taken off twice": (without(ROWS, "(one - row)", "one"), "rows? fits?, you said"),
        "the rows left over": (without(ROWS, "// row)", "% row)"), "rows? fits?, you said"),
        "a constant": ("def most_rows(peak, limit): return 64", "rows? fits?, you said 64"),
    },
}

RIGHT = {
    "09.1": {
        "a step, and its tensors": """
def training_bytes(model, optimizer):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    made = {"Adam": torch.optim.Adam}.get(optimizer, torch.optim.SGD)(trained, **({"momentum": 0.9} if optimizer == "momentum" else {}))
    made.step()
    state = [value for slot in made.state.values() for value in slot.values() if torch.is_tensor(value) and value.is_cuda]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *[p.grad for p in trained], *state])
""",
        "element by element": BYTES.replace("tensor.nbytes", "tensor.numel() * tensor.element_size()"),
        "NumPy's number": "import numpy\n" + BYTES.replace("return kept +", "return numpy.int64(kept) +"),
        "a float": BYTES.replace("return kept +", "return 1.0 * kept +"),
    },
    "09.2": {
        "slices": """
def accumulate(model, x, y, rows):
    for first in range(0, len(x), rows):
        a, b = x[first : first + rows], y[first : first + rows]
        torch.nn.functional.cross_entropy(model(a), b, reduction="sum").div(len(x)).backward()
""",
        "gradients asked for": """
def accumulate(model, x, y, rows):
    parameters = list(model.parameters())
    for a, b in zip(x.split(rows), y.split(rows)):
        loss = torch.nn.functional.cross_entropy(model(a), b, reduction="sum") / len(x)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad += gradient
""",
        "by torch.func": """
def accumulate(model, x, y, rows):
    def loss(parameters, a, b):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, parameters, a), b, reduction="sum") / len(x)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for a, b in zip(x.split(rows), y.split(rows)):
        gradients = torch.func.grad(loss)(parameters, a, b)
        for name, parameter in model.named_parameters():
            parameter.grad.add_(gradients[name])
""",
        "smaller parts": ACCUMULATE.replace("split(rows)", "split(max(1, rows // 2))"),
        "even parts": ACCUMULATE.replace("x.split(rows), y.split(rows)", "x.chunk(-(-len(x) // rows)), y.chunk(-(-len(x) // rows))"),
        "with a checkpoint": """
def accumulate(model, x, y, rows):
    from torch.utils.checkpoint import checkpoint
    for a, b in zip(x.split(rows), y.split(rows)):
        outputs = checkpoint(model, a, use_reentrant=False)
        (torch.nn.functional.cross_entropy(outputs, b, reduction="sum") / len(x)).backward()
""",
        "a criterion": ACCUMULATE.replace("torch.nn.functional.cross_entropy(", "torch.nn.CrossEntropyLoss()("),
    },
    "09.3": {
        "written into one tensor": """
def predict(model, x, rows):
    modes = {module: module.training for module in model.modules()}
    result = x.new_empty(len(x), 4)
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(x), rows):
                result[first : first + rows] = model(x[first : first + rows])
    finally:
        for module, mode in modes.items():
            module.train(mode) if not list(module.children()) else setattr(module, "training", mode)
    return result
""",
        "no parameter is trained meanwhile": re.sub(
            "(    with torch.no_grad.*\n)(.*)\n",
            r"    trained = [p for p in model.parameters() if p.requires_grad]\n    model.requires_grad_(False)\n    if True:\n\2\n"
            r"    [p.requires_grad_() for p in trained]\n",
            PREDICT,
        ),
        "inference, then a copy": PREDICT.replace("no_grad", "inference_mode").replace("return result", "return result.clone()"),
        "a decorator": """
@torch.no_grad()
def predict(model, x, rows):
    modes = [module.training for module in model.modules()]
    model.eval()
    result = torch.vstack([model(part) for part in x.split(rows)])
    for module, mode in zip(model.modules(), modes):
        module.training = mode
    return result
""",
        "half the rows": PREDICT.replace("x.split(rows)", "x.split(rows // 2)"),
    },
    "09.4": {
        "a function for each part": """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    def part(x, *some):
        for block in some:
            x = block(x)
        return x
    while blocks:
        x, blocks = checkpoint(part, x, *blocks[:every], use_reentrant=False), blocks[every:]
    return x
""",
        "no early stop": RUN.replace("use_reentrant=False)", "use_reentrant=False, early_stop=False)"),
    },
    "09.5": {
        "far apart": ROWS.replace("peak(1), peak(2)", "peak(1), peak(1001)").replace("two - one", "(two - one) // 1000"),
        "one more to be sure": ROWS.replace("    row = two - one\n", "    row = two - one\n    assert peak(3) - two == row\n"),
        "none first": """
def most_rows(peak, limit):
    one = peak(1)
    return 0 if one > limit else 1 + (limit - one) // (peak(2) - one)
""",
        "truncated": "import math\n" + ROWS.replace("(limit - (one - row)) // row", "math.floor((limit - (one - row)) / row)"),
        "NumPy's floor": "import numpy\n" + ROWS.replace("(limit - (one - row)) // row", "numpy.floor((limit - (one - row)) / row)"),
        "NumPy's number": "import numpy\n" + ROWS.replace("return max", "return numpy.int64(max").rstrip() + ")\n",
    },
}
