"""Wrong answers to the exercises of lesson 09: for each, what a learner may well write, and a part of what the check says."""

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
RUN = """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    for first in range(0, len(blocks), every):
        x = checkpoint(torch.nn.Sequential(*blocks[first : first + every]), x, use_reentrant=False)
    return x
"""


def without(source: str, line: str, instead: str = "") -> str:
    """The source with one piece changed, which must be there."""
    assert line in source
    return source.replace(line, instead)


LAST_RUN = "range(0, len(blocks), every)"

WRONG = {
    "09.1": {
        "what is saved": (
            without(
                BYTES, "[*model.parameters(), *model.buffers()]", "model.state_dict().values()"
            ),
            "never saved",
        ),
        "a constant": ("def training_bytes(model, optimizer): return 12345", "You said 12345 B"),
        "four bytes each": (
            without(BYTES, "parameter.nbytes", "4 * parameter.numel()"),
            "in half precision",
        ),
        "four bytes everywhere": (
            BYTES.replace("tensor.nbytes", "4 * tensor.numel()").replace(
                "parameter.nbytes", "4 * parameter.numel()"
            ),
            "half",
        ),
        "no buffers": (
            without(BYTES, "*model.parameters(), *model.buffers()", "*model.parameters()"),
            "some buffers",
        ),
        "one average of Adam": (without(BYTES, '"Adam": 3', '"Adam": 2'), "with Adam there are"),
        "momentum keeps nothing": (
            without(BYTES, '"momentum": 2', '"momentum": 1'),
            "with momentum there are",
        ),
        "SGD keeps something": (without(BYTES, '"SGD": 1', '"SGD": 2'), "with SGD there are"),
        "no gradients": (
            without(
                BYTES,
                '{"SGD": 1, "momentum": 2, "Adam": 3}',
                '{"SGD": 0, "momentum": 1, "Adam": 2}',
            ),
            "gradients",
        ),
        "buffers have gradients": (without(BYTES, "* trained", "* kept"), "there are"),
        "only what is trained": (without(BYTES, "return kept +", "return trained +"), "there are"),
        "in MiB": (
            without(BYTES, "return kept", "return (kept").replace(
                "* trained", "* trained) / 2**20"
            ),
            "there are",
        ),
        "as text": ("def training_bytes(model, optimizer): return '12 MiB'", "returned str"),
    },
    "09.4": {
        "not divided": (
            without(ACCUMULATE, " * len(a) / len(x)"),
            "not the gradients of the whole batch",
        ),
        "divided by the parts": (
            without(ACCUMULATE, "len(a) / len(x)", "rows / len(x)"),
            "not the gradients of the whole batch",
        ),
        "the sum": (
            without(ACCUMULATE, "b) * len(a) / len(x)", "b, reduction='sum')"),
            "not the gradients of the whole batch",
        ),
        "the sum by rows": (
            without(ACCUMULATE, "b) * len(a) / len(x)", "b, reduction='sum') / rows"),
            "not the gradients",
        ),
        "cleared first": (
            without(ACCUMULATE, "    for a", "    model.zero_grad()\n    for a"),
            "What was in .grad before",
        ),
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
        "so many parts": (
            without(ACCUMULATE, "x.split(rows), y.split(rows)", "x.chunk(5), y.chunk(5)"),
            "rows at once; at most",
        ),
        "the last part left out": (
            without(
                ACCUMULATE, "    for a, b", "    x, y = x[: len(x) // rows * rows], y\n    for a, b"
            ),
            "rows",
        ),
        "with a step": (
            ACCUMULATE + "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n",
            "parameters have changed",
        ),
        "all graphs alive": (
            """
def accumulate(model, x, y, rows):
    losses = [torch.nn.functional.cross_entropy(model(a), b, reduction="sum") for a, b in zip(x.split(rows), y.split(rows))]
    (sum(losses) / len(x)).backward()
""",
            "What keeps their graphs",
        ),
        "added to a gradient that is None": (
            """
def accumulate(model, x, y, rows):
    parameters = list(model.parameters())
    for a, b in zip(x.split(rows), y.split(rows)):
        loss = torch.nn.functional.cross_entropy(model(a), b, reduction="sum") / len(x)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad += gradient
""",
            "NoneType",
        ),
        "a copy of a gradient that is None": (
            """
def accumulate(model, x, y, rows):
    old = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for a, b in zip(x.split(rows), y.split(rows)):
        torch.nn.functional.cross_entropy(model(a), b, reduction="sum").backward()
    for parameter, before in zip(model.parameters(), old):
        parameter.grad.div_(len(x)).add_(before)
""",
            "NoneType",
        ),
        "in float16": (
            """
def accumulate(model, x, y, rows):
    for a, b in zip(x.split(rows), y.split(rows)):
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(a), b, reduction="sum") / len(x)
        loss.backward()
""",
            "not the gradients",
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
        "one for each block": (
            without(RUN, LAST_RUN, "range(len(blocks))").replace("first + every", "first + 1"),
            "need less",
        ),
        "the rest first": (
            without(RUN, LAST_RUN, "[0, *range(len(blocks) % every, len(blocks), every)]").replace(
                "[first : first + every]",
                "[first : first + every if first else len(blocks) % every]",
            ),
            "part by part",
        ),
        "without dropout": (
            without(
                RUN, "    for first", "    for block in blocks: block[2].p = 0.0\n    for first"
            ),
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
            without(
                RUN,
                "        x = checkpoint(",
                "        x = (checkpoint if first + every < len(blocks) else lambda f, x, **_: f(x))(",
            ),
            "need less",
        ),
        "every second part": (
            without(
                RUN,
                "        x = checkpoint(",
                "        x = (checkpoint if first % (2 * every) else lambda f, x, **_: f(x))(",
            ),
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
        "the last blocks left out": (
            without(RUN, "len(blocks), every", "len(blocks) - every + 1, every"),
            "not what the blocks make",
        ),
        "in evaluation mode": (
            without(RUN, "    for first", "    for block in blocks: block.eval()\n    for first"),
            "not what the blocks make",
        ),
        "the input by its name": (
            RUN.replace(", x, use", ", input=x, use"),
            "gradients are not those",
        ),
        "other dropout": (
            without(RUN, "use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"),
            "gradients are not those",
        ),
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
        "element by element": BYTES.replace(
            "tensor.nbytes", "tensor.numel() * tensor.element_size()"
        ),
        "NumPy's number": "import numpy\n"
        + BYTES.replace("return kept +", "return numpy.int64(kept) +"),
        "a float": BYTES.replace("return kept +", "return 1.0 * kept +"),
    },
    "09.4": {
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
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
""",
        "by torch.func": """
def accumulate(model, x, y, rows):
    def loss(parameters, a, b):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, parameters, a), b, reduction="sum") / len(x)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for a, b in zip(x.split(rows), y.split(rows)):
        gradients = torch.func.grad(loss)(parameters, a, b)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(gradients[name])
""",
        "smaller parts": ACCUMULATE.replace("split(rows)", "split(max(1, rows // 2))"),
        "even parts": ACCUMULATE.replace(
            "x.split(rows), y.split(rows)",
            "x.chunk(-(-len(x) // rows)), y.chunk(-(-len(x) // rows))",
        ),
        "with a checkpoint": """
def accumulate(model, x, y, rows):
    from torch.utils.checkpoint import checkpoint
    for a, b in zip(x.split(rows), y.split(rows)):
        outputs = checkpoint(model, a, use_reentrant=False)
        (torch.nn.functional.cross_entropy(outputs, b, reduction="sum") / len(x)).backward()
""",
        "a criterion": ACCUMULATE.replace(
            "torch.nn.functional.cross_entropy(", "torch.nn.CrossEntropyLoss()("
        ),
    },
    "09.3": {
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
        "no early stop": RUN.replace(
            "use_reentrant=False)", "use_reentrant=False, early_stop=False)"
        ),
    },
}
