"""What single operators take on a real GPU, at several shapes: what the rules of labkit/vgpu/traffic.py are read off.

usage: python benchmarks/timing/kernels.py OUT.json      on a CUDA GPU, or under `labkit run --virtual-time --no-values`

Milliseconds between two CUDA events, medians of 9. Sizes are large enough that launches do not show.
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
    """Elementwise work on operands of other shapes and orders."""
    for rows, columns, dtype in ((8192, 16384, torch.float32), (8192, 16384, HALF), (2048, 2048, torch.float32)):
        x, kind = normal(rows, columns, dtype=dtype), f"{rows} × {columns} {NAMES[dtype]}"
        row, column, one, y = normal(columns, dtype=dtype), normal(rows, 1, dtype=dtype), normal(1, dtype=dtype)[0], x.t().contiguous().t()
        yield f"add, {kind}", lambda x=x: x + 1
        yield f"add a row, {kind}", lambda x=x, row=row: x + row
        yield f"add a column, {kind}", lambda x=x, column=column: x + column
        yield f"add one number of the GPU, {kind}", lambda x=x, one=one: x + one
        yield f"add a transposed one, {kind}", lambda x=x, y=y: x + y
        yield f"multiply by itself, {kind}", lambda x=x: x * x
        yield f"transposed copy, {kind}", lambda x=x: x.t().contiguous()
        yield f"every second column, {kind}", lambda x=x: x[:, ::2].contiguous()
        yield f"every second row, {kind}", lambda x=x: x[::2].contiguous()
        yield f"left half, {kind}", lambda x=x: x[:, : x.shape[1] // 2].contiguous()
        yield f"fill, {kind}", lambda x=x: x.fill_(1.0)
        yield f"clone, {kind}", lambda x=x: x.clone()
        yield f"masked fill, {kind}", lambda x=x, mask=x > 0: x.masked_fill(mask, 0.0)
        yield f"normal numbers, {kind}", lambda x=x: x.normal_()
        yield f"dropout, {kind}", lambda x=x: F.dropout(x, 0.1)
    heads = normal(32, 512, 16, 64)
    yield "heads before tokens", lambda: heads.transpose(1, 2).contiguous()
    pictures = normal(64, 64, 112, 112)
    yield "channels last", lambda: pictures.contiguous(memory_format=torch.channels_last)
    yield "add channels' bias", lambda bias=normal(64, 1, 1): pictures + bias


def rows_of() -> Iterator[tuple[str, Work]]:
    """Softmax, normalization, reductions and scans of rows."""
    for rows, columns, dtype in (
        (1 << 20, 64, torch.float32), (1 << 17, 512, torch.float32), (1 << 16, 1024, torch.float32), (1 << 14, 4096, torch.float32),
        (4096, 50257, torch.float32), (1 << 16, 1024, HALF),
    ):  # fmt: skip
        x, kind = normal(rows, columns, dtype=dtype), f"{rows} × {columns} {NAMES[dtype]}"
        wide, classes = x.clone().requires_grad_(), torch.randint(columns, (rows,), device="cuda")
        weight, bias = (normal(columns, dtype=dtype).requires_grad_() for _ in range(2))
        soft, normed, grad = wide.softmax(-1), F.layer_norm(wide, (columns,), weight, bias), x.clone()
        yield f"softmax, {kind}", lambda x=x: x.softmax(-1)
        yield f"softmax back, {kind}", lambda a=soft, b=wide, g=grad: torch.autograd.grad(a, b, g, retain_graph=True)
        yield f"log softmax, {kind}", lambda x=x: x.log_softmax(-1)
        yield f"layer norm, {kind}", lambda x=x, c=columns, w=weight, b=bias: F.layer_norm(x, (c,), w, b)
        yield f"layer norm back, {kind}", lambda a=normed, b=(wide, weight, bias), g=grad: torch.autograd.grad(a, b, g, retain_graph=True)
        yield f"cross entropy, {kind}", lambda x=x, c=classes: F.cross_entropy(x, c)
        yield f"sum of rows, {kind}", lambda x=x: x.sum(1)
        yield f"sum of columns, {kind}", lambda x=x: x.sum(0)
        yield f"max of rows, {kind}", lambda x=x: x.max(1)
        yield f"argmax of rows, {kind}", lambda x=x: x.argmax(1)
        yield f"variance of rows, {kind}", lambda x=x: x.var(1)
        yield f"cumsum of rows, {kind}", lambda x=x: x.cumsum(1)
        yield f"cumsum of columns, {kind}", lambda x=x: x.cumsum(0)
        yield f"sort of rows, {kind}", lambda x=x: x.sort(1)
        yield f"topk of rows, {kind}", lambda x=x: x.topk(10, 1)
    for length, dtype in (
        (1 << 24, torch.float32),
        (1 << 24, HALF),
        (1 << 24, torch.int64),
        (1 << 20, torch.float32),
        (1 << 26, torch.float32),
    ):
        flat = (normal(length) * 1e6).to(dtype)
        yield f"sort, {length} {NAMES[dtype]}", lambda x=flat: x.sort()
        yield f"cumsum, {length} {NAMES[dtype]}", lambda x=flat: x.cumsum(0)
        yield f"sum, {length} {NAMES[dtype]}", lambda x=flat: x.sum()
        yield f"norm, {length} {NAMES[dtype]}", lambda x=flat: x.float().norm()


def picked() -> Iterator[tuple[str, Work]]:
    """Rows and elements chosen by an index."""
    for rows, columns, dtype in (
        (50_000, 1024, torch.float32),
        (50_000, 64, torch.float32),
        (50_000, 1024, HALF),
        (1000, 1024, torch.float32),
    ):
        table, kind = normal(rows, columns, dtype=dtype).requires_grad_(), f"{rows} × {columns} {NAMES[dtype]}"
        index = torch.randint(rows, (1 << 17,), device="cuda")
        found = F.embedding(index, table)
        with_grad = torch.randn_like(found)
        yield f"index, {kind}", lambda t=table.detach(), i=index: t[i]
        yield f"embedding, {kind}", lambda t=table.detach(), i=index: F.embedding(i, t)
        yield f"embedding back, {kind}", lambda a=found, t=table, g=with_grad: torch.autograd.grad(a, t, g, retain_graph=True)
        yield f"index_add, {kind}", lambda t=table.detach(), i=index, g=with_grad: t.index_add_(0, i, g)
        yield f"gather, {kind}", lambda t=table.detach(), i=index[:columns].expand(rows, columns) % columns: t.gather(1, i)
        yield (
            f"scatter_add, {kind}",
            lambda t=table.detach(), i=index[:columns].expand(rows, columns) % columns: t.scatter_add_(1, i, t.clone()),
        )


def images() -> Iterator[tuple[str, Work]]:
    for batch, channels, size, dtype in (
        (64, 64, 112, torch.float32), (64, 64, 56, torch.float32), (64, 256, 56, torch.float32), (64, 256, 28, torch.float32),
        (64, 512, 14, torch.float32), (64, 64, 56, HALF), (64, 256, 28, HALF), (64, 512, 14, BF16),
    ):  # fmt: skip
        x, kind = normal(batch, channels, size, size, dtype=dtype).requires_grad_(), f"{batch} × {channels} × {size}² {NAMES[dtype]}"
        conv = {k: nn.Conv2d(channels, channels, k, padding=k // 2, device="cuda", dtype=dtype) for k in (1, 3)}
        norm = nn.BatchNorm2d(channels, device="cuda", dtype=dtype)
        for k, layer in conv.items():
            out = layer(x)
            grad = torch.randn_like(out)
            yield f"convolution {k} × {k}, {kind}", lambda f=layer, x=x.detach(): f(x)
            yield (
                f"convolution {k} × {k} back, {kind}",
                lambda a=out, x=x, f=layer, g=grad: torch.autograd.grad(a, (x, *f.parameters()), g, retain_graph=True),
            )
            last, f_last = x.detach().contiguous(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
            yield f"convolution {k} × {k}, channels last, {kind}", lambda f=f_last, x=last: f(x)
        out = norm(x)
        yield f"batch norm, {kind}", lambda f=norm, x=x.detach(): f(x)
        yield (
            f"batch norm back, {kind}",
            lambda a=out, x=x, f=norm, g=torch.randn_like(out): torch.autograd.grad(a, (x, *f.parameters()), g, retain_graph=True),
        )
        yield f"batch norm for use, {kind}", lambda f=nn.BatchNorm2d(channels, device="cuda", dtype=dtype).eval(), x=x.detach(): f(x)
        yield f"max pool, {kind}", lambda x=x.detach(): F.max_pool2d(x, 2)
        pooled = F.max_pool2d(x, 2)
        yield f"max pool back, {kind}", lambda a=pooled, x=x, g=torch.randn_like(pooled): torch.autograd.grad(a, x, g, retain_graph=True)
        yield f"average pool, {kind}", lambda x=x.detach(): F.adaptive_avg_pool2d(x, 1)
    for dtype in (torch.float32, HALF):
        first, picture = nn.Conv2d(3, 64, 7, stride=2, padding=3, device="cuda", dtype=dtype), normal(64, 3, 224, 224, dtype=dtype)
        yield f"convolution 7 × 7, stride 2, {NAMES[dtype]}", lambda f=first, x=picture: f(x)
        deep, x = nn.Conv2d(128, 128, 3, padding=1, groups=128, device="cuda", dtype=dtype), normal(64, 128, 56, 56, dtype=dtype)
        yield f"convolution of each channel alone, {NAMES[dtype]}", lambda f=deep, x=x: f(x)


def attentions() -> Iterator[tuple[str, Work]]:
    for batch, heads, length, width, dtype in (
        (64, 16, 256, 64, HALF), (16, 16, 1024, 64, HALF), (8, 16, 4096, 64, HALF), (8, 16, 2048, 128, BF16), (16, 16, 1024, 64, torch.float32),
    ):  # fmt: skip
        q, k, v = (normal(batch, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3))
        kind = f"{batch} × {heads} × {length} × {width} {NAMES[dtype]}"
        for causal in (False, True):
            name = f"{', causal' * causal}, {kind}"
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            yield (
                f"attention{name}",
                lambda q=q.detach(), k=k.detach(), v=v.detach(), c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
            )
            yield (
                f"attention back{name}",
                lambda a=out, t=(q, k, v), g=torch.randn_like(out): torch.autograd.grad(a, t, g, retain_graph=True),
            )


def optimizers() -> Iterator[tuple[str, Work]]:
    for count, size in ((4, 1 << 24), (64, 1 << 20)):
        parameters = [nn.Parameter(normal(size)) for _ in range(count)]
        for x in parameters:
            x.grad = torch.randn_like(x)
        kinds = {
            "SGD": torch.optim.SGD(parameters, 1e-9), "SGD with momentum": torch.optim.SGD(parameters, 1e-9, momentum=0.9),
            "Adam": torch.optim.Adam(parameters, 1e-9), "AdamW": torch.optim.AdamW(parameters, 1e-9),
            "fused Adam": torch.optim.Adam(parameters, 1e-9, fused=True), "Adam one by one": torch.optim.Adam(parameters, 1e-9, foreach=False),
            "RMSprop": torch.optim.RMSprop(parameters, 1e-9),
        }  # fmt: skip
        for name, optimizer in kinds.items():
            yield f"{name}, {count} × {size}", optimizer.step
        yield f"norm of gradients, {count} × {size}", lambda p=parameters: nn.utils.clip_grad_norm_(p, 1e9)
        yield f"gradients to zero, {count} × {size}", lambda o=kinds["SGD"]: o.zero_grad(set_to_none=False)
    lstm, sequence = nn.LSTM(1024, 1024, num_layers=2, device="cuda"), normal(128, 64, 1024)
    yield "LSTM", lambda: lstm(sequence)
    yield "LSTM there and back", lambda: lstm(sequence)[0].sum().backward()


def main(path: str) -> None:
    found: dict[str, float] = {}
    for group in (layouts, rows_of, picked, images, attentions, optimizers):
        for name, work in group():
            try:
                found[name] = on_gpu(work)
            except (RuntimeError, NotImplementedError) as error:
                print(name, str(error)[:200])
        torch.cuda.empty_cache()
    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    with open(path, "w") as file:
        json.dump({"machine": machine, "milliseconds": found}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
