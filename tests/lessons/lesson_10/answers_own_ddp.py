"""Wrong answers to exercise 10.5, a DDP of one's own, and a part of what the check says to each; and right ones unlike the solution."""

OWN = """
def distribute(model, bucket_bytes):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    bucket, sent = [], []

    def send():
        flat = torch.cat([p.grad.flatten() for p in bucket])
        sent.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))
        bucket.clear()

    def ready(parameter):
        bucket.append(parameter)
        if sum(p.grad.nbytes for p in bucket) >= bucket_bytes:
            send()

    def finish():
        if bucket:
            send()
        for work, flat, parameters in sent:
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(part.view_as(p))
        sent.clear()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(ready)
    return finish
"""


def own(*changes: tuple[str, str]) -> str:
    """The solution with these lines in place of its own."""
    source = OWN
    for line, other in changes:
        assert line in source, line
        source = source.replace(line, other)
    return source


BROADCAST = "dist.broadcast(tensor, src=0)"
HOOKS = "parameter.register_post_accumulate_grad_hook(ready)"
SEND = "sent.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))"
MEAN = "flat /= dist.get_world_size()"
FLUSH = "        if bucket:\n            send()\n        for work"
FULL = "if sum(p.grad.nbytes for p in bucket) >= bucket_bytes:"
NOT_THE_MEAN = "not the mean of all ranks'"

