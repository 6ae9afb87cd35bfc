"""Wrong answers to the exercises 10.4 to 10.6, and a part of what the check says to each; and right ones unlike the solution."""

TRAIN = """
def train(model, optimizer, work, steps, path):
    import os
    first = 0
    if os.path.exists(path):
        state = torch.load(path)
        {load}
    for step in range(first, steps):
        {step}
"""
LOAD = "model.load_state_dict(state['model']); optimizer.load_state_dict(state['optimizer']); first = state['step'] + 1"
STATE = "{'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step}"
SAVE_WHOLE = (
    f"{{condition}} or (torch.save({STATE.replace('{', '{{').replace('}', '}}')}, path + '.part'), os.replace(path + '.part', path))"
)
WHOLE_SAVE = f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank()')}"

LAYERS = """
def two_layers(x, first, first_bias, second, second_bias):
    hidden = torch.relu(x @ first.T + first_bias)
    {lines}
"""
SUM = "y = hidden @ second.T; dist.all_reduce(y); return y + second_bias"


def ranks(number: str) -> str:
    return f"def ranks_needed(parameters, largest_layer, memory): return {number}\n"


WRONG = {
    "10.4": {
        "from the start": (
            TRAIN.format(
                load="model.load_state_dict(state['model'])",
                step="work(step); dist.get_rank() or torch.save({'model': model.state_dict()}, path)",
            ),
            r"started again, rank 0 did \[0, 1",
        ),
        "the last step twice": (
            TRAIN.format(load=LOAD.replace(" + 1", ""), step=f"work(step); dist.get_rank() or torch.save({STATE}, path)"),
            "steps were done when the ranks died",
        ),
        "saved before the step": (
            TRAIN.format(load=LOAD, step=f"dist.get_rank() or torch.save({STATE}, path); work(step)"),
            "steps were done when the ranks died|your answer raised",  # rank 1 may find the file half written when it begins
        ),
        "every rank saves": (
            TRAIN.format(load=LOAD, step=f"work(step); torch.save({STATE}, path)"),
            "2 ranks saved the checkpoint|your answer raised",
        ),
        "saved straight to its place": (
            TRAIN.format(load=LOAD, step=f"work(step); dist.get_rank() or torch.save({STATE}, path)"),
            "written in its place",
        ),
        "opened and written": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step)\n        with open(path if not dist.get_rank() else os.devnull, 'wb') as file: torch.save({STATE}, file)",
            ),
            "written in its place|your answer raised",
        ),
        "copied to its place": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); import shutil; dist.get_rank() or (torch.save({STATE}, path + '.part'), "
                "shutil.copy(path + '.part', path))",
            ),
            "written in its place",
        ),
        "removed, then renamed": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); dist.get_rank() or (torch.save({STATE}, path + '.part'), "
                "os.path.exists(path) and os.remove(path), os.rename(path + '.part', path))",
            ),
            "the file was removed",
        ),
        "removed when all is done": (
            TRAIN.format(load=LOAD, step=WHOLE_SAVE + "\n    dist.get_rank() or os.remove(path)"),
            "the file was removed",
        ),
        "whole, but before the step": (
            TRAIN.format(load=LOAD, step=f"{SAVE_WHOLE.format(condition='dist.get_rank()')}; work(step)"),
            "steps were done|Save after the last step, too|your answer raised",
        ),
        "before each step, and resumed there": (
            TRAIN.format(load=LOAD.replace(" + 1", ""), step=f"{SAVE_WHOLE.format(condition='dist.get_rank()')}; work(step)"),
            "Save after the last step, too|your answer raised",
        ),
        "every other step": (
            TRAIN.format(load=LOAD, step=f"work(step); {SAVE_WHOLE.format(condition='step % 2 or dist.get_rank()')}"),
            "Save after every step",
        ),
        "one file beside it for both": (
            TRAIN.format(
                load=LOAD,
                step=f"work(step); torch.save({STATE}, path + '.part'); dist.barrier(); "
                "dist.get_rank() or os.replace(path + '.part', path)",
            ),
            "2 ranks saved the checkpoint",
        ),
        "rank 0 alone goes on": (
            TRAIN.format(load=LOAD, step=WHOLE_SAVE).replace("if os.path.exists(path)", "if dist.get_rank() == 0 and os.path.exists(path)"),
            "started again, rank|waited for one another in vain",
        ),
        "saved at the end": (
            TRAIN.format(load=LOAD, step=f"work(step); step < steps - 1 or dist.get_rank() or torch.save({STATE}, path)"),
            "Save after every step",
        ),
    },
    "10.5": {
        "its own part": (LAYERS.format(lines="return hidden @ second.T + second_bias"), "What is summed"),
        "the mean": (
            LAYERS.format(lines="y = hidden @ second.T; dist.all_reduce(y); return y / dist.get_world_size() + second_bias"),
            "What is summed",
        ),
        "gathered": (
            LAYERS.format(
                lines="y = hidden @ second.T; parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]; "
                "dist.all_gather(parts, y); return torch.cat(parts, 1) + second_bias.repeat(dist.get_world_size())"
            ),
            "was due, whole on each rank",
        ),
        "each rank's second bias": (
            LAYERS.format(lines="y = hidden @ second.T + second_bias; dist.all_reduce(y); return y"),
            "What is summed",
        ),
        "summed before the ReLU": (
            LAYERS.format(lines="h = x @ first.T + first_bias; dist.all_reduce(h); return torch.relu(h) @ second.T + second_bias"),
            "What is summed",
        ),
        "no ReLU": (LAYERS.format(lines=SUM).replace("torch.relu", ""), "What is summed"),
        "ReLU at the end": (
            LAYERS.format(lines=SUM).replace("torch.relu", "").replace("return y +", "return torch.relu(y) +"),
            "What is summed",
        ),
        "the first layer summed": (LAYERS.format(lines=f"dist.all_reduce(hidden); {SUM}"), "What is summed"),
        "from rank 0": (LAYERS.format(lines="y = hidden @ second.T + second_bias; dist.broadcast(y, 0); return y"), "What is summed"),
        "for two ranks": (
            LAYERS.format(
                lines="y = hidden @ second.T; parts = [torch.empty_like(y) for _ in range(2)]; dist.all_gather(parts, y); "
                "return sum(parts) + second_bias"
            ),
            "your answer raised|What is summed|waited",
        ),
        "for rank 0": (LAYERS.format(lines="y = hidden @ second.T; dist.reduce(y, 0); return y + second_bias"), "rank 1 of"),
        "without the first bias": (
            """
def two_layers(x, first, first_bias, second, second_bias):
    y = torch.relu(x @ first.T) @ second.T
    dist.all_reduce(y)
    return y + second_bias
""",
            "What is summed",
        ),
        "nothing returned": (LAYERS.format(lines="y = hidden @ second.T; dist.all_reduce(y); y += second_bias"), "returned NoneType"),
    },
    "10.6": {
        "without the whole layer": (ranks("-(-16 * parameters // memory)"), "and what while a layer"),
        "the parameters of the layer alone": (ranks("-(-16 * parameters // (memory - 4 * largest_layer))"), "enough"),
        "all of the layer": (ranks("-(-16 * parameters // (memory - 16 * largest_layer))"), "enough"),
        "rounded down": (ranks("16 * parameters // (memory - 8 * largest_layer)"), "enough"),
        "rounded": (ranks("round(16 * parameters / (memory - 8 * largest_layer))"), "enough"),
        "one more": (ranks("16 * parameters // (memory - 8 * largest_layer) + 1"), "enough"),
        "SGD": (ranks("-(-8 * parameters // (memory - 8 * largest_layer))"), "enough"),
        "DDP's buckets": (ranks("-(-20 * parameters // (memory - 8 * largest_layer))"), "enough"),
        "half precision": (ranks("-(-8 * parameters // (memory - 4 * largest_layer))"), "enough"),
        "the layer shared, too": (ranks("-(-(16 * parameters + 8 * largest_layer) // memory)"), "enough"),
        "the rest of the layers": (ranks("-(-16 * (parameters - largest_layer) // (memory - 8 * largest_layer))"), "enough"),
        "a fraction": (ranks("16 * parameters / (memory - 8 * largest_layer)"), "enough"),
        "at least two": (ranks("max(2, -(-16 * parameters // (memory - 8 * largest_layer)))"), "enough"),
        "powers of two": (
            ranks("1 << max(0, (-(-16 * parameters // (memory - 8 * largest_layer)) - 1).bit_length())"),
            "enough",
        ),
        "of one try": (ranks("8"), "enough"),
        "text": (ranks("'eight'"), "returned str"),
    },
}

