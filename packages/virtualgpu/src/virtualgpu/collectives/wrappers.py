"""Tensor subclasses that report a CUDA device, such as DTensors and FakeTensors.

C++ believes them to be on the CPU, as it does of virtual tensors. Otherwise it would ask for CUDA's
device guard, which a PyTorch built for the CPU lacks, and autograd would abort the process.
`fully_shard` makes both kinds.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from virtualgpu.errors import unsupported
from virtualgpu.hardware import Machine
from virtualgpu.refusals import refuse

_PRIM_DEVICE: Any = torch.ops.prim.device.default


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.

    FakeTensors on a CUDA device are refused in programs without ranks, where they are not tested.
    """
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    yield handlers, {_PRIM_DEVICE: _device_for_cpp(handlers[_PRIM_DEVICE])}
    dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__
    yield (
        FakeTensor,
        {
            "__new__": _make_fake(FakeTensor.__new__),
            "__torch_dispatch__": classmethod(_dispatch_fake(dispatch)),
            "is_cuda": property(lambda x: x.device.type == "cuda"),
            "is_cpu": property(lambda x: x.device.type == "cpu"),
        },
    )
    make_wrapper = _make_wrapper(torch.Tensor._make_wrapper_subclass)
    yield torch.Tensor, {"_make_wrapper_subclass": staticmethod(make_wrapper)}
    # C++ makes a DTensor on the device of its local tensor. The class takes this __new__ when it is
    # imported, which may have happened already.
    made = getattr(torch.Tensor, "_dtensor__new__", None)
    if made:
        yield torch.Tensor, {"_dtensor__new__": staticmethod(_make_dtensor(made))}
    rpc = sys.modules.get("torch.distributed.rpc")
    if hasattr(rpc, "init_rpc"):
        yield rpc, {"init_rpc": refuse("torch.distributed.rpc.init_rpc")}
    imported = sys.modules.get("torch.distributed.tensor")
    if imported:
        yield imported.DTensor, _DEVICE


def _cuda_device(given: Any) -> torch.device | None:
    """Return `given` as a CUDA device with an index, or None if it is not a CUDA device."""
    device = None
    if given is not None:
        device = torch.device(given)
    if device is None or device.type != "cuda":
        return None
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _make_fake(make: Any) -> Any:
    """Return a replacement of `FakeTensor.__new__`, which is the function `make`.

    C++ gets the CPU in place of a CUDA device. Python still sees the CUDA device.
    """

    def make_fake(
        cls: type, mode: Any = None, elem: Any = None, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = None
        if device is not None:
            wanted = torch.device(device)
        if wanted is None or wanted.type != "cuda":
            return make(cls, mode, elem, device, *args, **kwargs)
        if not torch.distributed.is_initialized():
            raise unsupported(
                "a FakeTensor on a CUDA device, as torch.export and torch.onnx.export make them,"
            )
        fake = make(cls, mode, elem, torch.device("cpu"), *args, **kwargs)
        fake.fake_device = _cuda_device(wanted)
        return fake

    return make_fake


def _dispatch_fake(dispatch: Any) -> Any:
    """Return a replacement of `FakeTensor.__torch_dispatch__`, which is the function `dispatch`.

    C++ gets the CPU in place of a CUDA device among the arguments.
    """

    def dispatch_fake(
        cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        is_question = func is _PRIM_DEVICE and len(args) == 1 and isinstance(args[0], FakeTensor)
        if is_question and args[0].fake_device.type == "cuda":
            return torch.device("meta" if args[0].fake_mode.in_kernel_invocation else "cpu")
        return dispatch(cls, func, types, args, kwargs)

    return dispatch_fake


def _device_for_cpp(handler: Any) -> Any:
    """Return a replacement of `handler`, which tells C++ the device of a FakeTensor.

    It says CPU for a CUDA device.
    """

    def device_for_cpp(args: tuple) -> torch.device:
        device = handler(args)
        if device.type == "cuda":
            return torch.device("cpu")
        return device

    return device_for_cpp


def _make_wrapper(make: Any) -> Any:
    """Return a replacement of `_make_wrapper_subclass`, which is the function `make`.

    C++ gets the CPU in place of a CUDA device. The wrapper itself still reports the CUDA device.
    """

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = _cuda_device(kwargs.get("device"))
        if device is None:
            return make(cls, *args, **kwargs)
        wrapper = make(cls, *args, **kwargs | {"device": torch.device("cpu")})
        wrapper._virtual_device = device
        _add_device_attributes(cls)
        return wrapper

    return make_wrapper


def _make_dtensor(make: Any) -> Any:
    """Return a replacement of C++'s `__new__` of DTensor, which is the function `make`.

    It also adds device attributes to the class.
    """

    def make_dtensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _add_device_attributes(cls)
        return make(cls, *args, **kwargs)

    return make_dtensor


def _device_of(x: Any) -> torch.device:
    """Return the device that a wrapper tensor or a DTensor reports to Python."""
    local = getattr(x, "_local_tensor", None)
    if local is not None:
        return local.device
    device: torch.device = x.__dict__.get("_virtual_device")
    return device or torch._C.TensorBase.device.__get__(x)


_DEVICE = {
    "device": property(_device_of),
    "is_cuda": property(lambda x: x.device.type == "cuda"),
    "is_cpu": property(lambda x: x.device.type == "cpu"),
    "get_device": lambda x: -1 if x.device.index is None else x.device.index,
}


def _add_device_attributes(cls: Any) -> None:
    """Add `device`, `is_cuda` and similar attributes to a tensor class, unless it has them."""
    if "device" not in cls.__dict__:
        for name, value in _DEVICE.items():
            setattr(cls, name, value)
