"""For each exercise an answer that is known to be wrong, and how its check says so, as a regular expression.

A grader observes it in the process of each submission: if it looks right there, or wrong in another way, the submission has changed what
answers are observed with. Chosen so that the measurement itself, of memory, order, time or values, has to show what is wrong.
"""

CONTROLS: dict[str, tuple[str, str]] = {
    # on the CPU
    "00.1": (
        r"on cpu",
        r"""
def on_gpu(numbers): return torch.tensor(numbers)
""",
    ),
    # on the current device
    "01.1": (
        r"What does lengths.device",
        r"""
def padding_mask(lengths, size): return torch.arange(size, device='cuda') < lengths.cuda()[:, None]
""",
    ),
    # in place
    "01.2": (
        r"leave it as it was",
        r"""
def move(batch, device):
    if isinstance(batch, (list, dict)):
        for key in (batch if isinstance(batch, dict) else range(len(batch))):
            batch[key] = move(batch[key], device)
        return batch
    if isinstance(batch, tuple):
        return tuple(move(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
""",
    ),
    # four bytes each
    "01.3": (
        r"Do all dtypes have the same size?",
        r"""
def bytes_per_device(model):
    total = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + 4 * tensor.numel()
    return total
""",
    ),
    # not put back
    "01.4": (
        r"afterwards|after work raised",
        r"""
def on_device(index, work):
    torch.cuda.set_device(index)
    return work()
""",
    ),
    # one after the other
    "01.5": (
        r"one after the other",
        r"""
def copy_while(source, device, work):
    copy = source.to(device)
    work()
    return copy
""",
    ),
    # no wait at the end
    "02.1": (
        r"Did the GPU have time to finish",
        r"""
def seconds_of(work):
    torch.cuda.synchronize()
    start = labkit.host_time()
    work()
    return labkit.host_time() - start
""",
    ),
    # item at the end
    "02.2": (
        r"somewhere it waited",
        r"""
def mean_loss(model, batches):
    total = 0.0
    for batch in batches:
        total = total + model(batch).square().mean()
    return total.item() / len(batches)
""",
    ),
    # only after
    "02.3": (
        r"what was not there yet",
        r"""
def run_on(stream, work, x):
    here = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        y = work(x)
    here.wait_stream(stream)
    y.record_stream(here)
    return y
""",
    ),
    # cpu
    "02.4": (
        r"fetch itself waited",
        r"""
def fetch(x):
    y = x.cpu()
    return lambda: y
""",
    ),
    # in turn
    "02.5": (
        r"of the copying is hidden",
        r"""
def prefetched(batches):
    for batch in batches:
        yield batch.cuda(non_blocking=True)
""",
    ),
    # detached replicas
    "03.1": (
        r"Do the gradients of all replicas come back",
        r"""
def data_parallel(module, x, device_ids):
    inputs = nn.parallel.scatter(x, device_ids)
    replicas = nn.parallel.replicate(module, device_ids[:len(inputs)], detach=True)
    return nn.parallel.gather(nn.parallel.parallel_apply(replicas, inputs), device_ids[0])
""",
    ),
    # as even as can be
    "03.2": (
        r"scatter cuts",
        r"""
def chunk_sizes(rows, gpus): return [rows // gpus + (i < rows % gpus) for i in range(gpus)]
""",
    ),
    # detached
    "03.3": (
        r"Yours is None",
        r"""
def copies(weight, device_ids): return [weight.detach().to(f'cuda:{i}') for i in device_ids]
""",
    ),
    # what fits
    "03.4": (
        r"not those that were saved",
        r"""
def load(model, state): model.load_state_dict(state, strict=False)
""",
    ),
    # the outputs
    "03.5": (
        r"one tensor of shape",
        r"""
def with_loss(model, criterion):
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, x, target):
            return self.model(x)
    return Same()
""",
    ),
    # cut in the middle
    "04.1": (
        r"the layers belong on",
        r"""
def in_two(model, cut):
    class InTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model[:len(model)//2+1].cuda(0), model[len(model)//2+1:].cuda(1)
        def forward(self, x):
            return self.second(self.first(x.cuda(0)).cuda(1))
    return InTwo()
""",
    ),
    # one after the other
    "04.2": (
        r"Draw it",
        r"""
def forward_seconds(stage_seconds, micro_batches): return micro_batches * sum(stage_seconds)
""",
    ),
    # the middle layer
    "04.3": (
        r"Another cut",
        r"""
def best_cut(layer_seconds): return len(layer_seconds) // 2
""",
    ),
    # in one piece
    "04.4": (
        r"each half was to see",
        r"""
def step(first, second, x, splits):
    loss = second(first(x).to("cuda:1")).square().mean()
    loss.backward()
    return loss
""",
    ),
    # GPipe
    "04.5": (
        r"micro-batches wait for their backward at once",
        r"""
def one_forward_one_backward(stage, stages, micro_batches):
    return [f"{letter}{number}" for letter in "FB" for number in range(1, micro_batches + 1)]
""",
    ),
    # rounded to 512
    "05.1": (
        r"PyTorch reserved",
        r"""
def reserved_for(nbytes): return -(-nbytes // 512) * 512
""",
    ),
    # views
    "05.2": (
        r"Whose storage",
        r"""
def first_rows(batches, count): return [batch[:count] for batch in batches]
""",
    ),
    # all that is free
    "05.3": (
        r"all free blocks together",
        r"""
def largest_free_block(): return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
""",
    ),
    # again inside except
    "05.4": (
        r"inside `except`",
        r"""
def in_pieces(work, batch):
    try:
        return work(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
        half = len(batch) // 2
        return torch.cat([in_pieces(work, batch[:half]), in_pieces(work, batch[half:])])
""",
    ),
    # the cache emptied
    "05.5": (
        r"80 MiB afterwards",
        r"""
def compact(tensors): torch.cuda.empty_cache()
""",
    ),
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
    # float16 only
    "07.1": (
        r"stands for",
        r"""
def decode(bits, exponent_bits): return torch.tensor(int(bits[:16], 2)).to(torch.int16).view(torch.float16).item()
""",
    ),
    # areas in float16
    "07.2": (
        r"larger than 65504",
        r"""
def iou(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(dim=1)
    return (shared / ((a[:, 2:] - a[:, :2]).prod(dim=1) + (b[:, 2:] - b[:, :2]).prod(dim=1) - shared)).half()
""",
    ),
    # all of it
    "07.3": (
        r"of a BatchNorm layer, is torch.float16",
        r"""
def half_but_norms(model): return model.half()
""",
    ),
    # a constant
    "07.4": (
        r"infinite in float16|not the largest",
        r"""
def best_scale(gradients): return 65536.0
""",
    ),
    # clipped while scaled
    "07.5": (
        r"clipped: after unscale_",
        r"""
def training_step(model, optimizer, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
""",
    ),
    # on the current device
    "11.1": (
        r"with device",
        r"""
def zeros_beside(t): return torch.zeros(t.shape, dtype=t.dtype).cuda()
""",
    ),
    # of the current device
    "11.2": (
        r"of cuda:0, allocated is",
        r"""
def memory_report(device):
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
    }
""",
    ),
    # gradients that add up
    "11.3": (
        r"off by up to",
        r"""
def train(model, batches):
    model.to("cuda")
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.01), 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda"))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)
""",
    ),
    # one namespace for all
    "11.4": (
        r"Whose names does it see",
        r"""
def outcomes(snippets):
    found, names = [], {"torch": torch, "nn": nn}
    for snippet in snippets:
        try:
            exec(snippet, names)
            found.append("ok")
        except Exception as error:
            found.append(type(error).__name__)
    return found
""",
    ),
    # both on one GPU
    "11.5": (
        r"the parameters belong on",
        r"""
def two_halves(first, second): return nn.Sequential(first, second).to("cuda:0")
""",
    ),
}
