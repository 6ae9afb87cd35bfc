"""Measure the kernels of single operators on small, narrow and long tensors.

usage: python benchmarks/timing/small_kernels.py OUT.json

The script needs a CUDA GPU, or `virtualgpu run`.

The times are microseconds of all kernels of one call, as PyTorch's profiler measures them, and
medians of five calls. The host's time plays no part. small_kernels.json has the results of one GPU.
kernels.py measures large tensors.
"""

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
CALLS = 5
LARGEST = 1 << 26  # elements
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def normal(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, device="cuda").to(dtype)


def weight_gradients() -> Iterator[tuple[str, Work]]:
    """Yield products with few rows and columns and long sums."""
    for kind, dtype in TYPES.items():
        for side in (32, 64, 128, 256, 512, 1024):
            for terms in (64, 256, 1024, 4096, 16384, 65536):
                if side * terms > LARGEST:
                    continue
                x, y = normal(terms, side, dtype=dtype), normal(terms, side, dtype=dtype)
                yield f"weight gradient, {side} x {side}, {terms} terms, {kind}", lambda: x.t() @ y
    for rows, columns, terms in (
        (256, 64, 25088),
        (384, 128, 6272),
        (64, 1024, 4096),
        (1024, 64, 2048),
    ):
        x, y = normal(terms, rows), normal(terms, columns)
        yield f"weight gradient, {rows} x {columns}, {terms} terms, float32", lambda: x.t() @ y


def layers() -> Iterator[tuple[str, Work]]:
    """Yield linear layers."""
    for kind, dtype in TYPES.items():
        for rows in (16, 64, 256, 1024, 4096, 16384):
            for inputs, outputs in (
                (64, 64),
                (64, 256),
                (256, 256),
                (384, 1536),
                (1024, 1024),
                (9216, 128),
                (4096, 4096),
            ):
                x, weight, bias = (
                    normal(rows, inputs, dtype=dtype),
                    normal(outputs, inputs, dtype=dtype),
                    normal(outputs, dtype=dtype),
                )
                yield (
                    f"linear, {rows} rows, {inputs} to {outputs}, {kind}",
                    lambda: F.linear(x, weight, bias),
                )
        for batch, rows, terms, columns in (
            (48, 128, 64, 512),
            (48, 128, 512, 64),
            (96, 128, 64, 128),
            (8, 1024, 64, 1024),
            (256, 49, 32, 49),
        ):
            x, y = (
                normal(batch, rows, terms, dtype=dtype),
                normal(batch, terms, columns, dtype=dtype),
            )
            yield (
                f"batched product, {batch} times {rows} x {terms} x {columns}, {kind}",
                lambda: x @ y,
            )


def sums() -> Iterator[tuple[str, Work]]:
    for kind, dtype in TYPES.items():
        for rows in (64, 512, 1024, 4096, 16384, 65536):
            for columns in (64, 192, 384, 1024, 4096):
                if rows * columns <= LARGEST:
                    x = normal(rows, columns, dtype=dtype)
                    yield f"sum of rows, {rows} x {columns}, {kind}", lambda: x.sum(0)
    for rows in (64, 1024, 16384, 262144):
        for columns in (64, 384, 1024, 4096):
            if rows * columns <= LARGEST:
                x = normal(rows, columns)
                yield f"sum of columns, {rows} x {columns}", lambda: x.sum(1)
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
        x = normal(size)
        yield f"sum of all, {size}", lambda: x.sum()
    for shape in (
        (64, 32, 26, 26),
        (64, 64, 24, 24),
        (8, 64, 128, 128),
        (8, 256, 32, 32),
        (8, 1024, 14, 14),
        (32, 512, 7, 7),
    ):
        x = normal(*shape)
        yield f"sum of channels, {shape}", lambda: x.sum((0, 2, 3))


def backward_of(y: torch.Tensor, inputs: list[torch.Tensor]) -> Work:
    gradient = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, inputs, gradient, retain_graph=True)


