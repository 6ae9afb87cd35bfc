"""TorchScript on virtual GPUs.

C++ runs scripts on tensors that it takes for CPU tensors, so Python moves and loads them. Inside a
script `x.device` is cpu.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.tensor import VirtualTensor, tensors

# The errors of C++ if a script names a GPU: of a build without CUDA, and of a build with CUDA on a
# machine without a driver or a visible GPU.
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
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        yield kind, {"__call__": refusing(kind.__call__)}
    yield torch.jit.RecursiveScriptModule, {"_apply": apply}
    yield torch.jit, {name: tracing(getattr(torch.jit, name)) for name in ("trace", "trace_module")}
    yield torch.jit, {"load": loading(torch.jit.load)}


def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, which runs a script, changed to explain why a script cannot copy to a GPU.

    It then raises NotImplementedError. C++ asks the real driver before it copies. If a real GPU
    exists, the copy goes to the virtual GPU.
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
    """Return `trace`, which is `torch.jit.trace` or `trace_module`, changed to refuse GPU tensors.

    The virtual GPU's own calls on a tensor would be recorded in the graph.
    """

    @wraps(trace)
    def traced(module: Any, *args: Any, **kwargs: Any) -> Any:
        state = []
        if isinstance(module, torch.nn.Module):
            state = list(module.state_dict().values())
        if any(type(x) is VirtualTensor for x in tensors(state, args, kwargs)):
            raise unsupported("torch.jit.trace of CUDA tensors (torch.jit.script takes them)")
        with _disable_current_modes():
            return trace(module, *args, **kwargs)

    return traced


def apply(
    self: torch.jit.ScriptModule,
    change: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> torch.jit.ScriptModule:
    """Apply `change` to all tensors of a module. It replaces `Module._apply`.

    C++ holds the tensors of a script, so they are exchanged there.
    """
    if recurse:
        for child in self.children():
            child._apply(change)
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._c.setattr(
                    name, torch.nn.Parameter(change(parameter), parameter.requires_grad)
                )
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._c.setattr(name, change(buffer))
    return self


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.jit.load`, which is the function `load`.

    It reads a script on the CPU and can move it to a GPU.
    """

    @wraps(load)
    def load_to(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        gpu = None
        if map_location is not None:
            gpu = hardware.machine().gpu(map_location)
        if gpu is None:
            return load(file, map_location, *args, **kwargs)
        return load(file, "cpu", *args, **kwargs).to(gpu.device)

    return load_to