WRONG = {
    "10.5": {
        "so many gradients a bucket": (
            own((FULL, "if len(bucket) >= 3:")),
            "bytes of gradients; a bucket is full with",
        ),
        "sent from a stream that does not wait for the copy": (
            own((SEND, f"with torch.cuda.stream(torch.cuda.Stream()):\n            {SEND}")),
            "nothing orders `all_reduce` after",
        ),
        "no broadcast": (own((BROADCAST, "pass")), "does not begin with rank 0's parameters"),
        "broadcast without the buffers": (
            own(("model.state_dict().values()", "model.parameters()")),
            "parameters and buffers",
        ),
        "each rank from itself": (
            own((BROADCAST, "tensor.copy_(tensor.clone())")),
            "does not begin with rank 0's",
        ),
        "floating point alone": (
            own(
                (BROADCAST, "dist.broadcast(tensor, src=0) if tensor.is_floating_point() else None")
            ),
            "does not begin with rank 0's",
        ),
        "the mean of the weights": (
            own((BROADCAST, "dist.all_reduce(tensor, dist.ReduceOp.AVG)")),
            "does not begin with rank 0's",
        ),
        "the sum": (own((MEAN, "pass")), NOT_THE_MEAN),
        "divided by two": (own((MEAN, "flat /= 2")), NOT_THE_MEAN),
        "divided twice": (
            own(("async_op=True", "op=dist.ReduceOp.AVG, async_op=True")),
            NOT_THE_MEAN,
        ),
        "hook too early": (
            own((HOOKS, "parameter.register_hook(lambda grad, p=parameter: ready(p))")),
            "in the backward of step 1, rank 0 read a gradient that was None",
        ),
        "hook too early, with what is there": (
            own(
                (HOOKS, "parameter.register_hook(lambda grad, p=parameter: ready(p))"),
                (
                    "bucket.append(parameter)",
                    "bucket.extend([parameter] if parameter.grad is not None else [])",
                ),
            ),
            "0 of .* sent on rank 0. Is a gradient there when its hook is called?",
        ),
        "the hook's gradient in place of all": (
            own(
                (HOOKS, "parameter.register_hook(lambda grad, p=parameter: ready((p, grad)))"),
                ("[p.grad.flatten() for p in bucket]", "[grad.flatten() for _, grad in bucket]"),
                ("sum(p.grad.nbytes for p in bucket)", "sum(grad.nbytes for _, grad in bucket)"),
                ("[p.numel() for p in parameters]", "[p.numel() for p, _ in parameters]"),
                ("for p, part in", "for (p, _), part in"),
                ("p.grad.copy_(part.view_as(p))", "p.grad = part.view_as(p)"),
            ),
            "in step 3, .* not the mean",
        ),
        "the first bucket in time": (
            own(
                (FULL, "if not sent and sum(p.grad.nbytes for p in bucket) >= bucket_bytes:"),
                (
                    FLUSH,
                    "        them = list(bucket)\n        while them: bucket[:] = them[:4]; del them[:4]; send()\n        for work",
                ),
            ),
            "complete gradients had not been sent when another came",
        ),
        "the last bucket is not sent": (
            own((FLUSH, "        for work")),
            "what sends a bucket that is not full",
        ),
        "nobody waits": (own(("work.wait()", "pass")), NOT_THE_MEAN),
        "waits after it has read": (
            own(
                ("            work.wait()\n", ""),
                ("sent.clear()", "[work.wait() for work, *_ in sent]; sent.clear()"),
            ),
            NOT_THE_MEAN,
        ),
        "waits for the first alone": (own(("work.wait()", "sent[0][0].wait()")), NOT_THE_MEAN),
        "nothing comes back": (
            own(("p.grad.copy_(part.view_as(p))", "part.view_as(p)")),
            NOT_THE_MEAN,
        ),
        "kept for the next step": (
            own(("        sent.clear()\n", "")),
            "What is kept of the steps before",
        ),
        "waits at once": (
            own(
                (
                    SEND,
                    "sent.append((dist.all_reduce(flat, async_op=True), flat, list(bucket))); sent[-1][0].wait()",
                )
            ),
            "async_op",
        ),
        "waits for the bucket before": (
            own((SEND, f"if sent: sent[-1][0].wait()\n        {SEND}")),
            "the backward pass stood still",
        ),
        "the host waits for the bucket before": (
            own((SEND, f"if sent: sent[-1][0].wait(); torch.cuda.synchronize()\n        {SEND}")),
            "the backward pass stood still",
        ),
        "not asynchronous": (
            own(
                (SEND, "dist.all_reduce(flat); sent.append((None, flat, list(bucket)))"),
                ("work.wait()", "pass"),
            ),
            "async_op",
        ),
        "all at the end": (own((FULL, "if False:")), "one message took .* bytes"),
        "buckets at the end": (
            own(
                (FULL, "if False:"),
                (
                    FLUSH,
                    "        them = list(bucket)\n        while them: bucket[:] = them[:4]; del them[:4]; send()\n        for work",
                ),
            ),
            "complete gradients had not been sent when another came",
        ),
        "one message a gradient": (
            own((FULL, "if True:")),
            "bytes of gradients; a bucket is full with",
        ),
        "parameters counted, not bytes": (
            own((FULL, "if len(bucket) * 1000 >= bucket_bytes:")),
            "one message took|had not been sent",
        ),
        "a gradient for all": (
            own(
                (
                    FLUSH,
                    "        for p in model.parameters():\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
                    + FLUSH,
                )
            ),
            "a parameter that no forward uses has a gradient",
        ),
        "counts all parameters": (
            own(
                (FULL, "if len(bucket) == sum(p.requires_grad for p in model.parameters()):"),
                (FLUSH, "        for work"),
            ),
            "0 of .* sent on rank 0. .* Is a bucket ever full?",
        ),
        "unused parameters in their bucket": (
            own(
                (
                    FLUSH,
                    "        bucket.extend(p for p in model.parameters() if p.grad is None)\n"
                    + FLUSH,
                )
            ),
            "in the `finish.*` of step 1, rank 0 read a gradient that was None",
        ),
        "rank 0 alone sends": (
            own(
                (
                    "bucket.append(parameter)",
                    "bucket.append(parameter) if dist.get_rank() == 0 else None",
                )
            ),
            "do not agree",
        ),
        "the class itself": (
            "def distribute(model, bucket_bytes):\n    return nn.parallel.DistributedDataParallel(model)",
            "raised|not the mean|find_unused",
        ),
        "no finish": (own(("    return finish", "    return None")), "returned NoneType"),
        "called at once": (own(("    return finish", "    return finish()")), "returned NoneType"),
        "the weights": (own(("p.grad.flatten()", "p.data.flatten()")), NOT_THE_MEAN),
    },
}

