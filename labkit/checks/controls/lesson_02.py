"""Controls of lesson 02."""

CONTROLS = {
    # no wait at the end
    "02.1": (
        r"Did the GPU have time to finish",
        r"""
def seconds_of(work):
    torch.cuda.synchronize()
    start = labkit.host_time()
    work()
    return labkit.host_time() - start
""",
    ),
    # item at the end
    "02.2": (
        r"somewhere it waited",
        r"""
def mean_loss(model, batches):
    total = 0.0
    for batch in batches:
        total = total + model(batch).square().mean()
    return total.item() / len(batches)
""",
    ),
    # only after
    "02.3": (
        r"what was not there yet",
        r"""
def run_on(stream, work, x):
    here = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        y = work(x)
    here.wait_stream(stream)
    y.record_stream(here)
    return y
""",
    ),
    # cpu
    "02.4": (
        r"fetch itself waited",
        r"""
def fetch(x):
    y = x.cpu()
    return lambda: y
""",
    ),
    # in turn
    "02.5": (
        r"of the copying is hidden",
        r"""
def prefetched(batches):
    for batch in batches:
        yield batch.cuda(non_blocking=True)
""",
    ),
}
