"""Controls of lesson 08."""

CONTROLS = {
    # a copy
    "08.1": (
        r"memory of this process alone",
        r"""
def shared_copy(x):
    return x.clone()
""",
    ),
    # a new tensor under the old name
    "08.2": (
        r"the others the old ones",
        r"""
def sgd_step(parameters, rate):
    for p in parameters:
        if p.grad is not None:
            p.data = p.data - rate * p.grad
""",
    ),
    # all that is used
    "08.3": (
        r"Whose is the cache",
        r"""
def held_by_others(device):
    free, total = torch.cuda.mem_get_info(device)
    return total - free
""",
    ),
    # no context
    "08.4": (
        r"What does the limit count",
        r"""
def share_fairly(processes, context):
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(1 / processes)
""",
    ),
    # a nap
    "08.5": (
        r"did not wait until the consumer was done",
        r"""
import time
def produce(queue, done, sizes):

    for size in sizes:
        queue.put(torch.ones(size, device='cuda'))
    time.sleep(0.3)
""",
    ),
    # a reply on the GPU
    "08.6": (
        r"Send .cpu()",
        r"""
def serve(model, requests, replies):
    kept = []
    with torch.no_grad():
        for client, x in iter(requests.get, None):
            y = model(x.cuda())
            replies.put((client, y))
    pass
""",
    ),
}
