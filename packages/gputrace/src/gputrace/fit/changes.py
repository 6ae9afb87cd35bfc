"""Changes of a script that save memory, made from outside, without editing the script.

Each function of `CHANGES` patches PyTorch for the rest of the process. It returns a list, which
fills with the names of what the change has met. If the list is empty at the end, there was nothing
to change. With `alter=False` a function changes nothing, and its list says what it would have met.
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

Met = list[str]  # names of classes, because references would keep the script's objects alive
REPLICAS = "torch.nn.parallel.parallel_apply"  # the module that runs DataParallel's replicas
CHECKPOINTED = "_gputrace_checkpointed"  # an attribute of blocks, which their copies have, too
# The methods with which models of transformers and of timm switch checkpointing on, and the
# attributes that these methods set in the model or in its modules.
SWITCHES = "gradient_checkpointing_enable", "set_grad_checkpointing"
ON = "gradient_checkpointing", "grad_checkpointing"


def half_the_batch(alter: bool) -> Met:
    """Halve the batch size of each DataLoader that the script makes.

    Return a list that fills with the loaders' class names. With `alter=False`, batch sizes stay.
    """
    met: Met = []
    make = DataLoader.__init__

    @functools.wraps(make)
    def halved(
        self: DataLoader, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any
    ) -> None:
        if batch_size is not None and batch_size > 1:
            met.append(type(self).__name__)
            if alter:
                batch_size = -(-batch_size // 2)
        make(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = halved  # type: ignore[method-assign]
    return met


def accumulation(alter: bool) -> Met:
    """Halve the batches, and let the optimizer step after every second backward pass.

    The training stays the same if the loss is a mean. With `alter=False`, only list the loaders
    whose batches could be halved.
    """
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
            if held[0]:
                return None
            return step(*args, **kwargs)

        def unless_held(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            if not held[0]:
                zero_grad(*args, **kwargs)

        # Bound methods, because schedulers of the learning rate expect them.
        self.step = MethodType(every_second, self)  # type: ignore[method-assign]
        self.zero_grad = MethodType(unless_held, self)  # type: ignore[method-assign]

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]
    return met


def loop_optimizer(alter: bool) -> Met:
    """Let optimizers work on one parameter after the other (`foreach=False`).

    This avoids lists of temporary tensors. A fused optimizer has no such lists. With `alter=False`,
    only list the optimizers that would change.
    """
    met: Met = []

    def before_step(optimizer: Any, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is not False and not group.get("fused"):
                met.append(type(optimizer).__name__)
                if alter:
                    group["foreach"] = False

    register_optimizer_step_pre_hook(before_step)
    return met


def bfloat16(alter: bool) -> Met:
    """Run the forward pass of the model under autocast to bfloat16.

    With `alter=False`, only list the models that would change.
    """
    return _autocast(torch.bfloat16, alter)


def float16(alter: bool) -> Met:
    """Run the forward pass of the model under autocast to float16, and scale the gradients.

    With `alter=False`, only list the models that would change.
    """
    met = _autocast(torch.float16, alter)
    if alter:
        _scale_gradients(met)
    return met


def _autocast(dtype: torch.dtype, alter: bool) -> Met:
    """Run each model under autocast to `dtype`, unless the model uses autocast itself.

    Return a list that fills with the models' class names. With `alter=False`, the models do not
    change.
    """
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
    """Scale losses, and step with a GradScaler, as soon as `met` lists a model."""
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
            # The scaler calls this method again. It takes no closure, and needs gradients.
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
    """Return whether a parameter of an optimizer has a gradient."""
    groups = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])


def checkpointing(alter: bool) -> Met:
    """Checkpoint the blocks of the model, unless the model does so itself.

    A block keeps only its inputs, and the backward pass computes the rest again. If a model has a
    switch for checkpointing, the switch is used, because it handles caches that must not grow
    twice. With `alter=False`, only list the blocks that could be checkpointed.
    """
    met: Met = []
    seen: WeakSet[nn.Module] = WeakSet()

    def forward(module: nn.Module, call: Callable[[], Any]) -> Any:
        if module.training and module not in seen:  # a script may evaluate first
            seen.add(module)
            if not _is_checkpointed(module):
                met.extend(type(part).__name__ for part in _checkpoint_parts(module, alter))
        return call()

    _around_models(forward)
    return met


def _is_checkpointed(model: nn.Module) -> bool:
    """Return whether checkpointing is switched on in a model."""
    for part in model.modules():
        for on in ON:
            if getattr(part, on, False):
                return True
    return False


def _checkpoint_parts(module: nn.Module, alter: bool) -> list[nn.Module]:
    """Checkpoint parts of a module, and return them.

    The parts are the outermost modules with a switch for this. If there are none, or if a switch
    refuses, they are the module's repeated blocks. With `alter=False`, only return the parts.
    """
    switched = list(_switches(module))
    if switched:
        try:
            if alter:
                for part, switch in switched:
                    getattr(part, switch)()
        except (ValueError, AssertionError):  # the errors of transformers and timm
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
    """Change a class so that its marked blocks checkpoint their forward passes.

    The class gets the new method, and not the block. A replica of a block would run the block's own
    method on the block itself.
    """
    forward = kind.forward

    @functools.wraps(forward)
    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if CHECKPOINTED in vars(self):
            return _checkpointed(functools.partial(forward, self), *args, **kwargs)
        return forward(self, *args, **kwargs)

    kind.forward = marked


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward pass with checkpointing.

    Lists are copied, because a densely connected network appends to the list that it gives its
    layers.
    """
    kept = [list(x) if type(x) is list else x for x in args]
    return checkpoint(forward, *kept, use_reentrant=False, **kwargs)


