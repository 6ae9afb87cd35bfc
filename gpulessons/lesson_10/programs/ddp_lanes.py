"""Run a training step of eight linear layers on 512 rows per rank.

With several ranks, the layers are under DistributedDataParallel. The arguments are the layers'
width, the size of a bucket in MiB, and whether ranks may use NVLink (1) or must send through the
host (0). `result` has the seconds from the start of the step to the end of its forward pass, its
backward pass and its optimizer. Nothing runs on the GPU afterwards.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpulessons.rendezvous import meet

LAYERS, ROWS, WARM_UP = 8, 512, 3

width, bucket, nvlink = map(int, sys.argv[1:])
if not nvlink:
    os.environ["NCCL_P2P_DISABLE"] = "1"  # NCCL's own switch
rank, ranks, device = meet()
model: nn.Module = nn.Sequential(
    *[layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
).to(device)
if ranks > 1:
    model = DistributedDataParallel(model, bucket_cap_mb=bucket)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
x = torch.randn(ROWS, width, device=device)
marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]

for _ in range(WARM_UP + 1):  # in the first, DDP settles its buckets
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    marks[0].record()
    loss = model(x).square().mean()
    marks[1].record()
    loss.backward()
    marks[2].record()
    optimizer.step()
    optimizer.zero_grad()
    marks[3].record()
    torch.cuda.synchronize()

result = [marks[0].elapsed_time(mark) / 1e3 for mark in marks[1:]]
dist.destroy_process_group()
