"""Measure the workspaces that cuDNN takes for convolutions and recurrent layers on a real GPU: the tables that the virtual one reads.

usage: cudnn.py OUT.json [SECONDS [TABLE.json]]
SECONDS bound the work, 240 if not given; the commonest shapes come first. With a TABLE, convolutions that it does not hold alone.

Keys as in virtualgpu/footprint/cudnn_*_h200.json. Convolutions: dtype, channels first or last, transposed (T or F), channels in and
out, kernel, stride, padding, dilation, groups, then batch and size, to bytes for the output, the input's gradient and the weight's.
"""

import itertools
import json
import sys
import time

BATCHES = (64, 32, 16, 128, 8, 4, 100, 256, 1, 2, 10, 20, 25, 50, 12, 24, 30, 40, 48, 60, 96, 200, 500, 512, 1000)


def convolutions():
    """(channels in, out, kernel, stride, padding, size, groups, transposed), the common ones first."""
    rows = []

    def add(channels, kernel, stride, padding, sizes, groups=1, transposed=False, dims=2):
        for (a, b), size in itertools.product(channels, sizes):
            row = (a, b, kernel, stride, padding, size, a if groups == "all" else groups, transposed, dims)
            if size + 2 * padding >= kernel and row not in rows:
                rows.append(row)

    first, colour = [(1, n) for n in (32, 16, 8, 6, 10, 20, 64, 4)], [(3, n) for n in (16, 32, 64, 6, 8, 12)]
    inner = [
        (32, 64),
        (16, 32),
        (64, 64),
        (32, 32),
        (16, 16),
        (64, 128),
        (128, 128),
        (8, 16),
        (6, 16),
        (8, 8),
        (10, 20),
        (128, 256),
        (256, 256),
    ]
    wide = [(256, 512), (512, 512), (64, 32), (128, 64), (256, 128), (512, 256), (32, 16), (20, 50), (4, 8), (12, 24)]
    add(first, 3, 1, 0, (28,))
    add(first, 3, 1, 1, (28, 32))
    add(first, 5, 1, 0, (28, 32))
    add(first, 5, 1, 2, (28,))
    add(colour, 3, 1, 1, (32, 64))
    add(colour, 3, 1, 0, (32,))
    add(colour, 5, 1, 0, (32,))
    add(colour, 5, 1, 2, (32,))
    add(inner, 3, 1, 1, (16, 14, 8, 32, 7, 28))
    add(inner, 3, 1, 0, (26, 13, 15, 14))
    add([(6, 16), (10, 20), (16, 32), (32, 64), (20, 50), (8, 16)], 5, 1, 0, (14, 12))
    add([(16, 32), (32, 64)], 5, 1, 2, (14, 16))
    add(wide, 3, 1, 1, (16, 8, 4, 32))
    add([(1, 16), (1, 32), (16, 32), (32, 64), (3, 32), (3, 16)], 3, 2, 1, (28, 32, 14, 16, 64))
    add([(16, 10), (32, 10), (64, 10), (16, 1), (32, 1), (64, 1), (16, 3), (32, 3), (64, 3), (16, 4), (64, 21)], 1, 1, 0, (32, 64, 28, 8))
    add([(16, 3), (32, 3), (64, 3), (16, 1), (32, 1), (64, 1), (4, 32), (6, 16)], 3, 1, 1, (32, 28, 64))
    gan = [(64, 3), (128, 64), (256, 128), (512, 256), (64, 1), (128, 1), (32, 16), (64, 32), (16, 1), (32, 3)]
    add(gan, 4, 2, 1, (16, 8, 4, 32, 7, 14), transposed=True)
    add([(100, 512), (100, 256), (64, 128), (64, 256), (128, 256), (100, 128)], 4, 1, 0, (1,), transposed=True)
    add([(3, 64), (64, 128), (128, 256), (256, 512), (1, 64), (1, 32), (32, 64), (3, 32)], 4, 2, 1, (64, 32, 16, 8, 28, 14))
    add([(512, 1), (256, 1), (128, 1)], 4, 1, 0, (4,))
    add([(32, 16), (64, 32), (128, 64), (256, 128), (512, 256), (16, 8)], 2, 2, 0, (8, 16, 32, 7, 14, 28), transposed=True)
    add([(16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (512, 512)], 3, 1, 1, (64, 56, 112))
    add([(64, 64), (128, 128), (256, 256), (512, 512)], 3, 1, 1, (56, 28, 14, 7, 4))
    add([(64, 128), (128, 256), (256, 512)], 3, 2, 1, (56, 28, 14, 32, 16, 8))
    add([(64, 128), (128, 256), (256, 512), (16, 32), (32, 64)], 1, 2, 0, (56, 28, 14, 32, 16, 8))
    add([(64, 64), (64, 256), (256, 64), (256, 128), (128, 512), (512, 128), (512, 256), (256, 1024), (1024, 256)], 1, 1, 0, (56, 28, 14))
    add([(3, 64), (1, 64), (3, 16)], 7, 2, 3, (224, 64, 32, 28, 128))
    add([(3, 64)], 11, 4, 2, (224,))
    add([(64, 192)], 5, 1, 2, (27,))
    add([(192, 384), (384, 256), (256, 256)], 3, 1, 1, (13,))
    add([(3, 128), (3, 192), (3, 256), (3, 384), (3, 768), (3, 64), (1, 64)], 16, 16, 0, (224, 64))
    add([(3, 128), (3, 192), (3, 64), (3, 256)], 8, 8, 0, (64, 32, 224))
    add([(3, 128), (3, 192), (3, 64), (3, 256), (1, 64)], 4, 4, 0, (32, 28, 64))
    add([(3, 64), (3, 192)], 2, 2, 0, (32,))
    add([(n, n) for n in (16, 32, 64, 128)], 3, 1, 1, (32, 16, 8), groups="all")
    add([(3, 64), (3, 32), (3, 16), (64, 64), (64, 128), (32, 64), (16, 32)], 3, 1, 1, (128, 224, 96, 256))
    add([(1, 8), (8, 16), (3, 8), (16, 32), (32, 64)], 3, 1, 1, (100, 50, 25, 12, 6, 10, 20, 48, 24))
    more = [(16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (8, 16), (8, 8), (32, 16), (64, 32), (128, 64), (3, 16), (3, 32)]
    add(more, 3, 1, 1, (64, 24, 12, 10, 20, 48, 128, 5, 4))
    add([(1, 8), (1, 16), (1, 32), (1, 64)], 3, 1, 1, (64, 14, 20, 16, 8, 128))
    add([(8, 16), (16, 32), (32, 64), (32, 32), (64, 64), (16, 16), (64, 128), (3, 8)], 3, 1, 0, (30, 28, 12, 11, 10, 6, 5, 32, 64, 24))
    add([(1, 6), (1, 8), (3, 6), (6, 16), (16, 32), (3, 16)], 5, 1, 0, (16, 20, 64, 24, 10))
    add([(16, 16), (32, 32), (64, 64), (16, 32), (32, 64), (64, 128)], 4, 2, 1, (64, 48, 24, 12))
    add([(16, 8), (32, 16), (64, 32), (128, 64), (16, 3), (8, 1), (8, 3), (32, 1)], 4, 2, 1, (16, 32, 8, 7, 14, 4), transposed=True)
    add([(16, 2), (16, 5), (32, 2), (64, 1), (128, 10), (32, 64), (64, 32), (64, 128), (16, 32), (128, 256)], 1, 1, 0, (64, 32, 16, 14, 128, 8, 7))
    signals = [(1, 8), (1, 16), (1, 32), (1, 64), (8, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (3, 16), (12, 32)]
    lengths = (100, 128, 50, 64, 200, 256, 500, 1000, 28, 32)
    for kernel, padding in ((3, 1), (3, 0), (5, 2), (7, 3), (5, 0), (1, 0)):
        add(signals, kernel, 1, padding, lengths, dims=1)
    add(signals, 3, 2, 1, lengths, dims=1)
    add([(1, 8), (3, 8), (8, 16), (16, 32), (1, 16), (3, 16), (32, 64)], 3, 1, 1, (16, 8, 32, 12), dims=3)
    add([(1, 4), (1, 8), (3, 8), (8, 16)], 3, 1, 0, (16, 8, 12, 32), dims=3)
    return rows


def kinds():
    yield "float32", "first"
    for dtype, order in itertools.product(("float16", "bfloat16", "float32"), ("first", "last")):
        if (dtype, order) != ("float32", "first"):
            yield dtype, order


def jobs():
    """Convolutions in the order of their likelihood: rank of the layer plus rank of the batch plus that of the kind."""
    ranked = []
    for (i, layer), (j, batch), (k, kind) in itertools.product(enumerate(convolutions()), enumerate(BATCHES), enumerate(kinds())):
        a, b, kernel, stride, padding, size, groups, transposed, dims = layer
        if batch * size**dims * max(a, b) * 4 <= 1 << 30 and (dims == 2 or kind[1] == "first"):
            ranked.append((i / 60 + j / 2.5 + 4 * k, layer, batch, kind))
    ranked.sort(key=lambda row: row[0])
    return [row[1:] for row in ranked]


def recorded(torch, work):
    torch.cuda.memory._record_memory_history(max_entries=100, context=None)
    try:
        work()
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    return [(e["action"], e["size"]) for e in trace if e["action"] in ("alloc", "free_completed")]


def space(events):
    """The largest block that was freed within the call."""
    return max((size for action, size in events if action == "free_completed"), default=0)


def names(layer, kind):
    """The key of a layer, and its size of input."""
    a, b, kernel, stride, padding, size, groups, transposed, dims = layer
    *numbers, size = (",".join([str(n)] * dims) for n in (kernel, stride, padding, 1, size))
    return f"{' '.join(kind)} {'FT'[transposed]} {a} {b} {' '.join(numbers)} {groups}", size


def measure(torch, layer, batch, kind):
    a, b, kernel, stride, padding, size, groups, transposed, dims = layer
    dtype, order = kind
    form = torch.channels_last if order == "last" else torch.contiguous_format
    options = dict(device="cuda", dtype=getattr(torch, dtype))
    x = torch.randn(batch, a, *[size] * dims, **options).to(memory_format=form)
    shape = (*((a, b // groups) if transposed else (b, a // groups)), *[kernel] * dims)
    w = torch.randn(shape, **options).to(memory_format=form)
    settings = ([stride] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, groups)
    aten, out, spaces = torch.ops.aten, [], []

    def forward():
        out[:] = [aten.convolution(x, w, None, *settings)]

    spaces.append(space(recorded(torch, forward)))
    grad = torch.ones_like(out[0])
    for mask in ([True, False, False], [False, True, False]):
        results = []
        events = recorded(torch, lambda: results.append(aten.convolution_backward(grad, x, w, [0], *settings, mask)))
        spaces.append(space(events))
    return spaces


def share(job):
    """One worker's convolutions, until its time is over."""
    import torch

    number, workers, seconds, known = job
    end, rows, failed = time.monotonic() + seconds, {}, 0
    wanted = [(*names(layer, kind), layer, batch, kind) for layer, batch, kind in jobs()]
    wanted = [row for row in wanted if row[1] not in known.get(row[0], ())]
    for key, size, layer, batch, kind in wanted[number::workers]:
        if time.monotonic() > end:
            break
        try:
            rows[f"{key} {batch} {size}"] = measure(torch, layer, batch, kind)
        except RuntimeError:
            failed += 1
    return {"name": number, "rows": rows, "failed": failed}


def recurrent(job):
    """Workspaces of LSTM, GRU and RNN: the largest block freed within a forward call."""
    import torch

    number, workers, seconds = job
    end, rows = time.monotonic() + seconds, {}
    shapes = list(
        itertools.product(
            ("LSTM", "GRU", "RNN"),
            (10, 20, 28, 30, 35, 40, 50, 60, 64, 100, 128, 5, 15, 24, 7),
            (32, 16, 64, 8, 128, 4, 20, 50, 100, 24, 1),
            (
                (32, 64),
                (128, 256),
                (64, 128),
                (100, 128),
                (128, 128),
                (1, 64),
                (1, 32),
                (28, 128),
                (4, 64),
                (256, 256),
                (200, 200),
                (64, 64),
                (50, 100),
                (10, 20),
                (256, 512),
            ),
            ((1, False), (2, False), (1, True), (2, True)),
            ("float32", "float16"),
        )
    )
    import random

    random.Random(0).shuffle(shapes)
    for kind, steps, batch, (inputs, hidden), (layers, both), dtype in shapes[number::workers]:
        if time.monotonic() > end:
            break
        m = getattr(torch.nn, kind)(inputs, hidden, layers, bidirectional=both, device="cuda", dtype=getattr(torch, dtype))
        x = torch.randn(steps, batch, inputs, device="cuda", dtype=getattr(torch, dtype))
        for train in (True, False):
            m.train(train)
            rows[f"{kind} {steps} {batch} {inputs} {hidden} {layers} {1 + both} {dtype} {int(train)}"] = space(
                recorded(torch, lambda: m(x))
            )
    return {"name": number, "rows": rows}


def packed(job):
    """Packed sequences, dropout between layers: all that a forward call allocates, and the backward."""
    import torch

    number, workers, seconds = job
    end, rows = time.monotonic() + seconds, []
    lengths = ([20] * 8, list(range(20, 12, -1)), list(range(30, 6, -1)), [12, 5, 5, 1], [40] * 16 + [10] * 16)
    nets = itertools.product(("LSTM", "GRU", "RNN"), lengths, ((32, 64), (100, 128), (128, 256)), ((1, False), (2, False), (1, True), (2, True)), (0.0, 0.5), (True, False))
    for kind, steps, (inputs, hidden), (layers, both), dropout, pack in list(nets)[number::workers]:
        if time.monotonic() > end or (dropout and layers == 1):
            continue
        m = getattr(torch.nn, kind)(inputs, hidden, layers, bidirectional=both, dropout=dropout, device="cuda")
        x = torch.randn(steps[0], len(steps), inputs, device="cuda")
        if pack:
            x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(steps))
        m(x)
        for train in (True, False):
            m.train(train)
            held = []
            events = recorded(torch, lambda: held.append(m(x)))
            y = held[0][0].data if pack else held[0][0]
            back = recorded(torch, lambda: y.backward(torch.ones_like(y))) if train else []
            rows.append([[kind, steps, inputs, hidden, layers, both, dropout, pack, train], *([[a[0], n] for a, n in e] for e in (events, back))])
            held.clear()
    return {"name": number, "rows": rows}


def main():
    out, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 240
    known = json.load(open(sys.argv[3]))["lines"] if len(sys.argv) > 3 else {}
    import torch
    from forked import forked

    gpus = torch.cuda.device_count()
    workers = 8 * gpus
    answers = list(forked(share, [(i, workers, seconds * 0.8, known) for i in range(workers)], workers, gpus, seconds + 60))
    more = [] if known else list(forked(recurrent, [(i, workers, seconds * 0.2) for i in range(workers)], workers, gpus, seconds + 60))
    rest = list(forked(packed, [(i, workers, 60) for i in range(workers)], workers, gpus, seconds + 60))
    layers = {}
    for answer in answers:
        for name, spaces in answer.get("rows", {}).items():
            layer, batch, size = name.rsplit(" ", 2)
            layers.setdefault(layer, {})[f"{batch} {size}"] = spaces
    rnn = {name: size for answer in more for name, size in answer.get("rows", {}).items()}
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name(0),
    }
    sequences = [row for answer in rest for row in answer.get("rows", ())]
    json.dump({**versions, "convolutions": layers, "recurrent": rnn, "packed": sequences}, open(out, "w"), separators=(",", ":"))
    print(
        sum(map(len, layers.values())),
        "convolutions of",
        len(jobs()),
        "and",
        len(rnn),
        "recurrent layers",
        [a["error"] for a in answers + more + rest if "error" in a][:3],
    )


if __name__ == "__main__":
    main()
