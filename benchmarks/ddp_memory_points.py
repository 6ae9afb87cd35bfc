"""Memory of a transformer's first twelve training steps under DistributedDataParallel; `torchrun ddp_memory_points.py`.

`result` has, in the order of POINTS in ddp.py, the bytes allocated, reserved and at the peak.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.networks import TransformerBlock

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(*[TransformerBlock(1024, 16, device) for _ in range(4)]))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.randn(4, 512, 1024, device=device)
result = []


def note() -> None:
    torch.cuda.synchronize()
    result.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()])


for step in range(12):
    loss = model(x).square().mean()
    if step < 2:
        note()
    loss.backward()
    if step < 2:
        note()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 1, 11):
        note()
dist.destroy_process_group()
