"""Controls of lesson 09."""

CONTROLS = {
    # frozen ones counted
    "09.1": (
        r"One layer is frozen",
        r"""
def training_bytes(model, optimizer):
    kept = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    trained = sum(parameter.nbytes for parameter in model.parameters())
    return kept + {"SGD": 1, "momentum": 2, "Adam": 3}[optimizer] * trained
""",
    ),
    # a mean of means
    "09.2": (
        r"not the gradients of the whole batch",
        r"""
def accumulate(model, x, y, rows):
    for a, b in zip(x.split(rows), y.split(rows)):
        (torch.nn.functional.cross_entropy(model(a), b) / len(x.split(rows))).backward()
""",
    ),
    # all at once
    "09.3": (
        r"at its peak it took",
        r"""
def predict(model, x, rows):
    training = model.training
    model.eval()
    with torch.no_grad():
        result = torch.cat([model(part) for part in [x]])
    model.train(training)
    return result
""",
    ),
    # no checkpoint
    "09.4": (
        r"checkpoints need less than",
        r"""
def run(blocks, x, every): return torch.nn.Sequential(*blocks)(x)
""",
    ),
    # in proportion
    "09.5": (
        r"What does a step take that does not grow",
        r"""
def most_rows(peak, limit): return limit // peak(1)
""",
    ),
}
