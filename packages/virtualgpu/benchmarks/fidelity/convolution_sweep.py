"""Record the workspaces that cuDNN takes for convolutions drawn at random.

usage: convolution_sweep.py OUT.json.gz SECONDS SEED

With TYPICAL in the environment, layers are drawn as published networks have them. Four runs on one
H100 (26 November 2026) are kept together in h100/convolution_sweep.npz: seeds a and b, and with TYPICAL c and d.
"""
import gzip, json, math, os, random, sys, time
import multiprocessing as mp

CHANNELS = (1, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 58, 64, 72, 80, 96, 112, 116, 120, 128, 144, 160, 184, 192, 224, 232, 240, 256, 288, 320, 384, 448, 464, 480, 512, 576, 640, 672, 728, 768, 832, 960, 1024, 1152, 1280, 1536, 2048)
SIZES = (4, 5, 6, 7, 8, 10, 12, 13, 14, 15, 16, 17, 19, 20, 24, 25, 26, 28, 30, 32, 35, 38, 40, 48, 50, 52, 56, 60, 64, 72, 75, 80, 96, 100, 112, 120, 128, 144, 150, 160, 192, 200, 224, 240, 256, 288, 299, 320, 384, 416, 480, 512, 572, 640)
BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 100, 128, 192, 256)


COMMON = (3, 16, 24, 32, 48, 64, 80, 96, 112, 116, 128, 144, 160, 192, 224, 232, 256, 288, 320, 384, 464, 512, 640, 768, 960, 1024, 1280, 1536, 2048)
SQUARES = (4, 7, 8, 10, 12, 13, 14, 16, 20, 24, 26, 28, 32, 36, 40, 48, 52, 56, 60, 64, 72, 80, 96, 100, 112, 128, 150, 160, 192, 200, 224, 256, 299, 320, 384, 416, 512)


