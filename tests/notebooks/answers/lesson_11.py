"""Wrong answers to the exercises of lesson 11: for each, what a learner may well write, and a part of what the check says."""

REPORT = """
def memory_report(device):
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max_allocated": torch.cuda.max_memory_allocated(device),
        "max_reserved": torch.cuda.max_memory_reserved(device),
    }
"""
TRAIN = """
def train(model, batches):
    model.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total_loss = 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(batches)
"""
OUTCOMES = """
def outcomes(snippets):
    found = []
    for snippet in snippets:
        try:
            exec(snippet, {"torch": torch, "nn": nn})
            found.append("ok")
        except Exception as error:
            found.append(type(error).__name__)
    return found
"""
HALVES = """
def two_halves(first, second):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first.to("cuda:0"), second.to("cuda:1")

        def forward(self, x):
            return self.second(self.first(x.to("cuda:0")).to("cuda:1"))

    return Halves()
"""


def without(source: str, part: str, instead: str = "") -> str:
    """The source with one piece changed, which must be there."""
    assert part in source
    return source.replace(part, instead)


WRONG = {
    "11.1": {
        "the shape as a tensor": ("def zeros_beside(t): return torch.tensor(t.shape).to(t.device)", "with (dtype|shape)"),
        "of the default type": ("def zeros_beside(t): return torch.zeros(t.shape, device=t.device)", "with dtype"),
        "the same tensor": ("def zeros_beside(t): return t.zero_()", "has changed"),
        "ones": ("def zeros_beside(t): return torch.ones_like(t)", "not all of its numbers are 0"),
        "by the index of the device": (
            "def zeros_beside(t): return torch.zeros(t.shape, dtype=t.dtype, device=t.get_device())",
            "raised RuntimeError: .*cpu",
        ),
        "always the same": ("def zeros_beside(t): return torch.zeros(3, 4, device='cuda:0')", "with"),
    },
    "11.2": {
        "the old names": (
            without(without(REPORT, "memory_reserved", "memory_cached"), "max_memory_cached", "max_memory_cached"),
            "PyTorch warns: .*has been renamed",
        ),
        "of the current device": (without(REPORT, "(device),", "(),"), "of cuda:0, allocated is"),
        "the allocated peak twice": (without(REPORT, "max_memory_reserved", "max_memory_allocated"), "max_reserved is"),
        "in MiB": (
            without(REPORT, "torch.cuda.memory_allocated(device)", "torch.cuda.memory_allocated(device) / 2**20"),
            "whole numbers of bytes",
        ),
        "after emptying the cache": (without(REPORT, "    return {", "    torch.cuda.empty_cache()\n    return {"), "reserved is"),
    },
    "11.3": {
        "a tensor for a loss": (without(TRAIN, "loss.item()", "loss"), "a number was due"),
        "on the CPU": (
            without(without(TRAIN, '    model.to("cuda")\n'), '.to("cuda")', ""),
            "still on the CPU",
        ),
        "the last loss": (without(TRAIN, "total_loss / len(batches)", "loss.item()"), "the mean loss is"),
        "a copy of the model": (
            without(TRAIN, '    model.to("cuda")\n', '    import copy; model = copy.deepcopy(model).to("cuda")\n'),
            "still on the CPU",
        ),
        "data left on the CPU": (without(TRAIN, 'model(x.to("cuda"))', "model(x)"), "Expected all tensors to be on the same device"),
        "another rate": (without(TRAIN, "lr=0.01", "lr=0.1"), "off by up to"),
    },
    "11.4": {
        "two namespaces for each": (without(OUTCOMES, '"nn": nn})', '"nn": nn}, {})'), "def half"),
        "the message": (without(OUTCOMES, "type(error).__name__", "str(error)"), "you said"),
        "misprints stop the trial": (
            without(
                OUTCOMES,
                "        try:\n            exec(snippet,",
                '        code = compile(snippet, "s", "exec")\n        try:\n            exec(code,',
            ),
            "raised SyntaxError",
        ),
        "nothing at hand": (without(OUTCOMES, '{"torch": torch, "nn": nn}', "{}"), "Whose names does it see"),
        "the first failure ends it": (without(OUTCOMES, "__name__)\n", "__name__)\n            break\n"), "gave the outcomes of"),
        "runtime errors alone": (without(OUTCOMES, "except Exception", "except RuntimeError"), "raised"),
        "all fail": ("def outcomes(snippets): return ['NameError'] * len(snippets)", "you said"),
    },
    "11.5": {
        "no move between": (without(HALVES, '.to("cuda:1"))\n\n', ")\n\n"), "Expected all tensors to be on the same device"),
        "no move of the input": (without(HALVES, 'x.to("cuda:0")', "x"), "Expected all tensors to be on the same device"),
        "a function": (
            'def two_halves(first, second):\n    first.to("cuda:0"), second.to("cuda:1")\n'
            '    return lambda x: second(first(x.to("cuda:0")).to("cuda:1"))',
            "returned function, not a module",
        ),
        "both on one GPU": (
            'def two_halves(first, second):\n    return nn.Sequential(first, second).to("cuda:0")',
            "the parameters belong on",
        ),
        "the output brought back": (without(HALVES, '.to("cuda:1"))\n\n', '.to("cuda:1")).to("cuda:0")\n\n'), "belongs on cuda:1"),
        "the halves the wrong way round": (
            without(HALVES, 'first.to("cuda:0"), second.to("cuda:1")', 'first.to("cuda:1"), second.to("cuda:0")'),
            "the parameters belong on|same device",
        ),
    },
}
