"""Wrong answers to the exercises of lesson 04: for each, what a learner may well write, and a part of what the check says."""

IN_TWO = """
def in_two(model, cut):
    class InTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = {halves}
        def forward(self, x):
            {forward}
    return InTwo()
"""
HALVES = "model[:cut].cuda(0), model[cut:].cuda(1)"

WRONG = {
    "04.1": {
        "all on one GPU": ("def in_two(model, cut): return model.cuda(0)", "the layers belong on|RuntimeError"),
        "a function": (
            "def in_two(model, cut): return lambda x: model[cut:].cuda(1)(model[:cut].cuda(0)(x.cuda(0)).cuda(1))",
            "returned function",
        ),
        "the input as it comes": (
            IN_TWO.format(halves=HALVES, forward="return self.second(self.first(x).cuda(1))"),
            "RuntimeError.*a batch on|to see the whole batch once",
        ),
        "detached": (
            IN_TWO.format(halves=HALVES, forward="return self.second(self.first(x.cuda(0)).detach().cuda(1))"),
            "Does each copy stand in autograd's graph",
        ),
        "through the data": (
            IN_TWO.format(halves=HALVES, forward="return self.second(self.first(x.cuda(0)).data.to('cuda:1'))"),
            "Does each copy stand in autograd's graph",
        ),
        "brought back": (
            IN_TWO.format(halves=HALVES, forward="return self.second(self.first(x.cuda(0)).cuda(1)).cuda(0)"),
            "it was to stay on cuda:1",
        ),
        "halves in a list": (
            """
def in_two(model, cut):
    class InTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = [model[:cut].cuda(0), model[cut:].cuda(1)]
        def forward(self, x):
            return self.halves[1](self.halves[0](x.cuda(0)).cuda(1))
    return InTwo()
""",
            "an optimizer would miss some",
        ),
    },
    "04.2": {
        "as if all were the slowest": (
            "def forward_seconds(stage_seconds, micro_batches): return (micro_batches + len(stage_seconds) - 1) * max(stage_seconds)",
            "Draw it",
        ),
        "without filling": ("def forward_seconds(stage_seconds, micro_batches): return micro_batches * max(stage_seconds)", "Draw it"),
        "one too many": (
            "def forward_seconds(stage_seconds, micro_batches): return sum(stage_seconds) + micro_batches * max(stage_seconds)",
            "Draw it",
        ),
        "of one try": ("def forward_seconds(stage_seconds, micro_batches): return 35.0", "Draw it"),
        "a list": ("def forward_seconds(stage_seconds, micro_batches): return stage_seconds * micro_batches", "returned list"),
    },
    "04.3": {
        "when half is reached": (
            """
def best_cut(layer_seconds):
    for cut in range(1, len(layer_seconds)):
        if 2 * sum(layer_seconds[:cut]) >= sum(layer_seconds):
            return cut
    return len(layer_seconds) - 1
""",
            "Another cut",
        ),
        "before half is passed": (
            """
def best_cut(layer_seconds):
    cut = 1
    while cut < len(layer_seconds) - 1 and 2 * sum(layer_seconds[:cut + 1]) <= sum(layer_seconds):
        cut += 1
    return cut
""",
            "Another cut",
        ),
        "of one try": ("def best_cut(layer_seconds): return 3", "Another cut"),
        "everything on one GPU": ("def best_cut(layer_seconds): return len(layer_seconds)", "leaves a GPU without work"),
        "the seconds": ("def best_cut(layer_seconds): return sum(layer_seconds) / 2", "returned float"),
    },
    "04.4": {
        "the copy first": (
            """
def step(first, second, x, splits):
    outputs, before = [], None
    for part in x.chunk(splits):
        arrived = first(part).to("cuda:1")
        if before is not None:
            outputs.append(second(before))
        before = arrived
    loss = torch.cat([*outputs, second(before)]).square().mean()
    loss.backward()
    return loss
""",
            "the values are right, but",
        ),
        "a backward for each part": (
            """
def step(first, second, x, splits):
    total = 0
    for part in x.chunk(splits):
        loss = second(first(part).to("cuda:1")).square().sum() / (x.numel())
        loss.backward()
        total = total + loss.detach()
    return total
""",
            "the values are right, but",
        ),
        "one half after the other": (
            """
def step(first, second, x, splits):
    arrived = [first(part).to("cuda:1") for part in x.chunk(splits)]
    loss = torch.cat([second(part) for part in arrived]).square().mean()
    loss.backward()
    return loss
""",
            "the values are right, but",
        ),
        "the mean of the means": (
            """
def step(first, second, x, splits):
    losses = [second(first(part).to("cuda:1")).square().mean() for part in x.chunk(splits)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss
""",
            "The micro-batches are not equal",
        ),
        "no backward": (
            """
def step(first, second, x, splits):
    return torch.cat([second(first(part).to("cuda:1")) for part in x.chunk(splits)]).square().mean()
""",
            "a gradient is None",
        ),
        "gradients of the sum": (
            """
def step(first, second, x, splits):
    loss = torch.cat([second(first(part).to("cuda:1")) for part in x.chunk(splits)]).square().sum()
    loss.backward()
    return loss.detach() / len(x)
""",
            "Count each row once",
        ),
        "a constant": ("def step(first, second, x, splits): return 1.0", "returned float"),
    },
    "04.5": {
        "in turn from the start": (
            """
def one_forward_one_backward(stage, stages, micro_batches):
    return [f"{letter}{number}" for number in range(1, micro_batches + 1) for letter in "FB"]
""",
            "if a backward takes two forwards",
        ),
        "one forward too many": (
            """
def one_forward_one_backward(stage, stages, micro_batches):
    ahead = min(stages - stage, micro_batches)
    actions = [f"F{n}" for n in range(1, ahead + 1)]
    for n in range(ahead + 1, micro_batches + 1):
        actions += [f"F{n}", f"B{n - ahead}"]
    return actions + [f"B{n}" for n in range(micro_batches - ahead + 1, micro_batches + 1)]
""",
            "micro-batches wait for their backward at once",
        ),
        "counted from the wrong end": (
            """
def one_forward_one_backward(stage, stages, micro_batches):
    ahead = min(stage, micro_batches)
    actions = [f"F{n}" for n in range(1, ahead + 1)]
    for n in range(ahead + 1, micro_batches + 1):
        actions += [f"F{n}", f"B{n - ahead}"]
    return actions + [f"B{n}" for n in range(micro_batches - ahead + 1, micro_batches + 1)]
""",
            "wait for each other|at once|if a backward takes two forwards",
        ),
        "too few micro-batches forgotten": (
            """
def one_forward_one_backward(stage, stages, micro_batches):
    ahead = stages - 1 - stage
    actions = [f"F{n}" for n in range(1, ahead + 1)]
    for n in range(ahead + 1, micro_batches + 1):
        actions += [f"F{n}", f"B{n - ahead}"]
    return actions + [f"B{n}" for n in range(micro_batches - ahead + 1, micro_batches + 1)]
""",
            "each once",
        ),
        "without the last backwards": (
            """
def one_forward_one_backward(stage, stages, micro_batches):
    ahead = min(stages - 1 - stage, micro_batches)
    actions = [f"F{n}" for n in range(1, ahead + 1)]
    for n in range(ahead + 1, micro_batches + 1):
        actions += [f"F{n}", f"B{n - ahead}"]
    return actions
""",
            "each once",
        ),
        "of one try": ("def one_forward_one_backward(stage, stages, micro_batches): return ['F1', 'B1']", "each once"),
    },
}
