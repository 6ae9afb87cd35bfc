"""A training step of a GPT's blocks on data × tensor × pipeline ranks, as the first rank of a simulated world takes it.

Arguments: the three degrees, the blocks, their width, the tokens of a sequence, the sequences of a batch, and how many of them are a
micro-batch. `result` has the seconds and the peak in bytes of the second step; None for both if
the step does not fit.

The stages follow 1F1B. A rank is
simulated alone and the others are like it, so what it waits for while the pipeline fills and drains takes as long as its own work does: it
does so much of that before the step.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpulessons.transformer_block import Block

data, tensor, stages, blocks, width, tokens, sequences, micro = map(int, sys.argv[1:])

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
# The ranks of a tensor-parallel group are neighbours, and so on one node as long as it has enough.
mesh = init_device_mesh("cuda", (stages, data, tensor), mesh_dim_names=("pipeline", "data", "tensor"))
line, column, row = (mesh[name].get_group() for name in ("pipeline", "data", "tensor"))


class Bucket:
    """The gradients of a block, side by side. In the last backward of a step they are averaged while it goes on, as DDP does."""

    def __init__(self, block):
        parameters = list(block.parameters())
        self.flat, self.missing, self.count = torch.zeros(sum(p.numel() for p in parameters), device="cuda"), 0, len(parameters)
        for parameter, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        self.missing -= 1
        if self.missing == 0:
            sent.append(dist.all_reduce(self.flat, op=dist.ReduceOp.AVG, group=column, async_op=True))


def step(waiting, count):
    """Of so many micro-batches, after the time of `waiting` more."""
    for _ in range(waiting):
        backward(forward())
    kept = [forward() for _ in range(min(stages - 1, count))]
    for number in range(count):
        if number + len(kept) < count:
            kept.append(forward())
        if number == count - 1:
            for bucket in buckets:
                bucket.missing = bucket.count
        backward(kept.pop(0))
    for work in sent:
        work.wait()
    sent.clear()
    optimizer.step()
    for bucket in buckets:
        bucket.flat.zero_()


def forward():
    x = torch.randn(micro, tokens, width, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    if stages > 1:
        dist.send(y.detach(), group=line, group_dst=1)
    return y


def backward(y):
    upstream = torch.empty_like(y)
    if stages > 1:
        dist.recv(upstream, group=line, group_src=1)
    y.backward(upstream)


sent: list[torch.Tensor] = []
try:
    with torch.device("cuda"):
        model = nn.Sequential(*[Block(width, row) for _ in range(blocks // stages)])
    buckets = [Bucket(block) for block in model]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step(0, stages)  # as many micro-batches as there are at a time, so that the next step finds all its memory
    torch.cuda.reset_peak_memory_stats()  # building the model and the first step do not count
    start.record()
    step(stages - 1, sequences // (data * micro))
    end.record()
    torch.cuda.synchronize()
    result = {"seconds": start.elapsed_time(end) / 1e3, "peak": torch.cuda.max_memory_allocated()}
except torch.cuda.OutOfMemoryError:
    result = {"seconds": None, "peak": None}
dist.destroy_process_group()
