"""Measure programs and shapes to which no profile was fitted.

usage: python benchmarks/timing/others.py OUT.json

The script needs a CUDA GPU, or `virtualgpu run --virtual-time --no-values`. Its results show how
good the virtual GPU's times are elsewhere.

Times are milliseconds of each piece of work, in two groups. "gpu" has kernels long enough to keep
the GPU busy, between two CUDA events. "host" has work bound by its launches, on the host's clock,
and "host_add_us" says how fast that host launches an operator. others.json has the results of one
H200 with torch 2.11 and driver 580.159.04, on a host of 32 cores.
"""

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

ROUNDS = 9
Work = Callable[[], object]


def on_gpu(work: Work) -> float:
    """Return the median milliseconds of one piece of work on the GPU."""
    found = []
    for turn in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:  # the first two runs load kernels and choose between them
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def on_host(work: Work, repeats: int = 20) -> float:
    """Return the median milliseconds of one piece of work on the host's clock.

    Several are timed together.
    """
    found = []
    for turn in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        if turn > 1:
            found.append((time.perf_counter() - start) / repeats * 1e3)
    return statistics.median(found)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def products() -> dict[str, Work]:
    """Return matrix products whose shapes are not squares of powers of two, by name."""
    half, bfloat16 = torch.float16, torch.bfloat16
    work: dict[str, Work] = {}
    for name, (m, k, n), dtype in (
        ("square 3000 float32", (3000, 3000, 3000), torch.float32),
        ("square 6000 float16", (6000, 6000, 6000), half),
        ("wide 16384 × 1024 × 4096 bfloat16", (16384, 1024, 4096), bfloat16),
        ("thin result 8192 × 8192 × 256 float32", (8192, 8192, 256), torch.float32),
        ("few rows 32 × 8192 × 8192 float16", (32, 8192, 8192), half),
        ("one row 1 × 16384 × 16384 float32", (1, 16384, 16384), torch.float32),
        ("long sum 512 × 65536 × 512 float32", (512, 65536, 512), torch.float32),
    ):
        a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
        work[f"product, {name}"] = lambda a=a, b=b: a @ b
    a, b = normal(256, 1024, 64, dtype=half), normal(256, 64, 1024, dtype=half)
    work["product, batch of 256, 1024 × 64 × 1024 float16"] = lambda: a @ b
    layer, x = nn.Linear(2048, 8192, device="cuda"), normal(8192, 2048)
    work["linear layer 8192 × 2048 × 8192 float32"] = lambda: layer(x)
    return work


def passes() -> dict[str, Work]:
    """Return work for the GPU that is bound by memory, by name."""
    x, y, row = normal(8192, 16384), normal(8192, 16384), normal(16384)
    half, flat, keys = x.half(), normal(1 << 26), normal(1 << 24)
    index = torch.randint(50_000, (1 << 17,), device="cuda")
    table = normal(50_000, 1024)
    classes = torch.randint(16384, (8192,), device="cuda")
    return {
        "add a row": lambda: x + row,
        "add float16": lambda: half + half,
        "to float16": lambda: x.half(),
        "gelu": lambda: F.gelu(x),
        "in place": lambda: x.mul_(1.0001),
        "where": lambda: torch.where(x > 0, x, y),
        "dropout": lambda: F.dropout(x, 0.1),
        "softmax": lambda: x.softmax(-1),
        "layer norm": lambda: F.layer_norm(x, (16384,)),
        "mean of rows": lambda: x.mean(1),
        "sum of columns": lambda: x.sum(0),
        "largest of rows": lambda: x.max(1),
        "transposed copy": lambda: x.t().contiguous(),
        "cat": lambda: torch.cat([x, y]),
        "cumsum": lambda: flat.cumsum(0),
        "sort": lambda: keys.sort(),
        "rows of a table": lambda: table[index],
        "cross entropy": lambda: F.cross_entropy(x, classes),
        "random numbers": lambda: torch.randn(1 << 27, device="cuda"),
        "zeros": lambda: torch.zeros(1 << 28, device="cuda"),
    }


def images() -> dict[str, Work]:
    """Return work of convolutional networks, by name."""
    x = normal(64, 64, 112, 112)
    narrow, wide = (
        nn.Conv2d(64, 64, 3, padding=1, device="cuda"),
        nn.Conv2d(64, 256, 1, device="cuda"),
    )
    first, picture = (
        nn.Conv2d(3, 64, 7, stride=2, padding=3, device="cuda"),
        normal(64, 3, 224, 224),
    )
    norm = nn.BatchNorm2d(64, device="cuda")
    block = nn.Sequential(narrow, norm, nn.ReLU(), nn.MaxPool2d(2))
    return {
        "convolution 3 × 3": lambda: narrow(x),
        "convolution 1 × 1": lambda: wide(x),
        "convolution 7 × 7, stride 2": lambda: first(picture),
        "batch norm": lambda: norm(x),
        "max pool": lambda: F.max_pool2d(x, 2),
        "block of a network, there and back": lambda: block(x).mean().backward(),
    }


