"""Tensor subclasses that say cuda, FakeTensors among them (`fully_shard` makes both): C++ sees the CPU, as of virtual tensors.

A wheel for the CPU has no device guard for CUDA, for which C++ would ask: autograd aborts the process there.
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
    """By owner, the names that change. Outside ranks nobody has tried them: there a FakeTensor on cuda is refused."""
    make, dispatch = FakeTensor.__new__, FakeTensor.__dict__["__torch_dispatch__"].__func__
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    told = handlers[_PRIM_DEVICE]

    def make_fake(
        cls: type, mode: Any = None, elem: Any = None, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        wanted = None if device is None else torch.device(device)
        if wanted is None or wanted.type != "cuda":
            return make(cls, mode, elem, device, *args, **kwargs)
        if not torch.distributed.is_initialized():
            raise unsupported(
                "a FakeTensor on a CUDA device, as torch.export and torch.onnx.export make them,"
            )
        fake = make(cls, mode, elem, torch.device("cpu"), *args, **kwargs)
        fake.fake_device = (
            wanted
            if wanted.index is not None
            else torch.device("cuda", torch.cuda.current_device())
        )
        return fake

    def dispatch_fake(
        cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if (
            func is _PRIM_DEVICE
            and len(args) == 1
            and isinstance(args[0], FakeTensor)
            and args[0].fake_device.type == "cuda"
        ):
            return torch.device("meta" if args[0].fake_mode.in_kernel_invocation else "cpu")
        return dispatch(cls, func, types, args, kwargs)

    def device_for_cpp(args: tuple) -> torch.device:
        device = told(args)
        return torch.device("cpu") if device.type == "cuda" else device

    yield handlers, {_PRIM_DEVICE: device_for_cpp}
    yield (
        FakeTensor,
        {
            "__new__": make_fake,
            "__torch_dispatch__": classmethod(dispatch_fake),
            "is_cuda": property(lambda x: x.device.type == "cuda"),
            "is_cpu": property(lambda x: x.device.type == "cpu"),
        },
    )
    yield (
        torch.Tensor,
        {
            "_make_wrapper_subclass": staticmethod(
                _make_wrapper(torch.Tensor._make_wrapper_subclass)
            )
        },
    )
    # C++ makes a DTensor on the device of its local tensor. Its class may be imported already, or takes this __new__ when it is.
    if made := getattr(torch.Tensor, "_dtensor__new__", None):
        yield torch.Tensor, {"_dtensor__new__": staticmethod(_make_dtensor(made))}
    if hasattr(rpc := sys.modules.get("torch.distributed.rpc"), "init_rpc"):
        yield rpc, {"init_rpc": refuse("torch.distributed.rpc.init_rpc")}
    if imported := sys.modules.get("torch.distributed.tensor"):
        yield imported.DTensor, _DEVICE


def _make_wrapper(make: Any) -> Any:
    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if wanted is None or wanted.type != "cuda":
            return make(cls, *args, **kwargs)
        wrapper = make(cls, *args, **kwargs | {"device": torch.device("cpu")})
        wrapper._virtual_device = (
            wanted
            if wanted.index is not None
            else torch.device("cuda", torch.cuda.current_device())
        )
        _tell_device(cls)
        return wrapper

    return make_wrapper


def _make_dtensor(make: Any) -> Any:
    def make_dtensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _tell_device(cls)
        return make(cls, *args, **kwargs)

    return make_dtensor


def _device_of(x: Any) -> torch.device:
    if (local := getattr(x, "_local_tensor", None)) is not None:
        return local.device
    device: torch.device = x.__dict__.get("_virtual_device") or torch._C.TensorBase.device.__get__(
        x
    )
    return device


_DEVICE = {
    "device": property(_device_of),
    "is_cuda": property(lambda x: x.device.type == "cuda"),
    "is_cpu": property(lambda x: x.device.type == "cpu"),
    "get_device": lambda x: -1 if x.device.index is None else x.device.index,
}


def _tell_device(cls: Any) -> None:
    if "device" not in cls.__dict__:
        for name, value in _DEVICE.items():
            setattr(cls, name, value)
