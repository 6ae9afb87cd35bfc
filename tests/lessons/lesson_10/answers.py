"""Wrong answers to the exercises 10.1 to 10.3, and a part of what the check says to each; and right ones unlike the solution."""

GRADIENTS = """
def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            {lines}
"""

MEAN = "dist.all_reduce(parameter.grad); parameter.grad /= dist.get_world_size()"

ROWS = """
def my_rows(count, rank, ranks, epoch):
    {lines}
"""
ORDER = "order = torch.randperm(count, generator=torch.Generator().manual_seed({seed})).tolist()"


def rows(result: str, seed: str = "epoch") -> str:
    return ROWS.format(lines=f"{ORDER.format(seed=seed)}; return {result}")


PARTS = """
def accumulate(model, parts):
    {lines}
"""
HAND = """
def accumulate(model, parts):
    with model.no_sync():
        for part in parts:
            (model(part).square().mean() / len(parts)).backward()
    for parameter in model.parameters():
        {lines}
"""


WRONG = {
    "10.1": {
        "always two ranks": (
            GRADIENTS.format(lines="dist.all_reduce(parameter.grad); parameter.grad /= 2"),
            "rank 0 of 3 had",
        ),
        "on rank 0 alone": (
            GRADIENTS.format(
                lines="dist.reduce(parameter.grad, 0); parameter.grad /= dist.get_world_size()"
            ),
            "rank 1 of 2 had the gradient",
        ),
        "not waited for": (
            GRADIENTS.format(
                lines="dist.all_reduce(parameter.grad, async_op=True); parameter.grad /= dist.get_world_size()"
            ),
            "With `async_op=True`, `wait\\(\\)` before you read",
        ),
        "PyTorch divides, and nobody waits": (
            GRADIENTS.format(
                lines="dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, async_op=True)"
            ),
            "With `async_op=True`, `wait\\(\\)` before you return",
        ),
        "in a copy": (
            GRADIENTS.format(
                lines="mean = parameter.grad.clone(); dist.all_reduce(mean); mean /= dist.get_world_size()"
            ),
            "and it has .* now",
        ),
        "the parameters": (
            GRADIENTS.format(lines="dist.all_reduce(parameter.data); parameter.data /= 4"),
            "has changed its parameters",
        ),
        "without a gradient": (
            "def average_gradients(model):\n for parameter in model.parameters():\n  dist.all_reduce(parameter.grad)",
            "your answer raised .*given rank [01] of 2",
        ),
        "zeros for none": (
            GRADIENTS.format(lines="pass")
            .replace("is not None", "is None")
            .replace("pass", "parameter.grad = torch.zeros_like(parameter)")
            + "    for parameter in model.parameters():\n"
            "        dist.all_reduce(parameter.grad); parameter.grad /= dist.get_world_size()\n",
            "a parameter without a gradient has .*0, 0.* on rank",
        ),
        "what is trained": (
            GRADIENTS.format(lines=MEAN).replace(
                "parameter.grad is not None", "parameter.requires_grad"
            ),
            "your answer raised .*given rank [01] of 2",
        ),
        "those of zeros left out": (
            GRADIENTS.format(lines=f"if parameter.grad.any(): {MEAN}"),
            "waited for one another in vain|the mean over all ranks",
        ),
        "divided twice": (
            GRADIENTS.format(lines=f"parameter.grad /= dist.get_world_size(); {MEAN}"),
            "the mean over all ranks is",
        ),
        "the largest": (
            GRADIENTS.format(lines="dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)"),
            "the mean over all ranks is",
        ),
        "until one has none": (
            GRADIENTS.format(lines=f"{MEAN}\n        else: break"),
            "the mean over all ranks is",
        ),
        "the first parameter": (
            GRADIENTS.format(lines=f"{MEAN}; break"),
            "the mean over all ranks is",
        ),
        "from rank 0": (
            GRADIENTS.format(lines="dist.broadcast(parameter.grad, 0)"),
            "the mean over all ranks is",
        ),
        "rank 0 alone asks": (
            GRADIENTS.format(lines="if dist.get_rank() == 0: dist.all_reduce(parameter.grad)"),
            "waited for one another in vain",
        ),
    },
    "10.2": {
        "each rank its own order": (
            ROWS.format(lines="return torch.randperm(count)[rank::ranks].tolist()"),
            "went to none of",
        ),
        "one order for all epochs": (
            rows("order[rank::ranks]", "0"),
            "most rows follow the same row",
        ),
        "ten orders in turn": (
            rows("order[rank::ranks]", "epoch % 10"),
            "most rows follow the same row",
        ),
        "by the hash of a text": (
            rows("order[rank::ranks]", "hash(str(epoch))"),
            "went to none of",
        ),
        "one order for two epochs": (
            rows("order[rank::ranks]", "epoch // 2"),
            "most rows follow the same row",
        ),
        "one order, turned": (
            rows("(order[epoch:] + order[:epoch])[rank::ranks]", "0"),
            "most rows follow the same row",
        ),
        "one order, backwards": (
            rows("order[:: 1 if epoch % 2 else -1][rank::ranks]", "0"),
            "follow the same row|came up once more",
        ),
        "its own rows, shuffled": (
            ROWS.format(
                lines="import random; own = list(range(rank, count, ranks)); random.Random(epoch).shuffle(own); return own"
            ),
            "the same rows are together on a rank",
        ),
        "its own part, shuffled": (
            ROWS.format(
                lines="import random; own = list(range(count))[count * rank // ranks : count * (rank + 1) // ranks]; "
                "random.Random(epoch).shuffle(own); return own"
            ),
            "the same rows are together on a rank",
        ),
        "parts that go round": (
            ROWS.format(
                lines="import random; own = list(range((rank + epoch) % ranks, count, ranks)); "
                "random.Random(epoch).shuffle(own); return own"
            ),
            "the same rows are together on a rank",
        ),
        "the first epoch in order": (
            rows("sorted(order[rank::ranks]) if epoch % 2 else order[rank::ranks]"),
            "come in their own order",
        ),
        "epoch 0 in order": (
            ROWS.format(
                lines="order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)) if epoch else torch.arange(count); "
                "return order[rank::ranks].tolist()"
            ),
            "in epoch 0 the rows come in their own order",
        ),
        "in chunks": (
            rows("list(torch.tensor(order).chunk(ranks)[rank])"),
            "the one with fewer would wait",
        ),
        "the seed set again": (
            ROWS.format(
                lines="seed = torch.initial_seed(); torch.manual_seed(epoch); order = torch.randperm(count); torch.manual_seed(seed); "
                "return order[rank::ranks].tolist()"
            ),
            "had a random state of its own, and your function has changed it",
        ),
        "seeds the global generator": (
            ROWS.format(
                lines="torch.manual_seed(epoch); return torch.randperm(count)[rank::ranks].tolist()"
            ),
            "torch draws the same",
        ),
        "seeds that of random": (
            ROWS.format(
                lines="import random; random.seed(epoch); return random.sample(range(count), count)[rank::ranks]"
            ),
            "random draws the same",
        ),
        "seeds NumPy's": (
            ROWS.format(
                lines="import numpy; numpy.random.seed(epoch); return numpy.random.permutation(count)[rank::ranks]"
            ),
            "NumPy draws the same",
        ),
        "one order for the process": (
            ROWS.format(
                lines="order = orders.setdefault(epoch, torch.randperm(count).tolist()); return order[rank::ranks]"
            ).replace("epoch):", "epoch, orders={}):"),
            "went to none of",
        ),
        "one stream of orders": (
            ROWS.format(
                lines="return torch.randperm(count, generator=draws)[rank::ranks].tolist()"
            ).replace("epoch):", "epoch, draws=torch.Generator()):"),
            "asked again for epoch",
        ),
        "a seed for each rank": (rows("order[rank::ranks]", "epoch + rank"), "went to none of"),
        "without the last rows": (
            rows("order[rank * (count // ranks) : (rank + 1) * (count // ranks)]"),
            "went to none of",
        ),
        "the rest to the last rank": (
            rows(
                "order[rank * (count // ranks) : None if rank == ranks - 1 else (rank + 1) * (count // ranks)]"
            ),
            "the one with fewer would wait|went to none of",
        ),
        "filled up": (rows("(order + order[: -count % ranks])[rank::ranks]"), "came up once more"),
        "all rows": (rows("order"), "came up once more"),
        "a number": (ROWS.format(lines="return count // ranks"), "returned int"),
        "fractions": (
            ROWS.format(lines="return torch.rand(count)[rank::ranks]"),
            "returned Tensor",
        ),
    },
    "10.3": {
        "never sent": (
            PARTS.format(
                lines="with model.no_sync():\n        for part in parts: (model(part).square().mean() / len(parts)).backward()"
            ),
            "nothing was sent",
        ),
        "not divided": (
            """
def accumulate(model, parts):
    with model.no_sync():
        for part in parts[:-1]:
            model(part).square().mean().backward()
    model(parts[-1]).square().mean().backward()
""",
            "that of all ranks' rows in one batch is",
        ),
        "the last part alone": (
            "def accumulate(model, parts): model(parts[-1]).square().mean().backward()",
            "in one batch is",
        ),
        "without DDP": (
            "def accumulate(model, parts):\n for part in parts: (model.module(part).square().mean() / len(parts)).backward()",
            r"nothing was sent|sent \d times",
        ),
        "one batch": (
            PARTS.format(lines="model(torch.cat(parts)).square().mean().backward()"),
            "one at a time",
        ),
        "one batch, under DDP": (
            PARTS.format(lines="model.module(torch.cat(parts)).square().mean().backward()"),
            "nothing was sent",
        ),
        "one loss": (
            PARTS.format(
                lines="(sum(model(part).square().mean() for part in parts) / len(parts)).backward()"
            ),
            r"sent \d times|were there still",
        ),
        "a list of losses": (
            PARTS.format(
                lines="losses = [model.module(part).square().mean() for part in parts]; model.require_backward_grad_sync = False"
            )
            + "    (sum(losses) / len(losses)).backward(); "
            + "[(dist.all_reduce(p.grad), p.grad.div_(dist.get_world_size())) for p in model.parameters()]\n",
            "were there still",
        ),
        "sent before the rest": (
            """
def accumulate(model, parts):
    (model(parts[0]).square().mean() / len(parts)).backward()
    with model.no_sync():
        for part in parts[1:]:
            (model(part).square().mean() / len(parts)).backward()
""",
            "that of all ranks' rows in one batch is",
        ),
        "no_sync around the last, too": (
            PARTS.format(
                lines="with model.no_sync():\n        for part in parts[:-1]: (model(part).square().mean() / len(parts)).backward()\n"
                "        (model(parts[-1]).square().mean() / len(parts)).backward()"
            ),
            "nothing was sent",
        ),
        "the sum of the ranks": (
            HAND.format(lines="dist.all_reduce(parameter.grad)"),
            "in one batch is",
        ),
        "each sent by hand": (
            PARTS.format(lines="for part in parts:\n        with model.no_sync():\n")
            + "            (model(part).square().mean() / len(parts)).backward()\n"
            "        for parameter in model.parameters(): dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)\n",
            r"sent \d times|in one batch is",
        ),
        "and a step": (
            PARTS.format(lines="with model.no_sync():\n        for part in parts[:-1]:")
            + "            (model(part).square().mean() / len(parts)).backward()\n"
            "    (model(parts[-1]).square().mean() / len(parts)).backward()\n"
            "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n",
            "the weights have changed",
        ),
    },
}

