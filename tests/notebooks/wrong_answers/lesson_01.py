"""Wrong answers to the exercises of lesson 01: for each, what a learner may well write, and a part of what the check says."""

WRONG = {
    "01.1": {
        "positions on the CPU": ("def padding_mask(lengths, size): return torch.arange(size) < lengths[:, None]", "RuntimeError"),
        "through the CPU": ("def padding_mask(lengths, size): return torch.arange(size) < lengths.cpu()[:, None]", "your mask is on cpu"),
        "one too many": (
            "def padding_mask(lengths, size): return torch.arange(size, device=lengths.device) <= lengths[:, None]",
            "some values are wrong",
        ),
        "as numbers": (
            "def padding_mask(lengths, size): return (torch.arange(size, device=lengths.device) < lengths[:, None]).float()",
            "torch.float32",
        ),
        "by get_device": (
            "def padding_mask(lengths, size): return torch.arange(size, device=lengths.get_device()) < lengths[:, None]",
            "RuntimeError",
        ),
    },
    "01.2": {
        "one level": ("def move(batch, device): return {k: v.to(device) for k, v in batch.items()}", "AttributeError"),
        "copies what is there": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch.to(device, copy=True) if isinstance(batch, torch.Tensor) else batch
""",
            "copied all the same",
        ),
        "tuples become lists": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [move(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, torch.Tensor) else batch
""",
            "became a list",
        ),
        "always the current device": (
            """
def move(batch, device):
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return (batch if batch.is_cuda else batch.cuda()) if isinstance(batch, torch.Tensor) else batch
""",
            "not on cuda",
        ),
    },
    "01.3": {
        "no buffers": (
            """
def bytes_per_device(model):
    total = {}
    for tensor in model.parameters():
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    return total
""",
            "you counted",
        ),
        "the first parameter's device": (
            """
def bytes_per_device(model):
    tensors = [*model.parameters(), *model.buffers()]
    return {str(tensors[0].device): sum(tensor.numel() * tensor.element_size() for tensor in tensors)}
""",
            "the model is on",
        ),
        "shared weights twice": (
            """
def bytes_per_device(model):
    total = {}
    for tensor in model.state_dict().values():
        total[str(tensor.device)] = total.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    return total
""",
            "you counted",
        ),
        "one number": ("def bytes_per_device(model): return sum(p.numel() for p in model.parameters())", "returned int"),
    },
    "01.4": {
        "not after an exception": (
            """
def on_device(index, work):
    before = torch.cuda.current_device()
    torch.cuda.set_device(index)
    result = work()
    torch.cuda.set_device(before)
    return result
""",
            "after work raised an exception",
        ),
        "always back to device 0": (
            """
def on_device(index, work):
    torch.cuda.set_device(index)
    try:
        return work()
    finally:
        torch.cuda.set_device(0)
""",
            "was 1 before and 0",
        ),
        "the exception swallowed": (
            """
def on_device(index, work):
    with torch.cuda.device(index):
        try:
            return work()
        except Exception:
            return None
""",
            "kept it to itself",
        ),
        "a device for tensors only": (
            "def on_device(index, work):\n    with torch.device('cuda', index):\n        return work()",
            "it saw device",
        ),
        "no result": ("def on_device(index, work):\n    with torch.cuda.device(index):\n        work()", "did not return"),
    },
    "01.5": {
        "one number": (
            "def copy_while(source, device, work):\n    work()\n    return torch.full((1,), -1, device=device)",
            "the copy's shape is",
        ),
        "work first": (
            """
def copy_while(source, device, work):
    work()
    copy = source.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    return copy
""",
            "one after the other",
        ),
        "no waiting": (
            "def copy_while(source, device, work):\n    copy = source.to(device, non_blocking=True)\n    work()\n    return copy",
            "before the copy had arrived",
        ),
        "waiting too early": (
            """
def copy_while(source, device, work):
    copy = source.to(device, non_blocking=True)
    torch.cuda.synchronize(device)
    work()
    return copy
""",
            "one after the other",
        ),
        "from pageable memory": (
            """
def copy_while(source, device, work):
    copy = source.clone().to(device, non_blocking=True)
    work()
    torch.cuda.synchronize(device)
    return copy
""",
            "one after the other",
        ),
        "no work": (
            "def copy_while(source, device, work):\n    copy = source.to(device)\n    return copy",
            "it ran 0 times",
        ),
    },
}
