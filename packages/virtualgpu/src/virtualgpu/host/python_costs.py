"""The host time of PyTorch's own Python outside operators: calls of modules, and the replicas of nn.DataParallel.

Nothing is wrapped around a module's call, so hooks and tracebacks stay as they are. Every call asks C++ whether a trace is being made,
before the module's own `forward`; its time is taken there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from virtualgpu.hardware import Machine


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch._C, asking_for_a_trace(machine)
    yield nn.Module, {"_replicate_for_data_parallel": replicating(machine, nn.Module._replicate_for_data_parallel)}


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