RIGHT = {
    "10.1": {
        "PyTorch divides": GRADIENTS.format(
            lines="dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)"
        ),
        "divided before": GRADIENTS.format(
            lines="parameter.grad /= dist.get_world_size(); dist.all_reduce(parameter.grad)"
        ),
        "gathered": GRADIENTS.format(
            lines="parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]; "
            "dist.all_gather(parts, parameter.grad); parameter.grad = torch.stack(parts).mean(0)"
        ),
        "one bucket": """
def average_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for gradient, part in zip(gradients, bucket.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))
""",
        "all at once, then waited for": """
def average_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    torch._foreach_div_(gradients, dist.get_world_size())
""",
    },
    "10.2": {
        "by the hash of numbers": rows("order[rank::ranks]", "hash((3, epoch))"),
        "NumPy's array": ROWS.format(
            lines="import numpy; return numpy.random.default_rng(epoch).permutation(count)[rank::ranks]"
        ),
        "a tensor": ROWS.format(
            lines="return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tensor_split(ranks)[rank]"
        ),
        "a generator kept": (
            "draws = torch.Generator()\n"
            + ROWS.format(
                lines="return torch.randperm(count, generator=draws.manual_seed(epoch))[rank::ranks]"
            )
        ),
        "a shuffle": ROWS.format(
            lines="import random; order = list(range(count)); random.Random(f'epoch {epoch}').shuffle(order); "
            "return tuple(order[rank::ranks])"
        ),
        "the state put back": ROWS.format(
            lines="state = torch.get_rng_state(); torch.manual_seed(epoch); order = torch.randperm(count)[rank::ranks]; "
            "torch.set_rng_state(state); return list(order)"
        ),
        "rank 0 deals": ROWS.format(
            lines="order = torch.randperm(count, generator=torch.Generator().manual_seed(7 * epoch + 1)); "
            "dist.broadcast(order, 0); return order[rank::ranks].tolist()"
        ),
        "sorted by a hash": ROWS.format(
            lines="import hashlib; key = lambda row: hashlib.md5(f'{row} in {epoch}'.encode()).digest(); "
            "return sorted(range(count), key=key)[rank::ranks]"
        ),
    },
    "10.3": {
        "averaged by hand": HAND.format(
            lines="dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)"
        ),
        "gathered by hand": HAND.format(
            lines="parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]; "
            "dist.all_gather(parts, parameter.grad); parameter.grad = torch.stack(parts).mean(0)"
        ),
        "as in the lesson": """
def accumulate(model, parts):
    from contextlib import nullcontext
    for part in parts:
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss = model(part).square().mean() / len(parts)
            loss.backward()
""",
        "the switch of DDP": """
def accumulate(model, parts):
    for index, part in enumerate(parts):
        model.require_backward_grad_sync = index == len(parts) - 1
        output = model(part)
        (output.square().sum() / sum(map(len, parts))).backward()
""",
        "without DDP's wrapper": """
def accumulate(model, parts):
    for part in parts:
        (model.module(part).square().mean() / len(parts)).backward()
    for parameter in model.module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
""",
        "gradients in a list": """
def accumulate(model, parts):
    parameters = list(model.module.parameters())
    found = [torch.autograd.grad(model.module(part).square().mean(), parameters) for part in parts]
    for parameter, *gradients in zip(parameters, *found):
        parameter.grad = sum(gradients) / len(parts)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
""",
    },
}
