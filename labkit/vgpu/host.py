"""The host of a virtual machine: its operators take time, its memory can be pinned."""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.vgpu import costs
from labkit.vgpu.hardware import Machine
from labkit.vgpu.operators import matrix_work
from labkit.vgpu.tensor import VirtualTensor


class HostOperators(TorchDispatchMode):
    """Sees every operator of the threads of a machine: those on CPU tensors take host time, and C++ may make tensors for a GPU.

    A composite operator in C++ makes its temporaries on the device that it believes its inputs to be on: the CPU. What Python
    creates always says `pin_memory`; what C++ creates never does. So a factory without it belongs to the GPU of the operator that
    ran just before, if that came from the same Python instruction.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        machine = self.machine
        selected = machine.selected
        frame = sys._getframe(1)
        if VirtualTensor in types:
            selected.instruction = (id(frame), frame.f_lasti)
            return VirtualTensor.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if "device" in kwargs and not types:
            if "pin_memory" in kwargs:
                if kwargs["pin_memory"]:
                    return pinned(func(*args, **(kwargs | {"pin_memory": False})))
            elif selected.instruction == (id(frame), frame.f_lasti) and kwargs["device"].type == "cpu":
                return func(*args, **(kwargs | {"device": selected.gpu.device}))
        else:
            selected.instruction = None
        result = func(*args, **kwargs)
        moved = sum(x.numel() * x.itemsize for x in (*args, result) if isinstance(x, torch.Tensor))
        machine.clock.advance_host(costs.cpu_seconds(machine.profile, moved, host_flops(func, args)))
        return result


def host_flops(func: Any, args: tuple) -> int:
    work = matrix_work(func, args)
    return 0 if work is None else work[0]


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor as lying in page-locked memory. The mark is on its storage, so views have it too."""
    tensor.untyped_storage().pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)
