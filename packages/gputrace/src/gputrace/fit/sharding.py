"""Sharding of a script's model among GPUs, of which one runs.

FSDP2 shards the model, and copies of it, when its optimizer is made.
"""

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

STEP = "training_step"  # the method of a module that Lightning calls


def sharding(ranks: int) -> list[str]:
    """Shard each model among ranks as soon as its optimizer is made.

    This process is the first rank. Return the list of the models' classes, which is filled later.
    """
    met: list[str] = []
    shards = WeakTensorKeyDictionary()  # the shard of each whole parameter that is still alive
    add = torch.optim.Optimizer.add_param_group

    @functools.wraps(add)
    def add_shards(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        add(self, group)
        held = self.param_groups[-1]["params"]
        for model in _models_over(held):
            if isinstance(model, nn.DataParallel):
                raise RuntimeError(
                    "DataParallel copies the whole model to each GPU, so it is not sharded"
                )
            if not met:
                _start(ranks)
            met.append(type(model).__name__)
            for alike in (model, *_copies_of(model)):
                shards.update(_shard(alike))
        held[:] = [shards.get(parameter, parameter) for parameter in held]
        loose = [tuple(parameter.shape) for parameter in held if not _is_shard(parameter)]
        if loose:
            reason = f"no module has the optimizer's parameter of shape {loose[0]}"
            raise RuntimeError(f"{reason}, so that it cannot be sharded")

    def before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        if len(shards):
            gc.collect()
        kept = len(shards)
        if kept:
            had = "parameters that its model had before it was sharded"
            raise RuntimeError(f"the script keeps {kept} of the {had}")

    torch.optim.Optimizer.add_param_group = add_shards  # type: ignore[method-assign, assignment]
    register_optimizer_step_pre_hook(before_step)
    return met


def _models_over(parameters: list[torch.Tensor]) -> Iterator[nn.Module]:
    """Yield the outermost unsharded modules that own one of these parameters."""
    modules = of_kind(all_objects(), nn.Module)
    inner: set[int] = set()
    for module in modules:
        inner.update(map(id, vars(module).get("_modules", {}).values()))
    # The parameters are kept here, so that no shard gets the id of one.
    wanted = {id(parameter): parameter for parameter in parameters if not _is_shard(parameter)}
    for module in modules:
        is_outermost = id(module) not in inner and "_modules" in vars(module)
        if is_outermost and any(id(parameter) in wanted for parameter in module.parameters()):
            yield module


def _copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the unsharded copies of a model, such as a moving average of its weights.

    They have its class and its shapes. A script updates them from shards, so they are sharded, too.
    """
    shapes = _shapes(model)
    found = []
    for module in of_kind(all_objects(), type(model)):
        if module is model or "_modules" not in vars(module):
            continue
        if _shapes(module) == shapes and not any(map(_is_shard, module.parameters())):
            found.append(module)
    return found


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.device]]:
    """Return the shape and the device of each parameter of a model."""
    return {name: (each.shape, each.device) for name, each in model.named_parameters()}


def _start(ranks: int) -> None:
    """Start a process group in which this process is the first rank."""
    if dist.is_initialized():
        cure = "`labkit torchrun --simulate 8` runs one of eight"
        raise RuntimeError(f"the script starts ranks itself: {cure}")
    simulated.put_in_place()
    dist.init_process_group("nccl", rank=0, world_size=ranks)


def _shard(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Shard the blocks of a model, and the rest of it. Free the memory of its whole parameters.

    Return the shard of each whole parameter.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    whole = dict(model.named_parameters())
    name_of_model = type(model).__name__  # FSDP2 changes the class
    with suppress(Exception):  # if the model cannot be copied, no script copies it
        copied = functools.partial(_sharded_copy, _without_parameters(model))
        vars(model)["__deepcopy__"] = copied  # FSDP2's own method raises an error
    for part in (*repeated(model), model):
        before = [parameter for parameter in part.parameters() if not _is_shard(parameter)]
        fully_shard(part)
        # Free their memory, although the optimizer and lists of the script still hold them.
        for parameter in before:
            parameter.data = parameter.data.new_empty(0)
    if hasattr(model, STEP):
        register_fsdp_forward_method(model, STEP)
    shards = dict(model.named_parameters())
    if shards.keys() != whole.keys():
        reason = "which FSDP2 would shard apart"
        raise RuntimeError(f"blocks of {name_of_model} share parameters with others, {reason}")
    shard_of: dict[torch.Tensor, torch.Tensor] = {}
    for name, parameter in whole.items():
        shard_of[parameter] = shards[name]
    _put_in_place({id(parameter): shard for parameter, shard in shard_of.items()}, list(shard_of))
    return shard_of


def _without_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model as it is before FSDP2 changes it. Its parameters have no memory."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _sharded_copy(unsharded: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a sharded model, given its copy without memory, and shard the new copy.

    This function replaces `copy.deepcopy` for the model, and takes its `memo`.
    """
    parameters: dict[int, Any] = {}
    for parameter in unsharded.parameters():
        values = torch.empty_like(parameter, device="cuda")
        parameters[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
    made = copy.deepcopy(unsharded, parameters)
    _shard(made)
    return made


def _put_in_place(shards: dict[int, torch.Tensor], whole: list[torch.Tensor]) -> None:
    """Replace parameters with their shards in lists and variables of the script.

    The script may have lists of parameters, to clip their gradients for example, and a variable
    from a loop over them.

    Args:
        shards: the shards by the ids of the whole parameters.
    """
    variables = vars(sys.modules["__main__"])
    for holder in gc.get_referrers(*whole):
        if type(holder) is list and holder is not whole:
            holder[:] = [shards.get(id(x), x) for x in holder]
        elif holder is variables:
            variables.update(
                {name: shards[id(x)] for name, x in variables.items() if id(x) in shards}
            )


def _is_shard(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a shard."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)
