"""Wrong answers to the exercises of lesson 12, and a part of what the check says to each; and right ones unlike the solution."""

LAYERS = """
def two_layers(x, first, first_bias, second, second_bias):
    hidden = torch.relu(x @ first.T + first_bias)
    {lines}
"""
SUM = "y = hidden @ second.T; dist.all_reduce(y); return y + second_bias"


def ranks(number: str) -> str:
    return f"def ranks_needed(parameters, largest_layer, memory): return {number}\n"


WRONG = {
    "12.1": {
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
    "12.2": {
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
    "12.1": {
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
    "12.2": {
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
