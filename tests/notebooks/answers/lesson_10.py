"""Wrong answers to the exercises of lesson 10: for each, what a learner may well write, and a part of what the check says."""

GRADIENTS = """
def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            {lines}
"""

TRAIN = """
def train(model, optimizer, work, steps, path):
    import os
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        {load}
    for step in range(first, steps):
        {step}
"""
LOAD = "model.load_state_dict(state['model']); optimizer.load_state_dict(state['optimizer']); first = state['step'] + 1"
STATE = "{'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}"

LAYERS = """
def two_layers(x, first, first_bias, second, second_bias):
    hidden = torch.relu(x @ first.T + first_bias)
    {lines}
"""

WRONG = {
    "10.1": {
        "always two ranks": (GRADIENTS.format(lines="dist.all_reduce(parameter.grad); parameter.grad /= 2"), "rank 0 of 3 had"),
        "on rank 0 alone": (
            GRADIENTS.format(lines="dist.reduce(parameter.grad, 0); parameter.grad /= dist.get_world_size()"),
            "rank 1 of 2 had the gradient",
        ),
        "in a copy": (
            GRADIENTS.format(lines="mean = parameter.grad.clone(); dist.all_reduce(mean); mean /= dist.get_world_size()"),
            "and it has .* now",
        ),
        "the parameters": (
            GRADIENTS.format(lines="dist.all_reduce(parameter.data); parameter.data /= 4"),
            "has changed its parameters",
        ),
        "without a gradient": (
            "def average_gradients(model):\n for parameter in model.parameters():\n  dist.all_reduce(parameter.grad)",
            "your answer raised .*given rank 0 of 2",
        ),
        "from rank 0": (GRADIENTS.format(lines="dist.broadcast(parameter.grad, 0)"), "the mean over all ranks is"),
        "rank 0 alone asks": (
            GRADIENTS.format(lines="if dist.get_rank() == 0: dist.all_reduce(parameter.grad)"),
            "waited for one another in vain",
        ),
    },
    "10.2": {
        "each rank its own order": (
            "def my_rows(count, rank, ranks, epoch): return torch.randperm(count)[rank::ranks].tolist()",
            "went to none of",
        ),
        "one order for all epochs": (
            """
def my_rows(count, rank, ranks, epoch):
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[rank::ranks].tolist()
""",
            "give each rank the same rows",
        ),
        "without the last rows": (
            """
def my_rows(count, rank, ranks, epoch):
    share = count // ranks
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))[rank * share : (rank + 1) * share].tolist()
""",
            "went to none of",
        ),
        "the rest to the last rank": (
            """
def my_rows(count, rank, ranks, epoch):
    order, share = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist(), count // ranks
    return order[rank * share :] if rank == ranks - 1 else order[rank * share : (rank + 1) * share]
""",
            "the one with fewer would wait|went to none of",
        ),
        "all rows": (
            """
def my_rows(count, rank, ranks, epoch):
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
""",
            "came up once more",
        ),
        "a number": ("def my_rows(count, rank, ranks, epoch): return count // ranks", "returned int"),
    },
    "10.3": {
        "never sent": (
            """
def accumulate(model, parts):
    with model.no_sync():
        for part in parts:
            (model(part).square().mean() / len(parts)).backward()
""",
            "nothing was sent",
        ),
        "not divided": (
            """
def accumulate(model, parts):
    with model.no_sync():
        for part in parts[:-1]:
            model(part).square().mean().backward()
    model(parts[-1]).square().mean().backward()
""",
            "that of all ranks' rows in one batch is",
        ),
        "the last part alone": ("def accumulate(model, parts): model(parts[-1]).square().mean().backward()", "in one batch is"),
        "without DDP": (
            "def accumulate(model, parts):\n for part in parts: (model.module(part).square().mean() / len(parts)).backward()",
            r"nothing was sent|was sent \d times",
        ),
    },
    "10.4": {
        "from the start": (
            TRAIN.format(
                load="model.load_state_dict(state['model'])",
                step="work(step); dist.get_rank() or torch.save({'model': model.state_dict()}, path)",
            ),
            r"started again, rank 0 did \[0, 1",
        ),
        "the last step twice": (
            TRAIN.format(load=LOAD.replace(" + 1", ""), step=f"work(step); dist.get_rank() or torch.save({STATE}, path)"),
            "steps were done when the ranks died",
        ),
        "saved before the step": (
            TRAIN.format(load=LOAD, step=f"dist.get_rank() or torch.save({STATE}, path); work(step)"),
            "steps were done when the ranks died|your answer raised",  # rank 1 may find the file half written when it begins
        ),
        "every rank saves": (
            TRAIN.format(load=LOAD, step=f"work(step); torch.save({STATE}, path)"),
            "rank 1 saved the checkpoint too|your answer raised",
        ),
        "saved at the end": (
            TRAIN.format(load=LOAD, step=f"work(step); step < steps - 1 or dist.get_rank() or torch.save({STATE}, path)"),
            "Save after every step",
        ),
    },
    "10.5": {
        "its own part": (LAYERS.format(lines="return hidden @ second.T + second_bias"), "What is summed"),
        "the mean": (
            LAYERS.format(lines="y = hidden @ second.T; dist.all_reduce(y); return y / dist.get_world_size() + second_bias"),
            "What is summed",
        ),
        "gathered": (
            LAYERS.format(
                lines="y = hidden @ second.T; parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]; "
                "dist.all_gather(parts, y); return torch.cat(parts, 1) + second_bias.repeat(dist.get_world_size())"
            ),
            "was due, whole on each rank",
        ),
        "for rank 0": (LAYERS.format(lines="y = hidden @ second.T; dist.reduce(y, 0); return y + second_bias"), "rank 1 of"),
        "without the first bias": (
            """
def two_layers(x, first, first_bias, second, second_bias):
    y = torch.relu(x @ first.T) @ second.T
    dist.all_reduce(y)
    return y + second_bias
""",
            "What is summed",
        ),
        "nothing returned": (LAYERS.format(lines="y = hidden @ second.T; dist.all_reduce(y); y += second_bias"), "returned NoneType"),
    },
    "10.6": {
        "without the whole layer": (
            "def ranks_needed(parameters, largest_layer, memory): return -(-16 * parameters // memory)",
            "and what while a layer computes",
        ),
        "rounded down": (
            "def ranks_needed(parameters, largest_layer, memory): return 16 * parameters // (memory - 4 * largest_layer)",
            "GPUs are enough",
        ),
        "SGD": (
            "def ranks_needed(parameters, largest_layer, memory): return -(-8 * parameters // (memory - 4 * largest_layer))",
            "GPUs are enough",
        ),
        "a float": (
            "def ranks_needed(parameters, largest_layer, memory): return 16 * parameters / (memory - 4 * largest_layer)",
            "returned float",
        ),
        "of one try": ("def ranks_needed(parameters, largest_layer, memory): return 8", "GPUs are enough"),
    },
}
