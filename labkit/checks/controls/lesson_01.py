"""Controls of lesson 01."""

CONTROLS = {
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
}