FIXED = """
def distribute(model, bucket_bytes):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    parameters, buckets, size = [p for p in model.parameters() if p.requires_grad], [[]], 0
    for p in reversed(parameters):
        if buckets[-1] and size + p.nbytes > bucket_bytes:
            buckets.append([]); size = 0
        buckets[-1].append(p); size += p.nbytes
    place = {id(p): number for number, bucket in enumerate(buckets) for p in bucket}
    there, works = [0] * len(buckets), {}
    def send(number):
        used = [p for p in buckets[number] if p.grad is not None]
        if used:
            flat = torch.cat([p.grad.reshape(-1) for p in used]) / dist.get_world_size()
            works[number] = dist.all_reduce(flat, async_op=True), flat, used
    def ready(p):
        number = place[id(p)]
        there[number] += 1
        if there[number] == len(buckets[number]):
            send(number)
    def finish():
        for number in range(len(buckets)):
            if number not in works: send(number)
        for work, flat, used in works.values():
            work.wait()
            for p in used:
                p.grad.copy_(flat[: p.numel()].view(p.shape)); flat = flat[p.numel() :]
        works.clear(); there[:] = [0] * len(buckets)
    for p in parameters:
        p.register_post_accumulate_grad_hook(ready)
    return finish
"""

RIGHT = {
    "10.5": {
        "NCCL's own mean": own(
            (SEND, SEND.replace("async_op=True", "op=dist.ReduceOp.AVG, async_op=True")),
            (MEAN, "pass"),
        ),
        "divided before": own(
            (
                "[p.grad.flatten() for p in bucket]",
                "[p.grad.flatten() / dist.get_world_size() for p in bucket]",
            ),
            (MEAN, "pass"),
        ),
        "gradients that lie in the bucket": own(
            ("p.grad.copy_(part.view_as(p))", "p.grad = part.view_as(p)")
        ),
        "fixed buckets, in reverse": FIXED,
        "fixed buckets, as they were made": FIXED.replace("reversed(parameters)", "parameters"),
        "waits for all before it reads": own(
            (
                "        for work, flat, parameters in sent:\n            work.wait()",
                "        for work, *_ in sent:\n            work.wait()\n        for work, flat, parameters in sent:",
            )
        ),
        "one after the other": own(
            (BROADCAST, "dist.broadcast(tensor, src=0, async_op=True).wait()")
        ),
        "objects of rank 0": own(
            (
                "    for tensor in model.state_dict().values():\n        dist.broadcast(tensor, src=0)\n",
                "    whole = [{name: tensor.cpu() for name, tensor in model.state_dict().items()}]\n"
                "    dist.broadcast_object_list(whole, src=0)\n    model.load_state_dict(whole[0])\n",
            )
        ),
        "hooks that get the gradient": own(
            (
                HOOKS,
                "parameter.register_post_accumulate_grad_hook(lambda p: [p.grad.div_(3), ready(p)][1])",
            ),
            (MEAN, "pass"),
        ),
        "a bucket of views": own(
            (
                "flat = torch.cat([p.grad.flatten() for p in bucket])",
                "flat = nn.utils.parameters_to_vector([p.grad for p in bucket])",
            ),
        ),
        "more than it must hold": own(
            (FULL, "if sum(p.grad.nbytes for p in bucket) > bucket_bytes:")
        ),
        "a stream of its own": own(
            (
                SEND,
                "side = streams.setdefault(0, torch.cuda.Stream()); side.wait_stream(torch.cuda.current_stream())\n"
                "        with torch.cuda.stream(side):\n            "
                + SEND
                + "\n            flat.record_stream(side)",
            ),
            ("bucket, sent = [], []", "bucket, sent, streams = [], [], {}"),
        ),
    },
}
