"""Measure single operators on a real GPU at several shapes.

usage: python benchmarks/timing/kernels.py OUT.json

The script needs a CUDA GPU, or `virtualgpu run --virtual-time --no-values`. The rules of device
time in virtualgpu/ops are from its results.

Times are milliseconds between two CUDA events, medians of 9. kernels.json has those of one H200
with torch 2.11 and driver 580.159.04. The sizes are so large that launches take no part. Each piece
of work is timed before the next one is made.
"""

import datetime
import json
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from others import normal, on_gpu
from torch import nn

Work = Callable[[], object]
HALF, BF16 = torch.float16, torch.bfloat16
NAMES = {torch.float32: "float32", HALF: "float16", BF16: "bfloat16", torch.int64: "int64"}


def layouts() -> Iterator[tuple[str, Work]]:
    """Yield elementwise work on operands with other shapes and orders in memory."""
    for rows, columns, dtype in (
        (8192, 16384, torch.float32),
        (8192, 16384, HALF),
        (2048, 2048, torch.float32),
    ):
        x, kind = normal(rows, columns, dtype=dtype), f"{rows} × {columns} {NAMES[dtype]}"
        row, column, one, y = (
            normal(columns, dtype=dtype),
            normal(rows, 1, dtype=dtype),
            normal(1, dtype=dtype)[0],
            x.t().contiguous().t(),
        )
        yield f"add, {kind}", lambda: x + 1
        yield f"add a row, {kind}", lambda: x + row
        yield f"add a column, {kind}", lambda: x + column
        yield f"add one number of the GPU, {kind}", lambda: x + one
        yield f"add a transposed one, {kind}", lambda: x + y
        yield f"multiply by itself, {kind}", lambda: x * x
        yield f"transposed copy, {kind}", lambda: x.t().contiguous()
        yield f"every second column, {kind}", lambda: x[:, ::2].contiguous()
        yield f"every second row, {kind}", lambda: x[::2].contiguous()
        yield f"left half, {kind}", lambda: x[:, : x.shape[1] // 2].contiguous()
        yield f"fill, {kind}", lambda: x.fill_(1.0)
        yield f"clone, {kind}", lambda: x.clone()
        mask = x > 0
        yield f"masked fill, {kind}", lambda: x.masked_fill(mask, 0.0)
        yield f"normal numbers, {kind}", lambda: x.normal_()
        yield f"dropout, {kind}", lambda: F.dropout(x, 0.1)
    heads = normal(32, 512, 16, 64)
    yield "heads before tokens", lambda: heads.transpose(1, 2).contiguous()
    pictures, channels = normal(64, 64, 112, 112), normal(64, 1, 1)
    yield "channels last", lambda: pictures.contiguous(memory_format=torch.channels_last)
    yield "add channels' bias", lambda: pictures + channels


def rows_of() -> Iterator[tuple[str, Work]]:
    """Yield softmax, normalization, reductions and scans of rows."""
    for rows, columns, dtype in (
        (1 << 20, 64, torch.float32), (1 << 17, 512, torch.float32), (1 << 16, 1024, torch.float32),
        (1 << 14, 4096, torch.float32), (4096, 50257, torch.float32), (1 << 16, 1024, HALF),
    ):  # fmt: skip
        x, kind = normal(rows, columns, dtype=dtype), f"{rows} × {columns} {NAMES[dtype]}"
        wide, classes = x.clone().requires_grad_(), torch.randint(columns, (rows,), device="cuda")
        weight, bias = (normal(columns, dtype=dtype).requires_grad_() for _ in range(2))
        soft, normed, grad = (
            wide.softmax(-1),
            F.layer_norm(wide, (columns,), weight, bias),
            x.clone(),
        )
        yield f"softmax, {kind}", lambda: x.softmax(-1)
        yield (
            f"softmax back, {kind}",
            lambda: torch.autograd.grad(soft, wide, grad, retain_graph=True),
        )
        yield f"log softmax, {kind}", lambda: x.log_softmax(-1)
        yield f"layer norm, {kind}", lambda: F.layer_norm(x, (columns,), weight, bias)
        yield (
            f"layer norm back, {kind}",
            lambda: torch.autograd.grad(normed, (wide, weight, bias), grad, retain_graph=True),
        )
        yield f"cross entropy, {kind}", lambda: F.cross_entropy(x, classes)
        yield f"sum of rows, {kind}", lambda: x.sum(1)
        yield f"sum of columns, {kind}", lambda: x.sum(0)
        yield f"max of rows, {kind}", lambda: x.max(1)
        yield f"argmax of rows, {kind}", lambda: x.argmax(1)
        yield f"variance of rows, {kind}", lambda: x.var(1)
        yield f"cumsum of rows, {kind}", lambda: x.cumsum(1)
        yield f"cumsum of columns, {kind}", lambda: x.cumsum(0)
        yield f"sort of rows, {kind}", lambda: x.sort(1)
        yield f"topk of rows, {kind}", lambda: x.topk(10, 1)
    for length, dtype in (
        (1 << 24, torch.float32),
        (1 << 24, HALF),
        (1 << 24, torch.int64),
        (1 << 20, torch.float32),
        (1 << 26, torch.float32),
    ):
        flat = (normal(length) * 1e6).to(dtype)
        yield f"sort, {length} {NAMES[dtype]}", lambda: flat.sort()
        yield f"cumsum, {length} {NAMES[dtype]}", lambda: flat.cumsum(0)
        yield f"sum, {length} {NAMES[dtype]}", lambda: flat.sum()
        yield f"norm, {length} {NAMES[dtype]}", lambda: flat.float().norm()


def picked() -> Iterator[tuple[str, Work]]:
    """Yield work that selects rows and elements with an index."""
    for rows, columns, dtype in (
        (50_000, 1024, torch.float32),
        (50_000, 64, torch.float32),
        (50_000, 1024, HALF),
        (1000, 1024, torch.float32),
    ):
        table, kind = (
            normal(rows, columns, dtype=dtype).requires_grad_(),
            f"{rows} × {columns} {NAMES[dtype]}",
        )
        index = torch.randint(rows, (1 << 17,), device="cuda")
        found = F.embedding(index, table)
        grad, plain, places = (
            torch.randn_like(found),
            table.detach(),
            index[:columns].expand(rows, columns) % columns,
        )
        yield f"index, {kind}", lambda: plain[index]
        yield f"embedding, {kind}", lambda: F.embedding(index, plain)
        yield (
            f"embedding back, {kind}",
            lambda: torch.autograd.grad(found, table, grad, retain_graph=True),
        )
        yield f"index_add, {kind}", lambda: plain.index_add_(0, index, grad)
        yield f"gather, {kind}", lambda: plain.gather(1, places)
        yield f"scatter_add, {kind}", lambda: plain.scatter_add_(1, places, plain.clone())


def images() -> Iterator[tuple[str, Work]]:
    for batch, channels, size, dtype in (
        (64, 64, 112, torch.float32), (64, 64, 56, torch.float32), (64, 256, 56, torch.float32),
        (64, 256, 28, torch.float32), (64, 512, 14, torch.float32), (64, 64, 56, HALF),
        (64, 256, 28, HALF), (64, 512, 14, BF16),
    ):  # fmt: skip
        x, kind = (
            normal(batch, channels, size, size, dtype=dtype).requires_grad_(),
            f"{batch} × {channels} × {size}² {NAMES[dtype]}",
        )
        plain, in_use = x.detach(), nn.BatchNorm2d(channels, device="cuda", dtype=dtype).eval()
        conv = {
            k: nn.Conv2d(channels, channels, k, padding=k // 2, device="cuda", dtype=dtype)
            for k in (1, 3)
        }
        norm = nn.BatchNorm2d(channels, device="cuda", dtype=dtype)
        for k, layer in conv.items():
            out = layer(x)
            grad = torch.randn_like(out)
            yield f"convolution {k} × {k}, {kind}", lambda: layer(plain)
            inputs = (x, *layer.parameters())
            yield (
                f"convolution {k} × {k} back, {kind}",
                lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
            )
            last, layer_last = (
                plain.contiguous(memory_format=torch.channels_last),
                layer.to(memory_format=torch.channels_last),
            )
            yield f"convolution {k} × {k}, channels last, {kind}", lambda: layer_last(last)
        out, inputs = norm(x), (x, *norm.parameters())
        grad = torch.randn_like(out)
        yield f"batch norm, {kind}", lambda: norm(plain)
        yield (
            f"batch norm back, {kind}",
            lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        )
        yield f"batch norm for use, {kind}", lambda: in_use(plain)
        yield f"max pool, {kind}", lambda: F.max_pool2d(plain, 2)
        pooled = F.max_pool2d(x, 2)
        grad = torch.randn_like(pooled)
        yield (
            f"max pool back, {kind}",
            lambda: torch.autograd.grad(pooled, x, grad, retain_graph=True),
        )
        yield f"average pool, {kind}", lambda: F.adaptive_avg_pool2d(plain, 1)
    for dtype in (torch.float32, HALF):
        first, picture = (
            nn.Conv2d(3, 64, 7, stride=2, padding=3, device="cuda", dtype=dtype),
            normal(64, 3, 224, 224, dtype=dtype),
        )
        yield f"convolution 7 × 7, stride 2, {NAMES[dtype]}", lambda: first(picture)
        deep, x = (
            nn.Conv2d(128, 128, 3, padding=1, groups=128, device="cuda", dtype=dtype),
            normal(64, 128, 56, 56, dtype=dtype),
        )
        yield f"convolution of each channel alone, {NAMES[dtype]}", lambda: deep(x)


def attentions() -> Iterator[tuple[str, Work]]:
    for batch, heads, length, width, dtype in (
        (64, 16, 256, 64, HALF), (16, 16, 1024, 64, HALF), (8, 16, 4096, 64, HALF),
        (8, 16, 2048, 128, BF16), (16, 16, 1024, 64, torch.float32),
    ):  # fmt: skip
        q, k, v = (
            normal(batch, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3)
        )
        kind = f"{batch} × {heads} × {length} × {width} {NAMES[dtype]}"
        for causal in (False, True):
            name = f"{', causal' * causal}, {kind}"
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            plain, grad = [x.detach() for x in (q, k, v)], torch.randn_like(out)
            yield (
                f"attention{name}",
                lambda: F.scaled_dot_product_attention(*plain, is_causal=causal),
            )
            yield (
                f"attention back{name}",
                lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
            )


def optimizers() -> Iterator[tuple[str, Work]]:
    for count, size in ((4, 1 << 24), (64, 1 << 20)):
        parameters = [nn.Parameter(normal(size)) for _ in range(count)]
        for x in parameters:
            x.grad = torch.randn_like(x)
        kinds = {
            "SGD": torch.optim.SGD(parameters, 1e-9),
            "SGD with momentum": torch.optim.SGD(parameters, 1e-9, momentum=0.9),
            "Adam": torch.optim.Adam(parameters, 1e-9),
            "AdamW": torch.optim.AdamW(parameters, 1e-9),
            "fused Adam": torch.optim.Adam(parameters, 1e-9, fused=True),
            "Adam one by one": torch.optim.Adam(parameters, 1e-9, foreach=False),
            "RMSprop": torch.optim.RMSprop(parameters, 1e-9),
        }  # fmt: skip
        for name, optimizer in kinds.items():
            yield f"{name}, {count} × {size}", optimizer.step
        yield (
            f"norm of gradients, {count} × {size}",
            lambda: nn.utils.clip_grad_norm_(parameters, 1e9),
        )
        yield (
            f"gradients to zero, {count} × {size}",
            lambda: kinds["SGD"].zero_grad(set_to_none=False),
        )
    lstm, sequence = nn.LSTM(1024, 1024, num_layers=2, device="cuda"), normal(128, 64, 1024)
    yield "LSTM", lambda: lstm(sequence)
    yield "LSTM there and back", lambda: lstm(sequence)[0].sum().backward()


def main(path: str) -> None:
    found: dict[str, float] = {}
    for group in (layouts, rows_of, picked, images, attentions, optimizers):
        for name, work in group():
            found[name] = on_gpu(work)
        torch.cuda.empty_cache()
    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with open(path, "w") as file:
        json.dump({"machine": machine, "milliseconds": found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
