"""What an operator does where values are not kept: its outputs get their shapes from PyTorch's meta kernels."""

from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.hardware import Gpu
from virtualgpu.ops.schemas import written
from virtualgpu.tensor import VirtualTensor, empty_without_values, memory_of, tensors, unsupported

REMEMBERED = 4096  # calls whose shapes are kept: PyTorch needs a millisecond for those of a ReLU's backward
INFER_FROM = 1 << 26  # from this product of input sizes on, an operator's output is sized before it is computed


def loses_values(func: Any, args: tuple, kwargs: dict, gpu: Gpu) -> bool:
    """Must this operator's outputs go without values? Cheap where nothing is large or without values already."""
    return bool(gpu.machine.valueless_storages or not gpu.machine.values or _large(args)) and not keeps_values(func, args, kwargs, gpu)


def _large(args: tuple) -> bool:
    """Could the output be too large for the host? A broadcast or a product makes at most the product of the input sizes."""
    size = 1
    for x in args:
        if isinstance(x, torch.Tensor):
            size *= x.numel() or 1
    return size >= INFER_FROM


def keeps_values(func: Any, args: tuple, kwargs: dict, gpu: Gpu) -> bool:
    """Are all inputs known, and is there room for the outputs?"""
    for x in tensors(args, kwargs):
        if type(x) is VirtualTensor and x.layout is torch.strided and memory_of(x).kept is None:
            return False
    if gpu.machine.values and not _large(args):
        return True
    shapes = on_meta(func, args, kwargs)
    if shapes is None:
        return gpu.machine.values
    fresh = sum(x.untyped_storage().nbytes() for x in tensors(shapes) if x.device.type == "meta")
    return gpu.machine.may_keep(fresh)


_shapes: dict[tuple, Any] = {}  # what on_meta said of each call


def on_meta(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operator run on shapes alone; None where PyTorch cannot say them without the values. Read the result, never change it."""
    call = func, torch.get_default_dtype(), _shape_key(args), _shape_key(kwargs)
    try:
        if call not in _shapes:
            if len(_shapes) >= REMEMBERED:
                _shapes.clear()
            _shapes[call] = _on_meta(func, args, kwargs)
    except TypeError:  # an argument that cannot be remembered
        return _on_meta(func, args, kwargs)
    return _shapes[call]


def _shape_key(x: Any) -> Any:
    """What stands for an argument: equal for those that give the same shapes. 1, 1.0 and True are equal, but do not."""
    if isinstance(x, torch.Tensor):
        return torch.Tensor if x.is_nested else (x.size(), x.stride(), x.dtype)
    if isinstance(x, (list, tuple)):
        return tuple(map(_shape_key, x))
    if isinstance(x, dict):
        return tuple((name, _shape_key(value)) for name, value in x.items() if name != "generator")
    return type(x), x


def _on_meta(func: Any, args: tuple, kwargs: dict) -> Any:
    def shape_of(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.is_nested:
                raise NotImplementedError
            with _DisableTorchDispatch():
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, (list, tuple)):
            return type(x)(shape_of(y) for y in x)
        return x

    try:
        return func(*shape_of(args), **{key: shape_of(value) for key, value in kwargs.items() if key != "generator"})
    except NotImplementedError:
        return None


def infer(func: Any, args: tuple, kwargs: dict, gpu: Gpu) -> Any:
    """What the operator returns, without values."""
    targets = written(func, args, kwargs)
    for x in targets:
        forget(x)
    returns = func._schema.returns
    if all(r.alias_info is not None for r in returns):  # all that it does is to write
        return None if not returns else targets[0] if len(returns) == 1 else tuple(targets)
    shapes = on_meta(func, args, kwargs)
    if shapes is None:
        raise RuntimeError(f"{func._schema.name}: the shape of its result depends on values, and these were not kept")

    def place_shape(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return empty_without_values(gpu, x.size(), x.stride(), x.dtype)
        if isinstance(x, (list, tuple)):
            return type(x)(place_shape(y) for y in x)
        return x

    return place_shape(shapes)


def forget(x: torch.Tensor) -> None:
    """Something unknown was written into this tensor: its storage has no values any more."""
    memory = memory_of(x)
    if memory.shared and memory.kept is not None:
        raise unsupported("writing values that were not kept into a tensor that another process sees")
    memory.forget()


def all_known(*values: Any) -> bool:
    """Does every device tensor among these have values?"""
    return all(type(x) is not VirtualTensor or memory_of(x).kept is not None for x in tensors(*values))
