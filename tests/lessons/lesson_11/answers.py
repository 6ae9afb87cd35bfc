"""Wrong answers to the exercises of lesson 11, and a part of what the check says to each; and right ones unlike the solution."""

LAYERS = """
def two_layers(x, first, first_bias, second, second_bias):
    hidden = torch.relu(x @ first.T + first_bias)
    {lines}
"""
SUM = "y = hidden @ second.T; dist.all_reduce(y); return y + second_bias"


def ranks(number: str) -> str:
    return f"def ranks_needed(parameters, largest_layer, memory): return {number}\n"


WRONG = {
    "11.5": {
        "its own part": (
            LAYERS.format(lines="return hidden @ second.T + second_bias"),
            "What is summed",
        ),
        "the mean": (
            LAYERS.format(
                lines="y = hidden @ second.T; dist.all_reduce(y); return y / dist.get_world_size() + second_bias"
            ),
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
            LAYERS.format(
                lines="y = hidden @ second.T + second_bias; dist.all_reduce(y); return y"
            ),
            "What is summed",
        ),
        "summed before the ReLU": (
            LAYERS.format(
                lines="h = x @ first.T + first_bias; dist.all_reduce(h); return torch.relu(h) @ second.T + second_bias"
            ),
            "What is summed",
        ),
        "all weights gathered": (
            """
def two_layers(x, first, first_bias, second, second_bias):
    def gathered(part, dim):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    hidden = torch.relu(x @ gathered(first, 0).T + gathered(first_bias, 0))
    return hidden @ gathered(second.contiguous(), 1).T + second_bias
""",
            "Leave the weights where they are",
        ),
        "hidden numbers and the second weight gathered": (
            LAYERS.format(
                lines="n = dist.get_world_size(); hs = [None] * n; ws = [None] * n; dist.all_gather_object(hs, hidden); "
                "dist.all_gather_object(ws, second); return sum(h @ w.T for h, w in zip(hs, ws)) + second_bias"
            ),
            "Leave the weights where they are",
        ),
        "no ReLU": (LAYERS.format(lines=SUM).replace("torch.relu", ""), "What is summed"),
        "ReLU at the end": (
            LAYERS.format(lines=SUM)
            .replace("torch.relu", "")
            .replace("return y +", "return torch.relu(y) +"),
            "What is summed",
        ),
        "the first layer summed": (
            LAYERS.format(lines=f"dist.all_reduce(hidden); {SUM}"),
            "What is summed",
        ),
        "from rank 0": (
            LAYERS.format(
                lines="y = hidden @ second.T + second_bias; dist.broadcast(y, 0); return y"
            ),
            "What is summed",
        ),
        "for two ranks": (
            LAYERS.format(
                lines="y = hidden @ second.T; parts = [torch.empty_like(y) for _ in range(2)]; dist.all_gather(parts, y); "
                "return sum(parts) + second_bias"
            ),
            "your answer raised|What is summed|waited",
        ),
        "for rank 0": (
            LAYERS.format(lines="y = hidden @ second.T; dist.reduce(y, 0); return y + second_bias"),
            "rank 1 of",
        ),
        "without the first bias": (
            """
def two_layers(x, first, first_bias, second, second_bias):
    y = torch.relu(x @ first.T) @ second.T
    dist.all_reduce(y)
    return y + second_bias
""",
            "What is summed",
        ),
        "nothing returned": (
            LAYERS.format(lines="y = hidden @ second.T; dist.all_reduce(y); y += second_bias"),
            "returned NoneType",
        ),
    },
    "11.3": {
        "without the whole layer": (
            ranks("-(-16 * parameters // memory)"),
            "and what while a layer",
        ),
        "the parameters of the layer alone": (
            ranks("-(-16 * parameters // (memory - 4 * largest_layer))"),
            "enough",
        ),
        "all of the layer": (
            ranks("-(-16 * parameters // (memory - 16 * largest_layer))"),
            "enough",
        ),
        "rounded down": (ranks("16 * parameters // (memory - 8 * largest_layer)"), "enough"),
        "rounded": (ranks("round(16 * parameters / (memory - 8 * largest_layer))"), "enough"),
        "one more": (ranks("16 * parameters // (memory - 8 * largest_layer) + 1"), "enough"),
        "SGD": (ranks("-(-8 * parameters // (memory - 8 * largest_layer))"), "enough"),
        "DDP's buckets": (ranks("-(-20 * parameters // (memory - 8 * largest_layer))"), "enough"),
        "half precision": (ranks("-(-8 * parameters // (memory - 4 * largest_layer))"), "enough"),
        "the layer shared, too": (
            ranks("-(-(16 * parameters + 8 * largest_layer) // memory)"),
            "enough",
        ),
        "the rest of the layers": (
            ranks("-(-16 * (parameters - largest_layer) // (memory - 8 * largest_layer))"),
            "enough",
        ),
        "a fraction": (ranks("16 * parameters / (memory - 8 * largest_layer)"), "enough"),
        "at least two": (
            ranks("max(2, -(-16 * parameters // (memory - 8 * largest_layer)))"),
            "enough",
        ),
        "powers of two": (
            ranks(
                "1 << max(0, (-(-16 * parameters // (memory - 8 * largest_layer)) - 1).bit_length())"
            ),
            "enough",
        ),
        "of one try": (ranks("8"), "enough"),
        "text": (ranks("'eight'"), "returned str"),
    },
}

