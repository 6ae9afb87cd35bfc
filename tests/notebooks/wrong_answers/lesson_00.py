"""Wrong answers to the exercises of the introduction: for each, what a learner may well write, and a part of what the check says."""

WRONG = {
    "00.1": {
        "as integers": ("def on_gpu(numbers): return torch.tensor(numbers, device='cuda').int()", "torch.int32"),
        "double precision": ("def on_gpu(numbers): return torch.tensor(numbers, dtype=torch.float64, device='cuda')", "torch.float64"),
        "their number": ("def on_gpu(numbers): return torch.zeros(len(numbers), device='cuda')", "holds"),
        "nothing returned": ("def on_gpu(numbers): torch.tensor(numbers, device='cuda')", "NoneType"),
    },
}
