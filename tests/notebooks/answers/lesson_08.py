"""Wrong answers to the exercises of lesson 08: for each, what a learner may well write, and a part of what the check says."""


def copying(*lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"def shared_copy(x):\n{body}\n"


def stepping(line: str) -> str:
    return f"def sgd_step(parameters, rate):\n    for p in parameters:\n        if p.grad is not None:\n            {line}\n"


def holding(line: str) -> str:
    return f"def held_by_others(device):\n    free, total = torch.cuda.mem_get_info(device)\n    return {line}\n"


def limiting(share: str) -> str:
    return f"""def share_fairly(processes, context):
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction({share})
"""


def producing(*lines: str, sent: str = "torch.ones(size, device='cuda')", before: str = "") -> str:
    after = "\n".join(f"    {line}" for line in lines)
    return f"import time\ndef produce(queue, done, sizes):\n    {before}\n    for size in sizes:\n        queue.put({sent})\n{after}\n"


def serving(
    first: str = "kept = []",
    answer: str = "model(x.cuda()).cpu()",
    reply: str = "replies.put((client, y))",
    after: str = "pass",
    loop: str = "for client, x in iter(requests.get, None):",
    grad: str = "torch.no_grad()",
) -> str:
    return f"""def serve(model, requests, replies):
    {first}
    with {grad}:
        {loop}
            y = {answer}
            {reply}
    {after}
"""


ALONE, PRIVATE, VALUES = "memory of this process alone", "It was to stay private", "same values, dtype and device"
WAIT = "did not wait until the consumer was done"

WRONG = {
    "08.1": {
        "x itself": (copying("return x.share_memory_()"), PRIVATE),
        "shared, then copied": (copying("return x.share_memory_().clone()"), ALONE),
        "a view of x": (copying("return x.detach().share_memory_()"), PRIVATE),
        "no values": (copying("return torch.empty(x.shape, dtype=x.dtype).fill_(-1).share_memory_()"), VALUES),
        "through a list": (copying("return torch.tensor(x.tolist()).float().share_memory_()"), VALUES),
        "pinned in words only": (copying("return x.contiguous()"), ALONE),
    },
    "08.2": {
        "a new name": (stepping("p = p - rate * p.grad"), "was due"),
        "uphill": (stepping("p.data.add_(rate * p.grad)"), "was due"),
        "no rate": (stepping("p.data.sub_(p.grad)"), "was due"),
        "autograd looks on": (stepping("p.sub_(rate * p.grad)"), "RuntimeError: a leaf Variable that requires grad"),
        "every parameter has a gradient": (
            "def sgd_step(parameters, rate):\n    for p in parameters:\n        p.data.sub_(rate * p.grad)\n",
            "TypeError",
        ),
        "no longer trained": (stepping("p.requires_grad_(False).sub_(rate * p.grad)"), "requires no gradient any more"),
    },
    "08.3": {
        "allocated, not reserved": (holding("total - free - torch.cuda.memory_allocated(device)"), "Whose is the cache"),
        "what is free": (holding("free"), "Whose is the cache"),
        "the context alone": (
            "def held_by_others(device, known=[]):\n    free, total = torch.cuda.mem_get_info(device)\n"
            "    known.append(total - free - torch.cuda.memory_reserved(device))\n    return known[0]\n",
            "Whose is the cache",
        ),
        "a number": (holding("132120576"), "Whose is the cache"),
        "in MiB": (holding("(total - free - torch.cuda.memory_reserved(device)) / 2**20"), "Whose is the cache"),
        "nothing returned": (holding("print(end='')"), "returned NoneType"),
    },
    "08.4": {
        "one context for all": (limiting("(total - context) / processes / total"), "What does the limit count"),
        "twice the context": (limiting("(total / processes - 2 * context) / total"), "the rest lies idle"),
        "of what is free now": (limiting("(free / processes - context) / total"), "the rest lies idle"),
        "bytes": (limiting("total / processes - context"), "ValueError"),
        "returned, not set": (
            "def share_fairly(processes, context):\n    total = torch.cuda.mem_get_info()[1]\n    return 1 / processes - context / total\n",
            "no limit",
        ),
    },
    "08.5": {
        "a nap": (producing("time.sleep(0.3)"), WAIT),
        "a list": (producing("pass", before="kept = []", sent="kept.append(torch.ones(size, device='cuda')) or kept[-1]"), WAIT),
        "asked, not waited": (producing("done.is_set()"), WAIT),
        "waited for a limited time": (producing("done.wait(0.2)"), WAIT),
        "synchronized": (producing("torch.cuda.synchronize()"), WAIT),
        "waits before it sends": (producing("pass", before="done.wait()"), "Who waits for whom"),
        "a wait for each": (
            "def produce(queue, done, sizes):\n    for size in sizes:\n"
            "        queue.put(torch.ones(size, device='cuda'))\n        done.wait()\n",
            "Who waits for whom",
        ),
        "on the CPU": (producing("done.wait()", sent="torch.ones(size)"), "uncopied"),
        "other values": (producing("done.wait()", sent="torch.zeros(size, device='cuda')"), "ones were due"),
    },
    "08.6": {
        "with a graph": (serving(grad="torch.enable_grad()"), "does not train"),
        "one request": (serving(loop="for client, x in [requests.get()]:"), "until None comes"),
        "all at the end": (
            serving(reply="kept.append((client, y))", after="for reply in kept: replies.put(reply)"),
            "still had no reply",
        ),
        "all are kept": (serving(reply="replies.put((client, y)); kept.append(model(x.cuda()))"), "runs for months"),
        "whose reply": (serving(reply="replies.put(y)"), "a pair of the client"),
        "another model": (serving(answer="torch.relu(model(x.cuda())).cpu()"), "the model answers"),
        "never ends": (serving(loop="while True:\n            client, x = requests.get() or requests.get()"), "RuntimeError: after None"),
    },
}
