"""Controls of lesson 11."""

CONTROLS = {
    # on the current device
    "11.1": (
        r"with device",
        r"""
def zeros_beside(t): return torch.zeros(t.shape, dtype=t.dtype).cuda()
""",
    ),
    # cached for reserved
    "11.2": (
        r"were due for",
        r"""
def memory_report(device):
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "cached": torch.cuda.memory_reserved(device),
        "max_allocated": torch.cuda.max_memory_allocated(device),
        "max_reserved": torch.cuda.max_memory_reserved(device),
    }
""",
    ),
    # gradients that add up
    "11.3": (
        r"off by up to",
        r"""
def train(model, batches):
    model.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total_loss = 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda"))
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(batches)
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
    # the graph is cut
    "11.5": (
        r"no gradient",
        r"""
def two_halves(first, second):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first.to("cuda:0"), second.to("cuda:1")

        def forward(self, x):
            return self.second(self.first(x.to("cuda:0")).detach().to("cuda:1"))

    return Halves()
""",
    ),
}
