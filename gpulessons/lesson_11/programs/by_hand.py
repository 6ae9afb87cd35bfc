"""FSDP of three layers by hand, beside `fully_shard`: the memory and the time of a step, and whether the gradients are the same.

`result` has a row for each way: bytes at the peak of a step on top of what is there after it, and the step's milliseconds; and besides,
whether both ways give the same gradients, and the bytes that the way by hand sends in a step. On the CPU there are no such figures.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gpulessons.rendezvous import meet

warnings.simplefilter("ignore")  # new versions of PyTorch call these collectives all_gather_single and reduce_scatter_single
WIDTH, LAYERS, ROWS, STEPS = 1024, 3, 64, 2  # the first step warms up
rank, ranks, device = meet()
sent = 0  # bytes


def gathered(shard):
    global sent
    whole = shard.new_empty(ranks * len(shard), shard.shape[1])
    dist.all_gather_into_tensor(whole, shard)
    sent += (ranks - 1) * shard.nbytes
    return whole


class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)
        return x @ gathered(shard).T  # after this line, nothing refers to the whole weight

    @staticmethod
    def backward(ctx, upstream):
        global sent
        x, shard = ctx.saved_tensors
        weight, gradient, part = gathered(shard), upstream.T @ x, torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, gradient, op=dist.ReduceOp.AVG)
        sent += (ranks - 1) * part.nbytes
        return upstream @ weight, part


def by_hand(x):
    for shard in shards:
        x = ShardedLinear.apply(x, shard)
    return x


def step(forward, parameters):
    """A step's row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.reset_peak_memory_stats()
        start.record()
        forward(x).square().mean().backward()
        end.record()
        torch.cuda.synchronize()
    on_top = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return {"on top": on_top, "milliseconds": start.elapsed_time(end)}


torch.manual_seed(0)
model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)  # the same everywhere
shards: list[Any] = [nn.Parameter(layer.weight.detach().chunk(ranks)[rank].clone()) for layer in model]
for layer in model:
    fully_shard(layer)
fully_shard(model)
x = torch.randn(ROWS, WIDTH, device=device) + rank

result: dict[str, Any] = {"by hand": step(by_hand, shards), "fully_shard": step(model, list(model.parameters()))}
gradients = [parameter.grad for parameter in model.parameters()]
result["same gradients"] = all(torch.allclose(ours.grad, its.to_local()) for ours, its in zip(shards, gradients, strict=True))
result["sent by hand"] = sent // STEPS
dist.destroy_process_group()
