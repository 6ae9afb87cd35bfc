"""Training steps of a GPT's blocks with data or layers divided among the ranks of a simulated world, as its first rank takes them.

Arguments: the strategy (`DDP`, `ZeRO-1`, `ZeRO-2`, `FSDP`, `tensor`, or `FSDP × tensor`, whose layers are cut among the ranks of a node),
the blocks, their width, and the tokens of a sequence. A batch has one sequence for each rank. Mixed precision: 16 bytes for each parameter
with AdamW. `result` has the seconds of the second step, the bytes that this rank holds between two steps, those at the
peak of the second step, and those that it sends in a step if each collective is a ring; None for all four if it does not fit.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gpulessons.transformer_block import Block

way, (blocks, width, tokens) = sys.argv[1], map(int, sys.argv[2:])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
ranks = dist.get_world_size()
cut = {"tensor": ranks, "FSDP × tensor": int(os.environ["LOCAL_WORLD_SIZE"])}.get(way, 1)
mesh = init_device_mesh("cuda", (ranks // cut, cut), mesh_dim_names=("data", "tensor"))
column, row = (mesh[name].get_group() for name in ("data", "tensor"))


class Flat:
    """A block's parameters side by side. This rank updates all of them under DDP, and its share under ZeRO.

    In the backward, each block's gradients are averaged while it goes on: kept whole, or under ZeRO-2 this rank's share of them.
    """

    def __init__(self, block: nn.Module) -> None:
        self.parameters = list(block.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            parameter.data = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.share = nn.Parameter(mine(self.flat))
        self.gradients = None if way == "ZeRO-2" else torch.zeros_like(self.flat)
        self.share.grad = torch.zeros_like(self.share) if self.gradients is None else mine(self.gradients)
        self.start()

    def start(self) -> None:
        self.missing = len(self.parameters)
        if self.gradients is not None:
            self.gradients.zero_()
            for parameter, part in zip(self.parameters, self.gradients.split(self.sizes), strict=True):
                parameter.grad = part.view_as(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        self.missing -= 1
        if self.missing:
            return
        if self.gradients is None:
            whole = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
            for parameter in self.parameters:
                parameter.grad = None
            sent.append(dist.reduce_scatter_tensor(self.share.grad, whole, op=dist.ReduceOp.AVG, group=column, async_op=True))
        elif cut < ranks:
            sent.append(dist.all_reduce(self.gradients, op=dist.ReduceOp.AVG, group=column, async_op=True))

    def spread(self) -> None:
        """The other ranks' updated shares."""
        if len(self.share) < len(self.flat):
            dist.all_gather_into_tensor(self.flat, self.share.data, group=column)


def mine(flat: torch.Tensor) -> torch.Tensor:
    return flat.chunk(ranks)[dist.get_rank()] if way.startswith("ZeRO") else flat


class Sent(TorchDispatchMode):
    """The bytes that this rank sends, by rings."""

    nbytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        match operator.name():
            case "c10d::allreduce_":
                size = dist.ProcessGroup.unbox(args[1]).size()
                self.nbytes += 2 * (size - 1) * sum(x.nbytes for x in args[0]) // size
            case "c10d::_allgather_base_" | "c10d::_reduce_scatter_base_":
                self.nbytes += abs(args[0].nbytes - args[1].nbytes)
        return operator(*args, **(kwargs or {}))


def step() -> None:
    x = torch.randn(ranks if way == "tensor" else cut, tokens, width, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    y.float().square().mean().backward()
    for work in sent:
        work.wait()
    sent.clear()
    optimizer.step()
    for flat in flats:
        flat.spread()
        flat.start()
    if not flats:
        optimizer.zero_grad()


sent: list[dist.Work] = []
try:
    with torch.device("cuda"):
        model = nn.Sequential(*[Block(width, row) for _ in range(blocks)])
    if way.startswith("FSDP"):
        for module in (*model, model):
            fully_shard(module, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    flats = [] if way.startswith("FSDP") else [Flat(block) for block in model]
    optimizer = torch.optim.AdamW([flat.share for flat in flats] or model.parameters(), fused=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()  # building the model is no part of the step
    start.record()
    with Sent() as counted:
        step()
    end.record()
    torch.cuda.synchronize()
    result = {"seconds": start.elapsed_time(end) / 1e3, "held": held, "peak": torch.cuda.max_memory_allocated(), "sent": counted.nbytes}
except torch.cuda.OutOfMemoryError:
    result = dict.fromkeys(("seconds", "held", "peak", "sent"))
dist.destroy_process_group()
