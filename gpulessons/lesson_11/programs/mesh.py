"""Four ranks in two rows: layers cut within a row, and the cut layers divided by FSDP between the rows.

`result` has the shape of this rank's part of each weight, and whether the gradients, put together, are those of the whole layers.
"""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpulessons.rendezvous import meet

warnings.simplefilter("ignore")
logging.disable()  # of collectives that could be one
rank, ranks, device = meet()
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)  # the same everywhere
x = torch.randn(6, 8, device=device)
due = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "tensor"))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["data"])

mine = x.chunk(2)[mesh["data"].get_local_rank()]  # both ranks of a row train on the same data
model(mine).square().mean().backward()
result = {
    "weights": [list(model[number].weight.to_local().shape) for number in (0, 2)],
    "same gradients": all(
        torch.allclose(parameter.grad.full_tensor(), whole, atol=1e-6) for parameter, whole in zip(model.parameters(), due, strict=True)
    ),
}
dist.destroy_process_group()
