"""Changes of a script that make it take less memory, each made from outside: the script stays as it is.

Made, each of CHANGES patches PyTorch for the rest of the process, and returns a list which fills with what the change met. Where it stays
empty, there was nothing to change. With `alter=False` it changes nothing, and the list tells what it would have met.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from gputrace.fit.blocks import repeated
from gputrace.fit.sharding import sharding

Met = list[str]  # names, for a script's own objects are to live as long as without us
REPLICAS = "torch.nn.parallel.parallel_apply"  # the module that runs DataParallel's replicas
CHECKPOINTED = "_gputrace_checkpointed"  # an attribute of blocks, which replicas and copies get too
SWITCHES = "gradient_checkpointing_enable", "set_grad_checkpointing"  # methods of transformers' models, and of timm's
ON = "gradient_checkpointing", "grad_checkpointing"  # what these set, in the model or in modules of it


def half_the_batch(alter: bool) -> Met:
    """Batches of a DataLoader are half as large."""
    met: Met = []
    make = DataLoader.__init__

    @functools.wraps(make)
    def halved(self: DataLoader, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        if batch_size is not None and batch_size > 1:
            met.append(type(self).__name__)
            batch_size = -(-batch_size // 2) if alter else batch_size
        make(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = halved  # type: ignore[method-assign]
    return met


def accumulation(alter: bool) -> Met:
    """Batches are half as large, and the optimizer steps after every second backward: the same training, if its loss is a mean."""
    met = half_the_batch(alter)
    if not alter:
        return met
    make = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        step, zero_grad, held = self.step, self.zero_grad, [False]

        def every_second(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            held[0] = not held[0]
            return None if held[0] else step(*args, **kwargs)

        def unless_held(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            if not held[0]:
                zero_grad(*args, **kwargs)

        # Bound, as learning-rate schedulers expect it.
        self.step, self.zero_grad = MethodType(every_second, self), MethodType(unless_held, self)  # type: ignore[method-assign]

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]
    return met


def loop_optimizer(alter: bool) -> Met:
    """An optimizer works on one parameter after the other (`foreach=False`): without lists of temporary tensors. A fused one has none."""
    met: Met = []

    def before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is not False and not group.get("fused"):
                met.append(type(optimizer).__name__)
                group["foreach"] = False if alter else group["foreach"]

    register_optimizer_step_pre_hook(before_step)
    return met


def bfloat16(alter: bool) -> Met:
    """Run the model's forward pass under autocast to bfloat16."""
    return _autocast(torch.bfloat16, alter)


def float16(alter: bool) -> Met:
    """Run the model's forward pass under autocast to float16, and scale the gradients."""
    met = _autocast(torch.float16, alter)
    if alter:
        _scale_gradients(met)
    return met


def _autocast(dtype: torch.dtype, alter: bool) -> Met:
    """Put autocast around each model that has none, neither around its call nor inside."""
    met: Met = []
    entered: list[bool] = []
    enter = torch.autocast.__enter__

    def noted(self: torch.autocast) -> Any:
        # DataParallel enters the autocast of its caller again for each replica.
        inherits = sys._getframe(1).f_globals.get("__name__") == REPLICAS
        entered.append(self.device == "cuda" and self._enabled and not inherits)
        return enter(self)

    def forward(module: nn.Module, call: Callable[[], Any]) -> Any:
        if torch.is_autocast_enabled("cuda"):
            return call()
        with torch.autocast("cuda", dtype) if alter else nullcontext():
            entered.clear()
            result = call()
        if not any(entered):
            met.append(type(module).__name__)
        return result

    torch.autocast.__enter__ = noted  # type: ignore[method-assign]
    _around_models(forward)
    return met


def _scale_gradients(met: Met) -> None:
    """Scale losses and step through a GradScaler, as soon as a model has met the change."""
    scalers: list[torch.amp.GradScaler] = []
    backward, make = torch.Tensor.backward, torch.optim.Optimizer.__init__

    @functools.wraps(backward)
    def scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if met and loss.is_cuda:
            if not scalers:
                scalers.append(torch.amp.GradScaler("cuda"))
            loss = scalers[0].scale(loss)
        backward(loss, *args, **kwargs)

    @functools.wraps(make)
    def made(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        step, stepping = self.step, [False]

        def scaled_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            # The scaler calls this method again. It takes no closure, and wants gradients.
            if not scalers or stepping[0] or args or kwargs or not _has_gradients(self):
                return step(*args, **kwargs)
            stepping[0] = True
            try:
                result = scalers[0].step(self)
            finally:
                stepping[0] = False
            scalers[0].update()
            return result

        self.step = MethodType(scaled_step, self)  # type: ignore[method-assign]

    torch.Tensor.backward = scaled_backward  # type: ignore[method-assign, assignment]
    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])


