"""The host time of PyTorch's own Python outside operators: modules, optimizers, nn.DataParallel.

Nothing is wrapped around a module's call, so hooks and tracebacks stay as they are. Every call asks
C++ whether a trace is being made, before the module's own `forward`; its time is taken there. Every
step of an optimizer calls a method that profilers replace; its time is taken there.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from virtualgpu.hardware import Machine


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch._C, asking_for_a_trace(machine)
    yield (
        nn.Module,
        {
            "_replicate_for_data_parallel": replicating(machine, nn.Module._replicate_for_data_parallel),
            "zero_grad": clearing(machine, nn.Module.zero_grad, nn.Module.parameters),
        },
    )
    yield (
        torch.optim.Optimizer,
        {
            "_optimizer_step_code": stepping(machine, torch.optim.Optimizer._optimizer_step_code),
            "zero_grad": clearing(machine, torch.optim.Optimizer.zero_grad, parameters_of),
        },
    )


def asking_for_a_trace(machine: Machine) -> dict[str, Callable[[], Any]]:
    """What `Module.__call__` calls once of `torch._C`, by name: the tracing state; from PyTorch 2.15 on, whether there is one."""
    name = "_is_tracing" if "_is_tracing" in torch.nn.Module._call_impl.__code__.co_names else "_get_tracing_state"
    ask, clock, seconds = getattr(torch._C, name), machine.clock, machine.profile.module_seconds

    def asked() -> Any:
        if not machine.selected.untimed:
            clock.advance_host(seconds)
        return ask()

    return {name: asked}


def replicating(machine: Machine, replicate: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """`Module._replicate_for_data_parallel`, which nn.DataParallel calls for every module of every replica, at every forward."""
    clock, profile = machine.clock, machine.profile

    def replicate_for_data_parallel(self: nn.Module) -> nn.Module:
        attributes = len(self._parameters) + len(self._buffers) + len(self._modules)
        clock.advance_host(profile.replicate_seconds + attributes * profile.attribute_seconds)
        return replicate(self)

    return replicate_for_data_parallel


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what the optimizer trains."""
    for group in optimizer.param_groups:
        yield from group["params"]


def with_gradients(parameters: Iterable[torch.Tensor]) -> int:
    """Return how many parameters have a gradient."""
    return sum(parameter.grad is not None for parameter in parameters)


def stepping(machine: Machine, step_code: Callable[[Any], None]) -> Callable[[Any], None]:
    """`Optimizer._optimizer_step_code`, which every `step()` calls once, whatever its class."""
    profile = machine.profile

    @functools.wraps(step_code)
    def _optimizer_step_code(self: torch.optim.Optimizer) -> None:
        if not machine.selected.untimed:
            count = with_gradients(parameters_of(self))
            machine.clock.advance_host(profile.optimizer_seconds + count * profile.parameter_seconds)
        step_code(self)

    return _optimizer_step_code


def clearing(machine: Machine, zero_grad: Callable[..., None], parameters: Callable[[Any], Iterable[torch.Tensor]]) -> Callable[..., None]:
    """`zero_grad` of modules or of optimizers."""
    profile = machine.profile

    @functools.wraps(zero_grad)
    def timed(self: Any, set_to_none: bool = True) -> None:
        if not machine.selected.untimed:
            count = with_gradients(parameters(self))
            machine.clock.advance_host(profile.zero_grad_seconds + count * profile.gradient_seconds)
        zero_grad(self, set_to_none)

    return timed
