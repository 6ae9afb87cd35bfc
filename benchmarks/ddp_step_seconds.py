"""Measure the seconds of training steps under DistributedDataParallel.

usage: torchrun ddp_step_seconds.py JSON, which names the models and the ranks
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# {"gpus": [1, 2], "models": {"small": [1024, 512]}, "layers": 8, "repeats": 3}
asked = json.loads(sys.argv[1])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
rank = dist.get_rank()


def prepared(width: int, batch: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a training step on this rank's share of the batch, after it has run twice.

    The first steps load libraries and settle DDP's buckets.
    """
    layers = [
        layer
        for _ in range(asked["layers"])
        for layer in (nn.Linear(width, width, device=device), nn.ReLU())
    ]
    parallel = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    inputs = torch.ones(batch, width, device=device).chunk(group.size())[rank].clone()

    def step() -> None:
        loss = parallel(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    step()
    return step


def seconds(step: Callable[[], None], group: dist.ProcessGroup) -> float:
    """Return the seconds from the moment when all ranks are ready until this rank has finished."""
    torch.cuda.synchronize()
    dist.barrier(group)
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


result = []
for model, (width, batch) in asked["models"].items():
    for count in asked["gpus"]:
        group = dist.new_group(list(range(count)))
        if rank < count:
            step = prepared(width, batch, group)
            took = median(seconds(step, group) for _ in range(asked["repeats"]))
            del step
            if rank == 0:
                result.append(
                    {"gpus": count, "model": model, "width": width, "batch": batch, "seconds": took}
                )
        dist.barrier()  # the other ranks wait, and compute nothing meanwhile

dist.destroy_process_group()
