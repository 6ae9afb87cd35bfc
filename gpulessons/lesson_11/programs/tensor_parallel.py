"""Two linear layers cut among the ranks, by hand and by `parallelize_module`.

`result` says which way of joining the ranks' outputs gives the whole layers' output, whether `parallelize_module` does, the shape of the
first weight's part, and how many collectives a forward and a backward have, by name.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpulessons.rendezvous import meet

logging.disable()  # the next import would say that there is no Triton
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

rank, ranks, device = meet()
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)  # the same everywhere
x = torch.randn(32, 256, device=device, requires_grad=True)
due = model(x)

first, bias = model[0].weight.chunk(ranks)[rank], model[0].bias.chunk(ranks)[rank]
second = model[2].weight.chunk(ranks, dim=1)[rank]
mine = torch.relu(x @ first.T + bias) @ second.T

outputs = [torch.empty_like(mine) for _ in range(ranks)]
dist.all_gather(outputs, mine.detach())
joined: dict[str, Any] = {"added": sum(outputs), "averaged": sum(outputs) / ranks, "concatenated": torch.cat(outputs, dim=1)}
result: dict[str, Any] = {
    name: whole.shape == due.shape and torch.allclose(whole + model[2].bias, due, atol=1e-4) for name, whole in joined.items()
}

mesh = init_device_mesh(device.type, (ranks,))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
with CommDebugMode() as sent:
    y = model(x)
    y.square().mean().backward()
result["parallelize_module"] = torch.allclose(y, due, atol=1e-4)
result["first weight"] = list(model[0].weight.to_local().shape)
result["collectives"] = {operator.__name__: count for operator, count in sent.get_comm_counts().items()}
dist.destroy_process_group()