def _switches(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the outermost modules that have a switch, and the names of the switches."""
    for name in SWITCHES:
        if hasattr(module, name):
            yield module, name
            return
    for child in module.children():
        yield from _switches(child)


def _sharded(ranks: int, alter: bool) -> Met:
    """Shard the model among this number of GPUs.

    With `alter=False`, return an empty list, because the effect cannot be predicted.
    """
    if not alter:
        return []
    return sharding(ranks)


@dataclass(frozen=True)
class Change:
    """A change to a script that may save memory.

    Attributes:
        make: makes the change, or only notes what it would meet.
        nothing: why there may be nothing to change.
        share: the samples per step after the change, as a share of those before.
        capability: the lowest compute capability of a GPU that gains from the change.
        computes: the format that tensor cores of GPUs with a lower capability lack.
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
    "optimizer with foreach=False": Change(
        loop_optimizer, "no optimizer of torch.optim works on lists (foreach)"
    ),
    "autocast to bfloat16": Change(bfloat16, NO_AUTOCAST, capability=(8, 0), computes="bfloat16"),
    "autocast to float16, with GradScaler": Change(float16, NO_AUTOCAST),
    "two halves of a batch, accumulated": Change(accumulation, NO_BATCHES),
    "half the batch": Change(half_the_batch, NO_BATCHES, share=0.5),
    "checkpointing of each block": Change(
        checkpointing, "no repeated blocks with a tenth of its parameters, or it does so already"
    ),
}
SHARDINGS = {
    f"sharding over {ranks} GPUs (FSDP2)": Change(
        functools.partial(_sharded, ranks), NO_MODEL, share=ranks
    )
    for ranks in (2, 4, 8)
}
ALL = CHANGES | SHARDINGS


def _around_models(forward: Callable[[nn.Module, Callable[[], Any]], Any]) -> None:
    """Let `forward(module, call)` run each outermost call of a module with data on a GPU.

    These are the calls of the model and of its loss.
    """
    inside: list[nn.Module] = []
    called = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Transforms of a data set are modules, too. They usually run in a process without GPUs.
        if inside or not _on_gpu(self, args, kwargs):
            return called(self, *args, **kwargs)
        inside.append(self)
        try:
            return forward(self, functools.partial(called, self, *args, **kwargs))
        finally:
            inside.clear()

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _on_gpu(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Return whether a module's first parameter is on a GPU, or else one of its arguments."""
    first = next(module.parameters(), None)
    among = [*args, *kwargs.values()]
    if first is not None:
        among = [first]
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in among)
