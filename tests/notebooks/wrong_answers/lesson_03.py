"""Wrong answers to the exercises of lesson 03: for each, what a learner may well write, and a part of what the check says."""

WRONG = {
    "03.1": {
        "the module itself": ("def data_parallel(module, x, device_ids): return module(x)", "the module was to see"),
        "nothing gathered": (
            """
def data_parallel(module, x, device_ids):
    inputs = nn.parallel.scatter(x, device_ids)
    return nn.parallel.parallel_apply(nn.parallel.replicate(module, device_ids[:len(inputs)]), inputs)
""",
            "What puts the outputs together",
        ),
        "gathered on GPU 0": (
            """
def data_parallel(module, x, device_ids):
    inputs = nn.parallel.scatter(x, device_ids)
    return nn.parallel.gather(nn.parallel.parallel_apply(nn.parallel.replicate(module, device_ids[:len(inputs)]), inputs), 0)
""",
            "belongs on the first of the devices",
        ),
        "as many replicas as devices": (
            """
def data_parallel(module, x, device_ids):
    replicas = nn.parallel.replicate(module, device_ids)
    outputs = nn.parallel.parallel_apply(replicas, nn.parallel.scatter(x, device_ids))
    return nn.parallel.gather(outputs, device_ids[0])
""",
            "AssertionError.*1 rows",
        ),
        "copies of the module": (
            """
def data_parallel(module, x, device_ids):
    import copy
    inputs = nn.parallel.scatter(x, device_ids)
    replicas = [module] + [copy.deepcopy(module).cuda(i) for i in device_ids[1:len(inputs)]]
    for replica in replicas:
        replica.seen = module.seen
    return nn.parallel.gather(nn.parallel.parallel_apply(replicas, inputs), device_ids[0])
""",
            "Do the gradients of all replicas come back",
        ),
        "the whole batch on every device": (
            """
def data_parallel(module, x, device_ids):
    size = -(-len(x) // len(device_ids))
    inputs = [x.to(f"cuda:{device}")[i * size : (i + 1) * size] for i, device in enumerate(device_ids)]
    inputs = [part for part in inputs if len(part)]
    replicas = nn.parallel.replicate(module, device_ids[:len(inputs)])
    return nn.parallel.gather(nn.parallel.parallel_apply(replicas, inputs), device_ids[0])
""",
            "you put .* KiB there",
        ),
        "a constant": ("def data_parallel(module, x, device_ids): return torch.zeros(4, device='cuda')", "the result is"),
    },
    "03.2": {
        "the rest to the last": (
            "def chunk_sizes(rows, gpus): return [rows // gpus] * (gpus - 1) + [rows - rows // gpus * (gpus - 1)]",
            "scatter cuts",
        ),
        "with the GPUs that get nothing": (
            """
def chunk_sizes(rows, gpus):
    size = -(-rows // gpus)
    return [max(0, min(size, rows - i * size)) for i in range(gpus)]
""",
            "scatter cuts",
        ),
        "rounded down": (
            """
def chunk_sizes(rows, gpus):
    size = max(1, rows // gpus)
    return [min(size, rows - start) for start in range(0, rows, size)]
""",
            "scatter cuts",
        ),
        "of one try": ("def chunk_sizes(rows, gpus): return [2, 2, 1]", "scatter cuts"),
        "one number": ("def chunk_sizes(rows, gpus): return rows // gpus", "returned int"),
    },
    "03.3": {
        "without a graph": (
            "def copies(weight, device_ids):\n    with torch.no_grad():\n        return [weight.to(f'cuda:{i}') for i in device_ids]",
            "Which ways to copy does autograd follow",
        ),
        "new leaves": (
            "def copies(weight, device_ids): return [weight.detach().to(f'cuda:{i}').requires_grad_() for i in device_ids]",
            "Yours is None",
        ),
        "the data only": ("def copies(weight, device_ids): return [weight.data.cuda(i) for i in device_ids]", "Yours is None"),
        "all on the first": ("def copies(weight, device_ids): return [weight.clone() for _ in device_ids]", "the copies belong on"),
        "in the order of the GPUs": (
            "def copies(weight, device_ids): return [weight.to(f'cuda:{i}') for i in sorted(device_ids)]",
            "the copies belong on",
        ),
        "one of them": ("def copies(weight, device_ids): return [weight.to(f'cuda:{device_ids[-1]}')]", "a list of"),
    },
    "03.4": {
        "as it is": ("def load(model, state): model.load_state_dict(state)", "RuntimeError"),
        "every prefix": (
            """
def load(model, state):
    bare = model.module if isinstance(model, nn.DataParallel) else model
    bare.load_state_dict({name.replace('module.', ''): value for name, value in state.items()})
""",
            "RuntimeError",
        ),
        "always the first prefix": (
            """
def load(model, state):
    bare = model.module if isinstance(model, nn.DataParallel) else model
    bare.load_state_dict({name.removeprefix('module.'): value for name, value in state.items()})
""",
            "RuntimeError.*child named module",
        ),
        "bare models only": (
            """
def load(model, state):
    if set(state) != set(model.state_dict()):
        state = {name.removeprefix('module.'): value for name, value in state.items()}
    model.load_state_dict(state)
""",
            "RuntimeError.*wrapped model and a state saved from a bare one",
        ),
        "in order": (
            """
def load(model, state):
    for tensor, value in zip(model.state_dict().values(), state.values()):
        tensor = value
""",
            "not those that were saved",
        ),
    },
    "03.5": {
        "the means": (
            """
def with_loss(model, criterion):
    class Means(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, x, target):
            return criterion(self.model(x), target)[None], torch.tensor([len(x)], device=x.device)
    return Means()
""",
            "criterion gives their mean",
        ),
        "the outputs and the rows": (
            """
def with_loss(model, criterion):
    class Outputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, x, target):
            return self.model(x), torch.tensor([len(x)], device=x.device)
    return Outputs()
""",
            "two losses and two numbers",
        ),
        "without a graph": (
            """
def with_loss(model, criterion):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, x, target):
            loss = torch.tensor([criterion(self.model(x), target).item() * len(x)], device=x.device, requires_grad=True)
            return loss, torch.tensor([len(x)], device=x.device)
    return Detached()
""",
            "Does it come back through your module",
        ),
        "the model": ("def with_loss(model, criterion): return model", "TypeError|RuntimeError"),
        "a function": ("def with_loss(model, criterion): return lambda x, target: criterion(model(x), target)", "returned function"),
    },
}