RIGHT = {
    "10.4": {
        "rank 1 saves": TRAIN.format(load=LOAD, step=f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank() != 1')}"),
        "the step that comes next": TRAIN.format(
            load=LOAD.replace(" + 1", ""),
            step=f"work(step); {SAVE_WHOLE.format(condition='dist.get_rank()')}".replace("'step': step", "'step': step + 1"),
        ),
        "before the first, too": TRAIN.format(load=LOAD, step=WHOLE_SAVE).replace(
            "    for step", "    dist.barrier(); step = first - 1; " + SAVE_WHOLE.format(condition="dist.get_rank()") + "\n    for step"
        ),
        "pickled": TRAIN.format(
            load=LOAD,
            step="work(step)\n        if dist.get_rank() == 0:\n            import pickle, pathlib\n"
            f"            pathlib.Path(path + '.new').write_bytes(pickle.dumps({STATE}))\n"
            "            pathlib.Path(path + '.new').rename(path)",
        ).replace("torch.load(path)", "__import__('pickle').load(open(path, 'rb'))"),
        "a file of another name": TRAIN.format(
            load=LOAD,
            step="work(step)\n        if dist.get_rank() == 0:\n            import tempfile\n"
            "            with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:\n"
            f"                torch.save({STATE}, file)\n            os.replace(file.name, path)\n        dist.barrier()",
        ),
    },
    "10.5": {
        "the bias on rank 0": LAYERS.format(
            lines="y = hidden @ second.T + (second_bias if dist.get_rank() == 0 else 0); dist.all_reduce(y); return y"
        ),
        "a share of the bias": LAYERS.format(
            lines="y = hidden @ second.T + second_bias / dist.get_world_size(); dist.all_reduce(y); return y"
        ),
        "gathered and added": LAYERS.format(
            lines="y = hidden @ second.T; parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]; "
            "dist.all_gather(parts, y); return sum(parts) + second_bias"
        ),
        "PyTorch's functions": """
def two_layers(x, first, first_bias, second, second_bias):
    y = nn.functional.linear(nn.functional.linear(x, first, first_bias).relu(), second)
    return y.clone() if dist.all_reduce(y) else y.add_(second_bias)
""",
        "rank 0 adds and sends": LAYERS.format(
            lines="y = hidden @ second.T; dist.reduce(y, 0); y += second_bias; dist.broadcast(y, 0); return y"
        ),
    },
    "10.6": {
        "math.ceil": "import math\n" + ranks("math.ceil(16 * parameters / (memory - 8 * largest_layer))"),
        "NumPy's": "import numpy\n" + ranks("numpy.ceil(16 * parameters / (memory - 8 * largest_layer))"),
        "counted up": """
def ranks_needed(parameters, largest_layer, memory):
    ranks = 1
    while 16 * parameters / ranks + 8 * largest_layer > memory:
        ranks += 1
    return ranks
""",
        "without negation": ranks("(16 * parameters + memory - 8 * largest_layer - 1) // (memory - 8 * largest_layer)"),
    },
}
