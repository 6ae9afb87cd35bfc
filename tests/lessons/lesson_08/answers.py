"""Wrong answers to the exercises of lesson 08: for each, what a learner may well write, and a part of what the check says."""


def copying(*lines: str) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"def shared_copy(x):\n{body}\n"


def stepping(line: str) -> str:
    return f"def sgd_step(parameters, rate):\n    for p in parameters:\n        if p.grad is not None:\n            {line}\n"


def holding(line: str, free: str = "torch.cuda.mem_get_info()") -> str:
    return f"def outside_cache():\n    free, total = {free}\n    return {line}\n"


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


ALONE, PRIVATE, VALUES = "Whose memory is it", "x should stay private", "same values, shape, dtype and device"
WAIT, CACHE, GRADIENT = "did not wait until the consumer was done", "Whose is the cache", "It should stay as it is"
LOOP = """for size in sizes:
        queue.put(torch.ones(size, device='cuda'))"""

WRONG = {
    "08.1": {
        "x itself": (copying("return x.share_memory_()"), PRIVATE),
        "shared, then copied": (copying("return x.share_memory_().clone()"), ALONE),
        "a view of x": (copying("return x.detach().share_memory_()"), PRIVATE),
        "a copy, but x is shared": (copying("x.share_memory_()", "return x.clone().share_memory_()"), PRIVATE),
        "no values": (copying("return torch.empty(x.shape, dtype=x.dtype).fill_(-1).share_memory_()"), VALUES),
        "through a list": (copying("return torch.tensor(x.tolist()).float().share_memory_()"), VALUES),
        "its rows in a line": (copying("return x.flatten().clone().share_memory_()"), VALUES),
        "pinned in words only": (copying("return x.contiguous()"), ALONE),
        "a deep copy": (copying("import copy", "return copy.deepcopy(x)"), ALONE),
        "shared and not returned": (copying("x.clone().share_memory_()"), "NoneType"),
        "on the GPU": (copying("return x.cuda()"), VALUES),
        "one dtype": (copying("return x.double().share_memory_()"), VALUES + "|x should stay private"),
        "rows for columns": (copying("return torch.empty(x.shape[::-1], dtype=x.dtype).copy_(x.t()).share_memory_()"), VALUES),
        "mapped, not shared": (
            copying(
                "import mmap",
                "memory = mmap.mmap(-1, max(x.nbytes, 1), flags=mmap.MAP_PRIVATE)",
                "return torch.frombuffer(memory, dtype=x.dtype, count=x.numel()).view(x.shape).copy_(x)",
            ),
            ALONE,
        ),
    },
    "08.2": {
        "all but the first": (
            "def sgd_step(parameters, rate):\n    with torch.no_grad():\n        for p in [*parameters][1:]:\n"
            "            if p.grad is not None: p -= rate * p.grad\n",
            "the new values are",
        ),
        "a new name": (stepping("p = p - rate * p.grad"), "the new values are"),
        "uphill": (stepping("p.data.add_(rate * p.grad)"), "the new values are"),
        "no rate": (stepping("p.data.sub_(p.grad)"), "the new values are"),
        "autograd looks on": (stepping("p.sub_(rate * p.grad)"), "RuntimeError: a leaf Variable that requires grad"),
        "every parameter has a gradient": (
            "def sgd_step(parameters, rate):\n    for p in parameters:\n        p.data.sub_(rate * p.grad)\n",
            "TypeError",
        ),
        "no longer trained": (stepping("p.requires_grad_(False).sub_(rate * p.grad)"), "changed a tensor"),
        "the gradient is scaled": (stepping("p.data.sub_(p.grad.mul_(rate))"), GRADIENT),
        "the gradient is cleared": (stepping("p.data.sub_(rate * p.grad); p.grad.zero_()"), GRADIENT),
        "the gradient is gone": (stepping("p.data.sub_(rate * p.grad); p.grad = None"), GRADIENT),
        "the first without a gradient ends it": (
            "@torch.no_grad()\ndef sgd_step(parameters, rate):\n    for p in parameters:\n"
            "        if p.grad is None: return\n        p -= rate * p.grad\n",
            "the new values are",
        ),
        "Adam": ("def sgd_step(parameters, rate): torch.optim.Adam(parameters, lr=rate).step()", "the new values are"),
        "a sign alone": (stepping("p.data.sub_(rate * p.grad.sign())"), "the new values are"),
        "gradients in half precision": (stepping("p.data.sub_(rate * p.grad.half().float())"), "the new values are"),
        "shared again": (stepping("p.data = (p.data - rate * p.grad).share_memory_()"), "the others the old ones"),
        "the last one": (
            "def sgd_step(parameters, rate):\n    p = [p for p in parameters if p.grad is not None][-1]\n    p.data.sub_(rate * p.grad)\n",
            "the new values are",
        ),
    },
    "08.3": {
        "allocated, not reserved": (holding("total - free - torch.cuda.memory_allocated()"), CACHE),
        "what is free": (holding("free"), CACHE),
        "at most, not now": (holding("total - free - torch.cuda.max_memory_reserved()"), CACHE),
        "the cache": (holding("torch.cuda.memory_reserved()"), CACHE),
        "the unused cache alone": (holding("total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()"), CACHE),
        "the context alone": (
            "def outside_cache(known=[]):\n    free, total = torch.cuda.mem_get_info()\n"
            "    known.append(total - free - torch.cuda.memory_reserved())\n    return known[0]\n",
            CACHE,
        ),
        "after emptying the cache": (
            "def outside_cache():\n    torch.cuda.empty_cache()\n    free, total = torch.cuda.mem_get_info()\n"
            "    return total - free - torch.cuda.memory_reserved()\n",
            "emptied this process's cache",
        ),
        "a number": (holding("132120576"), CACHE),
        "nothing": (holding("0"), CACHE),
        "in MiB": (holding("(total - free - torch.cuda.memory_reserved()) / 2**20"), CACHE),
        "the wrong way round": (holding("total - free - torch.cuda.memory_reserved()", "torch.cuda.mem_get_info()[::-1]"), CACHE),
        "nothing returned": (holding("print(end='')"), "returned NoneType"),
    },
    "08.4": {
        "one context for all": (limiting("(total - context) / processes / total"), "What does the limit count"),
        "twice the context": (limiting("(total / processes - 2 * context) / total"), "the rest lies idle"),
        "the context is added": (limiting("min(1, (total / processes + context) / total)"), "What does the limit count"),
        "of what is free now": (limiting("(free / processes - context) / total"), "the rest lies idle"),
        "a share of the free": (limiting("(total / processes - context) / free"), "What does the limit count|lies idle"),
        "two processes": (limiting("(total / 2 - context) / total"), "What does the limit count|lies idle"),
        "two digits": (limiting("int(100 * (total / processes - context) / total) / 100"), "the rest lies idle"),
        "four digits": (limiting("round(1 / processes - context / total, 4)"), "What does the limit count|lies idle"),
        "all of it": (limiting("1.0"), "no limit"),
        "bytes": (limiting("total / processes - context"), "ValueError"),
        "returned, not set": (
            "def share_fairly(processes, context):\n    total = torch.cuda.mem_get_info()[1]\n    return 1 / processes - context / total\n",
            "no limit",
        ),
    },
    "08.5": {
        "a list": (producing("pass", before="kept = []", sent="kept.append(torch.ones(size, device='cuda')) or kept[-1]"), WAIT),
        "asked, not waited": (producing("done.is_set()"), WAIT),
        "waited for a limited time": (producing("done.wait(0.2)"), WAIT),
        "ten looks": (producing("for _ in range(10): time.sleep(0.0 if done.is_set() else 0.1)"), WAIT),
        "a few waits": (producing("for _ in range(3): done.wait(0.5)"), WAIT),
        "a thousand looks": (producing("for _ in range(1000):", "    if done.is_set(): break", "    time.sleep(0.1)"), WAIT),
        "a minute": (producing("end = time.time() + 60", "while not done.is_set() and time.time() < end: time.sleep(0.05)"), WAIT),
        "an end of its own": (producing("queue.put(None)", "done.wait()"), "more came"),
        "synchronized": (producing("torch.cuda.synchronize()"), WAIT),
        "collected": (producing("torch.cuda.ipc_collect()"), WAIT),
        "until the queue is empty": (producing("while not queue.empty(): time.sleep(0.01)"), WAIT),
        "says done itself": (producing("done.set()", "done.wait()"), "set `done` itself"),
        "says done, and ends": (producing("done.set()"), "set `done` itself"),
        "waits before it sends": (producing("pass", before="done.wait()"), "Who waits for whom"),
        "a wait for each": (
            "def produce(queue, done, sizes):\n    for size in sizes:\n"
            "        queue.put(torch.ones(size, device='cuda'))\n        done.wait()\n",
            "Who waits for whom",
        ),
        "on the CPU": (producing("done.wait()", sent="torch.ones(size)"), "uncopied"),
        "whole numbers": (producing("done.wait()", sent="torch.ones(size, dtype=torch.int64, device='cuda')"), "you send torch.int64"),
        "the first size": (producing("done.wait()", sent="torch.ones(sizes[0], device='cuda')"), "expected .* ones"),
        "other values": (producing("done.wait()", sent="torch.zeros(size, device='cuda')"), "expected .* ones"),
        "the process ends itself": (producing("import os; os._exit(0)"), WAIT + "|ended its process"),
    },
    "08.6": {
        "with a graph": (serving(grad="torch.enable_grad()"), "does not train"),
        "one request": (serving(loop="for client, x in [requests.get()]:"), "until None comes"),
        "all at the end": (
            serving(reply="kept.append((client, y))", after="for reply in kept: replies.put(reply)"),
            "still had no reply",
        ),
        "all are kept": (serving(reply="replies.put((client, y)); kept.append(model(x.cuda()))"), "runs for months"),
        "inputs are kept": (serving(answer="model(kept.append(x.cuda()) or kept[-1]).cpu()"), "runs for months"),
        "whose reply": (serving(reply="replies.put(y)"), "a pair of the client"),
        "always the same client": (serving(reply="replies.put((-1, y))"), "a pair of the client"),
        "numbers": (serving(reply="replies.put((client, y.tolist()))"), "and a tensor"),
        "rounded requests": (serving(answer="model(x.half().cuda().float()).cpu()"), "the model answers"),
        "another model": (serving(answer="torch.relu(model(x.cuda())).cpu() - 1"), "the model answers"),
        "nothing negative": (serving(answer="model(x.cuda()).relu().cpu()"), "the model answers"),
        "rounded": (serving(answer="model(x.cuda()).half().cpu()"), "the model answers"),
        "client 0 is nobody": (
            serving(loop="while (client := (request := requests.get() or (0, 0))[0]):\n            x = request[1]"),
            "until None",
        ),
        "one answer for each client": (
            serving(answer="dict(kept).get(client, model(x.cuda()).cpu())", reply="kept.append((client, y)); replies.put((client, y))"),
            "the model answers",
        ),
        "another shape": (serving(answer="model(x.cuda()).cpu().flatten()"), "the model answers"),
        "the model comes to the CPU": (serving(first="model.cpu()", answer="model(x)"), "computed on cpu"),
        "the model comes and goes": (serving(answer="model.cpu()(x); model.cuda()"), "computed on cpu"),
        "nothing moves": (serving(answer="model(x)"), "Expected all tensors to be on the same device"),
        "twice": (serving(reply="replies.put((client, y)); replies.put((client, y))"), "there are .* replies"),
        "never ends": (serving(loop="while True:\n            client, x = requests.get() or requests.get()"), "RuntimeError: after None"),
    },
}

