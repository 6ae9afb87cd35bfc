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
PREDICT = """
def predict(model, x, rows):
    training = model.training
    model.eval()
    with torch.no_grad():
        result = torch.cat([model(part) for part in x.split(rows)])
    model.train(training)
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


WRONG = {
    "09.1": {
        "a constant": ("def training_bytes(model, optimizer): return 12345", "You said 12345 B"),
        "four bytes each": (without(BYTES, "parameter.nbytes", "4 * parameter.numel()"), "in half precision"),
        "no buffers": (without(BYTES, "*model.parameters(), *model.buffers()", "*model.parameters()"), "has buffers"),
        "one average of Adam": (without(BYTES, '"Adam": 3', '"Adam": 2'), "with Adam there are"),
        "no gradients": (without(BYTES, '{"SGD": 1, "momentum": 2, "Adam": 3}', '{"SGD": 0, "momentum": 1, "Adam": 2}'), "gradients"),
        "as text": ("def training_bytes(model, optimizer): return '12 MiB'", "returned str"),
    },
    "09.2": {
        "not divided": (without(ACCUMULATE, " * len(a) / len(x)"), "not the gradients of the whole batch"),
        "cleared first": (without(ACCUMULATE, "    for a", "    model.zero_grad()\n    for a"), "What was in .grad before"),
        "all at once": (
            "def accumulate(model, x, y, rows): torch.nn.functional.cross_entropy(model(x), y).backward()",
            "rows at once; at most",
        ),
        "the last part left out": (without(ACCUMULATE, "    for a, b", "    x, y = x[: len(x) // rows * rows], y\n    for a, b"), "rows"),
        "all graphs alive": (
            """
def accumulate(model, x, y, rows):
    losses = [torch.nn.functional.cross_entropy(model(a), b, reduction="sum") for a, b in zip(x.split(rows), y.split(rows))]
    (sum(losses) / len(x)).backward()
""",
            "all graphs were alive at once",
        ),
    },
    "09.3": {
        "inference mode": (without(PREDICT, "no_grad", "inference_mode"), "inference tensors"),
        "in training mode": (without(PREDICT, "    model.eval()\n"), "BatchNorm has learned|not the model's predictions"),
        "always left in training mode": (without(PREDICT, "model.train(training)", "model.train()"), "left in training mode"),
        "left in the other mode": (
            without(PREDICT, "model.train(training)", "model.train(not training)"),
            "left in",
        ),
        "with a graph": (without(PREDICT, "torch.no_grad()", "torch.enable_grad()"), "hold a graph"),
        "detached too late": (
            without(without(PREDICT, "torch.no_grad()", "torch.enable_grad()"), "return result", "return result.detach()"),
            "at its peak it took",
        ),
        "a list": (
            without(PREDICT, "torch.cat([model(part) for part in x.split(rows)])", "[model(part) for part in x.split(rows)]"),
            "list",
        ),
    },
    "09.4": {
        "one for all": (
            """
def run(blocks, x, every):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(torch.nn.Sequential(*blocks), x, use_reentrant=False)
""",
            "The longest part decides",
        ),
        "one for each block": (
            without(RUN, "range(0, len(blocks), every)", "range(len(blocks))").replace("first + every", "first + 1"),
            "need less",
        ),
        "cut off": (
            without(RUN, "checkpoint(torch.nn", "checkpoint(torch.nn").replace(", x, use", ", x.detach(), use"),
            "gradients are not those",
        ),
        "no graph": (
            """
def run(blocks, x, every):
    with torch.no_grad():
        return torch.nn.Sequential(*blocks)(x)
""",
            "gradients are not those",
        ),
        "the last blocks left out": (without(RUN, "len(blocks), every", "len(blocks) - every + 1, every"), "not what the blocks make"),
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
            "you measured",
        ),
        "measured at nothing": (
            without(ROWS, "one, two = peak(1), peak(2)", "one, two = peak(0) + peak(1) - peak(0), peak(2)"),
            "no row at all|you measured",
        ),
        "rounded up": (without(ROWS, "// row)", "// row + 1)"), "rows fit, you said"),
        "never none": (without(ROWS, "max(0", "max(1"), "Not even one row fits"),
        "no whole number": (without(ROWS, "// row", "/ row"), "returned float"),
        "a constant": ("def most_rows(peak, limit): return 64", "rows fit, you said 64"),
    },
}
