"""A script's model divided among GPUs, of which one runs: FSDP2 put around it, and around copies of it, when its optimizer is made."""

import copy
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from gputrace.fit.blocks import repeated
from gputrace.holders.tensors import all_objects, of_kind
from virtualgpu.collectives import simulated

STEP = "training_step"  # what Lightning calls instead of its module


def sharding(ranks: int) -> list[str]:
    """Models are sharded among so many ranks, of which this process is the first, before an optimizer has their parameters."""
    met: list[str] = []
    shards = WeakTensorKeyDictionary()  # of each parameter that was whole, as long as somebody holds it
    add = torch.optim.Optimizer.add_param_group

    @functools.wraps(add)
    def add_shards(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        add(self, group)
        held = self.param_groups[-1]["params"]
        for model in _models_over(held):
            if isinstance(model, nn.DataParallel):
                raise RuntimeError("DataParallel copies the whole model to each GPU, so it is not sharded")
            if not met:
                _start(ranks)
            met.append(type(model).__name__)
            for alike in (model, *_copies_of(model)):
                shards.update(_shard(alike))
        held[:] = [shards.get(parameter, parameter) for parameter in held]
        if loose := [tuple(parameter.shape) for parameter in held if not _is_shard(parameter)]:
            raise RuntimeError(f"no module has the optimizer's parameter of shape {loose[0]}, so that it cannot be sharded")

    def before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        if len(shards):
            gc.collect()
        if kept := len(shards):
            raise RuntimeError(f"the script keeps {kept} of the parameters that its model had before it was sharded")

    torch.optim.Optimizer.add_param_group = add_shards  # type: ignore[method-assign, assignment]
    register_optimizer_step_pre_hook(before_step)
    return met


def _models_over(parameters: list[torch.Tensor]) -> Iterator[nn.Module]:
    """Modules that no other module has, with a parameter among these that is whole yet."""
    modules = of_kind(all_objects(), nn.Module)
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    wanted = {id(parameter): parameter for parameter in parameters if not _is_shard(parameter)}  # alive, so that no shard gets its id
    for module in modules:
        if id(module) not in inner and "_modules" in vars(module) and any(id(parameter) in wanted for parameter in module.parameters()):
            yield module


def _copies_of(model: nn.Module) -> list[nn.Module]:
    """Modules of its class with parameters of its shapes, such as the average of its weights: updated from shards, they are sharded."""
    shapes = _shapes(model)
    alike = [module for module in of_kind(all_objects(), type(model)) if module is not model and "_modules" in vars(module)]
    return [module for module in alike if _shapes(module) == shapes and not any(map(_is_shard, module.parameters()))]


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.device]]:
    return {name: (parameter.shape, parameter.device) for name, parameter in model.named_parameters()}


def _start(ranks: int) -> None:
    if dist.is_initialized():
        raise RuntimeError("the script starts ranks itself: `labkit torchrun --simulate 8` runs one of eight")
    simulated.put_in_place()
    dist.init_process_group("nccl", rank=0, world_size=ranks)


def _shard(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Shard its blocks and the rest; the shards by the parameters that were whole, whose memory is free afterwards."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    whole, name_of_model = dict(model.named_parameters()), type(model).__name__  # which FSDP2 changes
    with suppress(Exception):  # what cannot be copied no script copies
        vars(model)["__deepcopy__"] = functools.partial(_sharded_copy, _without_parameters(model))  # FSDP2's own refuses
    for part in (*repeated(model), model):
        before = [parameter for parameter in part.parameters() if not _is_shard(parameter)]
        fully_shard(part)
        for parameter in before:  # as if the optimizer and the script's lists did not hold it
            parameter.data = parameter.data.new_empty(0)
    if hasattr(model, STEP):
        register_fsdp_forward_method(model, STEP)
    shards = dict(model.named_parameters())
    if shards.keys() != whole.keys():
        raise RuntimeError(f"blocks of {name_of_model} share parameters with others, which FSDP2 would shard apart")
    _put_in_place({id(parameter): shards[name] for name, parameter in whole.items()}, list(whole.values()))
    return {parameter: shards[name] for name, parameter in whole.items()}


def _without_parameters(model: nn.Module) -> nn.Module:
    """The model before FSDP2 changed it, its parameters on no device."""
    kept: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    nowhere = {id(parameter): nn.Parameter(parameter.to("meta"), parameter.requires_grad) for parameter in model.parameters()}
    return copy.deepcopy(model, kept | nowhere)


def _sharded_copy(unsharded: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As if the script had copied its model before it was sharded, and sharded the copy too."""
    made = copy.deepcopy(
        unsharded,
        {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="cuda"), parameter.requires_grad)
            for parameter in unsharded.parameters()
        },
    )
    _shard(made)
    return made


def _put_in_place(shards: dict[int, torch.Tensor], whole: list[torch.Tensor]) -> None:
    """The script may have lists of parameters, to clip their gradients for example, and a variable that a loop over them left behind."""
    variables = vars(sys.modules["__main__"])
    for holder in gc.get_referrers(*whole):
        if type(holder) is list and holder is not whole:
            holder[:] = [shards.get(id(x), x) for x in holder]
        elif holder is variables:
            variables.update({name: shards[id(x)] for name, x in variables.items() if id(x) in shards})


def _is_shard(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)