RIGHT = {
    "11.5": {
        "outputs gathered as objects": (
            LAYERS.format(
                lines="parts = [None] * dist.get_world_size(); dist.all_gather_object(parts, hidden @ second.T); "
                "return sum(parts) + second_bias"
            )
        ),
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
    "11.3": {
        "math.ceil": "import math\n"
        + ranks("math.ceil(16 * parameters / (memory - 8 * largest_layer))"),
        "NumPy's": "import numpy\n"
        + ranks("numpy.ceil(16 * parameters / (memory - 8 * largest_layer))"),
        "counted up": """
def ranks_needed(parameters, largest_layer, memory):
    ranks = 1
    while 16 * parameters / ranks + 8 * largest_layer > memory:
        ranks += 1
    return ranks
""",
        "without negation": ranks(
            "(16 * parameters + memory - 8 * largest_layer - 1) // (memory - 8 * largest_layer)"
        ),
    },
}

FREED = """
def backward(x, shard, upstream):
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, upstream.T @ x, op=dist.ReduceOp.AVG)
    weight = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather_into_tensor(weight, shard)
    return upstream @ weight, part
"""
SHARE = "dist.reduce_scatter_tensor(part, upstream.T @ x, op=dist.ReduceOp.AVG)"
GATHER = "dist.all_gather_into_tensor(weight, shard)"
END = "return upstream @ weight, part"
ADAM = """
def sharded_adam(model, lr):
    parameters, ranks, rank = list(model.parameters()), dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.Adam(parameters[rank::ranks], lr=lr)

    def step():
        optimizer.step()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % ranks)

    return step
"""
MINE = "torch.optim.Adam(parameters[rank::ranks], lr=lr)"
SEND = "dist.broadcast(parameter.data, src=number % ranks)"
MESH = """
def my_groups(rows, columns):
    mesh, mine = torch.arange(rows * columns).reshape(rows, columns), []
    for lines in (mesh.tolist(), mesh.T.tolist()):
        for line in lines:
            group = dist.new_group(line)
            if dist.get_rank() in line:
                mine.append(group)
    return mine
"""


def changed(source: str, *changes: tuple[str, str]) -> str:
    """The solution with these lines in place of its own."""
    for line, other in changes:
        assert line in source, line
        source = source.replace(line, other)
    return source


def meshed(line: str) -> str:
    return f"def my_groups(rows, columns):\n    from torch.distributed.device_mesh import init_device_mesh\n    {line}\n"


LATER = "What need not be"
WRONG |= {
    "11.4": {
        "both whole": (
            changed(
                FREED,
                (SHARE, "gradient = upstream.T @ x"),
                (END, f"{SHARE.replace('upstream.T @ x', 'gradient')}; {END}"),
            ),
            LATER,
        ),
        "as in the lesson": (
            """
def backward(x, shard, upstream):
    weight = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather_into_tensor(weight, shard)
    gradient, part = upstream.T @ x, torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, gradient, op=dist.ReduceOp.AVG)
    return upstream @ weight, part
""",
            LATER,
        ),
        "gathered in parts and joined": (
            changed(
                FREED,
                (
                    GATHER,
                    "parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]; dist.all_gather(parts, shard); "
                    "weight = torch.cat(parts)",
                ),
            ),
            LATER,
        ),
        "both whole, then one deleted": (
            """
def backward(x, shard, upstream):
    weight = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather_into_tensor(weight, shard)
    gradient, of_x = upstream.T @ x, upstream @ weight
    del weight
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, gradient, op=dist.ReduceOp.AVG)
    return of_x, part
""",
            LATER,
        ),
        "joined first, and let go of": (
            """
def backward(x, shard, upstream):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    of_x = upstream @ torch.cat(parts)
    del parts
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, upstream.T @ x, op=dist.ReduceOp.AVG)
    return of_x, part
""",
            LATER,
        ),
        "joined and let go of in two lines": (
            """
def backward(x, shard, upstream):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    weight = torch.cat(parts)
    of_x = upstream @ weight
    del parts, weight
    gradient, part = upstream.T @ x, torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, gradient, op=dist.ReduceOp.AVG)
    return of_x, part
""",
            LATER,
        ),
        "the sum": (
            changed(FREED, (", op=dist.ReduceOp.AVG", "")),
            "rows of the weight is the sum over the ranks",
        ),
        "divided twice": (
            changed(FREED, (END, "return upstream @ weight, part / dist.get_world_size()")),
            "the mean, divided once more",
        ),
        "its own": (
            changed(
                FREED,
                (
                    SHARE,
                    "part = (upstream.T @ x).chunk(dist.get_world_size())[dist.get_rank()].clone()",
                ),
            ),
            "this rank's data alone",
        ),
        "all of it sent": (
            changed(
                FREED,
                (
                    SHARE,
                    "g = upstream.T @ x; dist.all_reduce(g, dist.ReduceOp.AVG); part = g.chunk(3)[dist.get_rank()].clone(); del g",
                ),
            ),
            "Which collective leaves",
        ),
        "the whole gradient": (
            changed(
                FREED, (SHARE, "part = upstream.T @ x; dist.all_reduce(part, dist.ReduceOp.AVG)")
            ),
            "that of the whole weight",
        ),
        "another's": (
            changed(
                FREED,
                (
                    SHARE,
                    "g = upstream.T @ x; dist.all_reduce(g, dist.ReduceOp.AVG); part = g.chunk(3)[dist.get_rank() - 1].clone()",
                ),
            ),
            r"that of rank \d's rows",
        ),
        "x averaged, too": (
            changed(
                FREED,
                (
                    END,
                    "gx = upstream @ weight; dist.all_reduce(gx, dist.ReduceOp.AVG); return gx, part",
                ),
            ),
            "x is the mean over the ranks",
        ),
        "x summed": (
            changed(FREED, (END, "gx = upstream @ weight; dist.all_reduce(gx); return gx, part")),
            "x is the sum over the ranks",
        ),
        "the other way round": (
            changed(FREED, (END, "return part, upstream @ weight")),
            r"the gradient of x is a tensor of \[\d+, \d+\] where",
        ),
        "transposed": (
            changed(FREED, (END, "return upstream @ weight, part.T")),
            "rows of the weight is a tensor of",
        ),
        "its own rows for x": (
            changed(FREED, (END, "n = len(shard); return upstream[:, :n] @ shard, part")),
            "gradient of x is other numbers",
        ),
        "upstream divided in place": (
            changed(
                FREED,
                (
                    SHARE,
                    "upstream /= 3; dist.reduce_scatter_tensor(part, upstream.T @ x); upstream *= 3; x += 1",
                ),
            ),
            "has changed x",
        ),
        "one gradient": (
            changed(FREED, (END, "return part")),
            "returned Tensor; two tensors are due",
        ),
        "rank 0 alone": (
            changed(FREED, (SHARE, f"if dist.get_rank() == 0: {SHARE}")),
            "waited for one another in vain|do not agree on collective",
        ),
    },
    "11.2": {
        "whole on each rank": (
            changed(ADAM, ("parameters[rank::ranks]", "parameters")),
            "Adam's whole state is",
        ),
        "nobody sends": (changed(ADAM, (SEND, "pass")), "did not move on rank"),
        "rank 0 sends": (changed(ADAM, ("src=number % ranks", "src=0")), "did not move on rank"),
        "rank 0 steps": (
            changed(
                ADAM,
                (MINE, "torch.optim.Adam(parameters, lr=lr)"),
                ("optimizer.step()", "optimizer.step() if rank == 0 else None"),
                ("src=number % ranks", "src=0"),
            ),
            "Adam's whole state is",
        ),
        "averaged": (
            changed(ADAM, (SEND, "dist.all_reduce(parameter.data, dist.ReduceOp.AVG)")),
            "are not those of Adam",
        ),
        "summed": (
            changed(ADAM, (SEND, "dist.all_reduce(parameter.data)")),
            "are not those of Adam",
        ),
        "SGD": (changed(ADAM, ("Adam(", "SGD(")), "are not those of Adam"),
        "AdamW": (
            changed(
                ADAM,
                (
                    "Adam(parameters[rank::ranks], lr=lr)",
                    "AdamW(parameters[rank::ranks], lr=lr, weight_decay=10.0)",
                ),
            ),
            "are not those of Adam",
        ),
        "Adam's own rate": (changed(ADAM, (", lr=lr", "")), "are not those of Adam with lr=0.0"),
        "anew in each step": (
            changed(
                ADAM,
                ("optimizer.step()", f"optimizer = {MINE}; optimizer.step()"),
                (f"    optimizer = {MINE}\n\n", ""),
            ),
            "after step 2",
        ),
        "blocks and turns": (
            changed(ADAM, ("parameters[rank::ranks]", "parameters[3 * rank : 3 * rank + 3]")),
            "did not move on rank",
        ),
        "the optimizer": (
            changed(ADAM, ("return step", "return optimizer")),
            "returned Adam; it is to return `step`",
        ),
        "at once": (changed(ADAM, ("return step", "step()")), "returned NoneType"),
        "a gradient is cleared": (
            changed(
                ADAM,
                ("optimizer.step()", "[p.grad.mul_(0) for p in parameters[:1]]; optimizer.step()"),
            ),
            "did not move|are not those of Adam|has changed",
        ),
        "one rank keeps all": (
            changed(
                ADAM,
                (
                    "parameters[rank::ranks]",
                    "(parameters if rank == 1 else [])  or parameters[-1:]",
                ),
                ("src=number % ranks", "src=1"),
            ),
            "rank 1 keeps",
        ),
        "for two ranks": (
            changed(
                ADAM,
                ("parameters[rank::ranks]", "parameters[rank::2]"),
                ("src=number % ranks", "src=number % 2"),
            ),
            "ranks together keep",
        ),
        "the same gradients are added": (
            changed(
                ADAM,
                (
                    "optimizer.step()",
                    "[dist.all_reduce(p.grad) for p in parameters if p.grad is not None]; optimizer.step()",
                ),
            ),
            "has changed the gradient of 7 of 8 parameters",
        ),
        "clears all gradients to zeros": (
            changed(
                ADAM,
                (
                    "optimizer.step()",
                    "optimizer.step(); [setattr(p, 'grad', torch.zeros_like(p)) for p in parameters]",
                ),
            ),
            "has changed the gradient of 8 of 8 parameters",
        ),
        "clears the gradients": (
            changed(ADAM, ("optimizer.step()", "optimizer.step(); model.zero_grad()")),
            "has changed the gradient of 7 of 8 parameters",
        ),
        "numbers those with a gradient": (
            changed(
                ADAM,
                ("enumerate(parameters)", "enumerate(p for p in parameters if p.grad is not None)"),
            ),
            "did not move on rank|are not those of Adam",
        ),
    },
    "11.6": {
        "column and row": (
            changed(MESH, ("return mine", "return mine[::-1]")),
            r"the row of rank 0 is \[0, 1",
        ),
        "the mesh's first dimension first": (
            meshed(
                "mesh = init_device_mesh('cpu', (rows, columns)); return mesh.get_group(0), mesh.get_group(1)"
            ),
            "the row of rank 0 is",
        ),
        "columns by rows": (
            meshed(
                "mesh = init_device_mesh('cpu', (columns, rows)); return mesh.get_group(1), mesh.get_group(0)"
            ),
            "the row of rank 0 is",
        ),
        "by columns": (
            changed(MESH, (".reshape(rows, columns)", ".reshape(columns, rows).T")),
            "the row of rank 0 is",
        ),
        "lists of ranks": (
            changed(MESH, ("mine.append(group)", "mine.append(line)")),
            "for the row of rank 0 you returned list",
        ),
        "the mesh": (
            meshed("return init_device_mesh('cpu', (rows, columns))"),
            "returned DeviceMesh; a pair",
        ),
        "all ranks": (
            changed(MESH, ("return mine", "return dist.group.WORLD, dist.group.WORLD")),
            "the row of rank 0 is",
        ),
        "the row alone": (
            changed(MESH, ("return mine", "return mine[0]")),
            "returned ProcessGroup; a pair",
        ),
        "the last groups": (
            changed(MESH, ("return mine", "return group, group")),
            "you returned a group of others, not a process group that it is in|the row of rank",
        ),
        "every group": (
            changed(
                MESH,
                (
                    "            if dist.get_rank() in line:\n                mine.append(group)",
                    "            mine.append(group)",
                ),
            ),
            "returned list; a pair",
        ),
        "square": (
            changed(MESH, (".reshape(rows, columns)", ".reshape(rows, -1)[:, :rows]")),
            "raised|the row of rank|waited",
        ),
        "the larger first": (
            changed(
                MESH,
                (".reshape(rows, columns)", ".reshape(max(rows, columns), min(rows, columns))"),
            ),
            "of 2 × 3 ranks, the row of rank",
        ),
        "never more columns than rows": (
            changed(MESH, (".reshape(rows, columns)", ".reshape(rows, columns)[:, :rows]")),
            "for the row of rank 2 you returned|returned list; a pair|the row of rank 0 is",
        ),
        "itself alone": (
            changed(MESH, ("dist.new_group(line)", "dist.new_group([dist.get_rank()])")),
            "the row of rank 0 is|raised|waited",
        ),
        "its own groups alone": (
            """
def my_groups(rows, columns):
    row, column = divmod(dist.get_rank(), columns)
    first = dist.new_group([row * columns + other for other in range(columns)])
    return first, dist.new_group([other * columns + column for other in range(rows)])
""",
            "waited for one another in vain|raised|Does every rank make every group",
        ),
    },
}
RIGHT |= {
    "11.4": {
        "divided by hand": changed(
            FREED,
            (", op=dist.ReduceOp.AVG", ""),
            (END, "return upstream @ weight, part / dist.get_world_size()"),
        ),
        "upstream divided before": changed(
            FREED,
            (SHARE, "dist.reduce_scatter_tensor(part, (upstream / dist.get_world_size()).T @ x)"),
        ),
        "the weight first, and let go of": """
def backward(x, shard, upstream):
    weight = torch.cat([shard] * dist.get_world_size())
    dist.all_gather_into_tensor(weight, shard)
    of_x = upstream @ weight
    del weight
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, torch.mm(upstream.t(), x), op=dist.ReduceOp.AVG)
    return [of_x, part]
""",
        "row by row": """
def backward(x, shard, upstream):
    of_x, mine = torch.zeros_like(x), None
    for rank, columns in enumerate(upstream.chunk(dist.get_world_size(), dim=1)):
        piece = columns.T @ x
        dist.reduce(piece, rank, op=dist.ReduceOp.AVG)
        rows = shard.clone()
        dist.broadcast(rows, rank)
        of_x += columns @ rows
        if rank == dist.get_rank():
            mine = piece
    return of_x, mine
""",
    },
    "11.2": {
        "PyTorch's": """
def sharded_adam(model, lr):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr).step
""",
        "in blocks": changed(
            ADAM,
            ("parameters[rank::ranks]", "parameters[3 * rank : 3 * rank + 3]"),
            ("number % ranks", "number // 3"),
        ),
        "added to nothing": changed(
            ADAM,
            (SEND, "parameter.data.mul_(number % ranks == rank); dist.all_reduce(parameter.data)"),
        ),
        "by hand": """
def sharded_adam(model, lr):
    mine = [(n, p) for n, p in enumerate(model.parameters()) if n % dist.get_world_size() == dist.get_rank()]
    state, count = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in mine}, 0

    @torch.no_grad()
    def step():
        nonlocal count
        count += 1
        for n, p in mine:
            if p.grad is not None:
                m, v = state[n]
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p -= lr * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
        for n, p in enumerate(model.parameters()):
            dist.broadcast(p, src=n % dist.get_world_size())

    return step
""",
        "the lightest rank next": """
def sharded_adam(model, lr):
    load, owner = [0] * dist.get_world_size(), {}
    for p in sorted(model.parameters(), key=lambda p: -p.numel()):
        owner[p] = load.index(min(load))
        load[owner[p]] += p.numel()
    optimizer = torch.optim.Adam([p for p in owner if owner[p] == dist.get_rank()], lr=lr)

    def step():
        optimizer.step()
        for p, rank in owner.items():
            dist.broadcast(p.data, rank)

    return step
""",
    },
    "11.6": {
        "a device mesh": meshed(
            "mesh = init_device_mesh('cpu', (rows, columns)); return mesh.get_group(1), mesh.get_group(0)"
        ),
        "a mesh with names": meshed(
            "mesh = init_device_mesh('cpu', (rows, columns), mesh_dim_names=('data', 'tensor')); "
            "return mesh['tensor'].get_group(), mesh['data'].get_group()"
        ),
        "PyTorch's subgroups": """
def my_groups(rows, columns):
    row, _ = dist.new_subgroups(columns)
    column, _ = dist.new_subgroups_by_enumeration([[r * columns + c for r in range(rows)] for c in range(columns)])
    return row, column
""",
        "columns first": """
def my_groups(rows, columns):
    rank, found = dist.get_rank(), {}
    for column in range(columns):
        found["column", column] = dist.new_group(range(column, rows * columns, columns))
    for row in range(rows):
        found["row", row] = dist.new_group(range(row * columns, (row + 1) * columns))
    return [found["row", rank // columns], found["column", rank % columns]]
""",
    },
}

AVERAGED = """
def averaged(x):
    ranks = dist.get_world_size()
    padded = nn.functional.pad(x.flatten(), (0, -x.numel() % ranks))
    part = padded.new_empty(len(padded) // ranks)
    dist.reduce_scatter_tensor(part, padded)
    whole = torch.empty_like(padded)
    dist.all_gather_into_tensor(whole, part / ranks)
    return whole[: x.numel()].reshape(x.shape)
"""
SCATTER = "dist.reduce_scatter_tensor(part, padded)"
GATHER_PARTS = "dist.all_gather_into_tensor(whole, part / ranks)"
WHOLE_SHAPE = "return whole[: x.numel()].reshape(x.shape)"
PAD = "nn.functional.pad(x.flatten(), (0, -x.numel() % ranks))"
WRONG["11.1"] = {
    "all_reduce": (
        "def averaged(x):\n    y = x.clone(); dist.all_reduce(y); return y / dist.get_world_size()\n",
        "another collective, allreduce",
    ),
    "the sum": (changed(AVERAGED, ("part / ranks", "part")), "where the mean is"),
    "divided twice": (
        changed(AVERAGED, (WHOLE_SHAPE, "return whole[: x.numel()].reshape(x.shape) / ranks")),
        "where the mean is",
    ),
    "flat": (
        changed(AVERAGED, (WHOLE_SHAPE, "return whole[: x.numel()]")),
        "Return the shape of x",
    ),
    "with the padding": (changed(AVERAGED, (WHOLE_SHAPE, "return whole")), "Return the shape of x"),
    "not padded": (changed(AVERAGED, (PAD, "x.flatten()")), "raised|waited|ended its process"),
    "in place": (
        changed(AVERAGED, (WHOLE_SHAPE, "return x.copy_(whole[: x.numel()].reshape(x.shape))")),
        "has changed x",
    ),
    "its own part": (
        changed(AVERAGED, (WHOLE_SHAPE, "return part / ranks")),
        "Return the shape of x|where the mean is",
    ),
    "its own tensor": ("def averaged(x): return x.clone()\n", "where the mean is"),
    "nothing": (changed(AVERAGED, (WHOLE_SHAPE, "whole")), "returned NoneType"),
    "for two ranks": (
        changed(AVERAGED, ("ranks = dist.get_world_size()", "ranks = 2")),
        "raised|waited|ended its process",
    ),
    "gathered whole": (
        "def averaged(x):\n    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(every, x)\n    return sum(every) / len(every)\n",
        "gave only 0 bytes of x to a reduce_scatter",
    ),
    "a reduce_scatter that is not used": (
        changed(
            AVERAGED,
            ("whole = torch.empty_like(padded)", "whole = padded.new_empty(ranks * len(padded))"),
            (GATHER_PARTS, "dist.all_gather_into_tensor(whole, padded)"),
            (WHOLE_SHAPE, "return whole.view(ranks, -1).mean(0)[: x.numel()].reshape(x.shape)"),
        ),
        "bytes to an all_gather",
    ),
    "objects": (
        "def averaged(x):\n    every = [None] * dist.get_world_size()\n"
        "    dist.all_gather_object(every, x)\n    return sum(every) / len(every)\n",
        "gave only 0 bytes of x to a reduce_scatter|another collective",
    ),
    "broadcasts": (
        "def averaged(x):\n    total = torch.zeros_like(x)\n    for rank in range(dist.get_world_size()):\n"
        "        y = x.clone()\n        dist.broadcast(y, rank)\n        total += y\n    return total / dist.get_world_size()\n",
        "another collective, broadcast",
    ),
}
RIGHT["11.1"] = {
    "lists": """
def averaged(x):
    ranks = dist.get_world_size()
    flat = torch.cat([x.reshape(-1), x.new_zeros(-x.numel() % ranks)]) / ranks
    part = torch.empty_like(flat[: len(flat) // ranks])
    dist.reduce_scatter(part, list(flat.chunk(ranks)))
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part)
    return torch.cat(parts)[: x.numel()].view_as(x)
""",
    "always padded": changed(AVERAGED, ("-x.numel() % ranks", "ranks - x.numel() % ranks")),
    "divided at the end": changed(
        AVERAGED,
        ("part / ranks", "part"),
        (WHOLE_SHAPE, "return (whole / ranks)[: x.numel()].reshape(x.shape)"),
    ),
    "new zeros": changed(
        AVERAGED,
        (PAD, "x.new_zeros(-(-x.numel() // ranks) * ranks); padded[: x.numel()] = x.flatten()"),
    ),
}

GO_ON = """
def go_on(build, folder, batches):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = build()
    for part in [*model, model]:
        fully_shard(part)
    model.to_empty(device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return model
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
SET = "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)"
SAVE = 'checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)'
LOAD = 'checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)'
WRONG["11.7"] = {
    "built on the host": (
        changed(GO_ON, ('with torch.device("meta")', 'with torch.device("cpu")')),
        "on cpu, where it would not fit",
    ),
    "no clipping": (changed(GO_ON, (CLIP, "pass")), "without clipping"),
    "another limit": (
        changed(GO_ON, ("model.parameters(), 1.0)", "model.parameters(), 0.5)")),
        "another training",
    ),
    "gradients add up": (changed(GO_ON, ("optimizer.zero_grad()", "pass")), "gradients add up"),
    "not saved": (changed(GO_ON, (SAVE, "pass")), "from before the training"),
    "saved before the training": (
        changed(
            GO_ON,
            ("for x, y in batches", f"{SAVE}\n    for x, y in batches"),
            (f"    {SAVE}\n    return", "    return"),
        ),
        "from before the training",
    ),
    "saved elsewhere": (
        changed(GO_ON, (SAVE, SAVE.replace("=folder", '=folder + "/new"'))),
        "from before the training",
    ),
    "the optimizer starts anew": (
        changed(
            GO_ON,
            (
                SET,
                f"{SET}\n    optimizer = torch.optim.Adam(model.parameters(), lr=optimizer.param_groups[0]['lr'])",
            ),
        ),
        "Adam starts anew",
    ),
    "Adam's own rate": (
        changed(GO_ON, (SET, f"{SET}\n    optimizer.param_groups[0]['lr'] = 1e-3")),
        "another learning rate",
    ),
    "the model alone is set": (
        changed(GO_ON, (SET, "model.load_state_dict(weights)")),
        "another training|another learning rate|Adam starts anew",
    ),
    "the whole model at once": (
        changed(GO_ON, ("for part in [*model, model]", "for part in [model]")),
        "0 of 3 layers",
    ),
    "some layers alone": (
        changed(GO_ON, ("[*model, model]", "[model[0], model]")),
        "1 of 3 layers",
    ),
    "not divided": (
        changed(GO_ON, ("    for part in [*model, model]:\n        fully_shard(part)\n", "")),
        "are not divided by rows|raised|waited|another training",
    ),
    "nothing returned": (
        changed(GO_ON, ("return model", "return None")),
        "returned NoneType, not the model",
    ),
    "the optimizer returned": (
        changed(GO_ON, ("return model", "return optimizer")),
        "returned Adam, not the model",
    ),
    "the sum of squares": (
        changed(
            GO_ON, ("nn.functional.mse_loss(model(x), y)", "((model(x) - y).square().sum() * 1e-6)")
        ),
        "another training|without clipping",
    ),
    "one step": (
        changed(GO_ON, ("for x, y in batches", "for x, y in batches[:1]")),
        "another training",
    ),
    "one rank saves": (
        changed(GO_ON, (SAVE, f"if dist.get_rank() == 0: {SAVE}")),
        "waited for one another in vain|raised|took longer",
    ),
}
RIGHT["11.7"] = {
    "layers with parameters alone": changed(
        GO_ON,
        (
            "for part in [*model, model]:\n        fully_shard(part)",
            "for part in model:\n        if list(part.parameters()):\n            fully_shard(part)\n    fully_shard(model)",
        ),
    ),
    "layers without the model": changed(
        GO_ON, ("[*model, model]", "[part for part in model if list(part.parameters())]")
    ),
    "gradients cleared afterwards": changed(
        GO_ON,
        ("        optimizer.zero_grad()\n", ""),
        ("optimizer.step()", "optimizer.step()\n        model.zero_grad()"),
    ),
    "no resharding": changed(
        GO_ON, ("fully_shard(part)", "fully_shard(part, reshard_after_forward=False)")
    ),
    "two state dicts": changed(
        GO_ON,
        (
            "import get_state_dict, set_state_dict",
            "import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict",
        ),
        (
            SET,
            "set_model_state_dict(model, weights); set_optimizer_state_dict(model, optimizer, moments)",
        ),
        (
            "weights, moments = get_state_dict(model, optimizer)",
            "weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)",
        ),
    ),
}

WRONG["11.5"]["gathered as DTensors"] = (
    """
def two_layers(x, first, first_bias, second, second_bias):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [DTensor.from_local(part, mesh, [Shard(0)]).full_tensor() for part in (first, first_bias)]
    columns = DTensor.from_local(second.contiguous(), mesh, [Shard(1)]).full_tensor()
    return torch.relu(x @ rows[0].T + rows[1]) @ columns.T + second_bias
""",
    "Leave the weights where they are",
)

WRONG["11.1"]["all of x for each rank"] = (
    """
def averaged(x):
    ranks, total = dist.get_world_size(), x.new_empty(x.numel())
    dist.reduce_scatter_tensor(total, x.flatten().repeat(ranks))
    return (total / ranks).reshape(x.shape)
""",
    "bytes to a reduce_scatter, and x has",
)
RIGHT["11.1"]["number by number"] = """
def averaged(x):
    ranks, flat, means = dist.get_world_size(), x.flatten(), []
    for numbers in flat.split(ranks):
        padded = torch.zeros(ranks)
        padded[: len(numbers)] = numbers
        mine = torch.empty(1)
        dist.reduce_scatter_tensor(mine, padded)
        dist.all_gather_into_tensor(padded, mine / ranks)
        means.append(padded[: len(numbers)])
    return torch.cat(means).view(x.shape)
"""

ON_HOST = """
def sharded_adam(model, lr):
    parameters = list(model.parameters())
    copies = [nn.Parameter(parameter.detach().cpu()) for parameter in parameters]
    optimizer = torch.optim.Adam(copies, lr=lr)

    def step():
        for copy, parameter in zip(copies, parameters):
            copy.grad = None if parameter.grad is None else parameter.grad.cpu()
        optimizer.step()
        for copy, parameter in zip(copies, parameters):
            parameter.data.copy_(copy.data)

    return step
"""
HALF = (
    "half = parameter.data.half(); dist.broadcast(half, number % ranks); parameter.data.copy_(half)"
)
WRONG["11.2"] |= {
    "all of the state on the host": (ON_HOST, "Adam's whole state is"),
    "AdamW as it is": (changed(ADAM, ("Adam(", "AdamW(")), "are not those of Adam"),
    "sent in half precision": (changed(ADAM, (SEND, HALF)), "are not those of Adam"),
}

WRONG["11.4"] |= {
    "inputs and upstreams gathered": (
        """
def backward(x, share, upstream):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    xs, upstreams = ([torch.empty_like(each) for _ in range(ranks)] for each in (x, upstream))
    dist.all_gather(xs, x)
    dist.all_gather(upstreams, upstream)
    part = sum(u.chunk(ranks, dim=1)[rank].T @ y for u, y in zip(upstreams, xs)) / ranks
    weight = share.new_empty(ranks * len(share), share.shape[1])
    dist.all_gather_into_tensor(weight, share)
    return upstream @ weight, part
""",
        "Which collective leaves",
    ),
    "gradients gathered piece by piece": (
        """
def backward(x, share, upstream):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for number, columns in enumerate(upstream.chunk(ranks, dim=1)):
        piece = columns.T @ x
        pieces = piece.new_empty(ranks * len(piece), piece.shape[1])
        dist.all_gather_into_tensor(pieces, piece)
        if number == rank:
            part = pieces.view(ranks, *piece.shape).mean(0)
        del piece, pieces
    weight = share.new_empty(ranks * len(share), share.shape[1])
    dist.all_gather_into_tensor(weight, share)
    return upstream @ weight, part
""",
        "Which collective leaves",
    ),
}
RIGHT["11.4"]["one buffer for both"] = """
def backward(x, share, upstream):
    buffer, part = torch.mm(upstream.T, x), torch.empty_like(share)
    dist.reduce_scatter_tensor(part, buffer, op=dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(buffer, share)
    return torch.mm(upstream, buffer), part
"""

WRONG["11.6"]["at least two rows"] = (
    changed(
        MESH,
        (
            "def my_groups(rows, columns):\n",
            "def my_groups(rows, columns):\n    rows, columns = max(rows, 2), min(columns, 3)\n",
        ),
    ),
    "the row of rank|the column of rank|raised",
)

EMPTY = '    model.to_empty(device="cuda")\n'
DIVIDE = "    for part in [*model, model]:\n        fully_shard(part)\n"
NORM = "norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()"
WRONG["11.7"] |= {
    "memory before the division": (
        changed(GO_ON, (DIVIDE + EMPTY, EMPTY + DIVIDE)),
        "gave memory on cuda to whole layers",
    ),
    "the sum of the errors": (
        changed(GO_ON, ("mse_loss(model(x), y)", "mse_loss(model(x), y, reduction='sum')")),
        "another training",
    ),
    "always scaled": (
        changed(
            GO_ON,
            (CLIP, f"{NORM}; torch._foreach_div_([p.grad for p in model.parameters()], norm)"),
        ),
        "another training|raised",
    ),
    "the weights alone are saved": (
        changed(GO_ON, (SAVE, 'checkpoint.save({"model": weights}, checkpoint_id=folder)')),
        "no checkpoint with the weights and averages",
    ),
    "saved with other keys": (
        changed(
            GO_ON,
            (
                SAVE,
                'checkpoint.save({"weights": weights, "moments": moments}, checkpoint_id=folder)',
            ),
        ),
        "no checkpoint with the weights and averages",
    ),
    "loaded with other keys": (
        changed(
            GO_ON,
            (
                LOAD,
                'checkpoint.load({"weights": weights, "moments": moments}, checkpoint_id=folder)',
            ),
        ),
        "raised RuntimeError: Missing key in checkpoint",
    ),
    "clipped one by one": (
        changed(GO_ON, (CLIP, "[nn.utils.clip_grad_norm_([p], 1.0) for p in model.parameters()]")),
        "another training",
    ),
}
