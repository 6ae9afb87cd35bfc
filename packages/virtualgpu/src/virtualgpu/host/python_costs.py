"""The host time of PyTorch's own Python code outside operators: modules, optimizers, DataParallel.

No module's call is wrapped, so hooks and tracebacks stay as they are. Instead the time is taken in
functions that PyTorch calls anyway. Every module's call asks C++ whether a trace is being made, and
every step of an optimizer calls a method that profilers replace.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from virtualgpu.hardware import Machine


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch._C, asking_for_a_trace(machine)
    yield (
        nn.Module,
        {
            "_replicate_for_data_parallel": replicating(
                machine, nn.Module._replicate_for_data_parallel
            ),
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
    """Return a replacement of the function of `torch._C` that every module's call calls once.

    The original returns the tracing state. From PyTorch 2.15 on it returns whether there is one.
    The replacement also takes the host time of the module's call. The result maps its name to it.
    """
    name = "_get_tracing_state"
    if "_is_tracing" in torch.nn.Module._call_impl.__code__.co_names:
        name = "_is_tracing"
    ask, clock, seconds = getattr(torch._C, name), machine.clock, machine.profile.module_seconds

    def asked() -> Any:
        if not machine.selected.untimed:
            clock.advance_host(seconds)
        return ask()

    return {name: asked}


def replicating(
    machine: Machine, replicate: Callable[[nn.Module], nn.Module]
) -> Callable[[nn.Module], nn.Module]:
    """Return `Module._replicate_for_data_parallel`, changed to take host time.

    `replicate` is the original. nn.DataParallel calls it in every forward pass, for every module of
    every replica.
    """
    clock, profile = machine.clock, machine.profile

    def replicate_for_data_parallel(self: nn.Module) -> nn.Module:
        attributes = len(self._parameters) + len(self._buffers) + len(self._modules)
        clock.advance_host(profile.replicate_seconds + attributes * profile.attribute_seconds)
        return replicate(self)

    return replicate_for_data_parallel


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that the optimizer trains."""
    for group in optimizer.param_groups:
        yield from group["params"]


def with_gradients(parameters: Iterable[torch.Tensor]) -> int:
    """Return how many of the parameters have a gradient."""
    return sum(parameter.grad is not None for parameter in parameters)


def stepping(machine: Machine, step_code: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `Optimizer._optimizer_step_code`, changed to take the host time of a step.

    `step_code` is the original, which every `step()` calls once.
    """
    profile = machine.profile

    @functools.wraps(step_code)
    def _optimizer_step_code(self: torch.optim.Optimizer) -> None:
        if not machine.selected.untimed:
            count = with_gradients(parameters_of(self))
            machine.clock.advance_host(
                profile.optimizer_seconds + count * profile.parameter_seconds
            )
        step_code(self)

    return _optimizer_step_code


def clearing(
    machine: Machine,
    zero_grad: Callable[..., None],
    parameters: Callable[[Any], Iterable[torch.Tensor]],
) -> Callable[..., None]:
    """Return `zero_grad` of modules or of optimizers, changed to take host time.

    `parameters` returns the parameters of such an object.
    """
    profile = machine.profile

    @functools.wraps(zero_grad)
    def timed(self: Any, set_to_none: bool = True) -> None:
        if not machine.selected.untimed:
            count = with_gradients(parameters(self))
            machine.clock.advance_host(profile.zero_grad_seconds + count * profile.gradient_seconds)
        zero_grad(self, set_to_none)

    return timed