def checkpointing(alter: bool) -> Met:
    """The blocks of a model keep their inputs alone; the backward computes the rest again. There is nothing to do where it does so already.

    A model that has a switch for it knows more of its blocks, such as caches of theirs that must not grow twice.
    """
    met: Met = []
    seen: WeakSet[nn.Module] = WeakSet()

    def forward(module: nn.Module, call: Callable[[], Any]) -> Any:
        if module.training and module not in seen:  # a script may evaluate first
            seen.add(module)
            if not any(getattr(part, on, False) for part in module.modules() for on in ON):
                met.extend(type(part).__name__ for part in _checkpoint_parts(module, alter))
        return call()

    _around_models(forward)
    return met


def _checkpoint_parts(module: nn.Module, alter: bool) -> list[nn.Module]:
    """The outermost of its modules that have a switch, or else, or where they refuse, its blocks."""
    if switched := list(_switches(module)):
        try:
            for part, switch in switched if alter else ():
                getattr(part, switch)()
        except (ValueError, AssertionError):  # as those of transformers and timm refuse
            pass
        else:
            return [part for part, _ in switched]
    blocks = repeated(module)
    if alter:
        for kind in {type(block) for block in blocks}:
            _let_checkpoint(kind)
        for block in blocks:
            setattr(block, CHECKPOINTED, True)
            if "forward" in vars(block):
                block.forward = functools.partial(_checkpointed, block.forward)
    return blocks


def _let_checkpoint(kind: type[nn.Module]) -> None:
    """Let blocks of this class that are marked checkpoint their forward passes.

    The class has the new method, because a replica of a block would run a method of its own on the
    block that it is a replica of.
    """
    forward = kind.forward

    @functools.wraps(forward)
    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if CHECKPOINTED in vars(self):
            return _checkpointed(functools.partial(forward, self), *args, **kwargs)
        return forward(self, *args, **kwargs)

    kind.forward = marked


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A list is kept as it is now: a densely connected network goes on to append to the one that it gives its layers."""
    return checkpoint(forward, *(list(x) if type(x) is list else x for x in args), use_reentrant=False, **kwargs)


def _switches(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if switch := next((name for name in SWITCHES if hasattr(module, name)), None):
        yield module, switch
    else:
        for child in module.children():
            yield from _switches(child)


def _sharded(ranks: int, alter: bool) -> Met:
    """The model is divided among GPUs. What it would meet, nobody can say without that."""
    return sharding(ranks) if alter else []


@dataclass(frozen=True)
class Change:
    """A change of a script.

    Attributes:
        make: makes the change, or looks for what it would meet.
        nothing: says why there may be nothing to change.
        share: the samples of a step after the change, as a share of those before.
        capability: the least compute capability of a GPU that gains from the change.
        computes: the format that tensor cores of GPUs below that capability lack.
    """

    make: Callable[[bool], Met]
    nothing: str
    share: float = 1.0
    capability: tuple[int, int] = (0, 0)
    computes: str = ""


NO_AUTOCAST = "no module runs without autocast"
NO_BATCHES = "no DataLoader makes batches of 2 or more"
NO_MODEL = "no module has the parameters of an optimizer of torch.optim"
CHANGES = {
    "optimizer with foreach=False": Change(loop_optimizer, "no optimizer of torch.optim works on lists (foreach)"),
    "autocast to bfloat16": Change(bfloat16, NO_AUTOCAST, capability=(8, 0), computes="bfloat16"),
    "autocast to float16, with GradScaler": Change(float16, NO_AUTOCAST),
    "two halves of a batch, accumulated": Change(accumulation, NO_BATCHES),
    "half the batch": Change(half_the_batch, NO_BATCHES, share=0.5),
    "checkpointing of each block": Change(checkpointing, "no repeated blocks with a tenth of its parameters, or it does so already"),
}
SHARDINGS = {
    f"sharding over {ranks} GPUs (FSDP2)": Change(functools.partial(_sharded, ranks), NO_MODEL, share=ranks) for ranks in (2, 4, 8)
}
ALL = CHANGES | SHARDINGS


def _around_models(forward: Callable[[nn.Module, Callable[[], Any]], Any]) -> None:
    """Let `forward(module, call)` run each call of a module on the GPU that no other module calls: of the model, and of its loss."""
    inside: list[nn.Module] = []
    called = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside or not _on_gpu(self, args, kwargs):  # a data set's transforms are modules too, in a process without GPUs often
            return called(self, *args, **kwargs)
        inside.append(self)
        try:
            return forward(self, functools.partial(called, self, *args, **kwargs))
        finally:
            inside.clear()

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _on_gpu(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Is a parameter, or else what it is given, on a GPU?"""
    first = next(module.parameters(), None)
    among = [first] if first is not None else [*args, *kwargs.values()]
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in among)
