"""What each rank holds of a model after a step of Adam: whole under DDP, in part under ZeRO, FSDP and tensor parallelism."""

import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from rendezvous import meet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

width, layers = int(sys.argv[1]), int(sys.argv[2])
rank, ranks, device = meet()
mesh = init_device_mesh(device.type, (ranks,))


def ddp(model: nn.Sequential) -> tuple[nn.Module, torch.optim.Optimizer]:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return parallel, torch.optim.Adam(model.parameters(), lr=0.1)


def zero_1(model: nn.Sequential) -> tuple[nn.Module, torch.optim.Optimizer]:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return parallel, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)


def fsdp(model: nn.Sequential) -> tuple[nn.Module, torch.optim.Optimizer]:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def tensor_parallel(model: nn.Sequential) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every other layer is cut by its outputs, and the one behind it by its inputs: one all_reduce for two layers."""
    styles = (ColwiseParallel(), RowwiseParallel())
    parallelize_module(model, mesh, {str(index): styles[index % 2] for index in range(len(model))})
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of them that lie on this rank."""
    here = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def measured(way: Callable[[nn.Sequential], tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, int]:
    """Bytes after a step; and while a layer computes, those of parameters that are not in parts: FSDP puts each layer together for it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
    parallel, optimizer = way(model)
    whole = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: whole.append(held(p for p in model.parameters() if not isinstance(p, DTensor))))
    parallel(torch.ones(4, width, device=device)).square().mean().backward()
    optimizer.step()
    local = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer, the part of this rank
    state = [value for values in local.state.values() for value in values.values()]
    parameters = list(model.parameters())
    return {
        "parameters": held(parameters),
        "gradients": held(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer state": held(state),
        "whole": max(whole),
    }


WAYS = {"DDP": ddp, "ZeRO-1": zero_1, "FSDP": fsdp, "tensor parallel": tensor_parallel}
result = [{"way": name, "rank": rank, **measured(way)} for name, way in WAYS.items()]

dist.destroy_process_group()
