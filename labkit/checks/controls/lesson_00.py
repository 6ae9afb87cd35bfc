"""Controls of lesson 00."""

CONTROLS = {
    # on the CPU
    "00.1": (
        r"on cpu",
        r"""
def on_gpu(numbers): return torch.tensor(numbers)
""",
    ),
}
