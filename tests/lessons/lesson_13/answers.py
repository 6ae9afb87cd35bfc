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


def without(source: str, part: str, instead: str = "") -> str:
    """The source with one piece changed, which must be there."""
    assert part in source
    return source.replace(part, instead)


def zeros(made: str) -> str:
    return f"def zeros_beside(t): return {made}\n"


WRONG = {
    "13.1": {
        "the shape as a tensor": (
            "def zeros_beside(t): return torch.tensor(t.shape).to(t.device)",
            "with (dtype|shape)",
        ),
        "of the default type": (
            "def zeros_beside(t): return torch.zeros(t.shape, device=t.device)",
            "with dtype",
        ),
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
        "always the same": (
            "def zeros_beside(t): return torch.zeros(3, 4, device='cuda:0')",
            "with",
        ),
    },
    "13.2": {
        "the old names": (
            without(
                without(REPORT, "memory_reserved", "memory_cached"),
                "max_memory_cached",
                "max_memory_cached",
            ),
            "PyTorch warns.*has been renamed",
        ),
        "as requested": (
            REPORT.replace(
                "memory_allocated(device)", "memory_stats(device)['requested_bytes.all.current']", 1
            ),
            "allocated is",
        ),
        "of the current device": (without(REPORT, "(device),", "(),"), "on cuda:0, allocated is"),
        "the allocated peak twice": (
            without(REPORT, "max_memory_reserved", "max_memory_allocated"),
            "max_reserved is",
        ),
        "silenced": (
            "import warnings\n"
            + without(
                without(
                    REPORT, "    return {", "    warnings.simplefilter('ignore')\n    return {"
                ).replace("memory_reserved", "memory_cached"),
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
            REPORT.replace("(device),", "(),").replace(
                "    return {", "    torch.cuda.set_device(device)\n    return {"
            ),
            "the current device is",
        ),
        "the peaks reset": (
            without(REPORT, "    return {", "    told = {")
            + "    torch.cuda.reset_peak_memory_stats(device)\n    return told\n",
            "asking has changed the figures",
        ),
        "always GPU 0": (REPORT.replace("(device),", "(0),"), "on cuda:1, allocated is"),
        "what the driver says": (
            without(
                REPORT,
                "torch.cuda.memory_reserved(device)",
                "torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]",
            ),
            "reserved is",
        ),
        "nothing returned": (without(REPORT, "return {", "report = {"), "returned NoneType"),
        "in MiB": (
            without(
                REPORT,
                "torch.cuda.memory_allocated(device)",
                "torch.cuda.memory_allocated(device) / 2**20",
            ),
            "allocated is .* bytes; you said",
        ),
        "after emptying the cache": (
            without(REPORT, "    return {", "    torch.cuda.empty_cache()\n    return {"),
            "reserved is",
        ),
    },
    "13.3": {
        "a tensor for a loss": (without(TRAIN, "loss.item()", "loss"), "expected a number"),
        "ten times the rate": (without(TRAIN, "lr=0.01", "lr=0.1"), "one step of SGD with lr=0.01"),
        "Adam": (
            without(TRAIN, "torch.optim.SGD", "torch.optim.Adam"),
            "one step of SGD with lr=0.01",
        ),
        "never cleared": (
            without(TRAIN, "        optimizer.zero_grad()\n"),
            "What do gradients do from one step to the next",
        ),
        "on the CPU": (
            without(without(TRAIN, '    model.to("cuda")\n'), '.to("cuda")', ""),
            "computed on the CPU",
        ),
        "the article's sum": (
            without(
                without(TRAIN, "loss.item()", "loss"), "total_loss / len", "total_loss.item() / len"
            ),
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
            without(
                without(TRAIN, "total_loss += loss.item()", "losses.append(loss)"),
                "total_loss = 0.0",
                "losses = []",
            ).replace(
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
            without(TRAIN, '    model.to("cuda")\n')
            .replace('.to("cuda")', "")
            .replace("    return", '    model.to("cuda")\n    return'),
            "computed on the CPU",
        ),
        "cleared before the step": (
            without(
                without(TRAIN, "        optimizer.zero_grad()\n"),
                "loss.backward()",
                "loss.backward(); optimizer.zero_grad()",
            ),
            "off by up to",
        ),
        "no step": (without(TRAIN, "        optimizer.step()\n"), "off by up to"),
        "the sum": (without(TRAIN, " / len(batches)"), "the mean loss is"),
        "the sum of squares": (
            without(TRAIN, 'y.to("cuda"))', 'y.to("cuda"), reduction="sum")'),
            "off by up to",
        ),
        "the loss after the step": (
            without(
                TRAIN,
                "total_loss += loss.item()",
                'total_loss += nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda")).item()',
            ),
            "the mean loss is",
        ),
        "the last loss": (
            without(TRAIN, "total_loss / len(batches)", "loss.item()"),
            "the mean loss is",
        ),
        "a copy of the model": (
            without(
                TRAIN,
                '    model.to("cuda")\n',
                '    import copy; model = copy.deepcopy(model).to("cuda")\n',
            ),
            "still on the CPU",
        ),
        "data left on the CPU": (
            without(TRAIN, 'model(x.to("cuda"))', "model(x)"),
            "Expected all tensors to be on the same device",
        ),
        "another rate": (without(TRAIN, "lr=0.01", "lr=0.1"), "off by up to"),
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
        "in a block": REPORT.replace("(device),", "(),").replace(
            "    return {", "    with torch.cuda.device(device): return {"
        ),
        "by the index": REPORT.replace("(device),", "(device.index),"),
        "one more figure": without(
            REPORT, "    return {", "    return {'free': torch.cuda.mem_get_info(device)[0],"
        ),
        "NumPy's": "import numpy\n"
        + without(
            REPORT,
            "torch.cuda.memory_reserved(device)",
            "numpy.int64(torch.cuda.memory_reserved(device))",
        ),
    },
    "13.3": {
        "back on the CPU": without(TRAIN, "    return", '    model.to("cpu")\n    return'),
        "detached": without(
            without(TRAIN, "loss.item()", "loss.detach()"),
            "return total_loss",
            "return float(total_loss)",
        ),
        "a list of numbers": without(
            without(TRAIN, "total_loss += loss.item()", "losses.append(loss.item())"),
            "total_loss = 0.0",
            "losses = []",
        ).replace("total_loss / len(batches)", "sum(losses) / len(losses)"),
        "NumPy's": "import numpy\n"
        + without(
            TRAIN,
            "return total_loss / len(batches)",
            "return numpy.float32(total_loss / len(batches))",
        ),
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
            without(TRAIN, "        optimizer.zero_grad()\n"),
            "optimizer.step()\n",
            "optimizer.step()\n        optimizer.zero_grad()\n",
        ),
        "moved ahead": without(
            TRAIN,
            "    total_loss = 0.0",
            "    batches = [(x.cuda(), y.cuda()) for x, y in batches]\n    total_loss = 0.0",
        ),
    },
}
