"""Checks of the devices of gradients that a program's own code returns.

A `torch.autograd.Function` must return each gradient on the device of its input, and a hook must
return a tensor of the same type. PyTorch checks this in C++, which sees only CPU tensors here.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function

from virtualgpu.errors import is_wrapped, leave_out_the_kit
from virtualgpu.hardware import Machine
from virtualgpu.tensor import VirtualTensor

_PLAIN = frozenset({torch.Tensor, VirtualTensor, torch.nn.Parameter})


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield Function, {"apply": classmethod(noting_devices(vars(Function)["apply"]))}
    names = [name for name in ("apply", "apply_boxed") if name in vars(BackwardCFunction)]
    checked = {name: checking_devices(vars(BackwardCFunction)[name]) for name in names}
    yield BackwardCFunction, checked
    yield torch.Tensor, {"register_hook": with_checked_hook(torch.Tensor.register_hook)}


def noting_devices(apply: Any) -> Callable[..., Any]:
    """Return a replacement of `Function.apply` that notes the devices of the inputs.

    They are stored at the autograd node, for the check of the gradients. `apply` is PyTorch's class
    method. Python defines it up to version 2.13, and C++ later.
    """

    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply.__get__(None, cls)(*args, **kwargs)
        output = result
        if type(result) is tuple:
            output = next((x for x in result if type(x) in _PLAIN and x.requires_grad), None)
        if type(output) in _PLAIN and output.requires_grad and not kwargs:
            node = output.grad_fn
            if isinstance(node, BackwardCFunction):
                noted: Any = node
                devices = [x.device if isinstance(x, torch.Tensor) else None for x in args]
                noted._input_devices = devices
        return result

    return wraps(apply)(noting)


def checking_devices(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `BackwardCFunction.apply` that checks the devices of gradients.

    `apply` is the original method. A gradient on a wrong device raises RuntimeError.
    """

    def checking(self: Any, *args: Any) -> Any:
        gradients = apply(self, *args)
        # One device for each argument of the Function, or None if it is not a tensor.
        devices = getattr(self, "_input_devices", None)
        if devices is None:
            return gradients
        if not isinstance(gradients, tuple):
            return _placed(self, (gradients,), devices)[0]
        return _placed(self, gradients, devices)

    return wraps(apply)(checking)


def _placed(node: Any, gradients: tuple, devices: list) -> tuple:
    """Return the gradients of a node, each on the device of its input.

    `devices` has the inputs' devices. A gradient without dimensions is moved, as PyTorch's engine
    does. Any other gradient on a wrong device raises RuntimeError.
    """
    placed = list(gradients)
    index = 0  # counts the inputs that are tensors
    for position, (gradient, device) in enumerate(zip(gradients, devices, strict=False)):
        if device is None:
            continue
        elsewhere = type(gradient) in _PLAIN and gradient.device != device
        elsewhere = elsewhere and not is_wrapped(gradient)
        if elsewhere and node.next_functions[index][0] is not None:
            if gradient.dim():
                error = RuntimeError(
                    f"Function {node.name()} returned an invalid gradient at index {index} - "
                    f"expected device {device} but got {gradient.device}"
                )
                leave_out_the_kit(error)
                raise error
            placed[position] = gradient.to(device)
        index += 1
    return tuple(placed)


def with_checked_hook(register: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Tensor.register_hook`, which is the method `register`.

    It raises RuntimeError if a hook returns a gradient on another type of device.
    """

    @wraps(register)
    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        name = getattr(hook, "__name__", "<unknown>")

        @wraps(hook)
        def checked(gradient: torch.Tensor) -> Any:
            result = hook(gradient)
            plain = type(result) in _PLAIN and type(gradient) in _PLAIN
            if not plain or result.is_cuda == gradient.is_cuda:
                return result
            if not is_wrapped(result) and not is_wrapped(gradient):
                was, got = gradient.type(), result.type()
                changed = f"hook '{name}' has changed the type of value"
                raise RuntimeError(f"{changed} (was {was} got {got})")
            return result

        return register(self, checked)

    return register_hook
