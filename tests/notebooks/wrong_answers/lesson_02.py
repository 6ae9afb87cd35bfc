"""Wrong answers to the exercises of lesson 02: for each, what a learner may well write, and a part of what the check says."""

WRONG = {
    "02.1": {
        "no wait at the start": (
            """
def seconds_of(work):
    start = labkit.host_time()
    work()
    torch.cuda.synchronize()
    return labkit.host_time() - start
""",
            "what was queued before",
        ),
        "milliseconds": (
            """
def seconds_of(work):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
""",
            "Seconds are asked for",
        ),
        "a pause": (
            """
def seconds_of(work):
    import time
    start = labkit.host_time()
    work()
    time.sleep(0.001)
    return labkit.host_time() - start
""",
            "you measured",
        ),
        "twice the work": (
            """
def seconds_of(work):
    work()
    torch.cuda.synchronize()
    start = labkit.host_time()
    work()
    work()
    torch.cuda.synchronize()
    return labkit.host_time() - start
""",
            "you measured",
        ),
        "a constant": ("def seconds_of(work): return 0.0051", "you measured"),
        "a text": ("def seconds_of(work): return '5 ms'", "returned str"),
    },
    "02.2": {
        "float": (
            """
def mean_loss(model, batches):
    return torch.tensor(sum(float(model(batch).square().mean()) for batch in batches) / len(batches), device='cuda')
""",
            "somewhere it waited",
        ),
        "to the CPU": (
            """
def mean_loss(model, batches):
    losses = [model(batch).square().mean().cpu() for batch in batches]
    return torch.stack(losses).mean()
""",
            "somewhere it waited",
        ),
        "the sum": (
            """
def mean_loss(model, batches):
    total = 0.0
    for batch in batches:
        total = total + model(batch).square().mean()
    return total
""",
            "the mean of",
        ),
        "the last": (
            """
def mean_loss(model, batches):
    for batch in batches:
        loss = model(batch).square().mean()
    return loss
""",
            "the mean of",
        ),
        "all losses": (
            "def mean_loss(model, batches): return torch.stack([model(batch).square().mean() for batch in batches])",
            "one number on the GPU",
        ),
        "a constant": ("def mean_loss(model, batches): return torch.zeros((), device='cuda')", "the mean of"),
    },
    "02.3": {
        "no waits": (
            """
def run_on(stream, work, x):
    with torch.cuda.stream(stream):
        return work(x)
""",
            "what was not there yet|overwritten|waited",
        ),
        "only before": (
            """
def run_on(stream, work, x):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return work(x)
""",
            "what was not there yet|overwritten",
        ),
        "the allocator not told": (
            """
def run_on(stream, work, x):
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        y = work(x)
    here.wait_stream(stream)
    return y
""",
            "Who tells the allocator",
        ),
        "the host waits": (
            """
def run_on(stream, work, x):
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = work(x)
    torch.cuda.synchronize()
    return y
""",
            "the host waited",
        ),
        "the caller's stream": ("def run_on(stream, work, x): return work(x)", "on another stream"),
        "a constant": ("def run_on(stream, work, x): return torch.zeros(1, device='cuda')", "was not called once"),
    },
    "02.4": {
        "into pageable memory": (
            """
def fetch(x):
    y = torch.empty(x.shape)
    y.copy_(x, non_blocking=True)
    return lambda: y
""",
            "fetch itself waited",
        ),
        "no wait": (
            """
def fetch(x):
    y = x.to("cpu", non_blocking=True)
    return lambda: y.clone()
""",
            "Had the copy arrived",
        ),
        "too long a wait": (
            """
def fetch(x):
    y = x.to("cpu", non_blocking=True)
    def get():
        torch.cuda.synchronize()
        return y
    return get
""",
            "launched after the copy",
        ),
        "the event before the copy": (
            """
def fetch(x):
    event = torch.cuda.current_stream().record_event()
    torch.cuda._sleep(10_000_000)
    y = x.to("cpu", non_blocking=True)
    def get():
        event.synchronize()
        return y.clone()
    return get
""",
            "Had the copy arrived",
        ),
        "later": ("def fetch(x): return lambda: x.cpu()", "Had the copy arrived"),
        "the tensor": ("def fetch(x): return x.to('cpu', non_blocking=True)", "you gave Tensor"),
    },
    "02.5": {
        "no end": (
            "def prefetched(batches):\n    while True:\n        yield torch.zeros(1, device='cuda')",
            "9 or more. Does it end",
        ),
        "a stream, but nothing ahead": (
            """
def prefetched(batches):
    stream = torch.cuda.Stream()
    for batch in batches:
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            x = batch.cuda(non_blocking=True)
        here.wait_stream(stream)
        x.record_stream(here)
        yield x
""",
            "of the copying is hidden",
        ),
        "no wait": (
            """
def prefetched(batches):
    stream = torch.cuda.Stream()
    for batch in batches:
        with torch.cuda.stream(stream):
            x = batch.cuda(non_blocking=True)
        x.record_stream(torch.cuda.current_stream())
        yield x
""",
            "Does its stream wait",
        ),
        "the allocator not told": (
            """
def prefetched(batches):
    stream, following = torch.cuda.Stream(), None
    for batch in [*batches, None]:
        torch.cuda.current_stream().wait_stream(stream)
        ready, following = following, None
        if batch is not None:
            with torch.cuda.stream(stream):
                following = batch.cuda(non_blocking=True)
        if ready is not None:
            yield ready
        ready = None
""",
            "does the allocator know|ahead",
        ),
        "without the last": (
            """
def prefetched(batches):
    stream, ready = torch.cuda.Stream(), None
    for batch in batches:
        here = torch.cuda.current_stream()
        here.wait_stream(stream)
        previous = ready
        with torch.cuda.stream(stream):
            ready = batch.cuda(non_blocking=True)
        if previous is not None:
            previous.record_stream(here)
            yield previous
""",
            "Does the last one come",
        ),
        "all at once": (
            """
def prefetched(batches):
    stream, copied = torch.cuda.Stream(), []
    for batch in batches:
        with torch.cuda.stream(stream):
            copied.append((batch.cuda(non_blocking=True), stream.record_event()))
    for x, event in copied:
        torch.cuda.current_stream().wait_event(event)
        yield x
""",
            "batches ahead",
        ),
        "on the host": ("def prefetched(batches): yield from batches", "was not on the GPU"),
        "a constant": ("def prefetched(batches):\n    for _ in batches:\n        yield torch.zeros(4, device='cuda')", "no batch's values"),
    },
}