def norms() -> Iterator[tuple[str, Work]]:
    for rows in (256, 1024, 8192, 25088, 65536):
        for columns in (32, 64, 96, 128, 256, 384, 768, 1024):
            norm, x = nn.LayerNorm(columns).cuda(), normal(rows, columns).requires_grad_()
            yield f"layer norm, {rows} x {columns}", lambda: norm(x)
            yield (
                f"layer norm backward, {rows} x {columns}",
                backward_of(norm(x), [x, *norm.parameters()]),
            )
    for shape, groups in (
        *(
            ((8, 64, 128, 128), 8),
            ((8, 64, 128, 128), 32),
            ((8, 128, 64, 64), 8),
            ((8, 256, 32, 32), 8),
        ),
        *(
            ((32, 64, 32, 32), 8),
            ((2, 320, 64, 64), 32),
            ((64, 128, 16, 16), 1),
            ((8, 512, 16, 16), 32),
        ),
    ):
        norm, x = nn.GroupNorm(groups, shape[1]).cuda(), normal(*shape).requires_grad_()
        yield f"group norm of {groups}, {shape}", lambda: norm(x)
        yield (
            f"group norm of {groups} backward, {shape}",
            backward_of(norm(x), [x, *norm.parameters()]),
        )
    for shape in (
        (8, 1024, 14, 14),
        (8, 64, 112, 112),
        (64, 64, 32, 32),
        (8, 256, 7, 7),
        (128, 512, 4, 4),
        (2, 32, 256, 256),
    ):
        norm, x = nn.BatchNorm2d(shape[1]).cuda(), normal(*shape).requires_grad_()
        yield f"batch norm, {shape}", lambda: norm(x)
        yield f"batch norm backward, {shape}", backward_of(norm(x), [x, *norm.parameters()])


def lists() -> Iterator[tuple[str, Work]]:
    for count, size in (
        *(
            (1, 1 << 10),
            (1, 1 << 16),
            (1, 1 << 20),
            (1, 1 << 24),
            (4, 1 << 14),
            (4, 1 << 18),
            (10, 1 << 22),
        ),
        *(
            (20, 64),
            (20, 1 << 16),
            (100, 64),
            (100, 1 << 12),
            (100, 1 << 16),
            (100, 1 << 18),
            (200, 1 << 14),
            (400, 256),
        ),
    ):
        x, y, z = ([normal(size).abs_() for _ in range(count)] for _ in range(3))
        title = f"{count} of {size}"
        yield f"foreach add, {title}", lambda: torch._foreach_add_(x, y, alpha=1e-3)
        yield f"foreach multiply, {title}", lambda: torch._foreach_mul_(x, 0.99)
        yield f"foreach lerp, {title}", lambda: torch._foreach_lerp_(x, y, 0.01)
        yield f"foreach addcmul, {title}", lambda: torch._foreach_addcmul_(x, y, y, 1e-3)
        yield f"foreach addcdiv, {title}", lambda: torch._foreach_addcdiv_(x, y, z, 1e-3)
        yield f"foreach square root, {title}", lambda: torch._foreach_sqrt(x)


def images() -> Iterator[tuple[str, Work]]:
    for shape in ((4, 20, 64, 64), (4, 256, 16, 16), (8, 64, 32, 32), (16, 256, 32, 32)):
        x = normal(*shape).requires_grad_()
        title = str(shape)
        for mode in ("bilinear", "nearest"):
            yield f"upsample {mode}, {title}", lambda: F.interpolate(x, scale_factor=4, mode=mode)
            yield (
                f"upsample {mode} backward, {title}",
                backward_of(F.interpolate(x, scale_factor=4, mode=mode), [x]),
            )
        yield f"average pool, {title}", lambda: F.avg_pool2d(x, 2)
        yield f"average pool backward, {title}", backward_of(F.avg_pool2d(x, 2), [x])
        yield f"average pool of three backward, {title}", backward_of(F.avg_pool2d(x, 3, 2, 1), [x])
        yield f"max pool, {title}", lambda: F.max_pool2d(x, 2)
        yield f"max pool backward, {title}", backward_of(F.max_pool2d(x, 2), [x])


