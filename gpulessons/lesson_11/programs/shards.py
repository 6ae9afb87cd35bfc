"""What each rank holds of a model that is trained with Adam, at rest and at the peak of a step: under DDP, ZeRO and FSDP.

Arguments: the width and the number of the layers. `result` has a row for each way, in bytes.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpulessons.rendezvous import meet

width, layers = int(sys.argv[1]), int(sys.argv[2])
rank, ranks, device = meet()
ROWS = 4  # so few that activations do not count
Training = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: nn.Sequential, view: bool = True) -> Training:
    return DistributedDataParallel(model, gradient_as_bucket_view=view), torch.optim.Adam(model.parameters(), fused=True)


def zero_1(model: nn.Sequential) -> Training:
    """The optimizer's state in parts: each rank keeps that of some parameters, steps with them, and sends them to the others."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return parallel, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, fused=True)


def fsdp(model: nn.Sequential, free_after_forward: bool) -> Training:
    for layer in model:
        fully_shard(layer, reshard_after_forward=free_after_forward)
    fully_shard(model, reshard_after_forward=free_after_forward)
    return model, torch.optim.Adam(model.parameters(), fused=True)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of them that lie on this rank."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def measured(way: Callable[[nn.Sequential], Training]) -> dict[str, int]:
    """Bytes after a step, with its gradients; `other` is what the allocator has given out besides. And the step's peak."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
    parallel, optimizer = way(model)
    x = torch.ones(ROWS, width, device=device)
    for number in range(3):  # in the first, DDP settles its buckets, and Adam makes its state
        torch.cuda.synchronize()
        if number:
            time.sleep(0.2)  # ProcessGroupNCCL's watchdog looks ten times a second which messages are through, and frees their buckets
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    local = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer, the part of this rank
    parameters = list(model.parameters())
    told = {
        "parameters": held(parameters),
        "gradients": held(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer state": held(value for values in local.state.values() for value in values.values()),
    }
    told["other"] = torch.cuda.memory_allocated() - base - sum(told.values())
    return told | {"peak": torch.cuda.max_memory_allocated() - base}


nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()  # cuBLAS takes its workspaces, and keeps them
WAYS: dict[str, Callable[[nn.Sequential], Training]] = {
    "DDP": partial(ddp, view=False),
    "DDP, views": ddp,
    "ZeRO-1, views": zero_1,
    "FSDP, no reshard": partial(fsdp, free_after_forward=False),
    "FSDP": partial(fsdp, free_after_forward=True),
}
base, result = torch.cuda.memory_allocated(), []
for name, way in WAYS.items():
    gc.collect()  # the way before
    result.append({"way": name, **measured(way)})

dist.destroy_process_group()
