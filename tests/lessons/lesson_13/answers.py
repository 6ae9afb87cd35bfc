"""Wrong answers to the exercises of lesson 13, and a part of what the check says to each; and right ones unlike the solution."""

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


def zeros(made: str) -> str:
    return f"def zeros_beside(t): return {made}\n"


WRONG = {
    "13.1": {
        "the shape as a tensor": ("def zeros_beside(t): return torch.tensor(t.shape).to(t.device)", "with (dtype|shape)"),
        "of the default type": ("def zeros_beside(t): return torch.zeros(t.shape, device=t.device)", "with dtype"),
        "the same tensor": ("def zeros_beside(t): return t.zero_()", "has changed"),
        "ones": ("def zeros_beside(t): return torch.ones_like(t)", "not all of its numbers are 0"),
        "by the index of the device": (
            "def zeros_beside(t): return torch.zeros(t.shape, dtype=t.dtype, device=t.get_device())",
            "raised RuntimeError: .*cpu",
        ),
        "times 0": (zeros("t * 0"), "not all of its numbers are 0"),
        "less itself": (zeros("t - t"), "not all of its numbers are 0"),
        "not filled": (zeros("torch.empty_like(t)"), "not all of its numbers are 0"),
        "a copy": (zeros("t.clone()"), "not all of its numbers are 0"),
        "set to 0 in a view": (zeros("t.detach().zero_()"), "has changed"),
        "made on the CPU": (zeros("torch.zeros(t.shape, dtype=t.dtype)"), "with device"),
        "on the current GPU": (zeros("torch.zeros_like(t, device='cuda')"), "with device"),
        "one number": (zeros("torch.zeros(1, dtype=t.dtype, device=t.device)"), "with shape"),
        "a list": (zeros("[0] * t.numel()"), "returned list"),
        "always the same": ("def zeros_beside(t): return torch.zeros(3, 4, device='cuda:0')", "with"),
    },
    "13.2": {
        "the old names": (
            without(without(REPORT, "memory_reserved", "memory_cached"), "max_memory_cached", "max_memory_cached"),
            "PyTorch warns.*has been renamed",
        ),
        "as requested": (
            REPORT.replace("memory_allocated(device)", "memory_stats(device)['requested_bytes.all.current']", 1),
            "allocated is",
        ),
        "of the current device": (without(REPORT, "(device),", "(),"), "on cuda:0, allocated is"),
        "the allocated peak twice": (without(REPORT, "max_memory_reserved", "max_memory_allocated"), "max_reserved is"),
        "silenced": (
            "import warnings\n"
            + without(
                without(REPORT, "    return {", "    warnings.simplefilter('ignore')\n    return {").replace(
                    "memory_reserved", "memory_cached"
                ),
                "max_memory_cached",
                "max_memory_cached",
            ),
            "though you may have silenced it",
        ),
        "silenced for a moment": (
            "import warnings\n"
            + REPORT.replace("memory_reserved(device)", "memory_cached(device)").replace(
                "    return {", "    with warnings.catch_warnings(action='ignore'): return {"
            ),
            "though you may have silenced it|TypeError",
        ),
        "nobody warns": (
            "import warnings\nfrom unittest import mock\n"
            + REPORT.replace("memory_reserved(device)", "memory_cached(device)").replace(
                "    return {", "    with mock.patch.object(warnings, 'warn'): return {"
            ),
            "though you may have silenced it",
        ),
        "the device for good": (
            without(REPORT, "    return {", "    torch.cuda.set_device(device)\n    return {"),
            "the current device is",
        ),
        "the device for good, and no argument": (
            REPORT.replace("(device),", "(),").replace("    return {", "    torch.cuda.set_device(device)\n    return {"),
            "the current device is",
        ),
        "the peaks reset": (
            without(REPORT, "    return {", "    told = {") + "    torch.cuda.reset_peak_memory_stats(device)\n    return told\n",
            "asking has changed the figures",
        ),
        "always GPU 0": (REPORT.replace("(device),", "(0),"), "on cuda:1, allocated is"),
        "what the driver says": (
            without(
                REPORT, "torch.cuda.memory_reserved(device)", "torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]"
            ),
            "reserved is",
        ),
        "nothing returned": (without(REPORT, "return {", "report = {"), "returned NoneType"),
        "in MiB": (
            without(REPORT, "torch.cuda.memory_allocated(device)", "torch.cuda.memory_allocated(device) / 2**20"),
            "allocated is .* bytes; you said",
        ),
        "after emptying the cache": (without(REPORT, "    return {", "    torch.cuda.empty_cache()\n    return {"), "reserved is"),
    },
    "13.3": {
        "a tensor for a loss": (without(TRAIN, "loss.item()", "loss"), "expected a number"),
        "ten times the rate": (without(TRAIN, "lr=0.01", "lr=0.1"), "one step of SGD with lr=0.01"),
        "Adam": (without(TRAIN, "torch.optim.SGD", "torch.optim.Adam"), "one step of SGD with lr=0.01"),
        "never cleared": (without(TRAIN, "        optimizer.zero_grad()\n"), "What do gradients do from one step to the next"),
        "on the CPU": (
            without(without(TRAIN, '    model.to("cuda")\n'), '.to("cuda")', ""),
            "computed on the CPU",
        ),
        "the article's sum": (
            without(without(TRAIN, "loss.item()", "loss"), "total_loss / len", "total_loss.item() / len"),
            "graphs of .* earlier steps were still there",
        ),
        "the article's sum, as another line": (
            without(
                without(TRAIN, "total_loss += loss.item()", "total_loss = total_loss + loss"),
                "return total_loss",
                "return total_loss.item()",
            ),
            "graphs of .* earlier steps were still there",
        ),
        "a list of losses": (
            without(without(TRAIN, "total_loss += loss.item()", "losses.append(loss)"), "total_loss = 0.0", "losses = []").replace(
                "return total_loss / len(batches)", "return torch.stack(losses).mean().item()"
            ),
            "graphs of .* earlier steps were still there",
        ),
        "outputs for later": (
            without(
                TRAIN,
                '        loss = nn.functional.mse_loss(model(x.to("cuda"))',
                '        outputs = [*(outputs if total_loss else []), model(x.to("cuda"))]\n'
                "        loss = nn.functional.mse_loss(outputs[-1]",
            ),
            "graphs of .* earlier steps were still there",
        ),
        "trained on the CPU, moved at the end": (
            without(TRAIN, '    model.to("cuda")\n').replace('.to("cuda")', "").replace("    return", '    model.to("cuda")\n    return'),
            "computed on the CPU",
        ),
        "cleared before the step": (
            without(without(TRAIN, "        optimizer.zero_grad()\n"), "loss.backward()", "loss.backward(); optimizer.zero_grad()"),
            "off by up to",
        ),
        "no step": (without(TRAIN, "        optimizer.step()\n"), "off by up to"),
        "the sum": (without(TRAIN, " / len(batches)"), "the mean loss is"),
        "the sum of squares": (without(TRAIN, 'y.to("cuda"))', 'y.to("cuda"), reduction="sum")'), "off by up to"),
        "the loss after the step": (
            without(TRAIN, "total_loss += loss.item()", 'total_loss += nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda")).item()'),
            "the mean loss is",
        ),
        "the last loss": (without(TRAIN, "total_loss / len(batches)", "loss.item()"), "the mean loss is"),
        "a copy of the model": (
            without(TRAIN, '    model.to("cuda")\n', '    import copy; model = copy.deepcopy(model).to("cuda")\n'),
            "still on the CPU",
        ),
        "data left on the CPU": (without(TRAIN, 'model(x.to("cuda"))', "model(x)"), "Expected all tensors to be on the same device"),
        "another rate": (without(TRAIN, "lr=0.01", "lr=0.1"), "off by up to"),
    },
    "13.4": {
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
        "all names of the notebook": (without(OUTCOMES, '{"torch": torch, "nn": nn}', "dict(globals())"), "Whose names does it see"),
        "nothing at hand": (without(OUTCOMES, '{"torch": torch, "nn": nn}', "{}"), "Whose names does it see"),
        "the first failure ends it": (without(OUTCOMES, "__name__)\n", "__name__)\n            break\n"), "gave the outcomes of"),
        "runtime errors alone": (without(OUTCOMES, "except Exception", "except RuntimeError"), "raised"),
        "the class": (without(OUTCOMES, "type(error).__name__", "str(type(error))"), "you said"),
        "the name of a family": (without(OUTCOMES, "type(error).__name__", "type(error).__mro__[1].__name__"), "you said"),
        "True for ok": (without(OUTCOMES, '"ok"', '"True"'), "comes to 'ok'"),
        "values": (without(OUTCOMES, "exec(", "eval("), "comes to|raised"),
        "parsed": (without(OUTCOMES, 'exec(snippet, {"torch": torch, "nn": nn})', 'compile(snippet, "snippet", "exec")'), "you said"),
        "in the function's own names": (without(OUTCOMES, ', {"torch": torch, "nn": nn}'), "Whose names|The class's name"),
        "a module for all": (
            without(OUTCOMES, '{"torch": torch, "nn": nn}', "globals()"),
            "Whose names does it see",
        ),
        "what failed alone": (without(OUTCOMES, '            found.append("ok")\n', ""), "gave the outcomes of"),
        "all fail": ("def outcomes(snippets): return ['NameError'] * len(snippets)", "you said"),
    },
    "13.5": {
        "through the CPU": (
            without(HALVES, 'self.first(x.to("cuda:0")).to("cuda:1")', 'self.first(x.to("cuda:0")).cpu().to("cuda:1")'),
            "a tensor went through the CPU",
        ),
        "no move between": (without(HALVES, '.to("cuda:1"))\n\n', ")\n\n"), "Expected all tensors to be on the same device"),
        "no move of the input": (without(HALVES, 'x.to("cuda:0")', "x"), "Expected all tensors to be on the same device"),
        "both computed on GPU 1": (
            without(
                HALVES,
                'self.second(self.first(x.to("cuda:0")).to("cuda:1"))',
                "self.second(torch.func.functional_call(\n"
                "    self.first, {name: p.to('cuda:1') for name, p in self.first.named_parameters()}, x.to('cuda:1')))",
            ),
            "each half should be called once, on its own GPU",
        ),
        "the weights alone": (
            without(HALVES, 'self.first(x.to("cuda:0"))', 'nn.functional.linear(x.to("cuda:0"), self.first[0].weight, self.first[0].bias)'),
            "is not what both halves make of it|should be called once",
        ),
        "data": (without(HALVES, 'self.first(x.to("cuda:0"))', 'self.first(x.to("cuda:0")).data'), "no gradient"),
        "no gradients": (without(HALVES, "return self.second(self", "with torch.no_grad(): return self.second(self"), "no gradient"),
        "the first without a graph": (
            without(
                HALVES,
                "            return self.second",
                "            with torch.no_grad(): x = self.first(x.to('cuda:0'))\n            return self.second",
            ).replace('self.first(x.to("cuda:0")).to', "x.to"),
            "no gradient",
        ),
        "halves in a list": (
            without(
                HALVES,
                'self.first, self.second = first.to("cuda:0"), second.to("cuda:1")',
                'self.halves = [first.to("cuda:0"), second.to("cuda:1")]',
            )
            .replace("self.second", "self.halves[1]")
            .replace("self.first", "self.halves[0]"),
            "yours: nowhere",
        ),
        "the current GPU": (HALVES.replace('"cuda:0"', '"cuda"'), "belong on cuda:0"),
        "replicas": ("def two_halves(first, second): return nn.DataParallel(nn.Sequential(first, second).cuda(0))", "belong on cuda:0"),
        "the first alone": (
            without(HALVES, 'self.second(self.first(x.to("cuda:0")).to("cuda:1"))', 'self.first(x.to("cuda:0")).to("cuda:1")'),
            "is not what both",
        ),
        "a function": (
            'def two_halves(first, second):\n    first.to("cuda:0"), second.to("cuda:1")\n'
            '    return lambda x: second(first(x.to("cuda:0")).to("cuda:1"))',
            "returned function, not a module",
        ),
        "both on one GPU": (
            'def two_halves(first, second):\n    return nn.Sequential(first, second).to("cuda:0")',
            "belong on cuda:0",
        ),
        "the output brought back": (without(HALVES, '.to("cuda:1"))\n\n', '.to("cuda:1")).to("cuda:0")\n\n'), "belongs on cuda:1"),
        "the halves the wrong way round": (
            without(HALVES, 'first.to("cuda:0"), second.to("cuda:1")', 'first.to("cuda:1"), second.to("cuda:0")'),
            "belong on cuda:0|same device",
        ),
    },
}

