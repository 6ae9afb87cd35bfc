"""Controls of lesson 03."""

CONTROLS = {
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
}
