"""What DistributedDataParallel sends, and when: the buckets of one backward, and the messages of one step in micro-batches."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.rendezvous import meet

LAYERS, WIDTH, ROWS, MICRO_BATCHES = 4, 128, 64, 4
BUCKET = 0.1  # MiB: a little more than one layer's weight

rank, ranks, device = meet()
events: list[tuple[str, str]] = []  # in the order in which they happened: ("gradient", of which parameter), ("message", of which ones)


def network() -> DistributedDataParallel:
    """Four layers, the same on every rank, whose gradients and messages are noted in `events`."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)
    for name, parameter in layers.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(("gradient", name)))
    model = DistributedDataParallel(layers, bucket_cap_mb=BUCKET)
    model.register_comm_hook({id(p): name for name, p in layers.named_parameters()}, average)
    return model


def average(names: dict[int, str], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket when nobody asks for anything else; noted."""
    events.append(("message", " ".join(names[id(parameter)] for parameter in bucket.parameters())))
    work = dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def one_batch(model: DistributedDataParallel, mine: torch.Tensor) -> None:
    model(mine).square().mean().backward()


def micro_batches(model: DistributedDataParallel, mine: torch.Tensor) -> None:
    for part in mine.chunk(MICRO_BATCHES):
        (model(part).square().mean() / MICRO_BATCHES).backward()


def no_sync(model: DistributedDataParallel, mine: torch.Tensor) -> None:
    """The same, but only the last backward sends."""
    parts = mine.chunk(MICRO_BATCHES)
    for part in parts:
        with nullcontext() if part is parts[-1] else model.no_sync():
            (model(part).square().mean() / MICRO_BATCHES).backward()


def step(program: Callable[[DistributedDataParallel, torch.Tensor], None]) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """What happens in the program's second step (DDP settles its buckets after the first), and the first layer's gradient."""
    model = network()
    mine = torch.randn(ROWS, WIDTH, device=device).chunk(ranks)[rank]
    program(model, mine)
    model.zero_grad()
    events.clear()
    program(model, mine)
    return list(events), model.module[0].weight.grad


happened, gradient = step(one_batch)
result = [{"program": "one batch", "difference": 0.0, "events": happened}]
for program, name in ((micro_batches, "micro-batches"), (no_sync, "no_sync")):
    happened, accumulated = step(program)
    difference = (accumulated - gradient).abs().max().item() / gradient.abs().max().item()
    result.append({"program": name, "difference": difference, "events": happened})

dist.destroy_process_group()