RIGHT = {
    "13.1": {
        "like it": zeros("torch.zeros_like(t)"),
        "by the tensor": zeros("t.new_zeros(t.shape)"),
        "a copy, cleared": zeros("t.clone().zero_()"),
        "full of zeros": zeros("torch.full_like(t, 0)"),
        "moved": zeros("torch.zeros(t.size()).to(t)"),
        "inside a block": (
            "def zeros_beside(t):\n    with torch.device(t.device):\n        return torch.zeros(*t.shape, dtype=t.dtype) if t.dim() else "
            "torch.zeros((), dtype=t.dtype)\n"
        ),
    },
    "13.2": {
        "statistics": """
def memory_report(device):
    told = torch.cuda.memory_stats(device)
    names = {"allocated": "current", "max_allocated": "peak", "reserved": "current", "max_reserved": "peak"}
    return {name: told[f"{name.removeprefix('max_')}_bytes.all.{what}"] for name, what in names.items()}
""",
        "in a block": REPORT.replace("(device),", "(),").replace("    return {", "    with torch.cuda.device(device): return {"),
        "by the index": REPORT.replace("(device),", "(device.index),"),
        "one more figure": without(REPORT, "    return {", "    return {'free': torch.cuda.mem_get_info(device)[0],"),
        "NumPy's": "import numpy\n"
        + without(REPORT, "torch.cuda.memory_reserved(device)", "numpy.int64(torch.cuda.memory_reserved(device))"),
    },
    "13.3": {
        "back on the CPU": without(TRAIN, "    return", '    model.to("cpu")\n    return'),
        "detached": without(without(TRAIN, "loss.item()", "loss.detach()"), "return total_loss", "return float(total_loss)"),
        "a list of numbers": without(
            without(TRAIN, "total_loss += loss.item()", "losses.append(loss.item())"), "total_loss = 0.0", "losses = []"
        ).replace("total_loss / len(batches)", "sum(losses) / len(losses)"),
        "NumPy's": "import numpy\n" + without(TRAIN, "return total_loss / len(batches)", "return numpy.float32(total_loss / len(batches))"),
        "the optimizer first": without(TRAIN, '    model.to("cuda")\n').replace(
            "    total_loss = 0.0", "    model.cuda()\n    total_loss = 0.0"
        ),
        "by hand": without(
            without(
                TRAIN,
                "        optimizer.step()\n",
                "        with torch.no_grad():\n            for p in model.parameters(): p -= 0.01 * p.grad\n",
            ),
            "optimizer.zero_grad()",
            "model.zero_grad()",
        ),
        "cleared after the step": without(
            without(TRAIN, "        optimizer.zero_grad()\n"), "optimizer.step()\n", "optimizer.step()\n        optimizer.zero_grad()\n"
        ),
        "moved ahead": without(
            TRAIN, "    total_loss = 0.0", "    batches = [(x.cuda(), y.cuda()) for x, y in batches]\n    total_loss = 0.0"
        ),
    },
    "13.4": {
        "a function": """
def outcomes(snippets):
    def outcome(snippet):
        try:
            exec(compile(snippet, "<snippet>", "exec"), dict(torch=torch, nn=nn))
        except BaseException as error:
            return error.__class__.__name__
        return "ok"
    return list(map(outcome, snippets))
""",
        "with its traceback": "import sys\n"
        + without(OUTCOMES, "except Exception as error", "except Exception").replace("type(error).__name__", "sys.exc_info()[0].__name__"),
        "a module each": """
def outcomes(snippets):
    import types
    found = ["ok"] * len(snippets)
    for index, snippet in enumerate(snippets):
        module = types.ModuleType(f"snippet_{index}")
        module.torch, module.nn = torch, nn
        try:
            exec(snippet, vars(module))
        except Exception as error:
            found[index] = type(error).__name__
    return tuple(found)
""",
    },
    "13.5": {
        "registered the other way round": without(
            HALVES,
            'self.first, self.second = first.to("cuda:0"), second.to("cuda:1")',
            'self.second, self.first = second.to("cuda:1"), first.to("cuda:0")',
        ),
        "hooks": """
def two_halves(first, second):
    first.to("cuda:0").register_forward_pre_hook(lambda module, given: given[0].to("cuda:0"))
    second.to("cuda:1").register_forward_pre_hook(lambda module, given: given[0].to("cuda:1"))
    return nn.Sequential(first, second)
""",
        "copies of them": "import copy\n"
        + without(
            HALVES, 'first.to("cuda:0"), second.to("cuda:1")', 'copy.deepcopy(first).to("cuda:0"), copy.deepcopy(second).to("cuda:1")'
        ),
        "a module that moves": """
class Move(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, x):
        return x.to(self.device, non_blocking=True)

def two_halves(first, second):
    return nn.Sequential(Move(0), first.cuda(0), Move(1), second.cuda(1))
""",
        "by index": HALVES.replace('"cuda:0"', "0").replace('.to("cuda:1")', ".cuda(1)"),
        "a list of modules": without(
            HALVES,
            'self.first, self.second = first.to("cuda:0"), second.to("cuda:1")',
            'self.halves = nn.ModuleList([first.to("cuda:0"), second.to("cuda:1")])',
        )
        .replace("self.second(", "self.halves[1](")
        .replace("self.first(", "self.halves[0]("),
    },
}
