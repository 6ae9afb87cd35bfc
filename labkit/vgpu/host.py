"""The host of a virtual machine: its operators take time, its memory can be pinned."""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.vgpu import costs
from labkit.vgpu.hardware import Machine
from labkit.vgpu.operators import matrix_work, move, tensors
from labkit.vgpu.tensor import VirtualTensor

# PyTorch's own operators fail or crash on symbolic zeros where a mode watches: real zeros serve as well.
_SYMBOLIC_ZEROS, _ZEROS = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default


class HostOperators(TorchDispatchMode):
    """Sees every operator of the threads of a machine: those on CPU tensors take host time, and C++ may make tensors for a GPU.

    A composite operator in C++ makes its temporaries on the device that it believes its inputs to be on: the CPU. What Python
    creates always says `pin_memory`; what C++ creates never does. So a factory without it belongs to the GPU of the operator that
    ran just before, if that came from the same Python instruction. Where none did yet, its results wait on the CPU, and move to
    the GPU of the first device tensor that they meet in that instruction.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__ against torch.compile, which costs and hides the calling frame

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _SYMBOLIC_ZEROS:
            func = _ZEROS
        machine = self.machine
        selected = machine.selected
        frame = sys._getframe(1)
        instruction = id(frame), frame.f_lasti
        if VirtualTensor in types:
            selected.instruction = instruction
            if selected.waiting == instruction:
                args = adopt(args)
            return VirtualTensor.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        waits = selected.waiting == instruction
        if "device" in kwargs and not types:
            if "pin_memory" in kwargs:
                selected.instruction = None
                if kwargs["pin_memory"]:
                    return pinned(func(*args, **(kwargs | {"pin_memory": False})))
            elif kwargs["device"].type == "cpu":
                if selected.instruction == instruction:
                    return func(*args, **(kwargs | {"device": selected.gpu.device}))
                selected.waiting = instruction
                waits = True
        else:
            selected.instruction = None
        result = func(*args, **kwargs)
        if type(result) is VirtualTensor:
            return result  # a factory on a GPU: its own operators have taken their time
        if waits and type(result) is torch.Tensor and result.layout is torch.strided:
            result.untyped_storage().waiting = instruction
        moved = sum(x.numel() * x.itemsize for x in (*args, result) if isinstance(x, torch.Tensor))
        machine.clock.advance_host(costs.cpu_seconds(machine.profile, moved, host_flops(func, args)))
        return result


def adopt(args: tuple) -> tuple:
    """The arguments with those that C++ made on the CPU for this instruction moved to the GPU of the others."""
    gpu = next(x._gpu for x in tensors(args) if type(x) is VirtualTensor)
    waiting = gpu.machine.selected.waiting

    def moved(x: Any) -> Any:
        if type(x) is torch.Tensor and x.dim() and getattr(x.untyped_storage(), "waiting", None) == waiting:
            return move(x, gpu, None, True)
        return x

    return tuple(moved(x) for x in args)


def host_flops(func: Any, args: tuple) -> int:
    work = matrix_work(func, args)
    return 0 if work is None else work[0]


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor as lying in page-locked memory. The mark is on its storage, so views have it too."""
    tensor.untyped_storage().pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)