def typical(r):
    """Layers as published networks have them."""
    first, out = r.choice(COMMON), r.choice(COMMON)
    t = r.random()
    if t < 0.35: out = first
    elif t < 0.50: out = r.choice((2 * first, max(1, first // 2), 4 * first, max(1, first // 4)))
    elif t < 0.56: first = 3
    elif t < 0.60: out = r.choice((1, 2, 3, 10, 19, 21, 80, 255, 1000))
    groups = 1
    t = r.random()
    if t < 0.10: groups = out = first
    elif t < 0.15:
        groups = r.choice((2, 4, 8, 16, 32)); first = max(groups, first // groups * groups); out = max(groups, out // groups * groups)
    k, s, p, d, op, transposed = [3, 3], [1, 1], [1, 1], [1, 1], [0, 0], False
    t = r.random()
    if t < 0.30: k, p = [1, 1], [0, 0]
    elif t < 0.40: n = r.choice((5, 7, 7, 9)); k, p = [n, n], [n // 2] * 2
    elif t < 0.47:
        n = r.choice((2, 4, 8, 14, 16)); k, s, p = [n, n], [n, n], [0, 0]
        if n > 2: first = 3; groups = 1
    elif t < 0.55 and groups == 1:
        transposed = True
        k, s, p, op = ([n] * 2 for n in r.choice(((2, 2, 0, 0), (2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1))))
    elif t < 0.58: k, p = r.choice((([1, 7], [0, 3]), ([7, 1], [3, 0]), ([1, 3], [0, 1]), ([3, 1], [1, 0])))
    if not transposed and max(s) == 1:
        t = r.random()
        if t < 0.18: s = [2, 2]
        elif t < 0.26 and max(k) > 1: n = r.choice((2, 2, 4, 6, 12, 18)); d = [n, n]; p = [n * (v // 2) for v in k]
        elif t < 0.30: p = [0, 0]
    n = r.choice(SQUARES)
    e = [n, n] if r.random() < 0.92 else [n, r.choice(SQUARES)]
    batch = r.choice((1, 2, 4, 8, 8, 16, 16, 32, 32, 64, 64, 128, 256, 3, 6, 12, 24, 48, 96, 100))
    dtype = r.choices(("float32", "bfloat16", "float16"), (50, 33, 17))[0]
    last = r.random() < 0.2
    y = [((v - 1) * ss - 2 * pp + kk + oo) if transposed else (v + 2 * pp - dd * (kk - 1) - 1) // ss + 1 for v, kk, ss, pp, dd, oo in zip(e, k, s, p, d, op)]
    if min(y) < 1: return None
    item = 4 if dtype == "float32" else 2
    flops = 2 * batch * math.prod(e if transposed else y) * first * out // groups * math.prod(k)
    if max(batch * first * math.prod(e), batch * out * math.prod(y)) * item > 3 << 29 or flops > 1e12: return None
    return [dtype, int(last), int(transposed), first, out, k, s, p, d, op, groups, batch, e]


def draw(r):
    def channels():
        if r.random() < 0.2: return round(math.exp(r.uniform(math.log(3), math.log(1536))))
        return r.choice(CHANNELS)
    def size():
        if r.random() < 0.15: return round(math.exp(r.uniform(math.log(5), math.log(400))))
        return r.choice(SIZES)
    batch = r.choice(BATCHES) if r.random() < 0.9 else r.randint(1, 200)
    dims = r.choices((2, 1, 3), (90, 5, 5))[0]
    transposed = r.random() < 0.08
    first = channels()
    out = first if r.random() < 0.35 else channels()
    if not transposed and r.random() < 0.1: first = r.choice((1, 3, 3, 3, 4))
    groups = 1
    kind = r.random()
    if kind < 0.10 and not transposed: groups, out = first, first * r.choices((1, 2), (9, 1))[0]
    elif kind < 0.17:
        groups = r.choice((2, 3, 4, 8, 16, 32)); first = max(groups, first // groups * groups); out = max(groups, out // groups * groups)
    k = [r.choices((1, 3, 5, 7, 2, 4, 9, 11), (28, 45, 8, 6, 4, 4, 3, 2))[0]] * dims
    if dims == 2 and r.random() < 0.06: k = r.choice(([1, 3], [3, 1], [1, 5], [5, 1], [1, 7], [7, 1], [3, 5]))
    s = [1] * dims; p = [n // 2 for n in k]; d = [1] * dims; op = [0] * dims
    if transposed:
        k, s, p, op = r.choice((([2], [2], [0], [0]), ([4], [2], [1], [0]), ([3], [2], [1], [1]), ([3], [1], [1], [0]), ([5], [2], [2], [1]), ([4], [4], [0], [0])))
        k, s, p, op = k * dims, s * dims, p * dims, op * dims
    else:
        t = r.random()
        if t < 0.20: s = [2] * dims
        elif t < 0.24: s = list(k); p = [0] * dims
        elif t < 0.26: s = [r.choice((3, 4))] * dims
        t = r.random()
        if t < 0.12: p = [0] * dims
        elif t < 0.14: p = [r.randint(0, 3)] * dims
        if max(k) > 1 and r.random() < 0.10:
            d = [r.choice((2, 2, 3, 4, 6, 12, 18))] * dims; p = [dd * (n // 2) for n, dd in zip(k, d)]
    n = size()
    e = [n] * dims
    if dims > 1 and r.random() < 0.15: e = [size() for _ in range(dims)]
    if dims == 1: e = [n * r.choice((1, 1, 4, 16))]
    if dims == 3: e = [max(3, v // 4) for v in e]
    dtype = r.choices(("float32", "bfloat16", "float16"), (45, 35, 20))[0]
    last = dims == 2 and r.random() < 0.22
    y = [((v - 1) * ss - 2 * pp + kk + oo) if transposed else (v + 2 * pp - dd * (kk - 1) - 1) // ss + 1 for v, kk, ss, pp, dd, oo in zip(e, k, s, p, d, op)]
    if min(y) < 1: return None
    item = 4 if dtype == "float32" else 2
    bx, by = batch * first * math.prod(e) * item, batch * out * math.prod(y) * item
    flops = 2 * batch * math.prod(e if transposed else y) * first * out // groups * math.prod(k)
    if max(bx, by) > 1 << 30 or flops > 4e11 or batch * math.prod(y) < 1: return None
    return [dtype, int(last), int(transposed), first, out, k, s, p, d, op, groups, batch, e]


def worker(job):
    number, seconds, seed, profiled = job
    some = typical if len(sys.argv) > 4 or os.environ.get('TYPICAL') else draw
    import torch
    from torch.profiler import profile, record_function, ProfilerActivity
    r = random.Random(f"{seed} {number}")
    end = time.monotonic() + seconds
    aten = torch.ops.aten
    rows, names, failed = [], {}, 0
    stats = torch.cuda.memory_stats
    def measure(work):
        torch.cuda.reset_peak_memory_stats()
        before = stats()["requested_bytes.all.current"]
        result = work()
        now = stats()
        return now["requested_bytes.all.peak"] - before, now["requested_bytes.all.current"] - before, result
    def one(c, mark=None):
        dtype, last, transposed, first, out, k, s, p, d, op, groups, batch, e = c
        form = torch.channels_last if last else torch.contiguous_format
        o = dict(device="cuda", dtype=getattr(torch, dtype))
        x = torch.zeros(batch, first, *e, **o).to(memory_format=form)
        w = torch.zeros(*((first, out // groups) if transposed else (out, first // groups)), *k, **o).to(memory_format=form)
        settings = (s, p, d, bool(transposed), op, groups)
        found, result = [], None
        mark = mark or (lambda part: __import__("contextlib").nullcontext())
        with mark("f"):
            peak, kept, y = measure(lambda: aten.convolution(x, w, None, *settings))
        found += [peak - kept]
        grad = torch.zeros_like(y)
        for part, mask in (("x", [True, False, False]), ("w", [False, True, False])):
            with mark(part):
                peak, kept, result = measure(lambda: aten.convolution_backward(grad, x, w, [0], *settings, mask))
            found += [peak - kept]
            del result
        return found
    warm = torch.zeros(4, 4, device="cuda"); warm @ warm
    while time.monotonic() < end:
        block = [c for c in (some(r) for _ in range(60)) if c]
        if profiled:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
                got = []
                for i, c in enumerate(block):
                    try: got.append([c, one(c, lambda part: record_function(f"mark {i} {part}"))])
                    except RuntimeError: failed += 1; got.append(None); torch.cuda.empty_cache()
                torch.cuda.synchronize()
            kernels = {}
            for event in prof.events():
                if event.name.startswith("mark "):
                    _, i, part = event.name.split()
                    stack, found = [event], []
                    while stack:
                        node = stack.pop()
                        found += [(kernel.name, round(kernel.duration, 1)) for kernel in node.kernels]
                        stack += node.cpu_children
                    if found: kernels[int(i), part] = [[names.setdefault(name, len(names)), t] for name, t in found]
            for i, row in enumerate(got):
                if row: rows.append(row + [[kernels.get((i, part), []) for part in "fxw"]])
        else:
            for c in block:
                try: rows.append([c, one(c)])
                except RuntimeError: failed += 1; torch.cuda.empty_cache()
        if torch.cuda.memory_reserved() > 6 << 30: torch.cuda.empty_cache()
    return {"rows": rows, "names": list(names), "failed": failed}


def main():
    out, seconds, seed = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    started = time.monotonic()
    mp.set_start_method("spawn")
    workers = 14
    with mp.Pool(workers) as pool:
        answers = pool.map(worker, [(i, seconds, seed, False) for i in range(workers)], chunksize=1)
    import torch
    result = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "device": torch.cuda.get_device_name(0), "seed": seed, "answers": answers}
    with gzip.open(out, "wt") as f: json.dump(result, f, separators=(",", ":"))
    print([len(a["rows"]) for a in answers], [a["failed"] for a in answers], "seconds", round(time.monotonic() - started), "bytes", os.path.getsize(out))


if __name__ == "__main__":
    main()
