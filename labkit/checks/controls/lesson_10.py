"""Controls of lesson 10."""

CONTROLS = {
    # the sum
    "10.1": (
        r"the mean over all ranks is",
        r"""
def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
""",
    ),
    # not shuffled
    "10.2": (
        r"same rows in the same order",
        r"""
def my_rows(count, rank, ranks, epoch): return list(range(rank, count, ranks))
""",
    ),
    # sent each time
    "10.3": (
        r"it was sent \d times; once is enough",
        r"""
def accumulate(model, parts):
 for part in parts: (model(part).square().mean() / len(parts)).backward()
""",
    ),
    # without the optimizer
    "10.4": (
        r"The momentum was not restored",
        r"""
def train(model, optimizer, work, steps, path):
    import os
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state['model']); first = state['step'] + 1
    for step in range(first, steps):
        work(step); dist.get_rank() or torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}, path)
""",
    ),
    # the bias of every rank
    "10.5": (
        r"What is summed, and how often",
        r"""
def two_layers(x, first, first_bias, second, second_bias):
    hidden = torch.relu(x @ first.T + first_bias)
    y = x.new_zeros(()) + hidden @ second.T + second_bias; dist.all_reduce(y); return y
""",
    ),
    # parameters alone
    "10.6": (
        r"What does a rank hold",
        r"""
def ranks_needed(parameters, largest_layer, memory): return -(-4 * parameters // (memory - 4 * largest_layer))
""",
    ),
}
