"""Operators that are made of others, which come to the virtual GPU one by one: PyTorch's composites, and what a program adds in Python.

Autograd takes composites apart, unless it is off or was passed already: with inference tensors, and within another operator's function.
"""

from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.library import _impls  # what Python has registered: "namespace/name.overload/key"

from virtualgpu import hardware
from virtualgpu.tensor import unsupported


def composite(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that PyTorch makes of others on any device."""
    key = DispatchKey.CPU if _in_python(func, "CPU") else DispatchKey.CompositeImplicitAutograd  # virtualgpu.install replaces some
    with hardware.machine().host_operators:
        return func._op_dk(key, *args, **kwargs)


def in_python(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that a program adds: its function for CUDA is run. PyTorch says so where it has none for CUDA."""
    with hardware.machine().host_operators:
        return func.redispatch(DispatchKeySet(DispatchKey.CUDA), *args, **kwargs)


def is_made_of_others(func: Any) -> bool:
    return _has(func, "CompositeImplicitAutograd") and (_in_python(func, "CPU") or not _has(func, "CPU"))


def is_written_in_python(func: Any) -> bool:
    """Is what CUDA would run a Python function? Instead of a compiled kernel the CPU's is run; without one the operator is refused."""
    runs = next((key for key in ("CUDA", "CompositeExplicitAutograd") if _has(func, key)), "CPU")
    if runs == "CUDA" and not _in_python(func, "CUDA") and (_in_python(func, "CPU") or not _has(func, "CPU")):
        raise unsupported(f"{func.name()}, a CUDA kernel of another library,")
    return _in_python(func, runs)


def _has(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def _in_python(func: Any, key: str) -> bool:
    return f"{func.name().replace('::', '/')}/{key}" in _impls
