"""Controls of lesson 06."""

CONTROLS = {
    # the cache emptied
    "06.1": (
        r"more after 6 more steps",
        r'''
def train_and_validate(model, optimizer, batches):
    """Train; return the mean error that the model still makes after each step."""
    error, steps = 0, 0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error += nn.functional.l1_loss(model(x), y)
        torch.cuda.empty_cache()
        steps += 1
    return (error / steps).item()
''',
    ),
    # copied on the GPU
    "06.2": (
        r"Where are the tensors",
        r'''
def train_and_collect(model, optimizer, batches):
    """Train; return what the model said to each row, one below the other, on the CPU."""
    outputs = []
    for x, y in batches:
        output = model(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(output, y).backward()
        optimizer.step()
        outputs.append(output.detach().clone())
    return torch.cat(outputs).cpu()
''',
    ),
    # the graph not retained
    "06.3": (
        r"3 KiB more",
        r'''
def train_smoothed(model, optimizer, batches):
    """Train; return the loss of each step, smoothed: a tenth of it is new, the rest is the value before."""
    average, curve = 0, []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * loss
        curve.append(average)
    return [value.item() for value in curve]
''',
    ),
    # one hook, all outputs
    "06.4": (
        r"What does the hook keep",
        r'''
def train_watched(model, optimizer, batches):
    """Train; return the mean activation of the hidden layer, `model[1]`, at each step."""
    seen, means = [], []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append(seen[-1].mean().item())
    return means
''',
    ),
    # the cache emptied
    "06.5": (
        r"What does an exception know",
        r'''
def train_robustly(model, optimizer, batches):
    """Train; return the losses, and what was wrong with the batches that could not be used."""

    def step(number, x, y):
        loss = nn.functional.mse_loss(model(x), y)
        if loss.isnan():
            raise ValueError(f"batch {number} has no loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, errors = [], []
    for number, (x, y) in enumerate(batches):
        try:
            losses.append(step(number, x, y))
        except ValueError as error:
            errors.append(error)
            torch.cuda.empty_cache()
    return losses, [str(error) for error in errors]
''',
    ),
}