RIGHT = {
    "08.1": {
        "shared before it is filled": copying("return torch.empty_like(x).share_memory_().copy_(x)"),
        "an anonymous map": copying(
            "import mmap",
            "memory = mmap.mmap(-1, x.nbytes)",
            "return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)",
        ),
        "an array of multiprocessing's": copying(
            "import multiprocessing",
            "memory = multiprocessing.RawArray('B', x.nbytes)",
            "return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x)",
        ),
        "shared storage": copying("y = x.clone()", "y.untyped_storage().share_memory_()", "return y"),
        "a file": copying(
            "import tempfile",
            "with tempfile.NamedTemporaryFile() as file:",
            "    return torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype).view(x.shape).copy_(x)",
        ),
    },
    "08.2": {
        "the optimizer": "def sgd_step(parameters, rate): torch.optim.SGD(parameters, lr=rate).step()",
        "data": stepping("p.data.add_(p.grad, alpha=-rate)"),
        "through NumPy": stepping("p.detach().numpy()[...] -= rate * p.grad.numpy()"),
        "a copy into it": stepping("p.data.copy_(p.detach() - rate * p.grad)"),
        "all at once": (
            "def sgd_step(parameters, rate):\n    mine = [p for p in parameters if p.grad is not None]\n"
            "    torch._foreach_add_([p.data for p in mine], [p.grad for p in mine], alpha=-rate)\n"
        ),
    },
    "08.3": {
        "statistics": holding("total - free - torch.cuda.memory_stats()['reserved_bytes.all.current']"),
        "segments": holding(
            "total - free - sum(s['total_size'] for s in torch.cuda.memory_snapshot() if s['device'] == torch.cuda.current_device())"
        ),
        "NumPy's number": "import numpy\n" + holding("numpy.int64(total - free - torch.cuda.memory_reserved())"),
        "the GPU by number": holding("total - free - torch.cuda.memory_reserved(0)", "torch.cuda.mem_get_info(0)"),
        "a float": holding(
            "float(total - free - torch.cuda.memory_reserved('cuda'))", "torch.cuda.mem_get_info(torch.cuda.current_device())"
        ),
    },
    "08.4": {
        "shares": limiting("1 / processes - context / total"),
        "whole bytes": limiting("(total // processes - context) / total"),
        "what is left": limiting("(total - processes * context) / (processes * total)"),
        "the GPU by number": limiting("1 / processes - context / total, 0"),
        "the GPU by name": (
            "def share_fairly(processes, context):\n    total = torch.cuda.get_device_properties('cuda').total_memory\n"
            "    torch.cuda.set_per_process_memory_fraction(1 / processes - context / total, torch.cuda.current_device())\n"
        ),
    },
    "08.5": {
        "asks again and again": producing("while not done.is_set(): time.sleep(0.01)"),
        "asks, and sleeps by name": "from time import sleep\n" + producing("while not done.is_set(): sleep(0.2)"),
        "waits again and again": producing("while not done.wait(0.01): pass"),
        "made on the CPU": producing("done.wait()", sent="torch.ones(size).cuda()"),
        "long waits": producing("while not done.is_set(): done.wait(timeout=30)"),
        "in a thread": producing("import threading", "waiting = threading.Thread(target=done.wait)", "waiting.start(); waiting.join()"),
        "in a finally": f"def produce(queue, done, sizes):\n    try:\n     {LOOP}\n    finally:\n        done.wait()\n",
    },
    "08.6": {
        "inference mode": serving(grad="torch.inference_mode()"),
        "detached": serving(grad="torch.enable_grad()", answer="model(x.cuda()).detach().cpu()"),
        "where the model is": serving(answer="model(x.to(next(model.parameters()).device)).to('cpu')"),
        "the forward by name": serving(answer="model.forward(x.cuda(non_blocking=True)).cpu()", reply="replies.put([client, y])"),
        "pinned": serving(answer="torch.empty(1, 2).copy_(model(x.cuda()))"),
    },
}