def training() -> dict[str, Work]:
    """Return training steps that keep the GPU busy, by name."""
    encoder, tokens = (
        nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, device="cuda"),
        normal(32, 512, 1024),
    )
    query = normal(16, 16, 2048, 64, dtype=torch.float16)
    wide = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU()))
    ).cuda()
    adam, x = torch.optim.Adam(wide.parameters()), normal(4096, 4096)
    wide(x).mean().backward()

    def with_autocast() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = encoder(tokens).float().mean()
        loss.backward()

    def step() -> None:
        adam.zero_grad()
        wide(x).square().mean().backward()
        adam.step()

    return {
        "attention float16": lambda: F.scaled_dot_product_attention(query, query, query),
        "attention float16, causal": lambda: F.scaled_dot_product_attention(
            query, query, query, is_causal=True
        ),
        "encoder layer, there": lambda: encoder(tokens),
        "encoder layer, there and back": lambda: encoder(tokens).mean().backward(),
        "encoder layer, there and back, autocast": with_autocast,
        "Adam": adam.step,
        "norm of gradients": lambda: nn.utils.clip_grad_norm_(wide.parameters(), 1.0),
        "training step of four layers": step,
    }


def copies() -> dict[str, Work]:
    """Return work that copies batches from the host while others are processed, by name."""
    batches = [torch.empty(24 << 20, dtype=torch.float32, pin_memory=True) for _ in range(4)]
    pageable = torch.zeros(24 << 20)
    weight, side = normal(4096, 4096), torch.cuda.Stream()

    def use(batch: torch.Tensor) -> torch.Tensor:
        return batch.view(-1, 4096) @ weight

    def in_turn() -> None:
        for batch in batches:
            use(batch.to("cuda", non_blocking=True))

    def ahead() -> None:
        here = torch.cuda.current_stream()
        for batch in batches:
            with torch.cuda.stream(side):
                there = batch.to("cuda", non_blocking=True)
            here.wait_stream(side)
            there.record_stream(here)
            use(there)

    return {
        "batches in turn": in_turn,
        "batches ahead": ahead,
        "a pageable batch": lambda: pageable.cuda(),
        "a result of 96 MB to the host": lambda: batches[0].copy_(
            batches[1].cuda(), non_blocking=True
        ),
    }


def small() -> dict[str, Work]:
    """Return work that is bound by its launches, by name."""
    x = normal(64, 256)
    mlp = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU()))
    ).cuda()
    sgd, adam = (
        torch.optim.SGD(mlp.parameters(), 0.01, momentum=0.9),
        torch.optim.Adam(mlp.parameters()),
    )
    convolutions = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 256, 10),
    ).cuda()
    pictures, classes = normal(32, 3, 32, 32), torch.randint(10, (32,), device="cuda")
    lstm, sequence = nn.LSTM(64, 64, batch_first=True, device="cuda"), normal(16, 32, 64)
    encoder, tokens = (
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device="cuda"),
        normal(8, 16, 64),
    )
    host, back = torch.randn(256), torch.empty(256)
    mlp(x).mean().backward()

    def step() -> None:
        sgd.zero_grad()
        mlp(x).square().mean().backward()
        sgd.step()

    def classify() -> None:
        F.cross_entropy(convolutions(pictures), classes).backward()

    def waited() -> None:
        mlp(x)
        torch.cuda.synchronize()

    return {
        "six layers": lambda: mlp(x),
        "six layers and a wait": waited,
        "training step, SGD": step,
        "SGD": sgd.step,
        "Adam of twelve tensors": adam.step,
        "small pictures, there and back": classify,
        "LSTM": lambda: lstm(sequence),
        "small encoder layer, there and back": lambda: encoder(tokens).mean().backward(),
        "fifty slices added": lambda: [x[i] + x[i + 1] for i in range(50)],
        "a small tensor there and back": lambda: back.copy_(host.cuda()),
        "a list to the GPU": lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda"),
    }


def main(path: str) -> None:
    one = torch.zeros(1, device="cuda")
    found: dict[str, dict[str, float]] = {"gpu": {}, "host": {}}
    add = on_host(lambda: one.add_(1), 1000) * 1e3
    for group in (products, passes, images, training, copies):
        for name, work in group().items():
            found["gpu"][name] = on_gpu(work)
        torch.cuda.empty_cache()
    for name, work in small().items():
        found["host"][name] = on_host(work)
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with open(path, "w") as file:
        json.dump({"machine": machine, "host_add_us": add, **found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
