"""How long a training step takes by DistributedDataParallel, with all gradients in one bucket and with buckets of the usual size.

Arguments: such as 512x1024, the rows of a batch and the width of a network of eight layers. `result` has a row for each, in milliseconds:
alone, on one GPU with the whole batch; and on all ranks, each with its share. The two steps of the last argument are the last that run.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.rendezvous import meet

LAYERS = 8
BUCKETS = {"one bucket": 1 << 20, "25 MiB": 25}  # in MiB

rank, ranks, device = meet()


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """A step of it, after three that warm up: in the first, DDP settles its buckets."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Of one step, which the ranks begin together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


result = []
for size in sys.argv[1:]:
    rows, width = map(int, size.split("x"))
    layers = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, device=device), nn.ReLU())])
    x = torch.randn(rows, width, device=device)
    row = {"rows": rows, "width": width, "alone": milliseconds(training(layers, x))}
    steps = {}
    for name, mebibytes in BUCKETS.items():
        model = DistributedDataParallel(layers, bucket_cap_mb=mebibytes)
        layers.zero_grad()
        steps[name] = training(model, x[: rows // ranks])
    result.append(row | {name: milliseconds(step) for name, step in steps.items()})

dist.destroy_process_group()
