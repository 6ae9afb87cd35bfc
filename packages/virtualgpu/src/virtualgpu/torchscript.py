"""TorchScript on virtual GPUs: C++ runs it on tensors that it takes for the CPU's, so moving and loading is done from Python.

Inside a script `x.device` is cpu.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.tensor import VirtualTensor, tensors

# What C++ says where a script names a GPU: built without CUDA, and built for CUDA on a machine without a driver or a GPU in sight.
_WITHOUT_CUDA = (
    "Cannot initialize CUDA without ATen_cuda library",
    "PyTorch is not linked with support for cuda devices",
    "Found no NVIDIA driver",
    "CUDA driver version is insufficient",
    "No CUDA GPUs are available",
    "no CUDA-capable device is detected",
)

_COPY = "a copy to a GPU inside torch.jit.script"


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        yield kind, {"__call__": refusing(kind.__call__)}
    yield torch.jit.RecursiveScriptModule, {"_apply": apply}
    yield torch.jit, {name: tracing(getattr(torch.jit, name)) for name in ("trace", "trace_module")}
    yield torch.jit, {"load": loading(torch.jit.load)}


def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a script, which says by name that it cannot move a tensor to a GPU.

    C++ asks the real driver before it copies. Where that knows a GPU, the copy goes on as any other, to the virtual one.
    """

    @wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except RuntimeError as error:
            if any(words in str(error) for words in _WITHOUT_CUDA):
                raise unsupported(_COPY) from error
            raise

    return called


def tracing(trace: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.trace` and `trace_module`, on the CPU only: the virtual GPU's own calls on a tensor would be recorded in the graph."""

    @wraps(trace)
    def traced(module: Any, *args: Any, **kwargs: Any) -> Any:
        state = list(module.state_dict().values()) if isinstance(module, torch.nn.Module) else []
        if any(type(x) is VirtualTensor for x in tensors(state, args, kwargs)):
            raise unsupported("torch.jit.trace of CUDA tensors (torch.jit.script takes them)")
        with _disable_current_modes():
            return trace(module, *args, **kwargs)

    return traced


def apply(self: torch.jit.ScriptModule, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.jit.ScriptModule:
    """`Module._apply`, through which a module moves: C++ holds a script's tensors, so these are exchanged there."""
    for child in self.children() if recurse else ():
        child._apply(change)
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._c.setattr(name, torch.nn.Parameter(change(parameter), parameter.requires_grad))
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._c.setattr(name, change(buffer))
    return self


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.load`, also to a GPU: the script is read to the CPU, and moved."""

    @wraps(load)
    def load_to(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        gpu = None if map_location is None else hardware.machine().gpu(map_location)
        if gpu is None:
            return load(file, map_location, *args, **kwargs)
        return load(file, "cpu", *args, **kwargs).to(gpu.device)

    return load_to