def indexed() -> Iterator[tuple[str, Work]]:
    for size in (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 18, 1 << 20):
        x = normal(size)
        yield f"sort, {size}", lambda: x.sort()
        yield f"topk, {size}", lambda: x.topk(8)
        yield f"cumsum, {size}", lambda: x.cumsum(0)
    for count, rows, width in (
        (2401, 169, 8),
        (1024, 1024, 1),
        (1024, 1000, 64),
        (1024, 30000, 512),
        (16384, 30000, 512),
        (4096, 512, 768),
    ):
        table, chosen, values = (
            normal(rows, width),
            torch.randint(rows, (count,), device="cuda"),
            normal(count, width),
        )
        title = f"{count} of {rows} x {width}"
        yield f"index, {title}", lambda: table[chosen]
        yield (
            f"add at an index, {title}",
            lambda: table.index_put_((chosen,), values, accumulate=True),
        )
        yield f"put at an index, {title}", lambda: table.index_put_((chosen,), values)
        yield f"index add, {title}", lambda: table.index_add_(0, chosen, values)
        embedded = table.clone().requires_grad_()
        yield f"embedding backward, {title}", backward_of(F.embedding(chosen, embedded), [embedded])
    for rows, columns in ((8, 10), (128, 1000), (1024, 10000), (1024, 32000), (4096, 50257)):
        x, y = (
            normal(rows, columns).requires_grad_(),
            torch.randint(columns, (rows,), device="cuda"),
        )
        logarithms = F.log_softmax(x, 1).detach().requires_grad_()
        yield f"softmax, {rows} x {columns}", lambda: F.log_softmax(x, 1)
        yield f"softmax backward, {rows} x {columns}", backward_of(F.log_softmax(x, 1), [x])
        yield f"loss, {rows} x {columns}", lambda: F.nll_loss(logarithms, y)
        yield (
            f"loss backward, {rows} x {columns}",
            backward_of(F.nll_loss(logarithms, y), [logarithms]),
        )


def elementwise() -> Iterator[tuple[str, Work]]:
    for size in (1, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
        x, y = normal(size), normal(size)
        yield f"add, {size}", lambda: x + y
        yield f"gelu, {size}", lambda: F.gelu(x)
        yield f"to bfloat16, {size}", lambda: x.bfloat16()
        yield f"fill, {size}", lambda: x.fill_(1.0)
        yield f"dropout, {size}", lambda: F.dropout(x, 0.1)
        yield f"join, {size}", lambda: torch.cat([x, y])


def recurrent() -> Iterator[tuple[str, Work]]:
    for kind, dtype in TYPES.items():
        for layer in (nn.LSTM, nn.GRU, nn.RNN):
            for steps, batch, inputs, hidden, count in (
                *(
                    (32, 8, 64, 128, 1),
                    (64, 16, 512, 512, 1),
                    (64, 16, 512, 512, 2),
                    (256, 16, 256, 256, 1),
                ),
                *((32, 64, 128, 256, 1), (128, 32, 1024, 1024, 1)),
            ):
                network = layer(inputs, hidden, count).cuda().to(dtype)
                x = normal(steps, batch, inputs, dtype=dtype).requires_grad_()
                name = (
                    f"{layer.__name__}, {count} layers, {steps} steps, {batch} rows, {inputs} to "
                    f"{hidden}, {kind}"
                )
                yield f"{name}", lambda: network(x)
                yield f"{name}, backward", backward_of(network(x)[0], [x, *network.parameters()])


def kernel_microseconds(work: Work) -> float:
    for _ in range(2):
        work()
    found = []
    torch.cuda.synchronize()
    for _ in range(CALLS):
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            work()
            torch.cuda.synchronize()
        events = [
            event for event in recorded.events() if str(event.device_type) == "DeviceType.CUDA"
        ]
        found.append(sum(event.time_range.elapsed_us() for event in events))
    return round(median(found), 2)


def main(path: str) -> None:
    results = {}
    groups = (weight_gradients, layers, sums, norms, lists, images, indexed, elementwise, recurrent)
    for group in groups:
        for name, work in group():
            results[name] = kernel_microseconds(work)
        print(group.__name__, len(results), flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date}
    with open(path, "w") as file:
        json.dump({"machine": machine, "microseconds": results}, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
